//! Hardware behind a function: the calls of its driver, and the order of calls and replies.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

use rustix::net::RecvFlags;
use slipway_ram::{GRANULE, LateFiles, LateMemory};
use slipway_reactor::{Reactor, Settings};
use slipway_vfio_user::testing::{DOORBELLS, Knobs, Scratch};
use slipway_vfio_user::{Endpoint, EndpointParts, Hardware, MappedRange};

use crate::common::*;
use crate::dma_map::identity;
use spec::IrqSetFlags as F;

const ROUTE: F = F::DATA_EVENTFD.union(F::TRIGGER);

/// A call of the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Call {
    Map { iova: u64, len: u64, writable: bool, offset: u64 },
    Unmap(u64, u64),
    Vectors(Vec<bool>),
    Pin(bool),
    MaskPin(bool),
    Release,
}

#[derive(Default)]
struct HardwareState {
    calls: Vec<Call>,
    /// The bytes of the last range as a device on the bus finds them when it is mapped, past every
    /// check of this process.
    seen: Vec<u8>,
    /// Maps are refused.
    refuses: bool,
    /// Unmaps of the range at this address are refused.
    keeps: Option<u64>,
    /// Unmaps do not end.
    holds: bool,
    /// The number of releases that fail.
    failures: u32,
    /// The function's knobs, and its number of resets at the last release.
    knobs: Option<Arc<Knobs>>,
    resets: u32,
    /// The last routes of the vectors.
    routes: Vec<Option<Arc<OwnedFd>>>,
}

/// A driver that notes its calls.
#[derive(Clone, Default)]
struct Fake(Arc<(Mutex<HardwareState>, Condvar)>);

impl Fake {
    fn state(&self) -> MutexGuard<'_, HardwareState> {
        self.0.0.lock().unwrap()
    }

    fn note(&self, call: Call) -> MutexGuard<'_, HardwareState> {
        let mut state = self.state();
        state.calls.push(call);
        state
    }

    /// Returns the calls since the last call of this.
    fn take(&self) -> Vec<Call> {
        std::mem::take(&mut self.state().calls)
    }

    fn hold(&self, holds: bool) {
        self.state().holds = holds;
        self.0.1.notify_all();
    }
}

impl Hardware for Fake {
    fn map(&mut self, range: &MappedRange<'_>) -> Result<(), Errno> {
        assert!(range.address > 0 && range.address.is_multiple_of(4096));
        assert!(rustix::fs::fstat(range.file.0).unwrap().st_size > 0);
        let MappedRange { iova, len, permissions, file: (file, offset), .. } = *range;
        let writable = permissions.write;
        let mut state = self.note(Call::Map { iova, len, writable, offset });
        state.seen = bytes_of(file, offset, len);
        if state.refuses { Err(Errno::NOMEM) } else { Ok(()) }
    }

    fn unmap(&mut self, iova: u64, len: u64) -> Result<(), Errno> {
        let state = self.note(Call::Unmap(iova, len));
        let wait = self.0.1.wait_timeout_while(state, PATIENCE, |state| state.holds);
        let (state, wait) = wait.unwrap();
        assert!(!wait.timed_out());
        if state.keeps == Some(iova) { Err(Errno::BUSY) } else { Ok(()) }
    }

    fn route_vectors(&mut self, routes: &[Option<Arc<OwnedFd>>]) -> Result<(), Errno> {
        let routed = routes.iter().map(Option::is_some).collect();
        self.note(Call::Vectors(routed)).routes = routes.to_vec();
        Ok(())
    }

    fn route_pin(&mut self, route: Option<&Arc<OwnedFd>>) -> Result<(), Errno> {
        drop(self.note(Call::Pin(route.is_some())));
        Ok(())
    }

    fn mask_pin(&mut self, masked: bool) -> Result<(), Errno> {
        drop(self.note(Call::MaskPin(masked)));
        Ok(())
    }

    fn release(&mut self) -> Result<(), Errno> {
        let mut state = self.note(Call::Release);
        let knobs = state.knobs.clone();
        state.resets = knobs.map_or(0, |knobs| knobs.resets.load(Ordering::SeqCst));
        if state.failures > 0 {
            state.failures -= 1;
            return Err(Errno::IO);
        }
        Ok(())
    }
}

/// Returns the bytes of a file in memory.
fn bytes_of(file: BorrowedFd<'_>, offset: u64, len: u64) -> Vec<u8> {
    let mut bytes = vec![0; len as usize];
    let len = bytes.len();
    assert_eq!(rustix::io::pread(file, &mut bytes, offset).unwrap(), len);
    bytes
}

