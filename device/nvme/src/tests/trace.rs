//! Traces: a delay in one layer shows in that layer and in no other.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use slipway_block::DelayDisk;
use slipway_doorbells::Doorbells;
use slipway_nvme_spec::command::SubmissionEntry;
use slipway_nvme_spec::opcode::NvmOpcode;
use slipway_pci::{Function, Interrupt, InterruptSink};
use slipway_ram::{DmaMap, Fault, MessageMemory, Permissions, Region};
use slipway_telemetry::{Clock, ManualClock};

use super::rig::{MEMORY, Setup, ram};
use crate::driver::{Arena, Direct, Driver, io};
use crate::{
    Controller, Identity, Latencies, Layer, Limits, Namespace, OpcodeClass, Parts, Tracer,
    doorbell_count,
};

/// The address at which message-only memory begins.
const FAR: u64 = MEMORY as u64;
const FAR_SIZE: u64 = 1 << 20;

/// A delay: each call lets time pass.
#[derive(Clone, Default)]
struct Delay {
    clock: ManualClock,
    nanos: Arc<AtomicU64>,
}

impl Delay {
    fn pass(&self) {
        self.clock.advance(Duration::from_nanos(self.nanos.load(Relaxed)));
    }
}

/// Message-only memory of zeros: reading it takes time, and commands with data in it have that
/// read before their disk gets them.
struct SlowMemory(Delay);

impl MessageMemory for SlowMemory {
    fn read(&self, _: u64, into: &mut [u8]) -> Result<(), Fault> {
        self.0.pass();
        into.fill(0);
        Ok(())
    }

    fn write(&self, _: u64, _: &[u8]) -> Result<(), Fault> {
        Ok(())
    }
}

struct SlowInterrupts(Delay);

impl InterruptSink for SlowInterrupts {
    fn signal(&self, _: u16) {
        self.0.pass();
    }
}

struct Traced {
    driver: Driver<Direct<Controller>>,
    clock: ManualClock,
    memory: Delay,
    interrupts: Delay,
}

impl Traced {
    /// Makes a rig with a disk that takes 700 ns; every other delay is zero.
    fn new() -> Self {
        let clock = ManualClock::new();
        clock.advance(Duration::from_secs(1));
        let delay = || Delay { clock: clock.clone(), ..Delay::default() };
        let (memory, interrupts) = (delay(), delay());
        let mut map = DmaMap::new();
        map.add(0, Region::heap(MEMORY)).unwrap();
        let far = Arc::new(SlowMemory(memory.clone()));
        map.add(FAR, Region::remote(far, FAR_SIZE, Permissions::READ_WRITE)).unwrap();
        let disk_time = Duration::from_nanos(700);
        let disk = DelayDisk::new(ram(1 << 20, 512), Arc::new(clock.clone()), disk_time).unwrap();
        let sink: Arc<dyn InterruptSink> = Arc::new(SlowInterrupts(interrupts.clone()));
        let limits = Limits { in_flight: 64, ..Limits::default() };
        let controller = Controller::new(Parts {
            memory: map.memory(),
            interrupts: (0..3).map(|vector| Interrupt::new(sink.clone(), vector)).collect(),
            doorbells: Doorbells::trapped(doorbell_count(limits.queue_pairs)),
            namespaces: vec![Namespace::new(1, Box::new(disk), [1; 16])],
            clock: Arc::new(clock.clone()),
            identity: Identity::new("TRACED"),
            limits,
            journal: None,
        });
        let arena = Arena::new(map.memory(), 0, MEMORY as u64);
        let mut driver = Driver::new(Direct::new(controller.unwrap()), arena, 8).unwrap();
        driver.create_pair(1, 16, Some(1)).unwrap();
        driver.create_pair(2, 16, Some(2)).unwrap();
        Self { driver, clock, memory, interrupts }
    }

    fn controller(&mut self) -> &mut Controller {
        &mut self.driver.registers.function
    }

    fn trace(&mut self, every: u32) {
        let latencies = Latencies::new(self.controller().io_queues());
        let clock = Arc::new(self.clock.clone());
        let limits = self.controller().home.engine.limits;
        let tracer = Tracer::new(clock, every, &limits, latencies);
        self.controller().trace(Some(Box::new(tracer)));
    }

    fn take(&mut self) -> Latencies {
        let fresh = Latencies::new(self.controller().io_queues());
        self.controller().take_latencies(fresh).unwrap()
    }

    /// Runs a command. Returns the nanoseconds until the driver has its completion; `idle`
    /// nanoseconds pass between doorbell and poll.
    fn run(&mut self, queue: u16, command: SubmissionEntry, idle: u64) -> u64 {
        let before = self.clock.nanos();
        self.driver.submit(queue, command).unwrap();
        self.clock.advance(Duration::from_nanos(idle));
        let mut ended = Vec::new();
        while self.driver.reap(queue, &mut ended).unwrap() == 0 {
            self.controller().poll();
            if self.controller().requests_in_flight() > 0 {
                self.clock.advance(Duration::from_nanos(100));
            }
        }
        assert!(ended[0].status().is_success());
        self.clock.nanos() - before
    }
}

impl Traced {
    fn repeat(&mut self, times: u32, queue: u16, command: SubmissionEntry) {
        for _ in 0..times {
            self.run(queue, command, 0);
        }
    }
}

fn write() -> SubmissionEntry {
    let mut command = io(NvmOpcode::Write, 1, 0, 8);
    command.prp1.set(FAR);
    command
}

