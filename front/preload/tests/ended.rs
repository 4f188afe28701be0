//! Connections end before execve(2) of a program without the library, however many there are, and a
//! call that fails gives all of them back.
#![allow(clippy::unwrap_used, dead_code, unsafe_code)]

#[path = "../src/exec/ended.rs"]
mod ended;
#[path = "../src/real.rs"]
mod real;
#[path = "../src/exec/streams.rs"]
mod streams;

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use ended::Ended;
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::{FdFlags, fcntl_getfd};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use streams::Streams;

/// The first number of copies in these tests.
const FIRST_COPY: RawFd = 2000;
/// The number of connections that get a socket.
const REPLACED: usize = 512;

/// The limit of descriptors of this process while this value lives. One test at a time has it.
struct Limit {
    before: Rlimit,
    _alone: MutexGuard<'static, ()>,
}

impl Limit {
    /// Sets the limit as high as it may be.
    fn highest() -> Self {
        static ALONE: Mutex<()> = Mutex::new(());
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let limit = Self { before: getrlimit(Resource::Nofile), _alone: alone };
        limit.set(limit.before.maximum);
        limit
    }

    fn set(&self, current: Option<u64>) {
        setrlimit(Resource::Nofile, Rlimit { current, ..self.before }).unwrap();
    }
}

impl Drop for Limit {
    fn drop(&mut self) {
        self.set(self.before.current);
    }
}

/// Makes eventfds in the place of connections, the lowest number first, each with its own count.
fn connections(count: u32) -> Vec<(OwnedFd, u64)> {
    let make = |count| (eventfd(count, EventfdFlags::NONBLOCK).unwrap(), u64::from(count));
    let mut all: Vec<_> = (1..=count).map(make).collect();
    all.sort_by_key(|(fd, _)| fd.as_raw_fd());
    all
}

fn set_of(all: &[(OwnedFd, u64)]) -> Streams {
    let mut set = Streams::default();
    all.iter().for_each(|(fd, _)| set.insert(fd.as_raw_fd()));
    set
}

fn closes(fd: BorrowedFd<'_>) -> bool {
    fcntl_getfd(fd).unwrap().contains(FdFlags::CLOEXEC)
}

fn read(fd: BorrowedFd<'_>) -> Vec<u8> {
    let mut bytes = [0; 8];
    let count = rustix::io::read(fd, &mut bytes).unwrap();
    bytes[..count].to_vec()
}

/// Checks that all descriptors are what they were.
fn are_back(all: &[(OwnedFd, u64)]) {
    for (fd, count) in all {
        assert!(!closes(fd.as_fd()), "{fd:?}");
        assert_eq!(read(fd.as_fd()), count.to_ne_bytes(), "{fd:?}");
    }
}

#[test]
fn every_connection_ends_and_comes_back() {
    let limit = Limit::highest();
    if limit.before.maximum.is_some_and(|most| most < 3000) {
        return eprintln!("SKIPPED: every_connection_ends_and_comes_back: needs 3000 descriptors");
    }
    let all = connections(520);
    let ended = Ended::new(set_of(&all), FIRST_COPY);
    let (replaced, marked) = all.split_at(REPLACED);
    for (fd, _) in replaced {
        assert!(!closes(fd.as_fd()), "{fd:?}");
        assert_eq!(read(fd.as_fd()), b"", "{fd:?}");
    }
    assert!(marked.iter().all(|(fd, _)| closes(fd.as_fd())));
    ended.take_back();
    are_back(&all);
    let copies = FIRST_COPY..FIRST_COPY + REPLACED as RawFd;
    for copy in copies {
        // SAFETY: asks whether the number is in use.
        assert!(unsafe { libc::fcntl(copy, libc::F_GETFD) } < 0, "{copy} is open");
    }
}

#[test]
fn connections_end_under_a_limit_below_the_copies_numbers() {
    let limit = Limit::highest();
    let all = connections(3);
    let most = all[2].0.as_raw_fd() + 20;
    limit.set(Some(most as u64));
    let ended = Ended::new(set_of(&all), most + 1);
    for (fd, _) in &all {
        assert!(!closes(fd.as_fd()), "{fd:?}");
        assert_eq!(read(fd.as_fd()), b"", "{fd:?}");
    }
    ended.take_back();
    are_back(&all);
}

#[test]
fn without_a_number_for_a_copy_nothing_is_lost() {
    let limit = Limit::highest();
    let all = connections(3);
    let first_copy = all[2].0.as_raw_fd() + 1;
    limit.set(Some(first_copy as u64));
    let ended = Ended::new(set_of(&all), first_copy);
    assert!(all.iter().all(|(fd, _)| closes(fd.as_fd())));
    ended.take_back();
    are_back(&all);
}
