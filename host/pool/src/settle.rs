//! The last steps of a fault: pages get their first bytes, and are mapped.

use std::ops::Range as Bytes;

use slipway_pool_spec::Range;
use slipway_ram::{LateMemory, NotYet};

use crate::userfault::{Continued, Userfault};

/// Maps the pages of a part of a range, whose granules are clean, in pages of `page` bytes. Calls
/// `absent` with the offset in the range of each page that is not in the file.
pub(crate) fn map(
    faults: &Userfault,
    range: &Range,
    part: Bytes<u64>,
    page: u64,
    absent: impl Fn(u64),
) {
    let (mut at, mut most, mut passed) = (part.start, u64::MAX, false);
    while at < part.end {
        match faults.go_on(range.address + at, most.min(part.end - at)) {
            Ok(Continued::Mapped(bytes)) => at += bytes,
            Ok(found @ (Continued::Passed | Continued::Absent)) => {
                if found == Continued::Absent {
                    absent(at);
                }
                passed = true;
                at += page;
            }
            Ok(Continued::Changing) => {
                passed = true;
                break;
            }
            Ok(Continued::Ended) => return,
            // Some of it is not registered (any more): the kernel serves what is touched there.
            Err(_) if most > page => most = page,
            Err(_) => {
                passed = true;
                at += page;
            }
        }
    }
    if passed {
        let _ = faults.wake(range.address + part.start, part.end - part.start);
    }
}

/// Takes granules, and waits for other threads that are writing any of them.
///
/// # Errors
/// [`NotYet::Gone`].
pub(crate) fn settle(memory: &LateMemory, offset: usize, len: usize) -> Result<(), NotYet> {
    loop {
        match memory.take(offset, len) {
            Err(NotYet::Busy) => std::thread::yield_now(),
            other => return other,
        }
    }
}

/// Takes all granules, like [`settle`]. Devices look at no granule after that.
///
/// # Errors
/// As for [`settle`].
pub(crate) fn settle_all(memory: &LateMemory) -> Result<(), NotYet> {
    loop {
        match memory.take_all() {
            Err(NotYet::Busy) => std::thread::yield_now(),
            other => return other,
        }
    }
}
