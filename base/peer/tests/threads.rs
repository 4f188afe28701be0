//! The number of threads that a bin takes. This test has a process of its own because all bins of a
//! process share disposal threads.
#![allow(clippy::unwrap_used)]

use std::collections::HashSet;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::ThreadId;

use slipway_peer::Bin;

/// A value whose drop waits for a message, and then sends the id of its thread.
struct Waits(Receiver<()>, Sender<ThreadId>);

impl Drop for Waits {
    fn drop(&mut self) {
        let _ = self.0.recv();
        let _ = self.1.send(std::thread::current().id());
    }
}

#[test]
fn a_bin_takes_one_thread_however_much_is_in_it() {
    let bin = Bin::new();
    let (told, threads) = channel();
    let wakes: Vec<Sender<()>> = (0..100)
        .map(|_| {
            let (wake, woken) = channel();
            bin.discard_value(Waits(woken, told.clone()));
            wake
        })
        .collect();
    drop(wakes);
    let used: HashSet<ThreadId> = (0..100).map(|_| threads.recv().unwrap()).collect();
    assert_eq!(used.len(), 1);
}
