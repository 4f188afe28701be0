//! Which number is which endpoint, for the next image of a process.
//!
//! An endpoint that has an eventfd of its own is known by it, wherever its descriptor was moved to. Those that share one
//! are not: so where they may have been moved out of this library's table is noted, by dup2(2) in a child of
//! vfork(2) and by the actions of posix_spawn(3), and all that survives is written down ([`Survivor::Numbers`]). The new image
//! believes a number only if it is an eventfd that the endpoint sleeps on.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use libc::c_int;
use slipway_socket::hidden::Survivor;
use slipway_socket::lock::Lock;

use crate::fds;
use crate::real::{self, sys};

/// Descriptors that are written down, at most.
const MOST: usize = 512;
/// Copies that are remembered at a time.
const COPIED: usize = 64;

/// Copies that children of vfork(2) made: process and number, then the entry. They have this process's memory.
static COPIES: [[AtomicU64; 2]; COPIED] =
    [const { [AtomicU64::new(0), AtomicU64::new(0)] }; COPIED];
static NEXT: AtomicUsize = AtomicUsize::new(0);

/// What lists of actions do: the list, the number, the one that becomes a copy of it. Held while this process forks.
pub static ACTIONS: Lock<Vec<(usize, c_int, c_int)>> = Lock::new(Vec::new());

fn key(fd: c_int) -> u64 {
    let process = rustix::process::getpid().as_raw_nonzero().get().unsigned_abs();
    u64::from(process) << 32 | u64::from(fd.unsigned_abs())
}

/// The entry of the shared endpoint that `fd` is, also in a child of vfork(2).
fn entry_of(fd: c_int) -> Option<u64> {
    let copied = || {
        let (next, wanted) = (NEXT.load(Ordering::Relaxed), key(fd));
        let latest_first = (0..COPIED).map(|back| &COPIES[next.wrapping_sub(1 + back) % COPIED]);
        let mut found = latest_first.filter(|copy| copy[0].load(Ordering::Acquire) == wanted);
        let copy = found.next()?;
        let entry = copy[1].load(Ordering::Acquire);
        // Another child may have written there meanwhile.
        (copy[0].load(Ordering::Relaxed) == wanted).then_some(entry)
    };
    let copied = if fds::is_borrowed() { copied() } else { None };
    copied.or_else(|| {
        let object = fds::stream(fd)?;
        let endpoint = &object.stream()?.endpoint;
        endpoint.is_shared().then(|| endpoint.number())
    })
}

/// In a child of vfork(2): `new` is a copy of `fd` now.
pub fn copied(fd: c_int, new: c_int) {
    if let Some(entry) = entry_of(fd) {
        let [process, is] = &COPIES[NEXT.fetch_add(1, Ordering::Relaxed) % COPIED];
        process.store(0, Ordering::Relaxed);
        is.store(entry, Ordering::Relaxed);
        process.store(key(new), Ordering::Release);
    }
}

/// `actions` will make `new` a copy of `fd`.
pub fn will_copy(actions: usize, fd: c_int, new: c_int) {
    ACTIONS.hold().push((actions, fd, new));
}

/// There are no such `actions`, or none yet.
pub fn forget(actions: usize) {
    ACTIONS.hold().retain(|(list, ..)| *list != actions);
}

/// Numbers with the entries that they are.
pub struct Numbers([[u64; 2]; MOST], usize);

impl Numbers {
    /// Those of `fds` that are shared endpoints, and what `actions` make of others.
    pub fn of(fds: &[c_int], actions: usize) -> Self {
        let mut all = Self([[0; 2]; MOST], 0);
        for fd in fds {
            entry_of(*fd).into_iter().for_each(|entry| all.push(*fd, entry));
        }
        if actions != 0 {
            let copies = ACTIONS.hold().clone();
            for (_, fd, new) in copies.into_iter().filter(|(list, ..)| *list == actions) {
                let entry = all.entry(fd).or_else(|| entry_of(fd));
                entry.into_iter().for_each(|entry| all.push(new, entry));
            }
        }
        all
    }

    fn push(&mut self, fd: c_int, entry: u64) {
        if let Some(place) = self.0.get_mut(self.1) {
            *place = [fd as u64, entry];
            self.1 += 1;
        }
    }

    /// Writes them down where the next image finds them: at the number that is returned. None: there are none, or there
    /// is no way, and those connections end.
    pub fn leave(&self) -> Option<c_int> {
        let Self(all, count) = self;
        let (number, _) = Survivor::Numbers.places();
        if *count == 0 || sys!(SYS_fcntl, number, libc::F_GETFD, 0) >= 0 {
            return None;
        }
        let flags = libc::MFD_CLOEXEC;
        let file = sys!(SYS_memfd_create, c"slipway-numbers".as_ptr(), flags) as c_int;
        if file < 0 {
            return None;
        }
        let bytes = count * size_of::<[u64; 2]>();
        let written = sys!(SYS_pwrite64, file, all.as_ptr(), bytes, 0) as usize == bytes;
        let left = written && sys!(SYS_dup3, file, number, 0) >= 0;
        real::close(file);
        left.then_some(number)
    }

    /// What the image before this one left at `file`.
    pub fn read(file: c_int) -> Self {
        let mut all = [[0; 2]; MOST];
        let got = sys!(SYS_pread64, file, all.as_mut_ptr(), size_of_val(&all), 0);
        let count = usize::try_from(got).unwrap_or(0) / size_of::<[u64; 2]>();
        Self(all, count)
    }

    /// The entry that `fd` is: as was noted last.
    pub fn entry(&self, fd: c_int) -> Option<u64> {
        let mut latest_first = self.0[..self.1].iter().rev();
        latest_first.find(|[number, _]| *number == fd as u64).map(|[_, entry]| *entry)
    }
}
