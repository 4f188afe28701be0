//! NVMe controllers.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::io::Errno;
use slipway_block::{Completion, Disk, Geometry, RamDisk, Request as DiskRequest};
use slipway_nvme::driver::{Arena, Driver, admin, io};
use slipway_nvme::{
    Controller, Identity, Limits, Mailbox, Namespace, Parts, Request, doorbell_count,
};
use slipway_nvme_spec::command::CompletionEntry;
use slipway_nvme_spec::event::Event;
use slipway_nvme_spec::feature::FeatureId;
use slipway_nvme_spec::opcode::{AdminOpcode, NvmOpcode};
use slipway_pci::Interrupt;
use slipway_reactor::{Reactor, Settings};
use slipway_vfio_user::{Config, Control, DoorbellMode, Endpoint, EndpointParts, LaneHome};
use slipway_vfio_user_client::FunctionError;

use crate::common::*;

const QUEUES: u16 = 4;
const BLOCK: usize = 512;

/// A medium that several disks reach, and that holds requests back while `closed`.
#[derive(Clone)]
struct Medium {
    disk: Arc<Mutex<RamDisk>>,
    closed: Arc<AtomicBool>,
    waiting: Arc<AtomicUsize>,
}

impl Medium {
    fn new() -> Self {
        let disk = Arc::new(Mutex::new(RamDisk::new(1 << 20, BLOCK as u32).unwrap()));
        Self { disk, closed: Arc::default(), waiting: Arc::default() }
    }

    fn disk(&self) -> Box<dyn Disk> {
        Box::new(Gated { medium: self.clone(), waiting: Vec::new() })
    }
}

/// A disk on a [`Medium`].
struct Gated {
    medium: Medium,
    waiting: Vec<DiskRequest>,
}

impl Disk for Gated {
    fn geometry(&self) -> Geometry {
        self.medium.disk.lock().unwrap().geometry()
    }

    fn submit(&mut self, requests: &mut Vec<DiskRequest>, completions: &mut Vec<Completion>) {
        self.medium.waiting.fetch_add(requests.len(), Ordering::SeqCst);
        self.waiting.append(requests);
        self.poll(completions);
    }

    fn poll(&mut self, completions: &mut Vec<Completion>) {
        if !self.medium.closed.load(Ordering::SeqCst) {
            self.medium.waiting.fetch_sub(self.waiting.len(), Ordering::SeqCst);
            self.medium.disk.lock().unwrap().submit(&mut self.waiting, completions);
        }
    }
}

struct Served {
    path: PathBuf,
    control: Control,
    mailbox: Mailbox,
    _reactors: Vec<Reactor>,
    _directory: tempfile::TempDir,
}

/// How a controller is served.
#[derive(Clone, Copy, Debug)]
struct Shape {
    doorbells: DoorbellMode,
    /// There is a lane beside the home.
    lane: bool,
    serial: &'static str,
}

fn namespace(nsid: u32, medium: &Medium, shape: Shape) -> Namespace {
    let mut namespace = Namespace::new(nsid, medium.disk(), [nsid as u8; 16]);
    if shape.lane {
        namespace.lanes.push(medium.disk());
    }
    namespace
}

fn serve(medium: Option<&Medium>, shape: Shape) -> Served {
    serve_within(medium, shape, Config::at("").reply_deadline)
}

/// Serves a controller that has so much time to become quiet.
fn serve_within(medium: Option<&Medium>, shape: Shape, reply_deadline: Duration) -> Served {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    let config = Config { doorbells: shape.doorbells, reply_deadline, ..Config::at(&path) };
    let reactors = [(); 2].map(|()| Reactor::spawn(Settings::default()).unwrap());
    let mut parts = EndpointParts::new(&config);
    let sink = parts.interrupts();
    let lanes = 1 + u16::from(shape.lane);
    let controller = Controller::new(Parts {
        memory: parts.memory(),
        interrupts: (0..=QUEUES).map(|vector| Interrupt::new(sink.clone(), vector)).collect(),
        doorbells: parts.doorbells(doorbell_count(QUEUES)).unwrap(),
        namespaces: medium.map(|medium| namespace(1, medium, shape)).into_iter().collect(),
        clock: parts.clock(),
        identity: Identity::new(shape.serial),
        limits: Limits { queue_pairs: QUEUES, lanes, ..Limits::default() },
        journal: None,
    })
    .unwrap();
    let mailbox = controller.mailbox();
    let home = reactors[0].handle();
    let mut endpoint =
        Endpoint::new(config, parts, Box::new(controller), Vec::new(), &home).unwrap();
    if shape.lane {
        let lane = LaneHome { reactor: reactors[1].handle(), wakes: Vec::new() };
        endpoint.spread(vec![lane]).unwrap();
    }
    let control = endpoint.control();
    home.add(Box::new(endpoint)).unwrap();
    Served { path, control, mailbox, _reactors: reactors.into(), _directory: directory }
}

