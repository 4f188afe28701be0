//! The part of a PCI function's host that every function needs: BARs, MSI-X, notifications.

mod state;

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};

use kvm_ioctls::{IoEventAddress, NoDatamatch, VmFd};
use slipway_pci::{MsixControl, MsixLayout};
use slipway_pci_spec::{bar, capability, command, express, msix, register};
use vmm_sys_util::eventfd::EventFd;

use super::vectors::{VectorSource, Vectors};
use crate::interrupts::Interrupts;
use crate::layout::PCI_WINDOW;
use crate::lock::lock;

pub use state::SlotState;

/// A place of a BAR to which the guest writes to announce work, whatever value it writes.
pub struct Notification {
    /// The BAR's number.
    pub bar: u8,
    /// The offset in the BAR.
    pub offset: u64,
    /// The eventfd that KVM raises for a write, without an exit to user space. Several places may
    /// share one.
    pub eventfd: Arc<EventFd>,
}

/// A PCI function, whoever implements it. All methods are called by several CPUs' threads.
pub trait Backend: Send + Sync {
    /// Reads configuration space, as software sees it.
    fn config_read(&self, offset: u16, into: &mut [u8]);

    /// Writes configuration space.
    fn config_write(&self, offset: u16, from: &[u8]);

    /// Reads from a BAR.
    fn read(&self, bar: u8, offset: u64, into: &mut [u8]);

    /// Writes to a BAR.
    fn write(&self, bar: u8, offset: u64, from: &[u8]);

    /// The guest has ended the interrupt of the function's pin.
    fn end_of_interrupt(&self) {}
}

/// The shape of a function.
pub struct Shape {
    /// The memory BARs: number and size in bytes, a power of two.
    pub bars: Vec<(u8, u64)>,
    /// The origin of the function's interrupts.
    pub vectors: VectorSource,
    /// Places for notifications without an exit.
    pub notifications: Vec<Notification>,
}

/// A function that is told the number of a BAR, and the addresses at which it answers now.
pub(super) type Moved<'a> = &'a mut dyn FnMut(u8, Option<Range<u64>>);

/// The state that follows the addresses of the BARs.
struct Decoder {
    /// The address of each BAR, or `None` while it answers nowhere.
    ranges: Vec<Option<Range<u64>>>,
    notifications: Vec<Notification>,
    /// The function is off the bus: its BARs answer nowhere any more.
    closed: bool,
}

/// A device of the bus with one function.
pub struct Slot {
    number: u8,
    backend: Box<dyn Backend>,
    /// Number and size of each BAR.
    pub(super) bars: Vec<(u8, u64)>,
    /// The offset of the MSI-X capability in configuration space.
    msix: Option<usize>,
    /// The offset of the PCI Express capability.
    express: Option<usize>,
    decoder: Mutex<Decoder>,
    vectors: Option<Mutex<Vectors>>,
    vm: Arc<VmFd>,
}

impl Slot {
    /// Makes device `number` of the bus of `backend`.
    pub fn new(
        number: u8,
        backend: Box<dyn Backend>,
        shape: Shape,
        vm: &Arc<VmFd>,
        interrupts: &Interrupts,
    ) -> Arc<Self> {
        let Shape { bars, vectors: source, notifications } = shape;
        let (msix, layout) = find_msix(&*backend, &bars).unzip();
        let vectors = layout.map(|layout| Vectors::new(layout, source, interrupts.routes()));
        let ranges = vec![None; bars.len()];
        let decoder = Decoder { ranges, notifications, closed: false };
        Arc::new(Self {
            number,
            decoder: Mutex::new(decoder),
            bars,
            msix,
            express: find(&*backend, capability::EXPRESS),
            vectors: vectors.map(Mutex::new),
            backend,
            vm: Arc::clone(vm),
        })
    }

    /// Returns the device's number on the bus, 0 to 31.
    pub fn number(&self) -> u8 {
        self.number
    }

    /// Gives BAR `bar` an address, as firmware would.
    pub(super) fn place(&self, bar: u8, address: u64, moved: Moved<'_>) {
        let register = register::BAR0 as u16 + 4 * u16::from(bar);
        self.config_write(register, &address.to_le_bytes()[..4], moved);
    }

