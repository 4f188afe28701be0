//! A controller with a driver on it.
//!
//! Over 500 lines: what the tests of the crate share.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use slipway_block::{
    Completion, Disk, DiskError, Geometry, Operation, RamDisk, Request, Transferred,
};
use slipway_doorbells::Doorbells;
use slipway_nvme_spec::command::{CompletionEntry, SubmissionEntry};
use slipway_nvme_spec::registers::{ControllerStatus, offset};
use slipway_nvme_spec::status::Status;
use slipway_pci::{FifoSink, Function, Progress};
use slipway_ram::{Lasting, Memory, Span};
use slipway_telemetry::ManualClock;

use super::lanes;
use crate::driver::{Arena, Direct, Driver, RegisterAccess};
use crate::{Controller, Identity, Limits, Namespace, Parts, doorbell_count};

/// Bytes of guest memory.
pub const MEMORY: usize = 32 << 20;

/// The properties of a rig that a test chooses.
pub struct Setup {
    pub memory: Memory,
    pub disks: Vec<Box<dyn Disk>>,
    pub limits: Limits,
    pub clock: ManualClock,
    pub sink: Arc<FifoSink>,
    pub vectors: u16,
    pub serial: &'static str,
    pub journal: Option<Lasting>,
    /// `true` if the namespaces are shared with other controllers.
    pub shared: bool,
    /// `true` for a controller on one thread, even where other tests have lanes.
    pub alone: bool,
}

impl Setup {
    /// Returns a setup with one RAM disk of 16 MiB with 512-byte blocks.
    pub fn new() -> Self {
        Self::on(Memory::heap(MEMORY), ram(16 << 20, 512))
    }

    /// Returns a setup with one disk, on existing memory.
    pub fn on(memory: Memory, disk: Box<dyn Disk>) -> Self {
        Self {
            memory,
            disks: vec![disk],
            limits: Limits::default(),
            clock: ManualClock::new(),
            sink: FifoSink::new(),
            vectors: 65,
            serial: "TEST0001",
            journal: None,
            shared: false,
            alone: false,
        }
    }

    /// Keeps the controller on one thread: for features that lanes treat otherwise, such as fused
    /// pairs, or that each lane has for itself, such as turns.
    pub fn alone(self) -> Self {
        Self { alone: true, ..self }
    }

    pub fn disk(mut self, disk: Box<dyn Disk>) -> Self {
        self.disks = vec![disk];
        self
    }

    pub fn controller(self) -> Controller {
        let doorbells = Doorbells::trapped(doorbell_count(self.limits.queue_pairs));
        self.with_doorbells(doorbells)
    }

    pub fn with_doorbells(self, doorbells: Doorbells) -> Controller {
        // A controller with a journal gets its lanes after it has recovered.
        let kept = self.journal.is_some();
        let lanes = match self.alone {
            true => 1,
            false if kept => self.limits.lanes,
            false => lanes::wanted().max(self.limits.lanes),
        };
        let namespaces = self.disks.into_iter().zip(1..);
        let controller = Controller::new(Parts {
            memory: self.memory,
            interrupts: self.sink.interrupts(self.vectors),
            doorbells,
            namespaces: namespaces
                .map(|(disk, nsid)| {
                    let shared = self.shared;
                    Namespace { shared, ..namespace(nsid, disk, lanes) }
                })
                .collect(),
            clock: Arc::new(self.clock),
            identity: Identity::new(self.serial),
            limits: Limits { lanes, ..self.limits },
            journal: self.journal,
        });
        let controller = controller.unwrap();
        if kept { controller } else { controller.with_lanes_beside() }
    }

    /// Makes a rig with the admin queues enabled.
    pub fn admin(self) -> Rig {
        let (memory, clock, sink) = (self.memory.clone(), self.clock.clone(), self.sink.clone());
        let arena = Arena::new(memory, 0, MEMORY as u64);
        let driver = Driver::new(Direct::new(self.controller()), arena, 32).unwrap();
        Rig { driver, clock, sink }
    }

    /// Makes a rig with an I/O queue pair of 64 entries, number 1, vector 1.
    pub fn rig(self) -> Rig {
        let mut rig = self.admin();
        rig.driver.create_pair(1, 64, Some(1)).unwrap();
        rig
    }
}

