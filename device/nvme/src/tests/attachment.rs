//! Namespaces that come, go and change their size under a driver.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::sync::{Arc, Mutex};

use slipway_block::{Completion, Disk, Geometry, Request};
use slipway_nvme_spec::command::SubmissionEntry;
use slipway_nvme_spec::event::Event;
use slipway_nvme_spec::feature::FeatureId;
use slipway_nvme_spec::identify::{Cns, IdentifyNamespace};
use slipway_nvme_spec::opcode::{AdminOpcode, NvmOpcode};
use slipway_nvme_spec::status::Status;

use super::lanes;
use super::rig::{self, HeldDisk, ReadOnly, Rig, Setup, ram};
use crate::driver::{admin, io};
use crate::{ChangeError, Done, Namespace};

type Outcome = Result<(), ChangeError>;

/// Returns a callback for a change, and the receiver of its result.
fn waiter() -> (Done, Receiver<Outcome>) {
    let (sender, receiver) = channel();
    (Box::new(move |outcome| sender.send(outcome).unwrap()), receiver)
}

fn namespace(nsid: u32, disk: Box<dyn Disk>) -> Namespace {
    rig::namespace(nsid, disk, lanes::wanted())
}

/// Enables events, and leaves `requests` requests for them.
fn listen(rig: &mut Rig, requests: usize) {
    let set = admin(AdminOpcode::SetFeatures)
        .with_dword(10, FeatureId::AsynchronousEventConfiguration.0.into())
        .with_dword(11, 1 << 8);
    rig.driver.admin(set).unwrap();
    for _ in 0..requests {
        rig.driver.submit(0, admin(AdminOpcode::AsynchronousEventRequest)).unwrap();
    }
    rig.poll(1);
}

/// Returns the events that have come.
fn events(rig: &mut Rig) -> Vec<Event> {
    rig.poll(2);
    rig.reap(0).iter().map(|entry| Event::from_dword(entry.result.get())).collect()
}

/// Returns the Changed Namespace List, as far as `len` bytes hold it.
fn changed(rig: &mut Rig, len: usize, retain: bool) -> Vec<u32> {
    let command = admin(AdminOpcode::GetLogPage)
        .with_dword(10, 4 | u32::from(retain) << 15 | (len as u32 / 4 - 1) << 16);
    let page = rig.driver.admin_read(command, len).unwrap();
    let words = page.chunks(4).map(|word| u32::from_le_bytes(word.try_into().unwrap()));
    words.filter(|nsid| *nsid != 0).collect()
}

fn active(rig: &mut Rig) -> Vec<u32> {
    let page = rig.driver.identify(Cns::ActiveNamespaces, 0).unwrap();
    let words = page.chunks(4).map(|word| u32::from_le_bytes(word.try_into().unwrap()));
    words.take_while(|nsid| *nsid != 0).collect()
}

fn read(rig: &mut Rig, nsid: u32, lba: u64) -> SubmissionEntry {
    let page = rig.buffer(512);
    SubmissionEntry { prp1: page.into(), ..io(NvmOpcode::Read, nsid, lba, 1) }
}

#[test]
fn a_namespace_comes_and_the_host_is_told_once() {
    let mut rig = Setup::new().rig();
    listen(&mut rig, 2);
    rig.controller().attach(namespace(7, ram(1 << 20, 4096))).unwrap();
    rig.controller().attach(Namespace { shared: true, ..namespace(3, ram(1 << 20, 512)) }).unwrap();
    assert_eq!(events(&mut rig), [Event::NAMESPACE_CHANGED], "masked until the log is read");
    assert_eq!(active(&mut rig), [1, 3, 7]);
    let third = rig.driver.identify_namespace(3).unwrap();
    assert_eq!((third.sharing, third.nguid), (IdentifyNamespace::SHARED, [3; 16]));
    assert_eq!(rig.driver.identify_namespace(7).unwrap().sharing, 0);
    let command = read(&mut rig, 7, 255);
    assert_eq!(rig.status(1, command), Status::SUCCESS);

    assert_eq!(changed(&mut rig, 4096, true), [3, 7]);
    assert_eq!(events(&mut rig), []);
    assert_eq!(changed(&mut rig, 4, false), [3], "who read a part knows a part");
    assert_eq!(changed(&mut rig, 4096, false), [7]);
    assert!(changed(&mut rig, 4096, false).is_empty());
    rig.controller().attach(namespace(9, ram(1 << 20, 512))).unwrap();
    assert_eq!(events(&mut rig), [Event::NAMESPACE_CHANGED]);
}