fn serve_hardware(fake: &Fake) -> Served {
    let reactor = Arc::new(Reactor::spawn(Settings::default()).unwrap());
    let served = serve_parts(reactor, |_| {}, |config| parts(config, fake));
    fake.state().knobs = Some(served.knobs.clone());
    served
}

fn parts(config: &Config, fake: &Fake) -> EndpointParts {
    let mut parts = EndpointParts::new(config);
    parts.set_hardware(Box::new(fake.clone()));
    parts
}

fn set_irqs(flags: F, index: u32, start: u32, count: u32) -> spec::IrqSet {
    spec::IrqSet::new(flags, index, start, count, 0)
}

#[test]
fn hardware_is_told_of_each_range() {
    let fake = Fake::default();
    let served = serve_hardware(&fake);
    let mut raw = served.client();
    let guest = memory(0x4000);
    let mut readable = dma_map(0x10_0000, 0x1000);
    (readable.flags, readable.offset) = (U32::new(1), U64::new(0x2000));
    raw.call_with(Command::DmaMap, readable.as_bytes(), &[guest.as_fd()]).ok();
    raw.map(0x20_0000, 0x4000, guest.as_fd()).ok();
    raw.map(0x30_0000, 0x4000, guest.as_fd()).ok();
    let whole = |iova| Call::Map { iova, len: 0x4000, writable: true, offset: 0 };
    let part = Call::Map { iova: 0x10_0000, len: 0x1000, writable: false, offset: 0x2000 };
    assert_eq!(fake.take(), [part, whole(0x20_0000), whole(0x30_0000)]);
    raw.call(Command::DmaUnmap, dma_unmap(0x20_0000, 0x4000).as_bytes()).ok();
    assert_eq!(fake.take(), [Call::Unmap(0x20_0000, 0x4000)]);
    let mut all = dma_unmap(0, 0);
    all.flags = U32::new(2);
    raw.call(Command::DmaUnmap, all.as_bytes()).ok();
    assert_eq!(fake.take(), [Call::Unmap(0x10_0000, 0x1000), Call::Unmap(0x30_0000, 0x4000)]);
}

/// A byte that an earlier client left.
const STALE: u8 = 0xaa;
/// Bytes of recycled memory.
const RECYCLED: u64 = 4 * GRANULE as u64;

/// Memory that an earlier client has filled, all of it, and the files among which it is known.
fn recycled() -> (Arc<LateMemory>, LateFiles) {
    let mut late = LateMemory::new(memory(RECYCLED)).unwrap();
    late.give_holes();
    let stale = vec![STALE; late.len()];
    assert_eq!(rustix::io::pwrite(late.file(), &stale, 0).unwrap(), stale.len());
    late.recycle().unwrap();
    let (late, files) = (Arc::new(late), LateFiles::default());
    files.add(&late);
    (late, files)
}

/// Sets a client's memory.
fn set_memory(config: &mut Config, late: &LateMemory, files: &LateFiles) {
    (config.late, config.memory_file) = (files.clone(), Some(identity(late.file())));
}

#[test]
fn hardware_finds_no_byte_of_an_earlier_client() {
    let (late, files) = recycled();
    assert_eq!(late.zero_ahead(1), Ok(true));
    let fake = Fake::default();
    let reactor = Arc::new(Reactor::spawn(Settings::default()).unwrap());
    let with = |config: &mut Config| set_memory(config, &late, &files);
    let served = serve_parts(reactor, with, |config| parts(config, &fake));
    let mut raw = served.client();
    raw.map(0, RECYCLED, late.file()).ok();
    let seen = fake.state().seen.clone();
    assert_eq!(seen.len(), late.len());
    assert!(seen.iter().all(|byte| *byte == 0));
    let stats = served.control.stats();
    assert_eq!(stats.zeroed_for_hardware, RECYCLED - GRANULE as u64, "one was zeroed ahead");
}

/// Functions of this process find zeros in such memory whatever its pages have. That is enough for
/// them, and hardware that was mapped like that would find the pages' bytes.
#[test]
fn memory_that_only_functions_of_this_process_reach_is_not_zeroed_when_it_is_mapped() {
    let (late, files) = recycled();
    let served = serve_with(|config| set_memory(config, &late, &files));
    let mut raw = served.client();
    raw.map(0, RECYCLED, late.file()).ok();
    assert!(bytes_of(late.file(), 0, RECYCLED).iter().all(|byte| *byte == STALE));
    assert_eq!(served.control.stats().zeroed_for_hardware, 0);
}