fn pattern(lba: u64) -> [u8; BLOCK] {
    std::array::from_fn(|at| (at as u64 * 7 + lba * 13) as u8)
}

/// Returns completions until there are `count` of them.
fn wait_for(driver: &mut Driver<Registers>, queue: u16, count: usize) -> Vec<CompletionEntry> {
    let mut entries = Vec::new();
    eventually("commands end", || {
        driver.reap(queue, &mut entries).unwrap();
        entries.len() >= count
    });
    entries
}

/// Writes blocks through queue pairs 1 and 2, and reads them back.
fn use_disk(driver: &mut Driver<Registers>, nsid: u32, lbas: std::ops::Range<u64>) {
    let buffer = driver.arena.allocate(BLOCK).unwrap();
    for lba in lbas {
        let queue = (lba % 2 + 1) as u16;
        driver.arena.memory().write(buffer, &pattern(lba)).unwrap();
        driver.transfer(queue, io(NvmOpcode::Write, nsid, lba, 1), (buffer, BLOCK)).unwrap();
        driver.arena.memory().write(buffer, &[0; BLOCK]).unwrap();
        driver.transfer(queue, io(NvmOpcode::Read, nsid, lba, 1), (buffer, BLOCK)).unwrap();
        let mut read = [0; BLOCK];
        driver.arena.memory().read(buffer, &mut read).unwrap();
        assert!(read == pattern(lba), "block {lba}");
    }
}

/// Submits reads of blocks, without waiting for them. Returns the buffers.
fn submit_reads(
    driver: &mut Driver<Registers>,
    queue: u16,
    lbas: std::ops::Range<u64>,
) -> Vec<u64> {
    let read = |lba| {
        let buffer = driver.arena.allocate(BLOCK).unwrap();
        let mut command = io(NvmOpcode::Read, 1, lba, 1);
        (command.prp1, command.prp2) = driver.point(buffer, BLOCK).unwrap();
        driver.submit(queue, command).unwrap();
        buffer
    };
    lbas.map(read).collect()
}

fn shapes() -> impl Iterator<Item = Shape> {
    let modes = [DoorbellMode::Trapped, DoorbellMode::Mapped, DoorbellMode::Rung];
    let both = |doorbells| [false, true].map(|lane| Shape { doorbells, lane, serial: "FIRST" });
    modes.into_iter().flat_map(both)
}

/// A driver moves to another controller with commands in flight, and with commands that no
/// controller has seen yet.
#[test]
fn a_driver_goes_on_with_another_controller() {
    for shape in shapes() {
        let medium = Medium::new();
        let (first, guest) = (serve(Some(&medium), shape), guest(1 + QUEUES));
        let arena = Arena::new(guest.memory.clone(), 0, MEMORY);
        let mut driver = Driver::new(connect(&guest, &first.path), arena, 16).unwrap();
        for pair in 1..=2 {
            driver.create_pair(pair, 32, Some(pair)).unwrap();
        }
        use_disk(&mut driver, 1, 0..16);
        medium.closed.store(true, Ordering::SeqCst);
        let mut buffers = submit_reads(&mut driver, 1, 0..5);
        buffers.extend(submit_reads(&mut driver, 2, 5..8));
        eventually("the disk has them", || medium.waiting.load(Ordering::SeqCst) == 8);
        let function = driver.registers.function.clone();
        let stopped = std::thread::spawn(move || function.stop());
        eventually("it waits for the disk", || {
            medium.closed.store(false, Ordering::SeqCst);
            stopped.is_finished()
        });
        stopped.join().unwrap().unwrap();
        // The guest has rung these, and then it was paused.
        buffers.extend(submit_reads(&mut driver, 1, 8..12));
        buffers.extend(submit_reads(&mut driver, 2, 12..16));
        driver.registers.function.save().unwrap();
        let state = driver.registers.function.save().unwrap();
        // Interrupts for the first eight are the guest's already.
        for vector in 0..=usize::from(QUEUES) {
            guest.count(vector);
        }

        let second = serve(Some(&medium), Shape { serial: "SECOND", ..shape });
        driver.registers = connect(&guest, &second.path);
        driver.registers.function.load(&state).unwrap();
        assert_eq!(wait_for(&mut driver, 1, 9).len(), 9, "{shape:?}");
        assert_eq!(wait_for(&mut driver, 2, 7).len(), 7, "{shape:?}");
        assert!((1..=2).all(|vector| guest.count(vector) > 0), "{shape:?}");
        for (lba, buffer) in (0..).zip(buffers) {
            let mut read = [0; BLOCK];
            driver.arena.memory().read(buffer, &mut read).unwrap();
            assert!(read == pattern(lba), "{shape:?}: block {lba}");
        }
        use_disk(&mut driver, 1, 16..40);
        eventually("it interrupts", || guest.count(1) > 0 && guest.count(2) > 0);
        assert!(driver.identify_controller().unwrap().serial.starts_with(b"SECOND"));
        driver.create_pair(3, 8, Some(3)).unwrap();
        driver.delete_pair(3).unwrap();
        driver.shutdown().unwrap();
        first.control.close();
        assert!(first.control.wait_closed(PATIENCE));
    }
}

