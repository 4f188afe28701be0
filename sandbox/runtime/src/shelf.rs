//! The spare VMMs of a node that are ready, and when the next one is to be started.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use slipway_cgroup::Group;
use slipway_hypervisor::Spare;
use tokio::sync::Notify;
use tokio::task::{AbortHandle, JoinHandle};

use crate::lock::lock;
use crate::v1;

/// The time after a spare was taken in which none is started: the sandbox that took it starts.
const QUIET: Duration = Duration::from_millis(100);
/// The time after a spare that failed in which none is started.
const PAUSE: Duration = Duration::from_secs(30);

/// A VMM that was started ahead, and what its sandbox gets with it.
pub(crate) struct Ahead {
    pub(crate) spare: Spare,
    /// The VMM's user.
    pub(crate) uid: u32,
    /// The control group that the VMM is in.
    pub(crate) group: Group,
}

/// A spare that is ready, and the task that waits for its end.
pub(crate) struct Waiting {
    pub(crate) ahead: Ahead,
    pub(crate) watch: AbortHandle,
}

/// The spares of a node.
#[derive(Default)]
pub(crate) struct Spares {
    pub(crate) shelf: Mutex<Shelf<Waiting>>,
    /// Raised when a spare may be missing.
    pub(crate) changed: Notify,
    /// Raised when the spares are to end.
    pub(crate) closing: Notify,
    /// The task that starts them.
    pub(crate) task: Mutex<Option<JoinHandle<()>>>,
}

/// The spares that are ready, and when the next one is to be started.
pub(crate) struct Shelf<T> {
    pub(crate) ready: Vec<(u64, T)>,
    /// The number of the next spare.
    next: u64,
    /// The earliest time of the next start.
    pub(crate) start_at: Option<Instant>,
    /// No spare is started any more.
    pub(crate) closed: bool,
    /// All but the number of those that are ready.
    pub(crate) counts: v1::SpareVmms,
}

impl<T> Default for Shelf<T> {
    fn default() -> Self {
        let counts = v1::SpareVmms::default();
        Self { ready: Vec::new(), next: 0, start_at: None, closed: false, counts }
    }
}

/// The time of the next start of a spare.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Due {
    Now,
    In(Duration),
    /// When one is missing.
    WhenMissing,
    /// There are no more.
    Never,
}

impl<T> Shelf<T> {
    /// Returns when the next spare is to be started, of `most` that are to be ready.
    pub(crate) fn due(&self, most: usize, now: Instant) -> Due {
        let wait = self.start_at.map(|at| at.saturating_duration_since(now)).unwrap_or_default();
        match (self.closed, self.ready.len() < most) {
            (true, _) => Due::Never,
            (false, false) => Due::WhenMissing,
            (false, true) if wait.is_zero() => Due::Now,
            (false, true) => Due::In(wait),
        }
    }

    /// Adds a spare, which `make` makes of its number.
    pub(crate) fn add(&mut self, make: impl FnOnce(u64) -> T) {
        let number = self.next;
        self.next += 1;
        self.counts.started += 1;
        self.ready.push((number, make(number)));
    }

    /// Takes a spare. Returns `None` if none is ready.
    pub(crate) fn take(&mut self, now: Instant) -> Option<T> {
        let taken = self.ready.pop();
        match &taken {
            Some(_) => {
                self.counts.taken += 1;
                self.start_at = self.start_at.max(Some(now + QUIET));
            }
            None => self.counts.missed += u64::from(!self.closed),
        }
        taken.map(|(_, one)| one)
    }

    /// Takes the spare `number` off, which has ended. Returns `None` if a sandbox has it.
    pub(crate) fn lose(&mut self, number: u64, now: Instant) -> Option<T> {
        let place = self.ready.iter().position(|(own, _)| *own == number)?;
        self.fail(now);
        Some(self.ready.swap_remove(place).1)
    }

    /// Notes that a spare has ended, or did not start.
    pub(crate) fn fail(&mut self, now: Instant) {
        self.counts.failed += 1;
        self.start_at = Some(now + PAUSE);
    }
}

impl Spares {
    /// Returns the numbers of spares.
    pub(crate) fn figures(&self) -> v1::SpareVmms {
        let shelf = lock(&self.shelf);
        v1::SpareVmms { ready: shelf.ready.len() as u64, ..shelf.counts }
    }

    /// Ends the spares that are ready, and starts no more. Returns when their processes have ended
    /// and the pool has their control groups.
    pub(crate) async fn close(&self) {
        lock(&self.shelf).closed = true;
        self.changed.notify_one();
        self.closing.notify_one();
        let task = lock(&self.task).take();
        if let Some(task) = task {
            let _ = task.await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spare_that_was_taken_is_replaced_after_a_while() {
        let (mut shelf, now) = (Shelf::default(), Instant::now());
        assert_eq!(shelf.due(2, now), Due::Now);
        shelf.add(|number| number);
        assert_eq!((shelf.due(2, now), shelf.due(1, now)), (Due::Now, Due::WhenMissing));
        shelf.add(|number| number);
        assert_eq!(shelf.due(2, now), Due::WhenMissing);
        assert_eq!(shelf.take(now), Some(1));
        assert_eq!(shelf.due(2, now), Due::In(QUIET), "its sandbox starts");
        assert_eq!(shelf.due(2, now + QUIET), Due::Now);
        assert_eq!((shelf.take(now), shelf.take(now)), (Some(0), None));
        let counts = shelf.counts;
        assert_eq!((counts.started, counts.taken, counts.missed), (2, 2, 1));
        assert_eq!((counts.failed, counts.unfit), (0, 0));
    }

    #[test]
    fn a_spare_that_has_ended_is_replaced_after_a_pause() {
        let (mut shelf, now) = (Shelf::default(), Instant::now());
        for _ in 0..3 {
            shelf.add(|number| number);
        }
        assert_eq!(shelf.lose(1, now), Some(1));
        assert_eq!((shelf.lose(1, now), shelf.lose(7, now)), (None, None), "a sandbox has it");
        assert_eq!(shelf.due(3, now), Due::In(PAUSE));
        shelf.take(now).unwrap();
        assert_eq!(shelf.due(3, now), Due::In(PAUSE), "no take shortens it");
        assert_eq!(shelf.due(3, now + PAUSE), Due::Now);
        assert_eq!(shelf.counts.failed, 1);
    }

    #[test]
    fn nothing_is_started_once_spares_are_to_end() {
        let mut shelf: Shelf<u64> = Shelf { closed: true, ..Shelf::default() };
        assert_eq!(shelf.due(1, Instant::now()), Due::Never);
        assert_eq!((shelf.take(Instant::now()), shelf.counts.missed), (None, 0));
    }

    #[tokio::test]
    async fn spares_that_were_never_kept_close_at_once() {
        let spares = Spares::default();
        spares.close().await;
        assert_eq!(spares.figures(), v1::SpareVmms::default());
    }
}
