//! Loom goes through every interleaving of sides that fall asleep and sides that wake them:
//! `src/sleep.rs`, as it is, on loom's atomics. Each test is one shape in which the protocol is
//! used; `docs/decisions/waiting.md` lists the users.
#![allow(clippy::unwrap_used)] // helpers of tests state facts as tests do

#[path = "../src/sleep.rs"]
mod sleep;

/// The atomics and barriers that `sleep` uses, as loom's.
mod outside {
    use std::cell::Cell;

    pub use loom::sync::atomic::{AtomicU64, Ordering};

    std::thread_local! {
        /// Set if barriers do nothing. All threads of a model run on the thread of its test.
        pub static IS_WITHOUT: Cell<bool> = const { Cell::new(false) };
    }

    pub fn fence(order: Ordering) {
        if !IS_WITHOUT.get() {
            loom::sync::atomic::fence(order);
        }
    }
}

use loom::sync::{Arc, Condvar, Mutex, mpsc};
use outside::{AtomicU64, Ordering};
use sleep::{ANY, SleepWord};

/// Slots that are produced, one at a time.
const COUNT: u64 = 2;

/// A counter that a waker moves, and the word of the side that waits for it.
#[derive(Default)]
struct Place {
    moved: AtomicU64,
    asleep: AtomicU64,
}

impl Place {
    fn word(&self) -> SleepWord<'_> {
        SleepWord::new(&self.asleep)
    }

    fn count(&self) -> u64 {
        self.moved.load(Ordering::Acquire)
    }

    fn move_to(&self, count: u64) {
        self.moved.store(count, Ordering::Release);
    }
}

/// An eventfd: readable from the time when it is raised until somebody has waited for it.
#[derive(Default)]
struct Bell {
    is_raised: Mutex<bool>,
    changed: Condvar,
}

impl Bell {
    fn raise(&self) {
        *self.is_raised.lock().unwrap() = true;
        self.changed.notify_one();
    }

    /// Would never end, which loom reports, if nobody raised the bell.
    fn wait(&self) {
        let mut is_raised = self.is_raised.lock().unwrap();
        while !*is_raised {
            is_raised = self.changed.wait(is_raised).unwrap();
        }
        *is_raised = false;
    }

    fn lower(&self) -> bool {
        std::mem::take(&mut *self.is_raised.lock().unwrap())
    }
}

/// Runs a model of three threads.
fn model_of_three(run: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    // Bounds the time; a lost wake-up takes two switches.
    builder.preemption_bound = Some(3);
    builder.check(run);
}

#[test]
fn a_sleeper_is_always_told() {
    loom::model(|| {
        let place = Arc::new(Place::default());
        // The eventfd: who must tell sends, who sleeps waits for it.
        let (bell, rung) = mpsc::channel();
        let producer = {
            let place = place.clone();
            loom::thread::spawn(move || {
                for value in 1..=COUNT {
                    place.move_to(value);
                    if place.word().barrier_and_take(ANY) {
                        bell.send(()).unwrap();
                    }
                }
                // Kept until the end: nobody may be woken by its going away.
                bell
            })
        };
        let mut seen = 0;
        while seen < COUNT {
            let head = place.count();
            if head != seen {
                seen = head;
            } else if !place.word().arm(ANY, || place.count() != seen) {
                // Would never end, which loom reports, if nobody told.
                rung.recv().unwrap();
            }
        }
        drop(producer.join().unwrap());
    });
}

/// Returns whether there is an order of events in which the sleeper of one word sleeps on.
fn can_lose(is_without_barriers: bool) -> bool {
    outside::IS_WITHOUT.set(is_without_barriers);
    let lost = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let found = lost.clone();
    loom::model(move || {
        let (place, bell) = (Arc::new(Place::default()), Arc::new(Bell::default()));
        let waker = {
            let (place, bell) = (place.clone(), bell.clone());
            loom::thread::spawn(move || {
                place.move_to(1);
                if place.word().barrier_and_take(ANY) {
                    bell.raise();
                }
            })
        };
        let sleeps = !place.word().arm(ANY, || place.count() == 1);
        waker.join().unwrap();
        found.fetch_or(sleeps && !bell.lower(), std::sync::atomic::Ordering::Relaxed);
    });
    outside::IS_WITHOUT.set(false);
    lost.load(std::sync::atomic::Ordering::Relaxed)
}