#[test]
fn who_did_not_ask_for_events_gets_none() {
    let mut rig = Setup::new().rig();
    rig.driver.submit(0, admin(AdminOpcode::AsynchronousEventRequest)).unwrap();
    rig.poll(1);
    rig.controller().attach(namespace(2, ram(1 << 20, 512))).unwrap();
    assert_eq!(events(&mut rig), []);
    assert_eq!(changed(&mut rig, 4096, false), [2]);
}

#[test]
fn what_cannot_be_attached_is_refused() {
    let mut rig = Setup::new().rig();
    let mut attach = |nsid| rig.controller().attach(namespace(nsid, ram(1 << 20, 512)));
    for nsid in [0, 1025, u32::MAX] {
        assert_eq!(attach(nsid), Err(ChangeError::NamespaceId(nsid)));
    }
    assert_eq!(attach(1), Err(ChangeError::Taken(1)));
    attach(1024).unwrap();
    let none = Sized::make(0).0;
    let refused = rig.controller().attach(namespace(2, none));
    assert_eq!(refused, Err(ChangeError::Geometry(2)));
    for nsid in [0, 2, u32::MAX] {
        let (done, outcome) = waiter();
        rig.controller().detach(nsid, done);
        assert_eq!(outcome.try_recv(), Ok(Err(ChangeError::Unknown(nsid))));
    }
    assert_eq!(active(&mut rig), [1, 1024]);
}

#[test]
fn a_namespace_goes_when_its_disk_has_ended() {
    let (disk, gate) = HeldDisk::make(ram(1 << 20, 512));
    let mut setup = Setup::new();
    setup.disks.push(disk);
    let mut rig = setup.rig();
    listen(&mut rig, 1);
    for lba in 0..3 {
        let command = read(&mut rig, 2, lba);
        rig.driver.submit(1, command).unwrap();
    }
    rig.poll(2);
    assert_eq!(gate.waiting(), 3);
    let (done, outcome) = waiter();
    rig.controller().detach(2, done);
    assert_eq!(events(&mut rig), [Event::NAMESPACE_CHANGED]);
    assert_eq!((active(&mut rig), changed(&mut rig, 4096, false)), (vec![1], vec![2]));
    let command = read(&mut rig, 2, 0);
    assert_eq!(rig.status(1, command), Status::INVALID_NAMESPACE.dnr());
    assert_eq!(rig.driver.identify_namespace(2).unwrap().size.get(), 0);
    assert_eq!(outcome.try_recv(), Err(TryRecvError::Empty));
    let mut again = || rig.controller().attach(namespace(2, ram(1 << 20, 512)));
    assert_eq!(again(), Err(ChangeError::Taken(2)), "commands in flight know it by that");

    gate.allow(2);
    rig.poll(2);
    assert_eq!(outcome.try_recv(), Err(TryRecvError::Empty));
    gate.open();
    rig.poll(2);
    assert_eq!(outcome.try_recv(), Ok(Ok(())));
    assert_eq!(Arc::strong_count(&gate), 1, "the disk is dropped");
    let ended = rig.reap(1);
    assert_eq!(ended.len(), 3);
    assert!(ended.iter().all(|entry| entry.status().is_success()), "{ended:?}");
    assert_eq!(rig.controller().requests_in_flight(), 0);
    rig.controller().attach(namespace(2, ram(1 << 20, 512))).unwrap();
    let command = read(&mut rig, 2, 2047);
    assert_eq!(rig.status(1, command), Status::SUCCESS);
}

