//! MSI-X of a slot: the guest's table, and how its messages reach the CPUs.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use slipway_pci::state::MsixState;
use slipway_pci::{Access, Message, Msix, MsixControl, MsixLayout, Route, StateError};
use vmm_sys_util::eventfd::EventFd;

use crate::routes::Routes;

/// The origin of a function's interrupts.
pub enum VectorSource {
    /// The function calls [`super::Slot::signal`].
    Calls,
    /// A server raises eventfds. The function makes the eventfd of a vector and gives it to the
    /// server, when the guest uses the vector for the first time. It returns `None` if the vector
    /// cannot interrupt.
    Eventfds(Box<dyn Fn(u16) -> Option<EventFd> + Send>),
}

/// A vector whose interrupts come by an eventfd that a server raises.
struct Wired {
    eventfd: EventFd,
    gsi: u32,
    /// KVM sends the vector's message for each count.
    attached: bool,
}

/// The saved state of MSI-X vectors. Message Control is in configuration space.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VectorsState {
    table: MsixState,
    /// The vectors that the guest has used, of a function whose server raises eventfds.
    used: Vec<u16>,
}

/// The MSI-X vectors of a function.
pub struct Vectors {
    msix: Msix,
    control: MsixControl,
    source: VectorSource,
    /// The vectors that the guest has used, by their number.
    wired: BTreeMap<u16, Wired>,
    routes: Arc<Routes>,
}

impl Vectors {
    /// Makes the vectors of a function, all masked.
    pub fn new(layout: MsixLayout, source: VectorSource, routes: &Arc<Routes>) -> Self {
        let control = MsixControl { enabled: false, masked: false };
        let routes = Arc::clone(routes);
        Self { msix: Msix::new(layout), control, source, wired: BTreeMap::new(), routes }
    }

    /// Returns the number of vectors.
    pub fn count(&self) -> u16 {
        self.msix.layout().vectors()
    }

    /// Returns the state for a successor.
    pub fn save(&self) -> VectorsState {
        VectorsState { table: self.msix.save(), used: self.wired.keys().copied().collect() }
    }

    /// Takes over the state of a predecessor, with Message Control as configuration space has it.
    /// The guest is interrupted by every vector that it has used, since an interrupt may have been
    /// on its way, and a driver tolerates one too many.
    ///
    /// # Errors
    /// [`StateError`].
    pub fn restore(
        &mut self,
        saved: &VectorsState,
        control: MsixControl,
    ) -> Result<(), StateError> {
        self.msix.restore(&saved.table)?;
        self.control = control;
        let count = self.count();
        saved.used.iter().filter(|&&vector| vector < count).for_each(|&vector| self.wire(vector));
        self.rewire_all();
        self.raise_all();
        Ok(())
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
        self.rewire_all();
        self.deliver_unmasked();
    }

    /// Interrupts the guest by `vector`, or notes the interrupt as pending.
    pub fn raise(&mut self, vector: u16) {
        if let Route::Deliver(message) = self.msix.raise(vector, self.control) {
            self.routes.send(message);
        }
    }

    /// Interrupts the guest by every vector that it has used: after a server was replaced, an
    /// interrupt may have been lost, and a driver tolerates one too many.
    pub fn raise_all(&mut self) {
        let used: Vec<u16> = self.wired.keys().copied().collect();
        for vector in used {
            self.raise(vector);
        }
    }

    /// Returns to the state after a reset of the function.
    pub fn reset(&mut self) {
        self.msix.reset();
        self.set_control(MsixControl { enabled: false, masked: false });
    }

    /// Detaches all vectors for good, and gives back what they use of KVM's.
    pub fn close(&mut self) {
        self.source = VectorSource::Calls;
        self.reset();
        for (_, wired) in std::mem::take(&mut self.wired) {
            if !wired.attached || self.routes.detach(&wired.eventfd, wired.gsi).is_ok() {
                self.routes.release(wired.gsi);
            }
        }
    }

    fn deliver_unmasked(&mut self) {
        while let Some((_, message)) = self.msix.take_unmasked(self.control) {
            self.routes.send(message);
        }
    }

    /// Has the server interrupt by the vector, if it does not do so already.
    fn wire(&mut self, vector: u16) {
        if let VectorSource::Eventfds(make) = &self.source
            && !self.wired.contains_key(&vector)
            && let Some(eventfd) = make(vector)
            && let Some(gsi) = self.routes.reserve()
        {
            self.wired.insert(vector, Wired { eventfd, gsi, attached: false });
        }
    }

    /// Gives each vector its route, as [`Vectors::rewire`].
    fn rewire_all(&mut self) {
        (0..self.count()).for_each(|vector| self.rewire(vector));
    }

    /// Attaches the vector's eventfd to its message, or detaches it. A count that comes while it is
    /// detached waits in the eventfd: that is the vector's pending bit. If KVM or the server has no
    /// resources left, the guest misses this vector's interrupts, as with a broken device.
    fn rewire(&mut self, vector: u16) {
        match self.msix.route(vector, self.control) {
            Route::Deliver(message) => {
                self.wire(vector);
                if let Some(wired) = self.wired.get_mut(&vector) {
                    attach(wired, message, &self.routes);
                }
            }
            Route::Masked | Route::Off => {
                if let Some(wired) = self.wired.get_mut(&vector).filter(|wired| wired.attached) {
                    wired.attached = self.routes.detach(&wired.eventfd, wired.gsi).is_err();
                }
            }
        }
    }
}

/// Routes before it attaches, so that KVM never sends an old message.
fn attach(wired: &mut Wired, message: Message, routes: &Routes) {
    if routes.set(wired.gsi, Some(message)).is_ok() && !wired.attached {
        wired.attached = routes.attach(&wired.eventfd, wired.gsi).is_ok();
    }
}