#[test]
fn without_the_barriers_a_wake_up_can_be_lost() {
    assert!(!can_lose(false));
    assert!(can_lose(true));
}

#[test]
fn one_of_several_wakers_of_a_word_wakes() {
    model_of_three(|| {
        let asleep = Arc::new(AtomicU64::new(0));
        let moved = Arc::new([AtomicU64::new(0), AtomicU64::new(0)]);
        let bell = Arc::new(Bell::default());
        let wakers = [0, 1].map(|own| {
            let (asleep, moved, bell) = (asleep.clone(), moved.clone(), bell.clone());
            loom::thread::spawn(move || {
                moved[own].store(1, Ordering::Release);
                if SleepWord::new(&asleep).barrier_and_take(ANY) {
                    bell.raise();
                }
            })
        });
        let count = || moved.iter().map(|one| one.load(Ordering::Acquire)).sum::<u64>();
        let mut seen = count();
        while seen < 2 {
            if !SleepWord::new(&asleep).arm(ANY, || count() != seen) {
                bell.wait();
            }
            seen = count();
        }
        wakers.into_iter().for_each(|waker| waker.join().unwrap());
    });
}

#[test]
fn a_sleeper_of_several_words_needs_one_barrier() {
    model_of_three(|| {
        let places = Arc::new([Place::default(), Place::default()]);
        let bell = Arc::new(Bell::default());
        let wakers = [0, 1].map(|own| {
            let (places, bell) = (places.clone(), bell.clone());
            loom::thread::spawn(move || {
                places[own].move_to(1);
                if places[own].word().barrier_and_take(ANY) {
                    bell.raise();
                }
            })
        });
        let count = || places.iter().map(Place::count).sum::<u64>();
        let mut seen = 0;
        while seen < 2 {
            places.iter().for_each(|place| place.word().announce(ANY));
            sleep::barrier();
            if count() == seen {
                bell.wait();
            }
            places.iter().for_each(|place| place.word().withdraw());
            seen = count();
        }
        wakers.into_iter().for_each(|waker| waker.join().unwrap());
    });
}

#[test]
fn a_waker_of_several_sleepers_needs_one_barrier() {
    model_of_three(|| {
        let places = Arc::new([Place::default(), Place::default()]);
        let bells = Arc::new([Bell::default(), Bell::default()]);
        let sleepers = [0, 1].map(|own| {
            let (places, bells) = (places.clone(), bells.clone());
            loom::thread::spawn(move || {
                let place = &places[own];
                if !place.word().arm(ANY, || place.count() == 1) {
                    bells[own].wait();
                }
                assert_eq!(place.count(), 1);
            })
        });
        places.iter().for_each(|place| place.move_to(1));
        sleep::barrier();
        for (place, bell) in places.iter().zip(bells.iter()) {
            if place.word().take(ANY) {
                bell.raise();
            }
        }
        sleepers.into_iter().for_each(|sleeper| sleeper.join().unwrap());
    });
}

/// The event that there is work.
const WORK: u64 = 1;
/// The event that there is room for the sleeper's messages.
const ROOM: u64 = 2;

#[test]
fn a_sleeper_is_told_of_the_events_that_it_asks_for() {
    loom::model(|| {
        let (work, room) = (Arc::new(Place::default()), Arc::new(AtomicU64::new(0)));
        let bell = Arc::new(Bell::default());
        let waker = {
            let (work, room, bell) = (work.clone(), room.clone(), bell.clone());
            loom::thread::spawn(move || {
                work.move_to(1);
                if work.word().barrier_and_take(WORK) {
                    bell.raise();
                }
                room.store(1, Ordering::Release);
                if work.word().barrier_and_take(ROOM) {
                    bell.raise();
                }
            })
        };
        // Once there was work, the sleeper has a message to send, and waits for room.
        while work.count() == 0 {
            if !work.word().arm(WORK, || work.count() == 1) {
                bell.wait();
            }
        }
        while room.load(Ordering::Acquire) == 0 {
            if !work.word().arm(WORK | ROOM, || room.load(Ordering::Acquire) == 1) {
                bell.wait();
            }
        }
        waker.join().unwrap();
    });
}