#[test]
fn a_range_that_the_hardware_keeps_stays_mapped() {
    let fake = Fake::default();
    let served = serve_hardware(&fake);
    let mut raw = served.client();
    let guest = memory(0x1000);
    for iova in [0x1000, 0x2000, 0x3000] {
        raw.map(iova, 0x1000, guest.as_fd()).ok();
    }
    fake.take();
    fake.state().keeps = Some(0x2000);
    let one = dma_unmap(0x2000, 0x1000);
    assert_eq!(raw.call(Command::DmaUnmap, one.as_bytes()).err(), Errno::BUSY);
    assert_eq!(served.control.stats().regions.len(), 3);
    assert_eq!(raw.map(0x2000, 0x1000, guest.as_fd()).err(), Errno::EXIST);
    let mut all = dma_unmap(0, 0);
    all.flags = U32::new(2);
    assert_eq!(raw.call(Command::DmaUnmap, all.as_bytes()).err(), Errno::BUSY);
    // The first one is unmapped, and is not asked for once more.
    let stats = served.control.stats();
    assert_eq!(stats.regions.iter().map(|one| one.iova).collect::<Vec<_>>(), [0x2000, 0x3000]);
    fake.take();
    fake.state().keeps = None;
    raw.call(Command::DmaUnmap, all.as_bytes()).ok();
    assert_eq!(fake.take(), [Call::Unmap(0x2000, 0x1000), Call::Unmap(0x3000, 0x1000)]);
    assert!(served.control.stats().regions.is_empty());
}

#[test]
fn a_range_that_the_hardware_refuses_is_not_mapped() {
    let fake = Fake::default();
    let served = serve_hardware(&fake);
    let mut raw = served.client();
    let guest = memory(0x1000);
    fake.state().refuses = true;
    assert_eq!(raw.map(0, 0x1000, guest.as_fd()).err(), Errno::NOMEM);
    assert!(served.control.stats().regions.is_empty());
    let unmap = dma_unmap(0, 0x1000);
    assert_eq!(raw.call(Command::DmaUnmap, unmap.as_bytes()).err(), Errno::NOENT);
    fake.state().refuses = false;
    raw.map(0, 0x1000, guest.as_fd()).ok();
    assert_eq!(served.control.stats().regions.len(), 1);
}

#[test]
fn an_unmap_is_answered_when_the_hardware_has_unmapped() {
    let fake = Fake::default();
    let served = serve_hardware(&fake);
    let mut raw = served.client();
    let guest = memory(0x1000);
    raw.map(0, 0x1000, guest.as_fd()).ok();
    fake.take();
    fake.hold(true);
    let header = raw.header(Command::DmaUnmap as u16, 24);
    raw.send(&[header.as_bytes(), dma_unmap(0, 0x1000).as_bytes()].concat(), &[]);
    eventually("the hardware unmaps", || !fake.state().calls.is_empty());
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
    let early = rustix::net::recv(&raw.socket, &mut [0], flags);
    assert_eq!(early.err(), Some(Errno::AGAIN), "a reply to an unmap that has not ended");
    fake.hold(false);
    raw.reply().ok();
    assert!(served.control.stats().regions.is_empty());
}

#[test]
fn a_client_that_goes_is_cut_off_before_the_reset_and_before_the_next_client() {
    let fake = Fake::default();
    let served = serve_hardware(&fake);
    let mut raw = served.client();
    raw.map(0, 0x1000, memory(0x1000).as_fd()).ok();
    let resets = || served.knobs.resets.load(Ordering::SeqCst);
    let before = resets();
    fake.take();
    fake.state().failures = 1;
    drop(raw);
    // The hardware is cut off once more when this client goes.
    let mut next = served.client();
    assert!(next.is_alive());
    assert_eq!(fake.take(), [Call::Release, Call::Release], "the first one failed");
    assert_eq!((fake.state().resets, resets()), (before, before + 1));
    assert!(served.control.stats().regions.is_empty());
}