    /// Interrupts the guest by MSI-X vector `vector`.
    pub fn signal(&self, vector: u16) {
        if let Some(vectors) = &self.vectors {
            lock(vectors).raise(vector);
        }
    }

    /// Serves a read of configuration space.
    pub fn config_read(&self, offset: u16, into: &mut [u8]) {
        self.backend.config_read(offset, into);
    }

    /// Returns whether register `offset` is one of a capability whose reads do more than to show
    /// what was written. That of a virtio device may: its window (Virtio 1.3, 4.1.4.9).
    pub(super) fn is_window(&self, offset: u16) -> bool {
        capabilities(&*self.backend).any(|(at, header)| {
            let len = header as usize >> 16 & 0xff;
            header as u8 == capability::VENDOR && (at..at + len).contains(&offset.into())
        })
    }

    /// Serves a write of configuration space, and follows what it changes. `moved` is called for
    /// each BAR that answers elsewhere now, before another write can move it again.
    pub(super) fn config_write(&self, offset: u16, from: &[u8], moved: Moved<'_>) {
        let mut decoder = lock(&self.decoder);
        if decoder.closed {
            return;
        }
        self.backend.config_write(offset, from);
        self.follow(&mut decoder, moved);
        let Some(vectors) = &self.vectors else { return };
        let control = self.read_msix_control();
        let mut vectors = lock(vectors);
        let asks = |express| express::asks_for_reset(express, offset.into(), from);
        if self.express.is_some_and(asks) {
            vectors.reset();
        }
        vectors.set_control(control);
    }

    /// Lets each BAR answer where configuration space says now.
    fn follow(&self, decoder: &mut Decoder, moved: Moved<'_>) {
        for index in 0..self.bars.len() {
            let range = self.wanted(index);
            if decoder.ranges[index] != range {
                let bar = self.bars[index].0;
                self.unregister(decoder, index);
                decoder.ranges[index].clone_from(&range);
                self.register(decoder, index);
                moved(bar, range);
            }
        }
    }

    /// Returns the addresses that a BAR has by the registers. Returns `None` if it does not answer,
    /// as outside of the window, where nothing but BARs is.
    fn wanted(&self, index: usize) -> Option<Range<u64>> {
        let (bar, size) = self.bars[index];
        if self.read_u32(register::COMMAND) as u16 & command::MEMORY_SPACE == 0 {
            return None;
        }
        let at = register::BAR0 + 4 * usize::from(bar);
        let start = bar::address(self.read_u32(at), self.read_u32(at + 4));
        let end = start.checked_add(size)?;
        (start >= PCI_WINDOW.start && end <= PCI_WINDOW.end).then_some(start..end)
    }

    /// Ends all that KVM does for the function, for good. Waits for accesses of CPUs that change
    /// where the function answers, and so for the function's server: call it on a thread of its
    /// own.
    pub(super) fn close(&self) {
        let mut decoder = lock(&self.decoder);
        decoder.closed = true;
        for index in 0..self.bars.len() {
            self.unregister(&decoder, index);
            decoder.ranges[index] = None;
        }
        decoder.notifications.clear();
        if let Some(vectors) = &self.vectors {
            lock(vectors).close();
        }
    }

    /// Takes over the function's new server: its places for notifications, and interrupts that the
    /// old one may have lost.
    pub fn replace_server(&self, notifications: Vec<Notification>) {
        let mut decoder = lock(&self.decoder);
        if decoder.closed {
            return;
        }
        for index in 0..self.bars.len() {
            self.unregister(&decoder, index);
        }
        decoder.notifications = notifications;
        for index in 0..self.bars.len() {
            self.register(&decoder, index);
        }
        if let Some(vectors) = &self.vectors {
            lock(vectors).raise_all();
        }
    }

