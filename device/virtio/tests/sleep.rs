//! Loom goes through every interleaving of a driver that makes buffers available and a switch that
//! falls asleep: the unchanged `src/notify.rs` on loom's atomics.
#![allow(clippy::unwrap_used)] // helpers of tests state facts as tests do

#[path = "../src/notify.rs"]
mod notify;

use std::sync::atomic::AtomicBool;

use loom::sync::atomic::{AtomicU16, Ordering, fence};
use loom::sync::{Arc, Mutex};
use notify::{Meeting, Notifications};
use slipway_virtio_spec::queue::passes;

/// The number of buffers that the driver makes available, one by one.
const COUNT: u16 = 2;
const NO_NOTIFY: u16 = 1;

/// The words that both sides see.
#[derive(Clone)]
struct Words {
    available: Arc<AtomicU16>,
    event: Arc<AtomicU16>,
    flags: Arc<AtomicU16>,
    fenced: bool,
}

impl Meeting for Words {
    type Fault = ();

    fn available(&mut self) -> Result<u16, ()> {
        Ok(self.available.load(Ordering::Acquire))
    }

    fn set_event(&mut self, index: u16) -> Result<(), ()> {
        self.event.store(index, Ordering::Release);
        Ok(())
    }

    fn set_flags(&mut self, flags: u16) -> Result<(), ()> {
        self.flags.store(flags, Ordering::Release);
        Ok(())
    }

    fn fence(&self) {
        if self.fenced {
            fence(Ordering::SeqCst);
        }
    }
}

/// Makes buffers available and notifies as the specification has it (section 2.7.13.4).
fn driver(words: &Words, event_index: bool, notified: &Mutex<bool>) {
    for new in 1..=COUNT {
        words.available.store(new, Ordering::Release);
        fence(Ordering::SeqCst);
        let wanted = match event_index {
            true => passes(words.event.load(Ordering::Relaxed), new - 1, new),
            false => words.flags.load(Ordering::Relaxed) & NO_NOTIFY == 0,
        };
        if wanted {
            *notified.lock().unwrap() = true;
        }
    }
}

/// Takes buffers until it has all, or sleeps without a wake-up. Returns how many it took.
fn switch(words: &mut Words, event_index: bool, notified: &Mutex<bool>) -> u16 {
    let (mut notifications, mut next) = (Notifications::new(event_index), 0);
    while next < COUNT {
        notifications.awake(words, next).unwrap();
        let seen = words.available().unwrap();
        if seen != next {
            next = seen;
            continue;
        }
        if notifications.arm(words, next).unwrap() {
            continue;
        }
        // The switch sleeps: only a notification wakes it.
        if !std::mem::take(&mut *notified.lock().unwrap()) {
            break;
        }
    }
    next
}

/// Returns whether there is an order of events in which a buffer is lost while the switch sleeps.
fn can_lose(event_index: bool, fenced: bool) -> bool {
    let lost = std::sync::Arc::new(AtomicBool::new(false));
    let found = lost.clone();
    let mut builder = loom::model::Builder::new();
    // Bounds the time; a lost notification takes two switches.
    builder.preemption_bound = Some(3);
    builder.check(move || {
        let word = |value| Arc::new(AtomicU16::new(value));
        let (event, flags) = (word(u16::MAX), word(NO_NOTIFY));
        let mut words = Words { available: word(0), event, flags, fenced };
        let notified = Arc::new(Mutex::new(false));
        let other = (words.clone(), notified.clone());
        let driving = loom::thread::spawn(move || driver(&other.0, event_index, &other.1));
        let taken = switch(&mut words, event_index, &notified);
        driving.join().unwrap();
        // A notification that came after the switch fell asleep wakes it. Without one it sleeps on.
        let woken = *notified.lock().unwrap();
        found.fetch_or(taken < COUNT && !woken, std::sync::atomic::Ordering::Relaxed);
    });
    lost.load(std::sync::atomic::Ordering::Relaxed)
}

#[test]
fn no_notification_is_slept_over() {
    assert!(!can_lose(true, true));
    assert!(!can_lose(false, true));
}

#[test]
fn without_the_barrier_one_can_be() {
    assert!(can_lose(true, false));
    assert!(can_lose(false, false));
}
