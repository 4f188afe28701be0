//! Loom goes through every interleaving of a producer and a consumer that falls asleep:
//! `src/sleep.rs`, as it is, on loom's atomics.
#![allow(clippy::unwrap_used)] // helpers of tests state facts as tests do

#[path = "../src/sleep.rs"]
mod sleep;

/// The atomics and barriers that `sleep` uses, as loom's.
mod outside {
    pub use loom::sync::atomic::{AtomicU64, Ordering, fence};
}

use loom::sync::{Arc, mpsc};
use outside::{AtomicU64, Ordering};

/// Slots that are produced, one at a time.
const COUNT: u64 = 2;

#[test]
fn a_sleeper_is_always_told() {
    loom::model(|| {
        let words = Arc::new((AtomicU64::new(0), AtomicU64::new(0)));
        // The eventfd: who must tell sends, who sleeps waits for it.
        let (bell, rung) = mpsc::channel();
        let producer = {
            let words = words.clone();
            loom::thread::spawn(move || {
                for value in 1..=COUNT {
                    sleep::publish(&words.0, value);
                    sleep::barrier();
                    if sleep::is_asleep(&words.1) {
                        bell.send(()).unwrap();
                    }
                }
                // Kept until the end: nobody may be woken by its going away.
                bell
            })
        };
        let mut seen = 0;
        while seen < COUNT {
            let head = words.0.load(Ordering::Acquire);
            if head != seen {
                seen = head;
            } else if !sleep::arm(&words.0, &words.1, seen) {
                // Would never end, which loom reports, if nobody told.
                rung.recv().unwrap();
            }
        }
        drop(producer.join().unwrap());
    });
}
