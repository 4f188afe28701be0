//! A PCI function behind a vfio-user socket: the machine's side of `slipway_vfio_user_client`.
//!
//! - `config` keeps the machine's own view of configuration space: BARs are decoded here, so the
//!   server is asked only for what it alone knows.
//! - Interrupts go from the server's eventfds to the CPUs in the kernel (irqfd), those of the pin
//!   by the event loop ([`Attached::pin_raised`]).
//! - Writes that only announce work go to the server in the kernel (ioeventfd), or by memory that
//!   the server shares.
//! - `saved` stops a function and moves its state to another server's.
//!
//! A server that does not answer holds up the CPU whose guest asked it, for
//! [`FUNCTION_PATIENCE`] at most; then its function is broken, and reads as all ones.

mod config;
mod saved;

use std::collections::BTreeMap;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use slipway_machine::FUNCTION_PATIENCE;
use slipway_vfio_user_client::{ConnectionState, Continuity, FunctionError, RemoteFunction};
use slipway_vfio_user_spec::region;
use vmm_sys_util::eventfd::EventFd;

use crate::interrupts::Interrupts;
use crate::pci::{Backend, Notification, Shape, Slot, VectorSource};
use crate::{Chassis, Error, Machine, Result, eventfd};
use config::Config;
pub use saved::MAX_STATE;

/// The most MSI-X vectors of a function that reach the guest.
const MAX_VECTORS: u32 = 2048;

/// A function of the bus that a server serves.
struct SocketFunction {
    number: u8,
    function: Arc<RemoteFunction>,
    config: Config,
    interrupts: Arc<Interrupts>,
    has_pin: bool,
}

/// The loss of a function's connection.
#[derive(Debug)]
pub struct Loss {
    /// The reason, in one line.
    pub reason: String,
    /// The function is broken: no other connection can take this one's place.
    pub is_final: bool,
}

/// A function in the machine, for the event loop.
pub struct Attached {
    remote: Arc<SocketFunction>,
    slot: Arc<Slot>,
    /// The eventfd that the server raises for the pin.
    pin: Option<OwnedFd>,
    /// The function was stopped to be saved.
    stopped: AtomicBool,
}

impl Attached {
    /// Connects the function behind `socket` as PCI device `number` of the machine, the function
    /// with number `index` in messages. Its BARs get addresses.
    ///
    /// # Errors
    /// [`Error::Function`], [`Error::Config`].
    pub fn new(machine: &Machine, number: u8, index: usize, socket: OwnedFd) -> Result<Self> {
        let attached = Self::connect(&machine.chassis, number, index, socket)?;
        machine.chassis.pci.add(Arc::clone(&attached.slot))?;
        Ok(attached)
    }

    /// As [`Attached::new`], for a machine that may run: the guest gives the BARs addresses. Waits
    /// for the server, so call it on a thread of its own.
    ///
    /// # Errors
    /// [`Error::Function`], [`Error::Config`].
    pub fn plug(chassis: &Chassis, number: u8, index: usize, socket: OwnedFd) -> Result<Self> {
        let attached = Self::connect(chassis, number, index, socket)?;
        chassis.pci.plug(Arc::clone(&attached.slot))?;
        Ok(attached)
    }

    /// Ends what is left of a function that was taken off the bus. Waits for the server, so call it
    /// on a thread of its own.
    pub fn close(&self, chassis: &Chassis) {
        chassis.pci.close(&self.slot);
        self.remote.interrupts.set_inta(self.remote.number, false);
    }

    fn connect(machine: &Chassis, number: u8, index: usize, socket: OwnedFd) -> Result<Self> {
        let failed = |error: FunctionError| Error::Function { index, reason: error.to_string() };
        let function = RemoteFunction::new(socket, FUNCTION_PATIENCE).map_err(failed)?;
        let function = Arc::new(function);
        let ram = &machine.ram;
        // The server notes nothing of what it writes, and may be gone when that is asked for.
        ram.end_own_log();
        for part in ram.parts() {
            function.map(part.start, part.len, ram.file(), part.offset, true).map_err(failed)?;
        }
        for region in ram.hot_memory() {
            region.show_to(&function, ram.file()).map_err(failed)?;
        }
        if let Some(shared) = ram.shared() {
            let part = &shared.part;
            let mapped = function.map(part.start, part.len, shared.file(), part.offset, false);
            mapped.map_err(failed)?;
        }
        let config = Config::read(&function).map_err(failed)?;
        let mut pin = None;
        if config.has_pin() && function.pin().count > 0 {
            let eventfd = eventfd::new()?;
            function.route_pin(Some(eventfd.as_fd())).map_err(failed)?;
            pin = Some(eventfd);
        }
        let bars = config.bars.clone();
        let remote = Arc::new(SocketFunction {
            number,
            config,
            interrupts: Arc::clone(&machine.interrupts),
            has_pin: pin.is_some(),
            function: Arc::clone(&function),
        });
        let vectors = VectorSource::Eventfds(Box::new(move |vector| wire(&function, vector)));
        let shape = Shape { bars, vectors, notifications: notifications(&remote.function) };
        let backend: Box<dyn Backend> = Box::new(Arc::clone(&remote));
        let slot = Slot::new(number, backend, shape, &machine.vm, &machine.interrupts);
        Ok(Self { remote, slot, pin, stopped: AtomicBool::new(false) })
    }