#[test]
fn a_command_of_several_steps_takes_all_of_them_on_the_disk_that_goes() {
    let (disk, gate) = HeldDisk::make(ram(8 << 20, 512));
    let mut rig = Setup::new().alone().disk(disk).rig();
    let verify = io(NvmOpcode::Verify, 1, 0, 8192);
    rig.driver.submit(1, verify).unwrap();
    let (compare, page) = (read(&mut rig, 1, 0), rig.buffer(512));
    let fused = |opcode: NvmOpcode, fuse: u8| SubmissionEntry {
        opcode: opcode.0,
        flags: fuse,
        prp1: page.into(),
        ..compare
    };
    rig.driver.submit(1, fused(NvmOpcode::Compare, 1)).unwrap();
    rig.driver.submit(1, fused(NvmOpcode::Write, 2)).unwrap();
    rig.poll(2);
    let (done, outcome) = waiter();
    rig.controller().detach(1, done);
    for _ in 0..20 {
        assert_eq!(outcome.try_recv(), Err(TryRecvError::Empty));
        if gate.waiting() == 0 {
            break;
        }
        gate.allow(1);
        rig.poll(1);
    }
    gate.open();
    rig.poll(20);
    assert_eq!(outcome.try_recv(), Ok(Ok(())));
    let ended = rig.reap(1);
    assert_eq!(ended.len(), 3);
    assert!(ended.iter().all(|entry| entry.status().is_success()), "{ended:?}");
}

#[test]
fn a_reset_and_a_quiesce_end_what_leaves() {
    let (disk, gate) = HeldDisk::make(ram(1 << 20, 512));
    let mut setup = Setup::new();
    setup.disks.push(disk);
    let mut rig = setup.rig();
    let command = read(&mut rig, 2, 0);
    rig.driver.submit(1, command).unwrap();
    rig.poll(2);
    let (done, outcome) = waiter();
    rig.controller().detach(2, done);
    rig.write32(slipway_nvme_spec::registers::offset::CC, 0);
    rig.poll(2);
    assert!(rig.csts().ready(), "the disk still has guest memory");
    gate.open();
    assert!(slipway_pci::Function::quiesce(rig.controller()));
    rig.poll(2);
    assert_eq!(outcome.try_recv(), Ok(Ok(())));
    assert!(!rig.csts().ready());
}

/// A disk whose size a test changes.
struct Sized {
    inner: Box<dyn Disk>,
    size: Arc<AtomicU64>,
    blocks: u64,
}

impl Sized {
    fn make(blocks: u64) -> (Box<dyn Disk>, Arc<AtomicU64>) {
        let size = Arc::new(AtomicU64::new(blocks));
        let inner = ram(1 << 20, 512);
        (Box::new(Self { inner, size: size.clone(), blocks }), size)
    }
}

impl Disk for Sized {
    fn geometry(&self) -> Geometry {
        Geometry { blocks: self.blocks, ..self.inner.geometry() }
    }

    fn refresh(&mut self) -> Geometry {
        self.blocks = self.size.load(Relaxed);
        self.geometry()
    }

    fn submit(&mut self, requests: &mut Vec<Request>, completions: &mut Vec<Completion>) {
        self.inner.submit(requests, completions);
    }

    fn poll(&mut self, completions: &mut Vec<Completion>) {
        self.inner.poll(completions);
    }
}

