//! A function in this process.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, Weak};

use slipway_pci::{Access, Function, Interrupt, InterruptSink, Progress};
use slipway_pci_spec::register;
use slipway_ram::Memory;

use crate::eventfd;
use crate::lock::lock;
use crate::pci::{Backend, Bus, Notification, Shape, Slot, VectorSource};
use crate::state::LocalState;
use crate::{Chassis, Error, Result};

/// The way of a local function's interrupts to its slot, which is made after the function.
#[derive(Default)]
struct Sink(OnceLock<Weak<Slot>>);

impl InterruptSink for Sink {
    fn signal(&self, vector: u16) {
        if let Some(slot) = self.0.get().and_then(Weak::upgrade) {
            slot.signal(vector);
        }
    }
}

/// The threads that poll a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Polling {
    /// The one that serves its backend, and each CPU's thread after a register write.
    Anywhere,
    /// Only the one that serves its backend, by [`Local::step`]: the function does what CPUs'
    /// threads must not, or may not by their filters of system calls.
    InSteps,
}

/// A function in this process. The CPUs' threads access its registers; the thread that serves its
/// backend polls it when [`Local::notified`] becomes readable.
pub struct Local<F> {
    shared: Arc<Shared<F>>,
    slot: Arc<Slot>,
}

struct Shared<F> {
    function: Mutex<F>,
    polling: Polling,
    /// Raised by the kernel for a notification, and by a CPU's thread after another register write.
    notified: OwnedFd,
}

impl<F: Function + 'static> Local<F> {
    /// Makes a function with `make`, which gets the guest's memory and one interrupt for each of
    /// `vectors` vectors, and adds it to the machine's bus as device `number`. Writes of the driver
    /// that only announce work become counts of [`Local::notified`] in the kernel. `polling` says
    /// which threads poll the function.
    ///
    /// # Errors
    /// [`Error::Config`], [`Error::System`].
    pub fn new<E: ToString>(
        machine: &Chassis,
        polling: Polling,
        (number, vectors): (u8, u16),
        make: impl FnOnce(Memory, Vec<Interrupt>) -> Result<F, E>,
    ) -> Result<Self> {
        let sink = Arc::new(Sink::default());
        let interrupt = |vector| Interrupt::new(Arc::clone(&sink) as Arc<_>, vector);
        let function = make(machine.ram.memory(), (0..vectors).map(interrupt).collect());
        let function = function.map_err(|error| Error::Config(error.to_string()))?;
        let notified = eventfd::new()?;
        let copy = notified.try_clone().map_err(Error::system("duplicating a descriptor"))?;
        let eventfd = Arc::new(eventfd::of(copy));
        // The machine gives functions no ports.
        let bars = function.description().bars.iter().filter(|bar| !bar.ports);
        let notifications = bars.clone().flat_map(|bar| {
            let offsets = bar.notifications.iter().flat_map(slipway_pci::Notifications::offsets);
            let place = |offset| (bar.index, offset);
            offsets.map(place)
        });
        let place = |(bar, offset)| Notification { bar, offset, eventfd: Arc::clone(&eventfd) };
        let notifications = notifications.map(place).collect();
        let bars = bars.map(|bar| (bar.index, bar.size)).collect();
        let shape = Shape { bars, vectors: VectorSource::Calls, notifications };
        let shared = Arc::new(Shared { function: Mutex::new(function), polling, notified });
        let backend: Box<dyn Backend> = Box::new(Arc::clone(&shared));
        let slot = Slot::new(number, backend, shape, &machine.vm, &machine.interrupts);
        let _ = sink.0.set(Arc::downgrade(&slot));
        machine.pci.add(Arc::clone(&slot))?;
        Ok(Self { shared, slot })
    }

    /// Returns the descriptor that becomes readable when the driver has announced work.
    pub fn notified(&self) -> BorrowedFd<'_> {
        self.shared.notified.as_fd()
    }

    /// Makes [`Local::notified`] readable.
    pub fn announce(&self) {
        self.shared.announce();
    }

    /// Returns the state for a successor. The guest is stopped. The function does not touch the
    /// guest's memory until it is polled again.
    pub fn save(&self) -> LocalState {
        let function = {
            let mut function = self.shared.function();
            // Functions of this process have nothing in flight between two calls.
            function.quiesce();
            function.save()
        };
        LocalState { slot: self.slot.save(), function }
    }

    /// Takes over the state of a predecessor, on `bus`, and makes [`Local::notified`] readable.
    ///
    /// # Errors
    /// [`Error::State`].
    pub fn restore(&self, bus: &Bus, saved: &LocalState) -> Result<()> {
        let number = self.slot.number();
        let restored = self.shared.function().restore(&saved.function);
        restored.map_err(|error| Error::State(format!("PCI device {number}: {error}")))?;
        bus.restore(&self.slot, &saved.slot)?;
        self.announce();
        Ok(())
    }

    /// Clears [`Local::notified`], polls the function until it has nothing to do, and lets `serve`
    /// use its backend; polls again after that.
    pub fn serve<T>(&self, serve: impl FnOnce(&mut F) -> T) -> T {
        // Nobody else reads it, so a failure means that nothing was announced.
        let _ = rustix::io::read(&self.shared.notified, &mut [0; 8]);
        let mut function = self.shared.function();
        function.notified(1);
        poll_until_idle(&mut *function);
        let outcome = serve(&mut *function);
        // Work after `serve` may be what `serve` waits for, so it is called again.
        if !poll_until_idle(&mut *function) {
            self.shared.announce();
        }
        outcome
    }

    /// Clears [`Local::notified`] and polls the function once, so that work which takes many polls
    /// holds up no CPU that accesses its registers. Makes [`Local::notified`] readable if there may
    /// be more to do.
    pub fn step(&self) {
        let _ = rustix::io::read(&self.shared.notified, &mut [0; 8]);
        let mut function = self.shared.function();
        function.notified(1);
        if function.poll().is_busy() || !matches!(function.rest(), Progress::Idle(_)) {
            self.shared.announce();
        }
    }

    /// Lets `act` use the function between two polls.
    pub fn with<T>(&self, act: impl FnOnce(&mut F) -> T) -> T {
        act(&mut self.shared.function())
    }
}