#[test]
fn hardware_raises_the_eventfds_of_the_client() {
    let fake = Fake::default();
    let served = serve_hardware(&fake);
    let mut raw = served.client();
    let file = event();
    let route = set_irqs(ROUTE, spec::irq::MSIX, 1, 1);
    raw.call_with(Command::DeviceSetIrqs, route.as_bytes(), &[file.as_fd()]).ok();
    assert_eq!(fake.take(), [Call::Vectors(vec![false, true, false, false])]);
    let routed = fake.state().routes[1].clone().unwrap();
    rustix::io::write(&*routed, &1_u64.to_ne_bytes()).unwrap();
    assert_eq!(count(&file), 1);
    // The client tries its eventfd: no business of the hardware's.
    let trigger = set_irqs(F::DATA_NONE | F::TRIGGER, spec::irq::MSIX, 1, 1);
    raw.call(Command::DeviceSetIrqs, trigger.as_bytes()).ok();
    assert_eq!(count(&file), 1);
    for action in [F::MASK, F::UNMASK] {
        let mask = set_irqs(F::DATA_NONE | action, spec::irq::MSIX, 1, 1);
        let refused = raw.call(Command::DeviceSetIrqs, mask.as_bytes()).err();
        assert_eq!(refused, Errno::NOTSUP, "it could not hold an interrupt back");
    }
    assert!(fake.take().is_empty());
    let down = set_irqs(F::DATA_NONE | F::TRIGGER, spec::irq::MSIX, 0, 0);
    raw.call(Command::DeviceSetIrqs, down.as_bytes()).ok();
    assert_eq!(fake.take(), [Call::Vectors(vec![false; 4])]);
}

#[test]
fn the_pin_is_routed_and_masked() {
    let fake = Fake::default();
    let served = serve_hardware(&fake);
    let mut raw = served.client();
    let file = event();
    let route = set_irqs(ROUTE, spec::irq::INTX, 0, 1);
    raw.call_with(Command::DeviceSetIrqs, route.as_bytes(), &[file.as_fd()]).ok();
    for action in [F::MASK, F::UNMASK] {
        let mask = set_irqs(F::DATA_NONE | action, spec::irq::INTX, 0, 1);
        raw.call(Command::DeviceSetIrqs, mask.as_bytes()).ok();
    }
    let down = set_irqs(F::DATA_NONE | F::TRIGGER, spec::irq::INTX, 0, 0);
    raw.call(Command::DeviceSetIrqs, down.as_bytes()).ok();
    let calls = [Call::Pin(true), Call::MaskPin(true), Call::MaskPin(false), Call::Pin(false)];
    assert_eq!(fake.take(), calls);
}

#[test]
fn the_eventfd_that_unmasks_the_pin_unmasks_it_in_hardware() {
    let fake = Fake::default();
    let served = serve_hardware(&fake);
    let mut raw = served.client();
    let file = event();
    let route = set_irqs(F::DATA_EVENTFD | F::UNMASK, spec::irq::INTX, 0, 1);
    raw.call_with(Command::DeviceSetIrqs, route.as_bytes(), &[file.as_fd()]).ok();
    assert!(fake.take().is_empty());
    rustix::io::write(&file, &1_u64.to_ne_bytes()).unwrap();
    eventually("it is unmasked", || fake.state().calls.contains(&Call::MaskPin(false)));
}

#[test]
fn memory_without_a_descriptor_is_no_target_of_hardware() {
    let fake = Fake::default();
    let served = serve_hardware(&fake);
    let mut raw = served.client();
    // The mappable page of another device.
    raw.call(Command::DmaMap, dma_map(0, 0x1000).as_bytes()).ok();
    let large = raw.call(Command::DmaMap, dma_map(0x10_0000, 0x10_0000).as_bytes());
    assert_eq!(large.err(), Errno::NOTSUP);
    raw.call(Command::DmaUnmap, dma_unmap(0, 0x1000).as_bytes()).ok();
    assert!(fake.take().is_empty());
}

#[test]
fn an_endpoint_that_is_alone_needs_no_reactor() {
    let directory = tempfile::tempdir().unwrap();
    let config = Config::at(directory.path().join("socket"));
    let path = config.location.socket();
    let (fake, home) = (Fake::default(), Reactor::spawn(Settings::default()).unwrap());
    let mut parts = parts(&config, &fake);
    let doorbells = parts.doorbells(DOORBELLS).unwrap();
    let function = Scratch::new(parts.memory(), &parts.interrupts(), doorbells, Arc::default());
    let function = Box::new(function);
    let endpoint = Endpoint::new(config, parts, function, Vec::new(), &home.handle()).unwrap();
    let control = endpoint.control();
    endpoint.serve_alone("alone").unwrap();
    drop(home);
    for _ in 0..2 {
        let mut raw = Raw::new(connect(&path));
        raw.negotiate();
        assert!(raw.is_alive());
        drop(raw);
        eventually("it is cut off", || fake.take().contains(&Call::Release));
    }
    control.close();
    assert!(control.wait_closed(PATIENCE));
}
