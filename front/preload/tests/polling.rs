//! Threads of a program close and open listeners while others poll them, under `libslipway.so`.
#![allow(clippy::unwrap_used, unsafe_code)] // the test calls poll(2) itself

mod library;
mod under_library;

use std::net::TcpListener;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};

/// The number of descriptors that are polled.
const NUMBERS: usize = 8;
/// The number of listeners that are opened and closed.
const TURNS: usize = 20_000;

#[test]
fn a_set_may_change_while_it_is_polled() {
    under_library::run("a_set_may_change_while_it_is_polled", program);
}

fn program() {
    // This listener stays, so that the set always contains something of the library's.
    let stays = TcpListener::bind("127.0.0.1:0").unwrap();
    let first = stays.as_raw_fd();
    let (ended, numbers) = (AtomicBool::new(false), first..first + NUMBERS as i32);
    std::thread::scope(|scope| {
        let poller = scope.spawn(|| {
            while !ended.load(Ordering::Relaxed) {
                let of = |fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
                let mut set: Vec<_> = numbers.clone().map(of).collect();
                // SAFETY: the set is as long as it is said to be.
                let ready = unsafe { libc::poll(set.as_mut_ptr(), set.len() as _, 0) };
                assert!(ready >= 0, "{}", std::io::Error::last_os_error());
                assert_eq!(set[0].revents, 0, "nobody connects to the first one");
            }
        });
        for turn in 0..TURNS {
            let open: Vec<_> =
                (0..turn % NUMBERS).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
            drop(open);
            if poller.is_finished() {
                break;
            }
        }
        ended.store(true, Ordering::Relaxed);
    });
}
