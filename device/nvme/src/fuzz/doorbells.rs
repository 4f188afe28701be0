//! Shadow doorbells: an honest queue beside a hostile neighbourhood.
//!
//! The driver of queue 1 is honest and rings as section 7.13 has it. The input has everything else:
//! the rest of the two pages, the other queues' registers, and late writes of queue 1's registers.
//! Whatever the input is, the controller must not rest while queue 1 has entries that it has not
//! seen.

use slipway_nvme_spec::registers::{offset, tail_doorbell};
use slipway_pci::{Access, Function, Progress};
use slipway_ram::Memory;
use slipway_telemetry::ManualClock;

use super::{Input, MEMORY, STEPS, make};
use crate::Controller;
use crate::driver::{AccessError, Arena, Driver, DriverError, RegisterAccess, Shadowed, io};

/// Entries of the honest queue.
const ENTRIES: u16 = 16;

/// Registers of a controller that sleeps when it may.
struct Sleeper {
    function: Controller,
    asleep: bool,
}

impl Sleeper {
    fn poll(&mut self, rest: bool) {
        if !self.asleep {
            let found = if rest { self.function.rest() } else { self.function.poll() };
            self.asleep = matches!(found, Progress::Idle(_));
        }
    }
}

impl RegisterAccess for Sleeper {
    fn read(&mut self, offset: u64, into: &mut [u8]) -> Result<(), AccessError> {
        self.function.read(0, offset, into);
        Ok(())
    }

    fn write(&mut self, offset: u64, from: &[u8]) -> Result<(), AccessError> {
        self.asleep = false;
        match self.function.write(0, offset, from) {
            Access::Done => Ok(()),
            other => Err(AccessError(format!("{other:?}"))),
        }
    }

    fn idle(&mut self) -> Result<(), AccessError> {
        self.poll(true);
        Ok(())
    }
}

struct Host {
    driver: Driver<Shadowed<Sleeper>>,
    memory: Memory,
    clock: ManualClock,
    doorbells: u64,
    events: u64,
    page: u64,
    tail: u32,
}

/// Interprets `data` as a schedule of host and controller, with pokes between.
///
/// # Panics
/// When a doorbell of the honest queue is lost during sleep, or the controller has another defect.
pub fn fuzz(data: &[u8]) {
    let Ok(mut host) = Host::new() else { return };
    let mut input = Input(data);
    for _ in 0..STEPS {
        if input.0.is_empty() {
            break;
        }
        host.step(&mut input);
        host.check();
    }
    // Completions that were not taken yet are no reason to stay awake.
    host.reap();
    while host.in_flight() > 0 {
        assert!(!host.driver.registers.inner.asleep, "it sleeps over commands");
        host.driver.registers.inner.poll(true);
        host.reap();
    }
}

impl Host {
    fn new() -> Result<Self, DriverError> {
        let (memory, clock) = (Memory::heap(MEMORY), ManualClock::new());
        let sleeper = Sleeper { function: make(&memory, &clock), asleep: false };
        let arena = Arena::new(memory.clone(), 0, MEMORY as u64);
        let mut driver = Driver::new(Shadowed::new(sleeper, memory.clone()), arena, 16)?;
        driver.create_pair(2, 8, None)?;
        let (doorbells, events) = driver.shadow_doorbells(false)?;
        driver.create_pair(1, ENTRIES, None)?;
        let page = driver.arena.allocate(4096)?;
        Ok(Self { driver, memory, clock, doorbells, events, page, tail: 0 })
    }

    fn in_flight(&mut self) -> usize {
        self.driver.pair(1).map_or(0, |pair| pair.in_flight())
    }

    fn reap(&mut self) {
        let mut entries = Vec::new();
        let reaped = self.driver.reap(1, &mut entries);
        assert!(reaped.is_ok() && entries.iter().all(|entry| entry.status().is_success()));
    }

    fn step(&mut self, input: &mut Input<'_>) {
        match input.byte() % 8 {
            0 | 1 => self.submit(),
            2 => self.driver.registers.inner.poll(false),
            3 => self.driver.registers.inner.poll(true),
            4 => self.reap(),
            5 => {
                // Any entry but those of queue 1, of either page, and but the admin queue's: old
                // admin commands would come again, this configuration among them.
                let entry = u64::from(input.byte() % 128);
                let page = if input.byte() & 1 == 0 { self.doorbells } else { self.events };
                if entry >= 4 {
                    let _ = self.memory.store_u32(page + 4 * entry, input.word());
                }
            }
            6 => {
                let (index, value) = (u64::from(input.byte() % 12), input.word());
                // The admin queue's would be commands, and queue 1's register counts until its
                // entry has changed.
                let used = self.tail > 0 && index == tail_doorbell(1) as u64;
                if index > 3 || used {
                    let _ =
                        self.driver.registers.inner.write32(offset::DOORBELLS + 4 * index, value);
                }
            }
            _ => self.move_house(),
        }
    }

    fn submit(&mut self) {
        let mut command = io(slipway_nvme_spec::opcode::NvmOpcode::Read, 1, 0, 1);
        command.prp1 = self.page.into();
        if self.driver.submit(1, command).is_ok() {
            self.tail = (self.tail + 1) % u32::from(ENTRIES);
        }
    }

    /// Lets a successor take over; it is awake.
    fn move_house(&mut self) {
        let sleeper = &mut self.driver.registers.inner;
        while !sleeper.function.quiesce() {}
        let mut fresh = make(&self.memory, &self.clock);
        let restored = fresh.restore(&sleeper.function.save());
        assert!(restored.is_ok(), "{restored:?}");
        *sleeper = Sleeper { function: fresh, asleep: false };
    }

    /// Checks that a sleeping controller has seen all entries of queue 1.
    fn check(&mut self) {
        let sleeper = &mut self.driver.registers.inner;
        if !sleeper.asleep {
            return;
        }
        let seen = sleeper.function.home.engine.queues.submission(1).map(|queue| queue.tail);
        assert_eq!(seen, Some(self.tail), "it sleeps over a doorbell");
    }
}