/// Returns the means of all layers.
fn means(latencies: &Latencies, queue: u16, class: OpcodeClass) -> [f64; 5] {
    Layer::ALL.map(|layer| latencies.get(queue, class, layer).unwrap().mean())
}

#[test]
fn a_delay_shows_in_its_layer_and_in_no_other() {
    let mut traced = Traced::new();
    traced.trace(1);
    for delayed in [None, Some(Layer::Fetch), Some(Layer::Submit), Some(Layer::Complete)] {
        let delay = |layer| if delayed == Some(layer) { 5_000 } else { 0 };
        traced.memory.nanos.store(delay(Layer::Submit), Relaxed);
        traced.interrupts.nanos.store(delay(Layer::Complete), Relaxed);
        let took = (0..10).map(|_| traced.run(2, write(), delay(Layer::Fetch))).sum::<u64>();
        let latencies = traced.take();
        let means = means(&latencies, 2, OpcodeClass::Write);
        let expected = [delay(Layer::Fetch), delay(Layer::Submit), 700, delay(Layer::Complete)];
        assert_eq!(means[..4], expected.map(|nanos| nanos as f64), "{delayed:?}");
        let application = took as f64 / 10.0;
        assert_eq!(means[..4].iter().sum::<f64>(), application, "{delayed:?}");
        assert_eq!(means[4], application, "{delayed:?}");
    }
}

#[test]
fn queues_and_opcodes_are_counted_apart() {
    let mut traced = Traced::new();
    traced.run(1, write(), 0);
    traced.trace(1);
    let mut read = io(NvmOpcode::Read, 1, 0, 1);
    read.prp1.set(4096 * 100);
    traced.run(1, write(), 0);
    traced.repeat(2, 1, read);
    traced.repeat(3, 2, SubmissionEntry::new(NvmOpcode::Flush.0, 1));
    traced.repeat(4, 2, io(NvmOpcode::WriteZeroes, 1, 0, 1));
    let latencies = traced.take();
    let counts = |queue| {
        let count = |class| latencies.get(queue, class, Layer::Whole).unwrap().count();
        OpcodeClass::ALL.map(count)
    };
    assert_eq!((counts(1), counts(2)), ([2, 1, 0, 0], [0, 0, 3, 4]));
    assert_eq!((latencies.queues(), latencies.missed()), (2, 0));
    for queue in [0, 3, u16::MAX] {
        assert!(latencies.get(queue, OpcodeClass::Read, Layer::Whole).is_none());
    }
    assert_eq!(traced.take().get(1, OpcodeClass::Read, Layer::Whole).unwrap().count(), 0);
}

#[test]
fn one_doorbell_in_so_many_is_followed() {
    let mut traced = Traced::new();
    traced.trace(4);
    traced.repeat(21, 1, write());
    let latencies = traced.take();
    assert_eq!(latencies.get(1, OpcodeClass::Write, Layer::Backend).unwrap().count(), 6);
}

#[test]
fn a_tracer_that_may_choose_follows_all_that_is_rare_and_little_of_the_rest() {
    let mut traced = Traced::new();
    traced.trace(0);
    let mut run = |idle| {
        (0..160).for_each(|_| {
            traced.run(1, write(), idle);
        });
        traced.take().get(1, OpcodeClass::Write, Layer::Whole).unwrap().count()
    };
    assert_eq!(run(30_000), 160);
    // A command takes 1 µs, so about one in 20 is followed.
    let followed = run(300);
    assert!((8..=14).contains(&followed), "{followed}");
    assert!(run(30_000) > 130);
}

#[test]
fn a_queue_that_came_later_is_missed_and_then_traced() {
    let mut traced = Traced::new();
    traced.trace(1);
    traced.driver.create_pair(3, 4, None).unwrap();
    // The queue's ring goes round several times.
    traced.repeat(9, 3, write());
    assert_eq!(traced.take().missed(), 9);
    traced.repeat(9, 3, write());
    let latencies = traced.take();
    assert_eq!(means(&latencies, 3, OpcodeClass::Write), [0.0, 0.0, 700.0, 0.0, 700.0]);
    assert_eq!((latencies.missed(), latencies.queues()), (0, 3));
}

#[test]
fn what_ends_without_a_disk_or_without_its_host_is_not_counted() {
    let mut traced = Traced::new();
    traced.trace(1);
    traced.driver.submit(1, io(NvmOpcode::Read, 9, 0, 1)).unwrap();
    traced.controller().poll();
    traced.driver.submit(1, write()).unwrap();
    traced.controller().poll();
    // A reset while the disk has the command; then the controller is used again.
    traced.driver.registers.function.reset();
    traced.clock.advance(Duration::from_micros(5));
    traced.controller().poll();
    traced.controller().poll();
    traced.driver.enable(8).unwrap();
    traced.driver.create_pair(1, 16, Some(1)).unwrap();
    traced.run(1, write(), 0);
    let latencies = traced.take();
    assert_eq!(means(&latencies, 1, OpcodeClass::Write), [0.0, 0.0, 700.0, 0.0, 700.0]);
    assert_eq!(latencies.get(1, OpcodeClass::Write, Layer::Whole).unwrap().count(), 1);
    assert_eq!(latencies.get(1, OpcodeClass::Read, Layer::Whole).unwrap().count(), 0);
}

#[test]
fn nothing_is_counted_unless_it_is_asked_for() {
    let mut rig = Setup::new().rig();
    assert!(rig.controller().take_latencies(Latencies::new(1)).is_none());
    assert!(rig.controller().trace(None).is_none());
}