#[test]
fn a_size_is_taken_over_when_nothing_is_in_flight() {
    let (disk, size) = Sized::make(100);
    let (disk, gate) = HeldDisk::make(disk);
    let mut rig = Setup::new().disk(disk).rig();
    gate.open();
    listen(&mut rig, 2);
    let beyond = read(&mut rig, 1, 100);
    assert_eq!(rig.status(1, beyond), Status::LBA_OUT_OF_RANGE.dnr());
    gate.allowed.store(0, Relaxed);
    let inside = read(&mut rig, 1, 99);
    rig.driver.submit(1, inside).unwrap();
    rig.poll(2);
    size.store(200, Relaxed);
    let (done, outcome) = waiter();
    rig.controller().refresh(1, done);
    // Commands that come meanwhile wait for the new size.
    rig.driver.submit(1, inside).unwrap();
    assert_eq!(events(&mut rig), []);
    assert_eq!((outcome.try_recv(), gate.waiting()), (Err(TryRecvError::Empty), 1));
    gate.open();
    assert_eq!(events(&mut rig), [Event::NAMESPACE_CHANGED]);
    assert_eq!(outcome.try_recv(), Ok(Ok(())));
    rig.poll(2);
    assert_eq!(rig.reap(1).len(), 2);
    assert_eq!(changed(&mut rig, 4096, false), [1]);
    assert_eq!(rig.driver.identify_namespace(1).unwrap().size.get(), 200);
    assert_eq!(rig.status(1, beyond), Status::SUCCESS);

    // The same size again is no change; a size of 0 is refused.
    for (blocks, expected) in [(200, Ok(())), (0, Err(ChangeError::Geometry(1)))] {
        size.store(blocks, Relaxed);
        let (done, outcome) = waiter();
        rig.controller().refresh(1, done);
        assert_eq!(events(&mut rig), []);
        assert_eq!(outcome.try_recv(), Ok(expected));
    }
    size.store(50, Relaxed);
    let (done, outcome) = waiter();
    rig.controller().refresh(1, done);
    assert_eq!(events(&mut rig), [Event::NAMESPACE_CHANGED]);
    assert_eq!(outcome.try_recv(), Ok(Ok(())));
    assert_eq!(rig.status(1, inside), Status::LBA_OUT_OF_RANGE.dnr());
}

#[test]
fn a_namespace_that_goes_while_it_grows_answers_both() {
    let (disk, gate) = HeldDisk::make(ram(1 << 20, 512));
    let mut rig = Setup::new().disk(disk).rig();
    let command = read(&mut rig, 1, 0);
    rig.driver.submit(1, command).unwrap();
    rig.poll(2);
    let order = Arc::new(Mutex::new(Vec::new()));
    let note = |name: &'static str| -> Done {
        let order = order.clone();
        Box::new(move |outcome: Outcome| order.lock().unwrap().push((name, outcome)))
    };
    let (grown, gone) = (note("refresh"), note("detach"));
    rig.controller().refresh(1, grown);
    rig.controller().detach(1, gone);
    gate.open();
    rig.poll(2);
    let expected = [("refresh", Err(ChangeError::Unknown(1))), ("detach", Ok(()))];
    assert_eq!(*order.lock().unwrap(), expected);
    assert_eq!(rig.reap(1).len(), 1);
}

#[test]
fn a_read_only_attachment_refuses_writes() {
    let mut rig = Setup::new().rig();
    let disk = Box::new(ReadOnly(ram(1 << 20, 512)));
    rig.controller().attach(namespace(2, disk)).unwrap();
    let page = rig.buffer(512);
    let write = SubmissionEntry { prp1: page.into(), ..io(NvmOpcode::Write, 2, 0, 1) };
    assert_eq!(rig.status(1, write), Status::WRITE_PROTECTED.dnr());
}

#[test]
fn the_changed_list_is_saved() {
    let disks = || vec![ram(1 << 20, 512), ram(1 << 20, 512)];
    let mut rig = Setup::new().rig();
    let (done, _outcome) = waiter();
    rig.controller().detach(1, done);
    rig.poll(1);
    for (nsid, disk) in (1..).zip(disks()) {
        rig.controller().attach(namespace(nsid, disk)).unwrap();
    }
    assert!(slipway_pci::Function::quiesce(rig.controller()));
    let state = slipway_pci::Function::save(rig.controller());
    let mut setup = Setup::on(rig.driver.arena.memory().clone(), ram(1 << 20, 512));
    setup.disks = disks();
    let mut successor = setup.controller();
    slipway_pci::Function::restore(&mut successor, &state).unwrap();
    rig.driver.registers.function = successor;
    assert_eq!(changed(&mut rig, 4096, false), [1, 2]);
}
