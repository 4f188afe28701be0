//! Maps descriptor numbers to endpoints, for the next image of a process.
//!
//! An endpoint with its own eventfd is recognized by that eventfd, wherever its descriptor was
//! moved to. Endpoints that share an eventfd are not. So this module records copies that this
//! library's table does not see: by dup2(2) in a child of vfork(2), and by the actions of
//! posix_spawn(3). All descriptors that survive are written to a memfd ([`Survivor::Numbers`]). The
//! new image accepts a number only if it is an eventfd that the endpoint sleeps on.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use libc::c_int;
use slipway_socket::hidden::Survivor;
use slipway_socket::lock::Lock;

use crate::fds;
use crate::real::{self, sys};

/// The most descriptors that are written down.
const MOST: usize = 512;
/// The most copies that are remembered at a time.
const COPIED: usize = 64;

/// Copies that children of vfork(2), which share this memory, made: process and number, then the
/// entry.
static COPIES: [[AtomicU64; 2]; COPIED] =
    [const { [AtomicU64::new(0), AtomicU64::new(0)] }; COPIED];
static NEXT: AtomicUsize = AtomicUsize::new(0);

/// Copies that lists of posix_spawn(3) actions will make: the list, the original number, the number
/// of the copy. Locked while this process forks.
pub static ACTIONS: Lock<Vec<(usize, c_int, c_int)>> = Lock::new(Vec::new());

fn key(fd: c_int) -> u64 {
    let process = rustix::process::getpid().as_raw_nonzero().get().unsigned_abs();
    u64::from(process) << 32 | u64::from(fd.unsigned_abs())
}

/// Returns the entry of the shared endpoint that `fd` stands for, also in a child of vfork(2).
fn entry_of(fd: c_int) -> Option<u64> {
    let copied = || {
        let (next, wanted) = (NEXT.load(Ordering::Relaxed), key(fd));
        let latest_first = (0..COPIED).map(|back| &COPIES[next.wrapping_sub(1 + back) % COPIED]);
        let mut found = latest_first.filter(|copy| copy[0].load(Ordering::Acquire) == wanted);
        let copy = found.next()?;
        let entry = copy[1].load(Ordering::Acquire);
        // Another child may have overwritten the slot meanwhile.
        (copy[0].load(Ordering::Relaxed) == wanted).then_some(entry)
    };
    let copied = if fds::in_vfork_child() { copied() } else { None };
    copied.or_else(|| {
        let object = fds::stream(fd)?;
        let endpoint = &object.stream()?.endpoint;
        endpoint.is_shared().then(|| endpoint.number())
    })
}

/// Returns whether `fd` is a connection that shares its eventfd with others: the next image knows
/// which one it is by the list alone.
pub fn is_shared(fd: c_int) -> bool {
    entry_of(fd).is_some()
}

/// Records in a child of vfork(2) that `new` is a copy of `fd` now.
pub fn copied(fd: c_int, new: c_int) {
    if let Some(entry) = entry_of(fd) {
        let [process, is] = &COPIES[NEXT.fetch_add(1, Ordering::Relaxed) % COPIED];
        process.store(0, Ordering::Relaxed);
        is.store(entry, Ordering::Relaxed);
        process.store(key(new), Ordering::Release);
    }
}

/// Records that `actions` will make `new` a copy of `fd`.
pub fn will_copy(actions: usize, fd: c_int, new: c_int) {
    ACTIONS.hold().push((actions, fd, new));
}

/// Forgets the copies of `actions`, which were destroyed, or are initialised just now.
pub fn forget(actions: usize) {
    ACTIONS.hold().retain(|(list, ..)| *list != actions);
}

/// Descriptor numbers with their endpoints' entries, and how many there are.
pub struct Numbers([[u64; 2]; MOST], usize);

