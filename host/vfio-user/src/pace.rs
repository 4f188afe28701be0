//! The timing of polls of a function, or of a lane of one.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use slipway_doorbells::{CellPage, Doorbells};
use slipway_pci::Progress;
use slipway_reactor::Step;
use slipway_telemetry::Clock;

use crate::doorbells::SharedPage;
use crate::stats::add;

/// The shortest of the growing waits between two looks at mapped doorbells.
const FIRST_SWEEP: Duration = Duration::from_micros(50);

/// Doorbell cells that a client maps, and the number of them that are in use.
#[derive(Clone)]
pub(crate) struct Cells {
    pub(crate) page: Arc<SharedPage>,
    pub(crate) doorbells: Doorbells,
}

/// The results of past polls, and the time of the next one that follows from them.
pub(crate) struct Pace {
    clock: Arc<dyn Clock>,
    /// The cells that a client writes directly; `None` if the doorbells are not mapped.
    pub(crate) cells: Option<Cells>,
    busy: bool,
    /// More work is waiting than the polled part has turns for.
    behind: bool,
    /// The polled part may get work without a notification, until it is told to rest.
    watching: bool,
    /// The number of polls that were not idle. Written here, read by other threads, too.
    progress: Arc<AtomicU64>,
    deadline: Option<Instant>,
    last_progress: Instant,
    sweep_wait: Duration,
    /// The values of the mapped doorbells when last noted.
    rung: Vec<u32>,
}

impl Pace {
    /// Returns the pace of a function or lane that has not been polled yet. `clock` is the clock of
    /// its deadlines.
    pub(crate) fn new(clock: Arc<dyn Clock>) -> Self {
        Self {
            clock,
            cells: None,
            busy: false,
            behind: false,
            watching: false,
            progress: Arc::default(),
            deadline: None,
            last_progress: Instant::now(),
            sweep_wait: FIRST_SWEEP,
            rung: Vec::new(),
        }
    }

    /// Returns the pace of another part of the same function, which has not been polled yet.
    pub(crate) fn beside(&self) -> Self {
        Self { cells: self.cells.clone(), ..Self::new(self.clock.clone()) }
    }

    /// Records the result of a poll at `now`. Returns whether the poll made progress.
    #[inline]
    pub(crate) fn note(&mut self, found: Progress, now: Instant) -> bool {
        self.watching = matches!(found, Progress::Watching(_));
        self.behind = found == Progress::Behind;
        match found {
            Progress::Busy | Progress::Behind => {
                self.busy = true;
                add(&self.progress, 1);
                self.deadline = None;
                self.last_progress = now;
                self.sweep_wait = FIRST_SWEEP;
            }
            Progress::Idle(deadline) | Progress::Watching(deadline) => {
                self.busy = false;
                let wait = deadline.map(|at| at.saturating_sub(self.clock.now()));
                self.deadline = wait.and_then(|wait| now.checked_add(wait));
            }
        }
        self.busy
    }

    /// Resets the pace to its initial state, except that the next poll is due soon. The cells stay,
    /// and the counter, which other threads read, goes on.
    pub(crate) fn renew(&mut self) {
        let (cells, progress) = (self.cells.take(), self.progress.clone());
        *self = Self { cells, progress, busy: true, ..Self::new(self.clock.clone()) };
    }

    /// Returns the number of polls that were not idle.
    #[cfg(feature = "fuzz")]
    pub(crate) fn progress(&self) -> u64 {
        self.progress.load(Ordering::Relaxed)
    }

    /// Returns the counter of the polls that were not idle.
    pub(crate) fn progress_counter(&self) -> Arc<AtomicU64> {
        self.progress.clone()
    }

    /// Requests a poll soon.
    pub(crate) fn kick(&mut self) {
        self.busy = true;
    }

    /// Returns whether the next poll is due at once.
    pub(crate) fn is_busy(&self) -> bool {
        self.busy
    }

    /// Returns whether the polled part has to be told to rest before its thread sleeps.
    pub(crate) fn is_watching(&self) -> bool {
        self.watching
    }

    /// Returns the step that a task reports if its function [is due at once](Pace::is_busy).
    pub(crate) fn busy_step(&self) -> Step {
        if self.behind { Step::Behind } else { Step::Busy }
    }

    /// Returns whether a poll is due at `now`: the last one was busy, or the deadline has passed.
    pub(crate) fn is_due(&self, now: Instant) -> bool {
        self.busy || self.deadline.is_some_and(|at| at <= now)
    }

    /// Returns the time of the next poll, or `None` if only an event makes a poll due.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// Returns whether work may arrive that only a poll finds.
    pub(crate) fn is_unannounced(&self) -> bool {
        self.cells.is_some() || self.watching
    }

    /// Returns whether to poll again at once, since work may arrive without a notification and some
    /// was found less than `budget` ago.
    pub(crate) fn is_hot(&self, now: Instant, budget: Duration) -> bool {
        self.is_unannounced() && now.duration_since(self.last_progress) < budget
    }

    /// Returns when to check the mapped doorbells next. The waits double up to `period` while
    /// nothing is found, so that a client that paused briefly is noticed quickly. Returns `None` if
    /// the wait has reached `period`.
    pub(crate) fn next_sweep(&mut self, now: Instant, period: Duration) -> Option<Instant> {
        let wait = self.sweep_wait;
        self.sweep_wait = wait.saturating_mul(2).min(period);
        if wait < period { now.checked_add(wait) } else { None }
    }

    /// Notes the values of the mapped doorbells. Call it before the last poll, after which only
    /// [`Pace::stirs`] is checked: the poll finds what was rung before the note, the sweep what was
    /// rung after it.
    pub(crate) fn note_doorbells(&mut self) {
        if let Some(Cells { page, doorbells }) = &self.cells {
            let cells = &page.cells()[..doorbells.watched()];
            self.rung.clear();
            self.rung.extend(cells.iter().map(|cell| cell.load(Ordering::Acquire)));
        }
    }

    /// Returns whether a mapped doorbell has changed since it was noted. Without mapped doorbells,
    /// always returns true.
    pub(crate) fn stirs(&self) -> bool {
        let Some(Cells { page, .. }) = &self.cells else { return true };
        let changed = |(cell, rung): (&AtomicU32, &u32)| cell.load(Ordering::Relaxed) != *rung;
        // The number of watched doorbells changes only while the function is polled, which was
        // before the note.
        page.cells().iter().zip(&self.rung).any(changed)
    }
}

#[cfg(test)]
mod tests {
    use slipway_telemetry::MonotonicClock;

    use super::*;

    #[test]
    fn a_renewed_pace_has_nothing_of_the_client_before() {
        let mut pace = Pace::new(Arc::new(MonotonicClock::new()));
        let (now, period) = (Instant::now(), Duration::from_secs(1));
        let counter = pace.progress_counter();
        assert!(pace.note(Progress::Behind, now));
        assert!(matches!(pace.busy_step(), Step::Behind));
        pace.note(Progress::Watching(Some(Duration::ZERO)), now);
        pace.note(Progress::Behind, now);
        for _ in 0..5 {
            pace.next_sweep(now, period);
        }
        pace.renew();
        assert!(pace.is_busy() && matches!(pace.busy_step(), Step::Busy));
        assert!(!pace.is_watching() && pace.deadline().is_none());
        assert_eq!(pace.next_sweep(now, period), now.checked_add(FIRST_SWEEP));
        pace.note(Progress::Busy, now);
        assert_eq!(counter.load(Ordering::Relaxed), 3, "the counter goes on");
    }
}
