//! The connections of a set that a look found, in the order in which they are to be reported.

use libc::c_int;

/// Nanoseconds by which a time may be ahead of this process's clock. A peer with a time further
/// ahead has another clock, or lies.
const AHEAD: u64 = 1_000_000_000;

/// A connection that has events to report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ready {
    /// The time that decides its place in the order.
    pub time: u64,
    /// The time when the bytes that wait began to come, for connections whose `time` is the same.
    pub since: u64,
    pub fd: c_int,
    /// The events.
    pub is: u32,
    /// The stream's marks when it was looked at.
    pub marks: (u64, u64),
}

/// The connections that a look found. Those that a report had no room for stay for the next one.
#[derive(Default)]
pub(super) struct Found {
    all: Vec<Ready>,
    /// The number of those that were taken.
    taken: usize,
}

impl Found {
    /// Begins another look.
    pub(super) fn clear(&mut self) {
        self.all.clear();
        self.taken = 0;
    }

    /// Makes room for a set of `count` connections, so that no look allocates memory.
    pub(super) fn reserve(&mut self, count: usize) {
        self.all.reserve(count.saturating_sub(self.all.len()));
    }

    pub(super) fn add(&mut self, ready: Option<Ready>) {
        self.all.extend(ready);
    }

    /// Sorts the connections by time.
    pub(super) fn sort(&mut self) {
        self.all.sort_unstable_by_key(|ready| (ready.time, ready.since, ready.fd));
    }

    /// Forgets the connections whose time is after `cutoff`, unless all are. The connections are
    /// sorted.
    pub(super) fn drop_late(&mut self, cutoff: u64) {
        let in_time = self.all.partition_point(|ready| ready.time <= cutoff);
        if in_time > 0 {
            self.all.truncate(in_time);
        }
    }

    /// Returns the latest time if each of the connections has one after `cutoff`. They are sorted.
    pub(super) fn all_late(&self, cutoff: u64) -> Option<u64> {
        self.all.first().filter(|ready| ready.time > cutoff)?;
        self.all.last().map(|ready| ready.time)
    }

    /// Returns the number of those that were not taken.
    pub(super) fn left(&self) -> usize {
        self.all.len() - self.taken
    }

    pub(super) fn is_empty(&self) -> bool {
        self.left() == 0
    }

    /// Takes the next connection.
    pub(super) fn take(&mut self) -> Option<Ready> {
        let next = self.all.get(self.taken).copied()?;
        self.taken += 1;
        Some(next)
    }
}

/// Returns the `time` and the `since` of [`Ready`]. The time is when the bytes that wait began to
/// come (`since`), or that of the last report if they were there before it. `now` is a time shortly
/// before the look.
#[inline]
pub(super) fn place(since: Option<u64>, last_report: u64, now: u64) -> (u64, u64) {
    let since = since.filter(|since| *since < now.saturating_add(AHEAD)).unwrap_or(last_report);
    (since.max(last_report), since)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    fn ready(fd: c_int, since: Option<u64>, turn: u64) -> Option<Ready> {
        let (time, since) = place(since, turn, 10 * SECOND);
        Some(Ready { time, since, fd, is: 1, marks: (0, 0) })
    }

    fn order(found: &mut Found) -> Vec<c_int> {
        std::iter::from_fn(|| found.take()).map(|ready| ready.fd).collect()
    }

    #[test]
    fn what_came_first_is_first_and_what_was_reported_is_last() {
        let mut found = Found::default();
        found.reserve(5);
        // The last two were reported at 50 and not read.
        for (fd, since, turn) in [(1, 30, 5), (2, 20, 5), (3, 40, 7), (4, 11, 50), (5, 10, 50)] {
            found.add(ready(fd, Some(since), turn));
        }
        found.add(None);
        found.sort();
        assert_eq!(found.left(), 5);
        assert_eq!(found.take().map(|ready| ready.fd), Some(2));
        assert_eq!((found.left(), order(&mut found)), (4, vec![1, 3, 5, 4]));
        assert!(found.is_empty());
    }

    #[test]
    fn without_a_time_the_last_report_decides() {
        // Bytes of another machine, and those of a peer whose clock is far ahead.
        assert_eq!(place(None, 7, 0), (7, 7));
        assert_eq!(place(Some(9 * SECOND), 7, 8 * SECOND - 1), (7, 7));
        assert_eq!(place(Some(9 * SECOND), 7, 8 * SECOND + 1), (9 * SECOND, 9 * SECOND));
        assert_eq!(place(Some(u64::MAX), 7, u64::MAX - 1), (7, 7));
    }

    #[test]
    fn what_came_during_the_look_waits_for_the_next_one() {
        let mut found = Found::default();
        for (fd, since) in [(1, 30), (2, 20), (3, 40)] {
            found.add(ready(fd, Some(since), 0));
        }
        found.sort();
        assert_eq!((found.all_late(19), found.all_late(20)), (Some(40), None));
        found.drop_late(30);
        assert_eq!(order(&mut found), [2, 1]);
        found.clear();
        assert_eq!(found.all_late(0), None);
        found.add(ready(4, Some(50), 0));
        found.drop_late(49);
        assert_eq!(order(&mut found), [4], "there is nothing else");
    }
}
