//! Loom goes through every interleaving of the two sides of a Cross-FIFO that fall asleep:
//! `src/cross/index.rs`, as it is, on loom's atomics.
#![allow(clippy::unwrap_used)] // helpers of tests state facts as tests do
#![allow(dead_code)] // not all of it sleeps

#[path = "../src/cross/index.rs"]
mod index;

/// The atomics and barriers that `index` uses, as loom's.
mod outside {
    use loom::sync::atomic::fence;
    pub use loom::sync::atomic::{AtomicU64, Ordering};

    pub fn light(_across_machines: bool) {
        fence(Ordering::SeqCst);
    }

    pub fn heavy() {
        fence(Ordering::SeqCst);
    }

    pub fn now() -> u64 {
        1
    }
}

use index::{Inbox, Own, Receiving, Region, Sending};
use loom::sync::{Arc, mpsc};
use outside::AtomicU64;

/// Words of an inbox of both sides, and both sides' own of one direction.
struct Words([AtomicU64; 16]);

impl Words {
    fn new() -> Arc<Self> {
        Arc::new(Self(std::array::from_fn(|_| AtomicU64::new(0))))
    }

    fn inbox(&self, at: usize) -> Inbox<'_> {
        let [tail, head, data_wanted, space_wanted, since, is_timed] = &self.0[at..at + 6] else {
            unreachable!()
        };
        Inbox { tail, head, data_wanted, space_wanted, since, is_timed }
    }

    fn own(&self, at: usize) -> Own<'_> {
        Own { own: &self.0[at], seen: &self.0[at + 1] }
    }

    fn sending(&self) -> Sending<'_> {
        let across_machines = false;
        Sending { mine: self.inbox(0), theirs: self.inbox(6), state: self.own(12), across_machines }
    }

    fn receiving(&self) -> Receiving<'_> {
        let across_machines = false;
        Receiving {
            mine: self.inbox(6),
            theirs: self.inbox(0),
            state: self.own(14),
            pages: 1,
            across_machines,
        }
    }
}

const REGION: Region = Region { page: 0, order: 0 };

#[test]
fn a_consumer_that_sleeps_is_told() {
    loom::model(|| {
        let words = Words::new();
        words.sending().place(Some(REGION));
        let (bell, rung) = mpsc::channel();
        let producer = {
            let words = words.clone();
            loom::thread::spawn(move || {
                for last in [false, true] {
                    let tell =
                        if last { words.sending().finish() } else { words.sending().publish(1) };
                    if tell {
                        bell.send(()).unwrap();
                    }
                }
                // Kept until the end: nobody may be woken by its going away.
                bell
            })
        };
        let receiving = words.receiving();
        while !receiving.tail().is_end() {
            let count = receiving.refresh().unwrap();
            receiving.release(count);
            if !receiving.tail().is_end() && !receiving.arm(1).unwrap() {
                // Would never end, which loom reports, if nobody told.
                rung.recv().unwrap();
            }
        }
        assert_eq!(receiving.refresh().unwrap() + receiving.position(), 1);
        drop(producer.join().unwrap());
    });
}

#[test]
fn a_producer_that_sleeps_is_told() {
    loom::model(|| {
        let words = Words::new();
        words.sending().place(Some(REGION));
        words.sending().publish(4096);
        let (bell, rung) = mpsc::channel();
        let consumer = {
            let words = words.clone();
            loom::thread::spawn(move || {
                words.receiving().refresh().unwrap();
                for _ in 0..2 {
                    if words.receiving().release(2048) {
                        bell.send(()).unwrap();
                    }
                }
                bell
            })
        };
        while words.sending().refresh().unwrap() > 0 {
            if !words.sending().arm(0).unwrap() {
                rung.recv().unwrap();
            }
        }
        drop(consumer.join().unwrap());
    });
}