    /// Returns the notifications of BAR `index` in the list, each with its address. Empty while the
    /// BAR answers nowhere.
    fn notified<'a>(
        &self,
        decoder: &'a Decoder,
        index: usize,
    ) -> impl Iterator<Item = (&'a EventFd, IoEventAddress)> + use<'a> {
        let bar = self.bars[index].0;
        let places = decoder.notifications.iter().filter(move |place| place.bar == bar);
        let start = decoder.ranges[index].as_ref().map(|range| range.start);
        places.filter_map(move |place| {
            Some((&*place.eventfd, IoEventAddress::Mmio(start? + place.offset)))
        })
    }

    fn unregister(&self, decoder: &Decoder, index: usize) {
        for (eventfd, address) in self.notified(decoder, index) {
            let _ = self.vm.unregister_ioevent(eventfd, &address, NoDatamatch);
        }
    }

    /// Has KVM raise the eventfds of a BAR's notifications. If KVM refuses, because another BAR is
    /// there, a write causes an exit and reaches the function by that.
    fn register(&self, decoder: &Decoder, index: usize) {
        for (eventfd, address) in self.notified(decoder, index) {
            let _ = self.vm.register_ioevent(eventfd, &address, NoDatamatch);
        }
    }

    /// Returns the vectors if a place of BAR `bar` is theirs.
    fn vectors_at(&self, bar: u8, offset: u64) -> Option<MutexGuard<'_, Vectors>> {
        self.vectors.as_ref().map(lock).filter(|vectors| vectors.hold(bar, offset))
    }

    /// Serves a read of BAR `bar`.
    pub fn read(&self, bar: u8, offset: u64, into: &mut [u8]) {
        match self.vectors_at(bar, offset) {
            Some(vectors) => drop(vectors.read(bar, offset, into)),
            None => self.backend.read(bar, offset, into),
        }
    }

    /// Serves a write to BAR `bar`.
    pub fn write(&self, bar: u8, offset: u64, from: &[u8]) {
        match self.vectors_at(bar, offset) {
            Some(mut vectors) => vectors.write(bar, offset, from),
            None => self.backend.write(bar, offset, from),
        }
    }

    /// Tells the function that the guest has ended the interrupt of its pin.
    pub fn end_of_interrupt(&self) {
        self.backend.end_of_interrupt();
    }

    fn read_msix_control(&self) -> MsixControl {
        let header = self.msix.map_or(0, |at| self.read_u32(at));
        MsixControl::of((header >> 16) as u16)
    }

    fn read_u32(&self, offset: usize) -> u32 {
        read_u32(&*self.backend, offset)
    }
}

fn read_u32(backend: &dyn Backend, offset: usize) -> u32 {
    let mut bytes = [0; 4];
    backend.config_read(offset as u16, &mut bytes);
    u32::from_le_bytes(bytes)
}

/// Returns the function's capabilities: each one's offset, and its first four bytes.
fn capabilities(backend: &dyn Backend) -> impl Iterator<Item = (usize, u32)> {
    slipway_pci_spec::capabilities(|at| read_u32(backend, at))
}

/// Returns the offset of the first capability with ID `id`. Returns `None` if there is none.
fn find(backend: &dyn Backend, id: u8) -> Option<usize> {
    capabilities(backend).find(|(_, header)| *header as u8 == id).map(|(at, _)| at)
}

/// Finds MSI-X: the offset of the capability, and the places of the table and the pending bits.
/// Returns `None` if there is none, or a server's is impossible: such a function has no MSI-X.
fn find_msix(backend: &dyn Backend, bars: &[(u8, u64)]) -> Option<(usize, MsixLayout)> {
    let at = find(backend, capability::MSIX)?;
    let msix::VectorLayout { vectors, table: (bar, table), pba: (pba_bar, pba) } =
        msix::VectorLayout::read(at, |at| read_u32(backend, at));
    let &(_, size) = bars.iter().find(|(number, _)| *number == bar && bar == pba_bar)?;
    let end = |start: u64, len: u64| start.checked_add(len).filter(|&end| end <= size);
    let table_end = end(table, 16 * u64::from(vectors))?;
    let pba_end = end(pba, 8 * u64::from(vectors.div_ceil(64)))?;
    let overlap = table_end > pba && pba_end > table;
    (!overlap).then(|| (at, MsixLayout::new(bar, vectors, table, pba)))
}