impl Numbers {
    /// Lists those of `fds` that are shared endpoints, and the copies of them that `actions` will
    /// make.
    pub fn of(fds: impl Iterator<Item = c_int>, actions: usize) -> Self {
        let mut all = Self([[0; 2]; MOST], 0);
        for fd in fds {
            entry_of(fd).into_iter().for_each(|entry| all.push(fd, entry));
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

    /// Writes the list to a memfd at the number where the next image looks for it, and returns that
    /// number. Returns `None` if the list is empty, the number is in use or a system call failed;
    /// the connections of the list end then.
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

    /// Reads the list that the previous image left in `file`.
    pub fn read(file: c_int) -> Self {
        let mut all = [[0; 2]; MOST];
        let got = sys!(SYS_pread64, file, all.as_mut_ptr(), size_of_val(&all), 0);
        let count = usize::try_from(got).unwrap_or(0) / size_of::<[u64; 2]>();
        Self(all, count)
    }

    /// Returns the entry of `fd`: the latest one noted.
    pub fn entry(&self, fd: c_int) -> Option<u64> {
        let mut latest_first = self.0[..self.1].iter().rev();
        latest_first.find(|[number, _]| *number == fd as u64).map(|[_, entry]| *entry)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns what is read of a memfd with these bytes.
    fn read(bytes: &[u8]) -> Numbers {
        let flags = libc::MFD_CLOEXEC;
        let file = sys!(SYS_memfd_create, c"test".as_ptr(), flags) as c_int;
        assert!(file >= 0);
        let written = sys!(SYS_pwrite64, file, bytes.as_ptr(), bytes.len(), 0);
        assert_eq!(written as usize, bytes.len());
        let numbers = Numbers::read(file);
        real::close(file);
        numbers
    }

    fn pairs(pairs: &[[u64; 2]]) -> Vec<u8> {
        pairs.as_flattened().iter().flat_map(|word| word.to_ne_bytes()).collect()
    }

    #[test]
    fn the_latest_entry_of_a_number_counts() {
        let numbers = read(&pairs(&[[3, 30], [4, 40], [3, 31]]));
        assert_eq!([3, 4, 5, -1].map(|fd| numbers.entry(fd)), [Some(31), Some(40), None, None]);
    }

    #[test]
    fn a_list_that_is_cut_has_its_whole_pairs() {
        let bytes = pairs(&[[3, 30], [4, 40]]);
        for cut in 0..bytes.len() {
            let numbers = read(&bytes[..cut]);
            assert_eq!(numbers.entry(3), (cut >= 16).then_some(30), "{cut}");
            assert_eq!(numbers.entry(4), None, "{cut}");
        }
        assert_eq!(Numbers::read(-1).entry(0), None, "a file that cannot be read");
    }

    #[test]
    fn a_list_has_a_bound_which_a_longer_file_does_not_move() {
        let all: Vec<_> = (0..MOST as u64 + 8).map(|at| [at, at + 1]).collect();
        let mut numbers = read(&pairs(&all));
        let last = MOST as c_int - 1;
        assert_eq!((numbers.entry(last), numbers.entry(last + 1)), (Some(MOST as u64), None));
        numbers.push(last + 1, 7);
        assert_eq!(numbers.entry(last + 1), None);
    }

    #[test]
    fn actions_are_forgotten_list_by_list() {
        // Addresses that no list of actions has.
        let copies = |list: usize| {
            let all = ACTIONS.hold();
            all.iter().filter(|one| one.0 == list).map(|one| (one.1, one.2)).collect::<Vec<_>>()
        };
        will_copy(1, 3, 4);
        will_copy(2, 5, 6);
        will_copy(1, 4, 7);
        assert_eq!(copies(1), [(3, 4), (4, 7)]);
        forget(1);
        assert_eq!((copies(1), copies(2)), (vec![], vec![(5, 6)]));
        forget(2);
        // Copies of descriptors that are not ours have no entry.
        assert_eq!(Numbers::of([800_000].into_iter(), 2).leave(), None);
    }
}