pub fn ram(bytes: u64, block_size: u32) -> Box<dyn Disk> {
    Box::new(RamDisk::new(bytes, block_size).unwrap())
}

/// Returns a namespace for a controller on so many threads.
pub fn namespace(nsid: u32, disk: Box<dyn Disk>, lanes: u16) -> Namespace {
    let mut disks = Routed::make(disk, lanes.into());
    let first = Namespace::new(nsid, disks.remove(0), [nsid as u8; 16]);
    Namespace { lanes: disks, ..first }
}

/// A driver on a controller, with the clock and the interrupts of both.
pub struct Rig {
    pub driver: Driver<Direct<Controller>>,
    pub clock: ManualClock,
    pub sink: Arc<FifoSink>,
}

impl Rig {
    pub fn controller(&mut self) -> &mut Controller {
        &mut self.driver.registers.function
    }

    /// Polls until the controller sleeps. Returns how long the controller wants to sleep.
    pub fn settle(&mut self) -> Option<Duration> {
        loop {
            match self.controller().poll() {
                Progress::Busy | Progress::Behind => {}
                Progress::Idle(at) | Progress::Watching(at) => {
                    return at.map(|at| at - slipway_telemetry::Clock::now(&self.clock));
                }
            }
        }
    }

    pub fn poll(&mut self, times: usize) {
        // A message between home and lane takes a poll each way.
        let each = if self.controller().home.fleet.is_empty() { 1 } else { 3 };
        for _ in 0..each * times {
            self.controller().poll();
        }
    }

    pub fn advance(&mut self, by: Duration) {
        self.clock.advance(by);
    }

    /// Returns a command with `len` bytes at `address` as its data.
    pub fn with_data(
        &mut self,
        command: SubmissionEntry,
        address: u64,
        len: usize,
    ) -> SubmissionEntry {
        let mut command = command;
        (command.prp1, command.prp2) = self.driver.point(address, len).unwrap();
        command
    }

    pub fn buffer(&mut self, len: usize) -> u64 {
        self.driver.arena.allocate(len).unwrap()
    }

    pub fn fill(&self, address: u64, data: &[u8]) {
        self.driver.arena.memory().write(address, data).unwrap();
    }

    pub fn bytes(&self, address: u64, len: usize) -> Vec<u8> {
        let mut data = vec![0; len];
        self.driver.arena.memory().read(address, &mut data).unwrap();
        data
    }

    /// Takes the completions of queue `queue` that are there now.
    pub fn reap(&mut self, queue: u16) -> Vec<CompletionEntry> {
        let mut entries = Vec::new();
        self.driver.reap(queue, &mut entries).unwrap();
        entries
    }

    /// Runs `command` and returns its status, without "more".
    pub fn status(&mut self, queue: u16, command: SubmissionEntry) -> Status {
        Status(self.run(queue, command).status().0 & !(1 << 13))
    }

    pub fn csts(&mut self) -> ControllerStatus {
        ControllerStatus(self.driver.registers.read32(offset::CSTS).unwrap())
    }

    pub fn write32(&mut self, at: u64, value: u32) {
        self.driver.registers.write32(at, value).unwrap();
    }

    /// Runs a command on queue `queue` and returns its completion.
    pub fn run(&mut self, queue: u16, command: SubmissionEntry) -> CompletionEntry {
        self.driver.run(queue, command).unwrap()
    }
}

/// A disk that carries out only requests, like a disk that is not memory.
pub struct Requested(pub Box<dyn Disk>);

impl Disk for Requested {
    fn geometry(&self) -> Geometry {
        self.0.geometry()
    }

    fn submit(&mut self, requests: &mut Vec<Request>, completions: &mut Vec<Completion>) {
        self.0.submit(requests, completions);
    }

    fn poll(&mut self, completions: &mut Vec<Completion>) {
        self.0.poll(completions);
    }
}

/// A disk that holds requests back until a test lets them go, newest first, and that can make them
/// fail.
pub struct HeldDisk {
    inner: Box<dyn Disk>,
    waiting: Vec<Request>,
    gate: Arc<Gate>,
    copies: bool,
}

