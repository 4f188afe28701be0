//! Closed and copied descriptors: what close(2), dup(2) and their relatives change in the table.

use libc::{c_int, c_uint};
use slipway_socket::{Errno, hidden};

use crate::fds;
use crate::numbers;

/// The highest number that loops which close all descriptors visit.
const LAST: c_int = hidden::NUMBERS as c_int - 1;

/// Takes `fd`, which is about to be closed, out of the table.
///
/// # Errors
/// `EBADF` for a hidden descriptor, which a program cannot close.
pub fn closing(fd: c_int) -> Result<(), Errno> {
    if fds::is_known(fd) && !fds::in_vfork_child() {
        fds::remove(fd);
    } else if hidden::is_hidden(fd) {
        return Err(Errno::BADF);
    }
    Ok(())
}

/// Takes the descriptors from `first` to `last`, which close_range(2) with `flags` is about to
/// close, out of the table.
///
/// # Errors
/// `EINVAL` for a range that ends before it begins, or a flag that is unknown: nothing is closed.
pub fn closing_range(first: c_uint, last: c_uint, flags: c_int) -> Result<(), Errno> {
    if first > last || flags & !(libc::CLOSE_RANGE_UNSHARE as c_int) != 0 {
        return Err(Errno::INVAL);
    }
    if !fds::in_vfork_child() {
        let number = |bound| c_int::try_from(bound).unwrap_or(LAST).min(LAST);
        fds::all(number(first), number(last)).for_each(|(fd, _)| fds::remove(fd));
    }
    Ok(())
}

/// Calls `close` with each range of numbers from `first` to `last` without a number that
/// `is_hidden`. Returns the result of the last call; 0 without one.
pub fn between_hidden(
    first: c_uint,
    last: c_uint,
    is_hidden: impl Fn(c_int) -> bool,
    mut close: impl FnMut(c_uint, c_uint) -> c_int,
) -> c_int {
    let mut from = first;
    let mut done = 0;
    let end = last.min(LAST as c_uint);
    for fd in first..=end {
        if is_hidden(fd as c_int) {
            if fd > from {
                done = close(from, fd - 1);
            }
            from = fd + 1;
        }
    }
    if from <= last { close(from, last) } else { done }
}

/// Records that `new` is a copy of `fd` now, unless the call failed and `new` is less than 0.
pub fn copied(fd: c_int, new: c_int) {
    if new >= 0 && fds::in_vfork_child() {
        return numbers::copied(fd, new);
    }
    if new >= 0 && (fds::is_known(fd) || fds::is_known(new)) {
        match fds::get(fd) {
            Some(object) => fds::put(new, &object),
            None => fds::remove(new),
        }
    }
}

/// Handles a new kernel descriptor: if its number was ours, that one was closed without this
/// library.
pub fn fresh(fd: c_int) {
    if fds::is_known(fd) && !fds::in_vfork_child() {
        fds::remove(fd);
    }
}

/// Returns whether a program may replace the descriptor `to`.
///
/// # Errors
/// `EBUSY` for a hidden descriptor.
pub fn may_replace(to: c_int) -> Result<(), Errno> {
    if hidden::is_hidden(to) && !fds::in_vfork_child() { Err(Errno::BUSY) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fds::{DescriptorKind, make};

    fn closed(first: c_uint, last: c_uint, hidden: &[c_int]) -> Vec<(c_uint, c_uint)> {
        let mut ranges = Vec::new();
        between_hidden(
            first,
            last,
            |fd| hidden.contains(&fd),
            |from, to| {
                ranges.push((from, to));
                0
            },
        );
        ranges
    }

    #[test]
    fn hidden_descriptors_stay_open() {
        assert_eq!(closed(3, c_uint::MAX, &[]), [(3, c_uint::MAX)]);
        assert_eq!(closed(3, 9, &[5, 6]), [(3, 4), (7, 9)]);
        assert_eq!(closed(3, 9, &[3, 9]), [(4, 8)]);
        assert!(closed(5, 5, &[5]).is_empty());
        assert!(closed(6, 5, &[]).is_empty());
        let last = LAST as c_uint;
        assert_eq!(
            closed(last - 1, c_uint::MAX, &[LAST]),
            [(last - 1, last - 1), (last + 1, c_uint::MAX)]
        );
    }

    #[test]
    fn the_result_is_that_of_the_last_range() {
        let mut results = [7, 8].into_iter();
        let close = |_, _| results.next().unwrap();
        assert_eq!(between_hidden(0, 4, |fd| fd == 2, close), 8);
        assert_eq!(between_hidden(2, 2, |fd| fd == 2, |_, _| 9), 0);
    }

    // The numbers of these tests are beyond those that a test program has open.
    #[test]
    fn a_copy_has_the_object_and_a_copy_of_the_kernels_has_none() {
        let first = 700_000;
        fds::put(first, &make(DescriptorKind::Plain));
        copied(first, first + 1);
        copied(first, -1);
        let same = |a: c_int, b: c_int| {
            let address = |fd| fds::get(fd).map(|object| std::ptr::from_ref(object.object()));
            address(a).is_some() && address(a) == address(b)
        };
        assert!(same(first, first + 1));
        assert_eq!(closing(first), Ok(()));
        assert!(!fds::is_known(first) && fds::is_known(first + 1));
        copied(first + 2, first + 1);
        assert!(!fds::is_known(first + 1), "the number is the kernel's now");
    }

    #[test]
    fn a_range_is_taken_out_of_the_table() {
        let first = 710_000;
        for fd in first..first + 4 {
            fds::put(fd, &make(DescriptorKind::Plain));
        }
        let number = |fd: c_int| c_uint::try_from(fd).unwrap();
        assert_eq!(closing_range(number(first + 1), number(first + 2), 0), Ok(()));
        // The kernel refuses these, so they close nothing.
        let last = number(first + 3);
        assert_eq!(closing_range(last, number(first), 0), Err(Errno::INVAL));
        for unknown in [1, 8, c_int::MIN] {
            assert_eq!(closing_range(last, last, unknown), Err(Errno::INVAL));
        }
        let known: Vec<_> = (first..first + 4).filter(|fd| fds::is_known(*fd)).collect();
        assert_eq!(known, [first, first + 3]);
        fresh(first);
        fresh(first + 3);
        assert!(!fds::is_known(first) && !fds::is_known(first + 3));
    }
}
