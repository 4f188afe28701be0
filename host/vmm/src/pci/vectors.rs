//! MSI-X of a slot: the guest's table, and how its messages reach the CPUs.

use std::sync::Arc;

use slipway_pci::{Access, Message, Msix, MsixControl, MsixLayout, Route};
use vmm_sys_util::eventfd::EventFd;

use crate::routes::Routes;

/// A vector whose interrupts come by an eventfd that a server raises.
struct Wired {
    eventfd: EventFd,
    gsi: u32,
    /// KVM sends the vector's message for each count.
    attached: bool,
}

/// The MSI-X vectors of a function.
pub struct Vectors {
    msix: Msix,
    control: MsixControl,
    wired: Vec<Wired>,
    routes: Arc<Routes>,
}

impl Vectors {
    /// Makes the vectors of a function, all masked. Vector n of the function interrupts by
    /// `eventfds[n]`; a function that calls [`Vectors::raise`] has none.
    ///
    /// # Errors
    /// [`crate::Error::Config`] if the machine has too many vectors.
    pub fn new(
        layout: MsixLayout,
        eventfds: Vec<EventFd>,
        routes: &Arc<Routes>,
    ) -> crate::Result<Self> {
        let wire = |eventfd| {
            let gsi = routes.reserve();
            let gsi = gsi.ok_or_else(|| crate::Error::Config("too many interrupts".into()))?;
            Ok(Wired { eventfd, gsi, attached: false })
        };
        let wired = eventfds.into_iter().map(wire).collect::<crate::Result<_>>()?;
        let control = MsixControl { enabled: false, masked: false };
        Ok(Self { msix: Msix::new(layout), control, wired, routes: Arc::clone(routes) })
    }

    /// Returns whether byte `offset` of BAR `bar` belongs to the table or the pending bits.
    pub fn hold(&self, bar: u8, offset: u64) -> bool {
        self.msix.layout().holds(bar, offset)
    }

    /// Reads the table or the pending bits.
    pub fn read(&self, bar: u8, offset: u64, into: &mut [u8]) -> Access {
        self.msix.read(bar, offset, into)
    }

    /// Writes the table.
    pub fn write(&mut self, bar: u8, offset: u64, from: &[u8]) {
        if self.msix.write(bar, offset, from) == Access::Refused {
            return;
        }
        let table = self.msix.layout().table_range();
        let entry = |at: u64| (at.clamp(table.start, table.end - 1) - table.start) / 16;
        let last = entry(offset + from.len().max(1) as u64 - 1);
        for vector in entry(offset)..=last {
            self.rewire(vector as u16);
        }
        self.deliver_unmasked();
    }

    /// Takes over Message Control, as configuration space has it now.
    pub fn set_control(&mut self, control: MsixControl) {
        if control == self.control {
            return;
        }
        self.control = control;
        for vector in 0..self.wired.len() {
            self.rewire(vector as u16);
        }
        self.deliver_unmasked();
    }

    /// Interrupts the guest by `vector`, or notes the interrupt as pending.
    pub fn raise(&mut self, vector: u16) {
        if let Route::Deliver(message) = self.msix.raise(vector, self.control) {
            self.routes.send(message);
        }
    }

    /// Returns to the state after a reset of the function.
    pub fn reset(&mut self) {
        self.msix.reset();
        self.set_control(MsixControl { enabled: false, masked: false });
    }

    fn deliver_unmasked(&mut self) {
        while let Some((_, message)) = self.msix.take_unmasked(self.control) {
            self.routes.send(message);
        }
    }

    /// Attaches the vector's eventfd to its message, or detaches it. A count that comes while it is
    /// detached waits in the eventfd: that is the vector's pending bit.
    fn rewire(&mut self, vector: u16) {
        let Some(wired) = self.wired.get_mut(usize::from(vector)) else { return };
        match self.msix.route(vector, self.control) {
            Route::Deliver(message) => attach(wired, message, &self.routes),
            Route::Masked | Route::Off if wired.attached => {
                wired.attached = self.routes.detach(&wired.eventfd, wired.gsi).is_err();
            }
            Route::Masked | Route::Off => {}
        }
    }
}

/// Routes before it attaches, so that KVM never sends an old message. If KVM has no resources left,
/// the guest misses this vector's interrupts, as it would with a broken device.
fn attach(wired: &mut Wired, message: Message, routes: &Routes) {
    if routes.set(wired.gsi, Some(message)).is_ok() && !wired.attached {
        wired.attached = routes.attach(&wired.eventfd, wired.gsi).is_ok();
    }
}