    /// Returns the descriptor that is readable while the function has no connection.
    pub fn ended(&self) -> BorrowedFd<'_> {
        self.remote.function.as_fd()
    }

    /// Returns why the function has no connection. Returns `None` if it has one.
    pub fn lost(&self) -> Option<Loss> {
        match self.remote.function.state() {
            ConnectionState::Connected => None,
            ConnectionState::Lost(reason) => Some(Loss { reason, is_final: false }),
            ConnectionState::Broken(reason) => Some(Loss { reason, is_final: true }),
        }
    }

    /// Uses a new connection in place of the one that has ended. Waits for the server, so call it
    /// on a thread of its own.
    ///
    /// # Errors
    /// The reason for which the new connection cannot be used.
    pub fn reconnect(&self, socket: OwnedFd) -> Result<(), String> {
        let remote = &self.remote;
        let continuity = remote.function.reconnect(socket).map_err(|error| error.to_string())?;
        let restored = match continuity {
            Continuity::Resumed => Ok(()),
            Continuity::Reset => remote.config.restore(&remote.function),
        };
        // Also after a failure: the old places lead to nobody.
        self.slot.replace_server(notifications(&remote.function));
        // The guest may have written to the old places until now.
        remote.function.announce();
        restored.map_err(|error| error.to_string())
    }

    /// Returns the descriptor that is readable when the server has asserted the pin.
    pub fn pin(&self) -> Option<BorrowedFd<'_>> {
        self.pin.as_ref().map(AsFd::as_fd)
    }

    /// Passes the pin's interrupt on to the guest.
    pub fn pin_raised(&self) {
        if let Some(pin) = &self.pin
            && slipway_peer::eventfd::drain(pin.as_fd())
        {
            self.remote.interrupts.set_inta(self.remote.number, true);
        }
    }
}

/// Makes the eventfd of a vector, and gives it to the server.
fn wire(function: &RemoteFunction, vector: u16) -> Option<EventFd> {
    if u32::from(vector) >= function.vectors().count.min(MAX_VECTORS) {
        return None;
    }
    let eventfd = eventfd::new().ok()?;
    function.route(vector.into(), &[eventfd.as_fd()]).ok()?;
    Some(eventfd::of(eventfd))
}

/// Returns the registers whose writes KVM can pass to the server.
fn notifications(function: &RemoteFunction) -> Vec<Notification> {
    let mut all = Vec::new();
    // A server's eventfd is duplicated once, however many registers raise it.
    let mut eventfds = BTreeMap::new();
    for bar in 0..6 {
        for place in function.notifications(region::BAR0 + u32::from(bar)) {
            // KVM compares no value here: a register that has one is written by a message.
            if place.datamatch.is_some() {
                continue;
            }
            let file = place.event.as_fd();
            let known = eventfds.entry(file.as_raw_fd()).or_insert_with(|| {
                file.try_clone_to_owned().ok().map(|file| Arc::new(eventfd::of(file)))
            });
            if let Some(eventfd) = known {
                let eventfd = Arc::clone(eventfd);
                all.push(Notification { bar, offset: place.offset, eventfd });
            }
        }
    }
    all
}

impl Backend for Arc<SocketFunction> {
    fn config_read(&self, offset: u16, into: &mut [u8]) {
        self.config.load(&self.function, offset, into);
    }

    fn config_write(&self, offset: u16, from: &[u8]) {
        if self.config.store(&self.function, offset, from) {
            self.interrupts.set_inta(self.number, false);
        }
    }

    fn read(&self, bar: u8, offset: u64, into: &mut [u8]) {
        // A refused read gives all ones.
        let _ = self.function.read(region::BAR0 + u32::from(bar), offset, into);
    }

    fn write(&self, bar: u8, offset: u64, from: &[u8]) {
        // A refused write is dropped, as on a bus.
        let _ = self.function.put(region::BAR0 + u32::from(bar), offset, from);
    }

    fn end_of_interrupt(&self) {
        if self.has_pin {
            self.interrupts.set_inta(self.number, false);
            // The server asserts the pin again if the function still does.
            let _ = self.function.unmask_pin();
        }
    }
}
