//! select(2) with our descriptors and the kernel's in one set: a poll(2) of the sets' members.

use std::cell::Cell;

use libc::{c_int, c_ulong, pollfd, sigset_t, timespec, timeval};
use slipway_socket::{Deadline, Errno};

use crate::fds;
use crate::polling::poll;

/// The descriptors that one word of a set stands for.
const WORD: usize = c_ulong::BITS as usize;

/// For each of [`Sets`], the events of poll(2) to ask for, and those that count (its manual page).
const EVENTS: [(i16, i16); 3] = [
    (libc::POLLIN, libc::POLLIN | libc::POLLHUP | libc::POLLERR),
    (libc::POLLOUT, libc::POLLOUT | libc::POLLERR),
    (libc::POLLPRI, libc::POLLPRI),
];

/// The sets of select(2): descriptors to read, to write, and with exceptions. A descriptor is a bit
/// of a set. A program may pass the same memory as two sets.
#[derive(Clone, Copy)]
pub struct Sets<'a>([Option<&'a [Cell<c_ulong>]>; 3]);

/// Returns the number of words of a set of the descriptors below `count`.
pub fn words(count: c_int) -> usize {
    usize::try_from(count).unwrap_or(0).div_ceil(WORD)
}

impl<'a> Sets<'a> {
    /// Makes sets of those that the program passed.
    pub fn new(sets: [Option<&'a [Cell<c_ulong>]>; 3]) -> Self {
        Self(sets)
    }

    /// Returns whether a descriptor of ours below `count` is in a set.
    pub fn have_ours(&self, count: c_int) -> bool {
        (0..count.max(0)).any(|fd| fds::is_known(fd) && self.0.iter().any(|set| is_in(*set, fd)))
    }

    /// Returns the descriptors below `count` that are in a set, with the events to ask for.
    fn members(&self, count: c_int) -> Vec<pollfd> {
        let events_of = |fd| {
            let asked = self.0.into_iter().zip(EVENTS).filter(|(set, _)| is_in(*set, fd));
            asked.fold(0, |events, (_, (wanted, _))| events | wanted)
        };
        let all = (0..count).map(|fd| pollfd { fd, events: events_of(fd), revents: 0 });
        all.filter(|one| one.events != 0).collect()
    }

    /// Clears the bits of a descriptor in the sets whose events it does not have. `one` comes from
    /// [`Sets::members`]. Returns how many of its bits stay.
    fn store(&self, one: &pollfd) -> usize {
        let mut stay = 0;
        for (set, (wanted, counts)) in self.0.into_iter().zip(EVENTS) {
            if one.events & wanted == 0 {
                continue;
            }
            if one.revents & counts != 0 {
                stay += 1;
            } else if let Some((word, bit)) = set.and_then(|set| place(set, one.fd)) {
                word.set(word.get() & !bit);
            }
        }
        stay
    }
}

/// Returns the word of a set that holds the bit of `fd`, and that bit.
fn place(set: &[Cell<c_ulong>], fd: c_int) -> Option<(&Cell<c_ulong>, c_ulong)> {
    let fd = usize::try_from(fd).ok()?;
    Some((set.get(fd / WORD)?, 1 << (fd % WORD)))
}

/// Returns whether `fd` is in a set, which the program may have left out.
fn is_in(set: Option<&[Cell<c_ulong>]>, fd: c_int) -> bool {
    set.and_then(|set| place(set, fd)).is_some_and(|(word, bit)| word.get() & bit != 0)
}

/// Returns the length of time of select(2) in the format of pselect(2). As in the kernel, a second
/// or more of microseconds counts as seconds.
pub fn timespec_of(time: &timeval) -> timespec {
    let (seconds, rest) = (time.tv_usec / 1_000_000, time.tv_usec % 1_000_000);
    timespec { tv_sec: time.tv_sec.saturating_add(seconds), tv_nsec: rest * 1000 }
}

/// Returns a length of time in nanoseconds in the format of select(2).
pub fn timeval_of(nanoseconds: u64) -> timeval {
    timeval {
        tv_sec: (nanoseconds / 1_000_000_000) as _,
        tv_usec: (nanoseconds % 1_000_000_000 / 1000) as _,
    }
}

/// Waits until `until` for descriptors of the sets below `count`. Leaves the ready ones in the
/// sets, and returns how many bits are set. Only the kernel reads `mask`, the signal mask during a
/// sleep.
///
/// # Errors
/// The errors of pselect(2).
pub fn select(
    count: c_int,
    sets: Sets<'_>,
    until: Deadline,
    mask: *const sigset_t,
) -> Result<usize, Errno> {
    let mut polled = sets.members(count);
    poll(&mut polled, until, mask)?;
    if polled.iter().any(|one| one.revents & libc::POLLNVAL != 0) {
        return Err(Errno::BADF);
    }
    Ok(polled.iter().map(|one| sets.store(one)).sum())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(fds: &[usize], words: usize) -> Vec<Cell<c_ulong>> {
        let word = |at| {
            let bits = fds.iter().filter(|fd| **fd / WORD == at).map(|fd| 1 << (fd % WORD));
            Cell::new(bits.fold(0, |word: c_ulong, bit: c_ulong| word | bit))
        };
        (0..words).map(word).collect()
    }

    fn bits(set: &[Cell<c_ulong>]) -> Vec<c_int> {
        (0..(set.len() * WORD) as c_int).filter(|fd| is_in(Some(set), *fd)).collect()
    }

    #[test]
    fn a_set_has_a_word_for_each_64_descriptors() {
        assert_eq!([0, 1, 64, 65, 1024].map(words), [0, 1, 1, 2, 16]);
        assert_eq!((words(-1), words(c_int::MIN)), (0, 0));
        assert_eq!(words(c_int::MAX), 1 << 25);
    }

    #[test]
    fn no_bit_is_beyond_a_set() {
        let all = set(&[0, 63, 64, 127], 2);
        assert_eq!(bits(&all), [0, 63, 64, 127]);
        for fd in [1, 128, -1, c_int::MIN, c_int::MAX] {
            assert!(!is_in(Some(&all), fd), "{fd}");
        }
        assert!(!is_in(None, 0));
    }

    #[test]
    fn members_ask_for_the_events_of_all_their_sets() {
        let (read, write) = (set(&[0, 70], 2), set(&[3, 70], 2));
        let sets = Sets::new([Some(&read), Some(&write), None]);
        let asked: Vec<_> = sets.members(128).iter().map(|one| (one.fd, one.events)).collect();
        assert_eq!(
            asked,
            [(0, libc::POLLIN), (3, libc::POLLOUT), (70, libc::POLLIN | libc::POLLOUT)]
        );
        assert_eq!(sets.members(70).len(), 2, "the count is one more than the highest");
        assert!(sets.members(0).is_empty() && sets.members(-1).is_empty());
    }

    #[test]
    fn bits_of_descriptors_without_events_are_cleared() {
        let (read, write) = (set(&[1, 65], 2), set(&[1], 1));
        let sets = Sets::new([Some(&read), Some(&write), None]);
        let mut members = sets.members(66);
        // A connection that ended can be read, and cannot be written.
        members[0].revents = libc::POLLHUP;
        assert_eq!(sets.store(&members[0]), 1);
        assert_eq!((bits(&read), bits(&write)), (vec![1, 65], vec![]));
        assert_eq!(sets.store(&members[1]), 0);
        assert_eq!(bits(&read), [1]);
    }

    #[test]
    fn the_same_memory_may_be_two_sets() {
        let both = set(&[2], 1);
        let sets = Sets::new([Some(&both), Some(&both), None]);
        let mut members = sets.members(3);
        assert_eq!(members.len(), 1);
        members[0].revents = libc::POLLIN;
        assert_eq!(sets.store(&members[0]), 1);
        assert!(bits(&both).is_empty(), "the last set decides");
    }

    #[test]
    fn descriptors_of_the_kernel_alone_are_the_kernels() {
        let read = set(&[0, 1, 2], 1);
        assert!(!Sets::new([Some(&read), None, None]).have_ours(64));
        assert!(!Sets::new([None; 3]).have_ours(c_int::MIN));
    }

    #[test]
    fn what_is_left_of_a_timeout_has_whole_microseconds() {
        let left = timeval_of(3_000_000_999);
        assert_eq!((left.tv_sec, left.tv_usec), (3, 0));
        let time = timespec_of(&timeval { tv_sec: 1, tv_usec: 999_999 });
        assert_eq!((time.tv_sec, time.tv_nsec), (1, 999_999_000));
        let time = timespec_of(&timeval { tv_sec: 1, tv_usec: 2_500_000 });
        assert_eq!((time.tv_sec, time.tv_nsec), (3, 500_000_000));
        let time = timespec_of(&timeval { tv_sec: i64::MAX, tv_usec: i64::MAX });
        assert_eq!((time.tv_sec, time.tv_nsec), (i64::MAX, 775_807_000));
    }
}