/// A test's control of a [`HeldDisk`] disk.
#[derive(Default)]
pub struct Gate {
    /// The number of requests that may go.
    pub allowed: AtomicUsize,
    /// The number of requests that wait.
    pub waiting: AtomicUsize,
    /// The number of flushes that were let go.
    pub flushes: AtomicUsize,
    /// The number of durable requests that were let go.
    pub durable: AtomicUsize,
    /// The number of calls of `release`.
    pub releases: AtomicUsize,
    /// `true` if the disk cancels no request.
    pub keeps: AtomicBool,
    /// The error that every request ends with.
    pub error: Mutex<Option<DiskError>>,
}

impl Gate {
    pub fn open(&self) {
        self.allowed.store(usize::MAX / 2, Relaxed);
    }

    pub fn close(&self) {
        self.allowed.store(0, Relaxed);
    }

    pub fn allow(&self, requests: usize) {
        self.allowed.fetch_add(requests, Relaxed);
    }

    pub fn waiting(&self) -> usize {
        self.waiting.load(Relaxed)
    }

    pub fn fail(&self, error: Option<DiskError>) {
        *self.error.lock().unwrap() = error;
    }
}

impl HeldDisk {
    pub fn make(inner: Box<dyn Disk>) -> (Box<dyn Disk>, Arc<Gate>) {
        let gate = Arc::new(Gate::default());
        (Box::new(Self { inner, waiting: Vec::new(), gate: gate.clone(), copies: false }), gate)
    }

    /// Returns a held disk that reports that it copies.
    pub fn copying(inner: Box<dyn Disk>) -> (Box<dyn Disk>, Arc<Gate>) {
        let gate = Arc::new(Gate::default());
        (Box::new(Self { inner, waiting: Vec::new(), gate: gate.clone(), copies: true }), gate)
    }
}

impl Disk for HeldDisk {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn refresh(&mut self) -> Geometry {
        self.inner.refresh()
    }

    fn submit(&mut self, requests: &mut Vec<Request>, _: &mut Vec<Completion>) {
        self.waiting.append(requests);
        self.gate.waiting.store(self.waiting.len(), Relaxed);
    }

    fn poll(&mut self, completions: &mut Vec<Completion>) {
        while self.gate.allowed.load(Relaxed) > 0
            && let Some(request) = self.waiting.pop()
        {
            self.gate.allowed.fetch_sub(1, Relaxed);
            self.gate.flushes.fetch_add((request.operation == Operation::Flush).into(), Relaxed);
            self.gate.durable.fetch_add(request.durable.into(), Relaxed);
            match *self.gate.error.lock().unwrap() {
                Some(error) => completions.push(Completion {
                    tag: request.tag,
                    result: Err(error),
                    spans: request.spans,
                }),
                None => self.inner.submit(&mut vec![request], completions),
            }
        }
        self.inner.poll(completions);
        self.gate.waiting.store(self.waiting.len(), Relaxed);
    }

    fn copies(&self, _: Operation) -> bool {
        self.copies
    }

    fn release(&mut self) {
        self.gate.releases.fetch_add(1, Relaxed);
    }

    fn cancel(&mut self, tag: u64, completions: &mut Vec<Completion>) -> bool {
        let at = self.waiting.iter().position(|request| request.tag == tag);
        let Some(at) = at.filter(|_| !self.gate.keeps.load(Relaxed)) else { return false };
        let Request { tag, spans, .. } = self.waiting.remove(at);
        completions.push(Completion { tag, result: Err(DiskError::Cancelled), spans });
        true
    }
}

impl Drop for HeldDisk {
    fn drop(&mut self) {
        assert!(self.waiting.is_empty() || std::thread::panicking(), "requests were abandoned");
    }
}

/// A disk that reports that it is read-only.
pub struct ReadOnly(pub Box<dyn Disk>);

impl Disk for ReadOnly {
    fn geometry(&self) -> Geometry {
        Geometry { read_only: true, ..self.0.geometry() }
    }

    fn submit(&mut self, requests: &mut Vec<Request>, completions: &mut Vec<Completion>) {
        self.0.submit(requests, completions);
    }

    fn poll(&mut self, completions: &mut Vec<Completion>) {
        self.0.poll(completions);
    }
}

