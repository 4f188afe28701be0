//! The states of a granule of late memory, and the only ways from one to another.
//!
//! ```text
//!            populate               take                 recycle
//!   Absent ───────────▶ Untouched ────────▶ Clean ─────────────────▶ Dirty
//!      │                    ▲                 ▲                        │
//!      └────────────── take, │ give_hole ──────┤                        │ take, zero_ahead
//!                           │                 │                        ▼
//!                           └── zero_ahead ───┴──────── take ──────── Busy
//!                                                                       ▲
//!   Shared ───────────────────────── take ─────────────────────────────┘
//! ```
//!
//! Memory that begins as a template has the states `Absent`, `Shared`, `Busy` and `Clean`. Its
//! `Absent` granules are the template's holes: the user's process has them from the kernel without
//! a fault, so that the file has their bytes as it has those of `Clean` ones. Other memory has all
//! states but `Shared`, and none of it is `Absent` once a user has it ([`give_hole`]). The thread
//! that made a granule busy writes the bytes with which its user begins: the template's if it was
//! `Shared`, else zeros.
//!
//! A dirty granule that has no page when its memory is recycled is `Absent` again ([`forget`]), so
//! that a dirty one has all of its pages: those that the file lacks are no fault to this process.
//!
//! The process of a fork may give pages of the file back (madvise(2), `MADV_REMOVE`), and this
//! module is not told. A `Clean` or `Absent` granule stays so, and its bytes are zeros for all, as
//! those of any hole of the file are. A `Shared` one has no page, and is still the template's. The
//! page of a `Busy` one is written and removed under the file's lock: it is zeros, or the
//! template's, when the granule is `Clean`.
//!
//! Every change is a compare-and-swap of one byte, except those of the thread that made the granule
//! `Busy`: it alone may write the granule's bytes, and it stores the next state. Pairs: the release
//! in [`finish`] and the acquires in [`is_clean`] and [`take`], so that a thread that finds a
//! granule clean sees the written bytes and not what was there before. A granule that is `Clean`
//! stays so until its memory is recycled, which needs that nobody uses the memory.

use super::outside::{AtomicU8, Ordering};

/// No page is there, and no user has the memory, unless it began as a template.
pub(crate) const ABSENT: u8 = 0;
/// The bytes are those of an earlier user.
pub(crate) const DIRTY: u8 = 1;
/// One thread is writing the bytes with which the user begins.
pub(crate) const BUSY: u8 = 2;
/// All bytes are zero and nobody has been given the granule.
pub(crate) const UNTOUCHED: u8 = 3;
/// The granule had the bytes with which its present user begins when it was given. It is zeros
/// where its user has given pages back since.
pub(crate) const CLEAN: u8 = 4;
/// The bytes with which the user begins are in the template only, and nobody has been given the
/// granule.
pub(crate) const SHARED: u8 = 5;

/// The result of [`take`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TakeOutcome {
    /// The granule is clean.
    Clean,
    /// The caller made the granule busy: it writes the first bytes, and calls [`finish`].
    Mine,
    /// Another thread is writing them.
    Busy,
}

/// Returns whether the granule may be used as it is.
#[inline]
pub(crate) fn is_clean(state: &AtomicU8) -> bool {
    state.load(Ordering::Acquire) == CLEAN
}

/// Returns whether the bytes of a granule of memory with a template are in the file: the granule
/// was taken, or it is a hole of the template.
#[inline]
pub(crate) fn is_own(state: &AtomicU8) -> bool {
    matches!(state.load(Ordering::Acquire), CLEAN | ABSENT)
}

/// Takes the granule for its user.
pub(crate) fn take(state: &AtomicU8) -> TakeOutcome {
    let mut seen = state.load(Ordering::Acquire);
    loop {
        let next = match seen {
            CLEAN => return TakeOutcome::Clean,
            BUSY => return TakeOutcome::Busy,
            ABSENT | UNTOUCHED => CLEAN,
            _ => BUSY,
        };
        match state.compare_exchange(seen, next, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) if next == CLEAN => return TakeOutcome::Clean,
            Ok(_) => return TakeOutcome::Mine,
            Err(now) => seen = now,
        }
    }
}

/// Makes a dirty granule busy ahead of any user. Returns whether it was dirty: then the caller
/// writes zeros, and calls [`finish`].
pub(crate) fn begin_ahead(state: &AtomicU8) -> bool {
    state.compare_exchange(DIRTY, BUSY, Ordering::AcqRel, Ordering::Relaxed).is_ok()
}

/// Ends what the caller began: the granule is `state`, [`CLEAN`] or [`UNTOUCHED`] if the caller
/// wrote all of its bytes, or [`DIRTY`] or [`SHARED`], whichever it was, if it could not.
pub(crate) fn finish(cell: &AtomicU8, state: u8) {
    cell.store(state, Ordering::Release);
}

/// Gives the granule to its user if no page is there: the kernel makes a page of zeros when
/// somebody touches it.
pub(crate) fn give_hole(state: &AtomicU8) {
    // Most granules of recycled memory are not absent: a look costs less than an exchange.
    if state.load(Ordering::Relaxed) == ABSENT {
        let _ = state.compare_exchange(ABSENT, CLEAN, Ordering::AcqRel, Ordering::Relaxed);
    }
}

/// Notes that the kernel has filled an absent granule with pages of zeros.
pub(crate) fn populated(state: &AtomicU8) {
    let _ = state.compare_exchange(ABSENT, UNTOUCHED, Ordering::AcqRel, Ordering::Relaxed);
}

/// Notes that the granule's user is gone, with all that it or a thread of this process began. The
/// caller is the only one that knows the memory. An absent granule may have a page of a user whom
/// an earlier version of this process served.
pub(crate) fn recycle(state: &AtomicU8) {
    if state.load(Ordering::Acquire) != UNTOUCHED {
        state.store(DIRTY, Ordering::Release);
    }
}

/// Notes that a dirty granule of memory that nobody has holds no page.
pub(crate) fn forget(state: &AtomicU8) {
    let _ = state.compare_exchange(DIRTY, ABSENT, Ordering::AcqRel, Ordering::Relaxed);
}
