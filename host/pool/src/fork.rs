//! The faults of a sandbox whose memory begins as a template, and what is copied ahead of them.
//!
//! A fault copies the template's page into the sandbox's file, if nobody has yet, and then maps it.
//! The sandbox has no page before its granule is clean, so a page that was half copied when this
//! process died is copied again by a successor. What is copied ahead is mapped as well, so that it
//! never faults. It may have been copied before the sandbox began ([`prepare`](crate::prepare)).
//!
//! A sandbox may give pages back, which makes holes in its file. A page that the sandbox had of its
//! own is zeros from then on: its granule stays clean, and the next fault makes a page of zeros. A
//! page that is still the template's has no place in the file, and stays the template's.
//!
//! While nobody has told what forks of a template need, a fault copies its own page alone, so that
//! [`LateMemory::copied`] tells exactly what was touched. Otherwise it copies the pages around it,
//! too: half the time of a fault is the way to this process and back.

use std::ops::Range as Bytes;
use std::time::Duration;

use slipway_pool_spec::Range;
use slipway_ram::{LateMemory, NotYet, Template};

use crate::settle::{map, settle};
use crate::userfault::Userfault;

/// A page in bytes.
const PAGE: u64 = Template::GRANULE as u64;
/// The bytes that a fault copies where it is known what forks need.
const AROUND: u64 = 16 << 10;
/// The most bytes that are copied ahead between two looks at faults.
const BATCH: u64 = 128 << 10;
/// The size in bytes from which a hole of the template is left to the kernel.
const HOLE: u64 = 256 << 10;
/// The most holes that are left to the kernel. Each takes a request before the sandbox begins, and
/// splits a mapping of its process. In a Linux guest that has booted, the 16 largest holes have all
/// but a hundredth of the bytes of holes: 32 leave room for guests whose memory is in more parts.
const HOLES: usize = 32;

/// The part of a lease that only memory with a template has.
pub(crate) struct Fork {
    /// The bytes that a fault copies, aligned.
    around: u64,
    /// The bytes that are to be copied ahead, the next ones at the end.
    ahead: Vec<Bytes<u64>>,
}

impl Fork {
    /// Makes the part of a fork for which these bytes are copied ahead.
    pub(crate) fn new(ahead: &[Bytes<u64>]) -> Self {
        let around = if ahead.is_empty() { PAGE } else { AROUND };
        Self { around, ahead: ahead.iter().rev().cloned().collect() }
    }

    /// Returns whether there is anything to copy ahead.
    pub(crate) fn has_more(&self) -> bool {
        !self.ahead.is_empty()
    }

    /// Takes the next bytes to be copied ahead, at most `most` of them. Returns `None` if there are
    /// none left, or none are wanted.
    fn next(&mut self, most: u64) -> Option<Bytes<u64>> {
        let range = self.ahead.last_mut().filter(|_| most > 0)?;
        let end = range.end.min(range.start + most);
        let part = range.start..end;
        range.start = end;
        if range.is_empty() {
            self.ahead.pop();
        }
        Some(part)
    }
}

/// Serves a fault at byte `at` of a range.
pub(crate) fn serve(
    memory: &LateMemory,
    faults: &Userfault,
    (range, at): (&Range, u64),
    fork: &Fork,
) {
    let at = at - at % PAGE;
    let offset = range.offset + at;
    let start = (offset - offset % fork.around).max(range.offset);
    let end = (offset - offset % fork.around + fork.around).min(range.offset + range.len);
    let part = if memory.take(start as usize, (end - start) as usize).is_ok() {
        start - range.offset..end - range.offset
    } else {
        // Another thread is copying one of these pages, or the host has no memory for all of them:
        // only the page of the fault is settled.
        if settle(memory, offset as usize, PAGE as usize) == Err(NotYet::Gone) {
            tracing::error!("the host has no memory left for a page of a sandbox");
            std::thread::sleep(Duration::from_millis(100));
        }
        at..at + PAGE
    };
    if !memory.is_taken(offset as usize, PAGE as usize) {
        // The page is still without its bytes of the template: the thread that touched it is woken,
        // and its touch faults again.
        let _ = faults.wake(range.address + at, PAGE);
        return;
    }
    map(faults, range, part, PAGE, |absent| {
        // A page that nobody has made is one of zeros: a hole of the template, or a page that the
        // sandbox has given back. Those around the fault are made when they are touched.
        if absent == at
            && let Err(error) = faults.zero(range.address + at, PAGE)
        {
            tracing::debug!(%error, "no page of zeros for a sandbox");
        }
    });
}

