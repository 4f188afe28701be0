//! Loom goes through every interleaving of a thread that stores doorbells and a lane that begins a
//! nap: the unchanged `src/nap.rs` on loom's atomics.
#![allow(clippy::unwrap_used)] // helpers of tests state facts as tests do

#[path = "../src/nap.rs"]
mod nap;

mod outside {
    pub use loom::sync::atomic::{AtomicBool, Ordering, fence};
}

use loom::sync::atomic::{AtomicU32, Ordering};
use loom::sync::{Arc, Condvar, Mutex};
use nap::Nap;

/// Doorbells that are rung.
const RINGS: u32 = 2;

#[derive(Default)]
struct Lane {
    cell: AtomicU32,
    nap: Nap,
    woken: Mutex<bool>,
    bell: Condvar,
}

#[test]
fn no_doorbell_is_slept_over() {
    loom::model(|| {
        let lane = Arc::new(Lane::default());
        let home = lane.clone();
        let home = loom::thread::spawn(move || {
            for value in 1..=RINGS {
                home.cell.store(value, Ordering::Release);
                if home.nap.misses() {
                    *home.woken.lock().unwrap() = true;
                    home.bell.notify_one();
                }
            }
        });
        let mut seen = 0;
        while seen < RINGS {
            lane.nap.begin();
            let value = lane.cell.load(Ordering::Acquire);
            if value != seen {
                seen = value;
                lane.nap.end();
                continue;
            }
            // The lane sleeps. A wake-up that never comes is a deadlock here.
            let mut woken = lane.woken.lock().unwrap();
            while !*woken {
                woken = lane.bell.wait(woken).unwrap();
            }
            *woken = false;
        }
        home.join().unwrap();
    });
}
