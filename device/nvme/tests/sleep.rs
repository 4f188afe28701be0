//! Loom goes through every interleaving of a host that rings shadow doorbells and a controller that
//! falls asleep: the unchanged `src/cell.rs` on loom's atomics.
#![allow(clippy::unwrap_used)] // helpers of tests state facts as tests do
#![allow(dead_code)] // the module is used in part

#[path = "../src/cell.rs"]
mod cell;

/// Models of the items that `cell` uses.
mod outside {
    use std::cell::Cell;
    use std::rc::Rc;

    use loom::sync::Arc;
    use loom::sync::atomic::{AtomicU32, Ordering};

    #[derive(Debug)]
    pub struct Fault;

    /// Two words: the shadow doorbell at address 0, the event index at address 4096.
    #[derive(Clone)]
    pub struct Memory(pub Arc<[AtomicU32; 2]>);

    impl Memory {
        pub fn load_u32(&self, at: u64) -> Result<u32, Fault> {
            Ok(self.0[usize::from(at >= 4096)].load(Ordering::Acquire))
        }

        pub fn store_u32(&self, at: u64, value: u32) -> Result<(), Fault> {
            self.0[usize::from(at >= 4096)].store(value, Ordering::Release);
            Ok(())
        }
    }

    /// The register, which only the controller's thread touches.
    #[derive(Clone, Default)]
    pub struct Doorbells(Rc<Cell<u32>>);

    impl Doorbells {
        pub fn watch(&self, _: usize) {}

        pub fn load(&self, _: usize) -> u32 {
            self.0.get()
        }

        pub fn store(&self, _: usize, value: u32) {
            self.0.set(value);
        }
    }
}

use cell::{Cell, ShadowPages};
use loom::sync::atomic::{AtomicU32, Ordering, fence};
use loom::sync::{Arc, Mutex};
use outside::{Doorbells, Memory};
use slipway_nvme::driver::passes;

/// Entries of the queue.
const SIZE: u32 = 4;
/// The number of times that the host rings.
const COUNT: u32 = 2;

/// The driver: rings, and writes the register if the event index asks for it.
fn host(memory: &Memory, messages: &Mutex<Vec<u32>>) {
    for new in 1..=COUNT {
        memory.store_u32(0, new).unwrap();
        fence(Ordering::SeqCst);
        if passes(memory.load_u32(4096).unwrap(), new - 1, new) {
            messages.lock().unwrap().push(new);
        }
    }
}

/// The controller.
struct Controller {
    memory: Memory,
    doorbells: Doorbells,
    cell: Cell,
    tail: u32,
}

impl Controller {
    fn new(memory: Memory) -> Self {
        let doorbells = Doorbells::default();
        let mut cell = Cell::new(&doorbells, 0);
        cell.resume_shadow(ShadowPages { doorbells: 0, events: 4096, number: 0 }, 0, true);
        cell.keep_behind(&memory, 0, SIZE).unwrap();
        Self { memory, doorbells, cell, tail: 0 }
    }

    /// Looks once. Returns whether the doorbell had changed.
    fn look(&mut self) -> bool {
        let Some(value) = self.cell.changed(&self.memory).unwrap() else { return false };
        self.tail = value;
        self.cell.keep_behind(&self.memory, value, SIZE).unwrap();
        true
    }

    /// Works until it has seen everything, or sleeps and no register write comes.
    fn run(&mut self, messages: &Mutex<Vec<u32>>, fenced: bool) {
        while self.tail < COUNT {
            if self.look() {
                continue;
            }
            self.cell.publish(&self.memory, self.tail).unwrap();
            if fenced {
                fence(Ordering::SeqCst);
            }
            if self.look() {
                continue;
            }
            // The controller sleeps: only a register write wakes it.
            match messages.lock().unwrap().pop() {
                Some(value) => self.doorbells.store(0, value),
                None => return,
            }
        }
    }
}

/// Returns whether there is an order of events in which a doorbell is lost while the controller
/// sleeps.
fn can_lose(fenced: bool) -> bool {
    let lost = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let found = lost.clone();
    let mut builder = loom::model::Builder::new();
    // Bounds the time; a lost doorbell takes two switches.
    builder.preemption_bound = Some(3);
    builder.check(move || {
        let memory = Memory(Arc::new([AtomicU32::new(0), AtomicU32::new(0)]));
        let messages = Arc::new(Mutex::new(Vec::new()));
        let other = (memory.clone(), messages.clone());
        let ringing = loom::thread::spawn(move || host(&other.0, &other.1));
        let mut controller = Controller::new(memory);
        controller.run(&messages, fenced);
        ringing.join().unwrap();
        // A register write that came after the controller fell asleep wakes it. Without one it
        // sleeps on.
        while let Some(value) = messages.lock().unwrap().pop() {
            controller.doorbells.store(0, value);
            controller.look();
        }
        found.fetch_or(controller.tail < COUNT, std::sync::atomic::Ordering::Relaxed);
    });
    lost.load(std::sync::atomic::Ordering::Relaxed)
}

#[test]
fn no_doorbell_is_slept_over() {
    assert!(!can_lose(true));
}

#[test]
fn without_the_barrier_one_can_be() {
    assert!(can_lose(false));
}