impl<F> Shared<F> {
    /// Makes [`Local::notified`] readable.
    fn announce(&self) {
        // The counter overflows after 2^64 announcements.
        let _ = rustix::io::write(&self.notified, &1u64.to_ne_bytes());
    }

    fn function(&self) -> MutexGuard<'_, F> {
        lock(&self.function)
    }
}

impl<F: Function> Shared<F> {
    /// Lets `access` write a register, and has the function polled: by this thread, if it may, and
    /// by the one that serves the function's backend.
    fn then_poll(&self, access: impl FnOnce(&mut F)) {
        let mut function = self.function();
        access(&mut function);
        if self.polling == Polling::Anywhere {
            function.poll();
        }
        drop(function);
        self.announce();
    }
}

/// Polls until the function has nothing to do and will be announced new work, or the guest has kept
/// it busy for so long that others have to be served first. Returns whether there was nothing to do
/// from the beginning.
fn poll_until_idle(function: &mut impl Function) -> bool {
    const MOST: usize = 1024;
    let is_idle =
        |_: &usize| !function.poll().is_busy() && matches!(function.rest(), Progress::Idle(_));
    (0..MOST).find(is_idle) == Some(0)
}

impl<F: Function> Backend for Arc<Shared<F>> {
    fn config_read(&self, offset: u16, into: &mut [u8]) {
        self.function().config_read(offset, into);
    }

    /// A write of a capability may be one of a BAR: by the window of a virtio device (Virtio 1.3,
    /// 4.1.4.9), where drivers announce work, too.
    fn config_write(&self, offset: u16, from: &[u8]) {
        match usize::from(offset) < register::END {
            true => self.function().config_write(offset, from),
            false => self.then_poll(|function| function.config_write(offset, from)),
        }
    }

    fn read(&self, bar: u8, offset: u64, into: &mut [u8]) {
        if self.function().read(bar, offset, into) == Access::Refused {
            into.fill(0xff);
        }
    }

    fn write(&self, bar: u8, offset: u64, from: &[u8]) {
        self.then_poll(|function| {
            let _ = function.write(bar, offset, from);
        });
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::PollFlags;
    use slipway_virtio_rng::{Parts, Rng};

    use super::*;

    #[test]
    fn the_thread_of_the_backend_learns_of_writes_that_may_announce_work() {
        let parts = Parts {
            memory: Memory::heap(4096),
            interrupts: vec![Interrupt::new(Arc::new(Sink::default()), 0)],
            source: Box::new(|_: &mut [u8]| {}),
        };
        let shared = Arc::new(Shared {
            function: Mutex::new(Rng::new(parts).unwrap()),
            polling: Polling::InSteps,
            notified: eventfd::new().unwrap(),
        });
        let is_told = || {
            let told = !slipway_peer::ready(&shared.notified, PollFlags::IN).is_empty();
            let _ = rustix::io::read(&shared.notified, &mut [0; 8]);
            told
        };
        shared.write(0, 0x3000, &[0; 2]);
        assert!(is_told());
        shared.config_write(register::BAR0 as u16, &[0xff; 4]);
        assert!(!is_told(), "nothing but the bus has to know");
        shared.config_write(register::END as u16, &[0]);
        assert!(is_told(), "this may be the window");
    }
}