/// Copies the next [`BATCH`] bytes of what is to be copied ahead, unless they were copied before
/// the sandbox had its memory, and maps them. Returns the number of pages that were copied.
pub(crate) fn copy_ahead(
    memory: &LateMemory,
    faults: &Userfault,
    ranges: &[Range],
    fork: &mut Fork,
) -> u64 {
    // Ranges are a page or two as a rule: a look at faults between any two of them would take as
    // long as the copies.
    let (mut left, mut pages) = (BATCH, 0);
    while let Some(part) = fork.next(left) {
        let len = part.end - part.start;
        left -= len;
        let is_there = memory.is_taken(part.start as usize, len as usize);
        match memory.take(part.start as usize, len as usize) {
            Ok(()) => {}
            // A device copies a page of it: the rest is copied when it is needed.
            Err(NotYet::Busy) => continue,
            Err(NotYet::Gone) => {
                tracing::warn!("the host has no memory left to copy ahead for a sandbox");
                fork.ahead.clear();
                break;
            }
        }
        for range in ranges {
            let start = part.start.max(range.offset);
            let end = part.end.min(range.offset + range.len);
            if start < end {
                map(faults, range, start - range.offset..end - range.offset, PAGE, |_| ());
            }
        }
        pages += if is_there { 0 } else { len / PAGE };
    }
    pages
}

/// Copies the next [`BATCH`] bytes of what is to be copied ahead into memory that no sandbox has
/// yet. Returns the number of pages.
///
/// # Errors
/// [`NotYet::Gone`]: the host has no memory left.
pub(crate) fn copy_spare(memory: &LateMemory, fork: &mut Fork) -> Result<u64, NotYet> {
    let (mut left, mut pages) = (BATCH, 0);
    while let Some(part) = fork.next(left) {
        let len = part.end - part.start;
        left -= len;
        memory.take(part.start as usize, len as usize)?;
        pages += len / PAGE;
    }
    Ok(pages)
}

/// Leaves the large holes of the template to the kernel: whoever touches one gets zeros at once.
pub(crate) fn leave_holes(memory: &LateMemory, faults: &Userfault, ranges: &[Range]) {
    let Some(template) = memory.template() else { return };
    for hole in largest_holes(template) {
        for range in ranges {
            let start = hole.start.max(range.offset);
            let end = hole.end.min(range.offset + range.len);
            if start >= end {
                continue;
            }
            let address = range.address + (start - range.offset);
            if let Err(error) = faults.unregister(address, end - start) {
                tracing::debug!(%error, "a hole of a template stays registered");
            }
        }
    }
}

/// Returns the largest holes of a template.
fn largest_holes(template: &Template) -> Vec<Bytes<u64>> {
    let starts = std::iter::once(0).chain(template.data().iter().map(|data| data.end as u64));
    let ends = template.data().iter().map(|data| data.start as u64);
    let holes = starts.zip(ends.chain(std::iter::once(template.len() as u64)));
    let mut holes: Vec<_> = holes.map(|(start, end)| start..end).collect();
    holes.retain(|hole| hole.end - hole.start >= HOLE);
    holes.sort_unstable_by_key(|hole| std::cmp::Reverse(hole.end - hole.start));
    holes.truncate(HOLES);
    holes
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn what_is_copied_ahead_comes_in_parts_in_its_order() {
        let mut fork = Fork::new(&[BATCH..BATCH + PAGE, 0..BATCH + 1]);
        assert_eq!(fork.next(0), None);
        let parts: Vec<_> = std::iter::from_fn(|| fork.next(BATCH)).collect();
        assert_eq!(parts, [BATCH..BATCH + PAGE, 0..BATCH, BATCH..BATCH + 1]);
        assert!(!fork.has_more());
        assert_eq!((fork.around, Fork::new(&[]).around), (AROUND, PAGE));
    }

    #[test]
    fn large_holes_are_found_wherever_they_are() {
        let file = rustix::fs::memfd_create(c"saved", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, 8 * HOLE).unwrap();
        // The second hole is a page too small.
        for at in [HOLE, 2 * HOLE, 5 * HOLE] {
            rustix::io::pwrite(&file, &[1], at).unwrap();
        }
        let template = Template::copy_of(file.as_fd()).unwrap();
        let expected = [2 * HOLE + PAGE..5 * HOLE, 5 * HOLE + PAGE..8 * HOLE, 0..HOLE];
        assert_eq!(largest_holes(&template), expected);
    }
}