/// A controller without disks is the template of several. Each gets a disk of its own after it has
/// taken the state over, and the guest is told.
#[test]
fn forks_of_a_controller_get_disks_of_their_own() {
    for shape in shapes() {
        let (template, guest) = (serve(None, shape), guest(1 + QUEUES));
        let arena = Arena::new(guest.memory.clone(), 0, MEMORY);
        let mut driver = Driver::new(connect(&guest, &template.path), arena, 16).unwrap();
        for pair in 1..=2 {
            driver.create_pair(pair, 32, Some(pair)).unwrap();
        }
        let events = admin(AdminOpcode::SetFeatures)
            .with_dword(10, FeatureId::AsynchronousEventConfiguration.0.into())
            .with_dword(11, 1 << 8);
        driver.admin(events).unwrap();
        driver.submit(0, admin(AdminOpcode::AsynchronousEventRequest)).unwrap();
        // The request was fetched before this command.
        driver.identify_controller().unwrap();
        let state = driver.registers.function.save().unwrap();
        let medium = Medium::new();
        let fork = serve(None, Shape { serial: "FORK", ..shape });
        driver.registers = connect(&guest, &fork.path);
        driver.registers.function.load(&state).unwrap();
        guest.count(0);
        let (done, attached) = std::sync::mpsc::channel();
        let done = Box::new(move |outcome| done.send(outcome).unwrap());
        fork.mailbox.post(Request::Attach(namespace(9, &medium, shape), done));
        fork.control.poke();
        attached.recv_timeout(PATIENCE).unwrap().unwrap();
        let event = wait_for(&mut driver, 0, 1);
        assert_eq!(Event::from_dword(event[0].result.get()), Event::NAMESPACE_CHANGED);
        eventually("it interrupts", || guest.count(0) > 0);
        use_disk(&mut driver, 9, 0..8);
    }
}

#[test]
fn a_controller_of_another_size_takes_no_state_over() {
    let shape = Shape { doorbells: DoorbellMode::Trapped, lane: false, serial: "ONE" };
    let medium = Medium::new();
    let (served, guest) = (serve(Some(&medium), shape), guest(1 + QUEUES));
    let registers = connect(&guest, &served.path);
    let mut state = registers.function.save().unwrap();
    registers.function.load(&state).unwrap();
    let at = state.windows(15).position(|part| part == b"\"queue_pairs\":4").unwrap();
    state[at + 14] = b'3';
    let refused = Err(FunctionError::Refused(Errno::INVAL));
    assert_eq!(registers.function.load(&state), refused);
    assert_eq!(registers.function.start(), refused);
    registers.function.reset().unwrap();
    assert_eq!(
        registers.function.load(&vec![b' '; (1 << 20) + 1]),
        Err(FunctionError::Refused(Errno::FBIG))
    );
    assert_eq!(registers.function.load(&vec![b' '; 1 << 20]), refused);
    registers.function.reset().unwrap();
    let arena = Arena::new(guest.memory.clone(), 0, MEMORY);
    let mut driver = Driver::new(registers, arena, 16).unwrap();
    (1..=2).for_each(|pair| driver.create_pair(pair, 8, None).unwrap());
    use_disk(&mut driver, 1, 0..4);
}

/// The disk does not answer, and the function goes on with it.
#[test]
fn a_controller_whose_disk_hangs_is_not_stopped() {
    let shape = Shape { doorbells: DoorbellMode::Trapped, lane: false, serial: "ONE" };
    let medium = Medium::new();
    let deadline = Duration::from_millis(30);
    let served = serve_within(Some(&medium), shape, deadline);
    let guest = guest(1 + QUEUES);
    let arena = Arena::new(guest.memory.clone(), 0, MEMORY);
    let mut driver = Driver::new(connect(&guest, &served.path), arena, 16).unwrap();
    (1..=2).for_each(|pair| driver.create_pair(pair, 8, None).unwrap());
    use_disk(&mut driver, 1, 0..1);
    medium.closed.store(true, Ordering::SeqCst);
    let buffers = submit_reads(&mut driver, 1, 0..1);
    eventually("the disk has it", || medium.waiting.load(Ordering::SeqCst) == 1);
    let busy = FunctionError::Refused(Errno::BUSY);
    assert_eq!(driver.registers.function.stop(), Err(busy.clone()));
    assert_eq!(driver.registers.function.save(), Err(busy));
    medium.closed.store(false, Ordering::SeqCst);
    served.control.poke();
    wait_for(&mut driver, 1, 1);
    let mut read = [0; BLOCK];
    driver.arena.memory().read(buffers[0], &mut read).unwrap();
    assert!(read == pattern(0));
    driver.registers.function.stop().unwrap();
    driver.registers.function.start().unwrap();
    use_disk(&mut driver, 1, 1..4);
}