/// One of several disks in front of one disk, as lanes have them: each gets the ends of its own
/// requests.
struct Routed {
    medium: Arc<Mutex<Medium>>,
    own: usize,
}

struct Medium {
    disk: Box<dyn Disk>,
    ended: Vec<Vec<Completion>>,
    fresh: Vec<Completion>,
}

/// The lowest bit of the owner's number in a request's tag, above any request's number.
const OWNER: u32 = 56;

impl Routed {
    /// Returns `count` disks in front of `disk`; `disk` itself if one is enough.
    fn make(disk: Box<dyn Disk>, count: usize) -> Vec<Box<dyn Disk>> {
        if count == 1 {
            return vec![disk];
        }
        let ended = (0..count).map(|_| Vec::new()).collect();
        let medium = Arc::new(Mutex::new(Medium { disk, ended, fresh: Vec::new() }));
        let one = |own| Box::new(Self { medium: medium.clone(), own }) as Box<dyn Disk>;
        (0..count).map(one).collect()
    }

    fn with<T>(
        &self,
        completions: &mut Vec<Completion>,
        call: impl FnOnce(&mut dyn Disk, &mut Vec<Completion>) -> T,
    ) -> T {
        let mut medium = self.medium.lock().unwrap();
        let Medium { disk, ended, fresh } = &mut *medium;
        let result = call(&mut **disk, fresh);
        for mut one in fresh.drain(..) {
            let owner = (one.tag >> OWNER) as usize;
            one.tag &= (1 << OWNER) - 1;
            ended[owner].push(one);
        }
        completions.append(&mut medium.ended[self.own]);
        result
    }
}

impl Disk for Routed {
    fn geometry(&self) -> Geometry {
        self.medium.lock().unwrap().disk.geometry()
    }

    fn refresh(&mut self) -> Geometry {
        self.medium.lock().unwrap().disk.refresh()
    }

    fn release(&mut self) {
        self.medium.lock().unwrap().disk.release();
    }

    fn submit(&mut self, requests: &mut Vec<Request>, completions: &mut Vec<Completion>) {
        for request in requests.iter_mut() {
            request.tag |= (self.own as u64) << OWNER;
        }
        self.with(completions, |disk, ended| disk.submit(requests, ended));
    }

    fn poll(&mut self, completions: &mut Vec<Completion>) {
        self.with(completions, |disk, ended| disk.poll(ended));
    }

    fn transfer(&mut self, operation: Operation, at: (u64, u32), spans: &[Span]) -> Transferred {
        self.medium.lock().unwrap().disk.transfer(operation, at, spans)
    }

    fn copies(&self, operation: Operation) -> bool {
        self.medium.lock().unwrap().disk.copies(operation)
    }

    fn cancel(&mut self, tag: u64, completions: &mut Vec<Completion>) -> bool {
        let tag = tag | (self.own as u64) << OWNER;
        self.with(completions, |disk, ended| disk.cancel(tag, ended))
    }
}

/// A disk that outlives its controller.
#[derive(Clone)]
pub struct Shared(Arc<Mutex<Box<dyn Disk>>>);

impl Shared {
    pub fn new(disk: Box<dyn Disk>) -> Self {
        Self(Arc::new(Mutex::new(disk)))
    }
}

impl Disk for Shared {
    fn geometry(&self) -> Geometry {
        self.0.lock().unwrap().geometry()
    }

    fn submit(&mut self, requests: &mut Vec<Request>, completions: &mut Vec<Completion>) {
        self.0.lock().unwrap().submit(requests, completions);
    }

    fn poll(&mut self, completions: &mut Vec<Completion>) {
        self.0.lock().unwrap().poll(completions);
    }
}

/// A small generator with a seed, so that a failure repeats.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let mixed = self.0 ^ self.0 >> 33;
        mixed.wrapping_mul(0xff51afd7ed558ccd) ^ mixed >> 29
    }

    pub fn below(&mut self, bound: u64) -> u64 {
        (self.next() >> 16) % bound
    }

    pub fn bytes(&mut self, len: usize) -> Vec<u8> {
        (0..len).map(|_| self.next() as u8).collect()
    }
}
