//! When what is polled is polled again: a function, or a lane of one.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use slipway_pci::{CellPage, Doorbells, Progress};
use slipway_reactor::Step;
use slipway_telemetry::Clock;

use crate::doorbells::SharedPage;
use crate::stats::add;

/// The shortest of the growing waits between two looks at mapped doorbells.
const FIRST_SWEEP: Duration = Duration::from_micros(50);

/// Doorbell cells that a client maps, and how many of them count.
#[derive(Clone)]
pub(crate) struct Cells {
    pub(crate) page: Arc<SharedPage>,
    pub(crate) doorbells: Doorbells,
}

/// What polls found so far, and what follows from it.
pub(crate) struct Pace {
    clock: Arc<dyn Clock>,
    /// A client rings these itself.
    pub(crate) cells: Option<Cells>,
    busy: bool,
    /// Of its work more waits than it has turns for.
    behind: bool,
    /// It may get work unannounced, until it is told to rest.
    watching: bool,
    /// Polls that were not idle: written here, read by others too.
    progress: Arc<AtomicU64>,
    deadline: Option<Instant>,
    last_progress: Instant,
    sweep_wait: Duration,
    /// The mapped doorbells, as noted last.
    rung: Vec<u32>,
}

impl Pace {
    /// Of something that has not been polled yet. `clock` is the one of its deadlines.
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

    /// Of another part of the same function, which has not been polled yet.
    pub(crate) fn beside(&self) -> Self {
        Self { cells: self.cells.clone(), ..Self::new(self.clock.clone()) }
    }

    /// A poll at `now` found this. Whether it made progress.
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

    /// As at the start, but to be polled soon.
    pub(crate) fn renew(&mut self) {
        self.busy = true;
        self.watching = false;
        self.deadline = None;
    }

    /// Counts the polls that were not idle.
    pub(crate) fn progress(&self) -> u64 {
        self.progress.load(Ordering::Relaxed)
    }

    /// That counter.
    pub(crate) fn progress_counter(&self) -> Arc<AtomicU64> {
        self.progress.clone()
    }

    /// Has it polled soon.
    pub(crate) fn kick(&mut self) {
        self.busy = true;
    }

    /// Whether it wants to be polled at once.
    pub(crate) fn is_busy(&self) -> bool {
        self.busy
    }

    /// Whether it has to be told to rest.
    pub(crate) fn is_watching(&self) -> bool {
        self.watching
    }

    /// What a task says whose function [wants to be polled at once](Pace::is_busy).
    pub(crate) fn busy_step(&self) -> Step {
        if self.behind { Step::Behind } else { Step::Busy }
    }

    /// Whether it wants to be polled at `now`: it was busy, or its time has come.
    pub(crate) fn is_due(&self, now: Instant) -> bool {
        self.busy || self.deadline.is_some_and(|at| at <= now)
    }

    /// When it wants to be polled again; None: when something happens.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// Whether work may come that only a poll finds.
    pub(crate) fn is_unannounced(&self) -> bool {
        self.cells.is_some() || self.watching
    }

    /// Whether it shall be polled again at once, as work may have come that nothing announces: some
    /// was found less than `budget` ago.
    pub(crate) fn is_hot(&self, now: Instant, budget: Duration) -> bool {
        self.is_unannounced() && now.duration_since(self.last_progress) < budget
    }

    /// When mapped doorbells are to be looked at next: the waits double up to `period` while nothing
    /// is found, so one that paused briefly is found quickly. None: they are at `period` already.
    pub(crate) fn next_sweep(&mut self, now: Instant, period: Duration) -> Option<Instant> {
        let wait = self.sweep_wait;
        self.sweep_wait = wait.saturating_mul(2).min(period);
        if wait < period { now.checked_add(wait) } else { None }
    }

    /// Notes what the mapped doorbells are, before the last poll of what is then asked
    /// [`Pace::stirs`] only: what is rung before is found by the poll, and after by the sweep.
    pub(crate) fn note_doorbells(&mut self) {
        if let Some(Cells { page, doorbells }) = &self.cells {
            let cells = &page.cells()[..doorbells.watched()];
            self.rung.clear();
            self.rung.extend(cells.iter().map(|cell| cell.load(Ordering::Acquire)));
        }
    }

    /// Whether a mapped doorbell is another one than noted.
    pub(crate) fn stirs(&self) -> bool {
        let Some(Cells { page, .. }) = &self.cells else { return true };
        let changed = |(cell, rung): (&AtomicU32, &u32)| cell.load(Ordering::Relaxed) != *rung;
        // What is looked at changes only while the function is polled, and that was before the note.
        page.cells().iter().zip(&self.rung).any(changed)
    }
}
