//! Calls that wait for a peer's memory without a page fault.
//!
//! A touch of a page that a peer takes away at that moment waits in a page fault, which the kernel
//! counts for the thread. A call that writes to the file of such memory waits for the same, and for
//! the file's lock, and no fault is counted. So whoever makes such a call notes it, and whoever
//! looks for sleeps of a thread (`slipway_reactor::Stalls`) counts the notes as page faults.

use std::cell::Cell;

thread_local! {
    static NOTED: Cell<i64> = const { Cell::new(0) };
}

/// Notes that the calling thread makes a call that may wait for a peer's memory.
#[inline]
pub fn note() {
    NOTED.set(NOTED.get().wrapping_add(1));
}

/// Returns how many calls the calling thread has noted since it began. The number wraps around.
#[inline]
pub fn count() -> i64 {
    NOTED.get()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_thread_counts_its_own_calls() {
        let before = count();
        note();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                (0..5).for_each(|_| note());
                assert_eq!(count(), 5);
            });
        });
        note();
        assert_eq!(count(), before + 2);
    }
}
