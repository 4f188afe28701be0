//! The function that an endpoint presents, and what stays with it when clients come and go.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use slipway_pci::{Bar, CellPage, Doorbells, Function, Progress, Turn};
use slipway_ram::DmaMap;
use slipway_reactor::Step;
use slipway_telemetry::Clock;

use crate::EndpointParts;
use crate::doorbells::SharedPage;
use crate::interrupts::{EventSink, Line, drain};
use crate::stats::add;

/// The shortest of the growing waits between two looks at mapped doorbells.
const FIRST_SWEEP: Duration = Duration::from_micros(50);

/// A page of doorbells that clients map.
pub(crate) struct Mapped {
    pub(crate) page: Arc<SharedPage>,
    doorbells: Doorbells,
    /// The BAR it is in.
    pub(crate) bar: u8,
    /// From the BAR's start, in bytes.
    pub(crate) offset: u64,
}

pub(crate) struct Device {
    pub(crate) function: Box<dyn Function>,
    pub(crate) map: DmaMap,
    pub(crate) sink: Arc<EventSink>,
    pub(crate) bars: Vec<Bar>,
    pub(crate) mapped: Option<Mapped>,
    /// Error and device-request interrupts: routes are kept for the client, nothing signals them.
    pub(crate) error: Line,
    pub(crate) request: Line,
    /// The function has a pin.
    pub(crate) has_pin: bool,
    /// Its route is the eventfd by which the client unmasks the pin.
    pub(crate) unmasking: Line,
    /// That may have another route than before.
    unmasking_changed: AtomicBool,
    clock: Arc<dyn Clock>,
    busy: bool,
    /// Of its work more waits than it has turns for.
    behind: bool,
    /// The function may get work unannounced, until it is told to rest.
    watching: bool,
    turn: Turn,
    /// Polls that were not idle: written here, read by others too.
    progress: Arc<AtomicU64>,
    deadline: Option<Instant>,
    last_progress: Instant,
    sweep_wait: Duration,
    /// The mapped doorbells, as noted last.
    rung: Vec<u32>,
}

impl Device {
    /// # Errors
    /// A description that cannot be presented: a programmer's error of the function, told at
    /// construction.
    pub(crate) fn new(parts: EndpointParts, function: Box<dyn Function>) -> std::io::Result<Self> {
        let description = function.description().clone();
        parts.sink.size(description.vectors);
        let mapped = match parts.page {
            Some(page) => find_doorbells(page, &description.bars)?,
            None => None,
        };
        Ok(Self {
            function,
            map: parts.map,
            sink: parts.sink,
            bars: description.bars,
            mapped,
            error: Line::default(),
            request: Line::default(),
            has_pin: description.pin,
            unmasking: Line::default(),
            unmasking_changed: AtomicBool::new(true),
            clock: parts.clock,
            busy: false,
            behind: false,
            watching: false,
            turn: Turn::default(),
            progress: Arc::default(),
            deadline: None,
            last_progress: Instant::now(),
            sweep_wait: FIRST_SWEEP,
            rung: Vec::new(),
        })
    }

    pub(crate) fn bar(&self, index: u32) -> Option<&Bar> {
        self.bars.iter().find(|bar| u32::from(bar.index) == index)
    }

    /// Others on the thread have work too, or not any more.
    #[inline]
    pub(crate) fn share(&mut self, shared: bool) {
        let turn = if shared { Turn::Short } else { Turn::Long };
        if turn != self.turn {
            self.turn = turn;
            self.function.set_turn(turn);
        }
    }

    /// Polls the function once. Whether it made progress.
    pub(crate) fn poll(&mut self, now: Instant) -> bool {
        let found = self.function.poll();
        self.note(found, now)
    }

    /// Tells the function that it will not be polled, if it has to be told. Whether polling goes
    /// on all the same.
    pub(crate) fn rest(&mut self, now: Instant) -> bool {
        if !self.watching {
            return false;
        }
        let found = self.function.rest();
        self.note(found, now) || self.watching
    }

    fn note(&mut self, found: Progress, now: Instant) -> bool {
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

    /// Counts the polls that were not idle.
    pub(crate) fn progress(&self) -> u64 {
        self.progress.load(Ordering::Relaxed)
    }

    /// That counter.
    pub(crate) fn progress_counter(&self) -> Arc<AtomicU64> {
        self.progress.clone()
    }

    /// Has the function polled soon, which ends its quiesced state.
    pub(crate) fn kick(&mut self) {
        self.busy = true;
    }

    /// Whether the function wants to be polled at once.
    pub(crate) fn is_busy(&self) -> bool {
        self.busy
    }

    /// What a task says whose function [wants to be polled at once](Device::is_busy).
    pub(crate) fn busy_step(&self) -> Step {
        if self.behind { Step::Behind } else { Step::Busy }
    }

    /// Whether the function wants to be polled at `now`: it was busy, or its time has come.
    pub(crate) fn is_due(&self, now: Instant) -> bool {
        self.busy || self.deadline.is_some_and(|at| at <= now)
    }

    /// When the function wants to be polled again; None: when something happens.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// Whether work may come that only a poll finds.
    pub(crate) fn is_unannounced(&self) -> bool {
        self.mapped.is_some() || self.watching
    }

    /// Whether the function shall be polled again at once, as work may have come that nothing
    /// announces: some was found less than `budget` ago.
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

    /// Notes what the mapped doorbells are, before the last poll of a device that is then asked
    /// [`Device::stirs`] only: what is rung before is found by the poll, and after by the sweep.
    pub(crate) fn note_doorbells(&mut self) {
        if let Some(mapped) = &self.mapped {
            let cells = &mapped.page.cells()[..mapped.doorbells.watched()];
            self.rung.clear();
            self.rung.extend(cells.iter().map(|cell| cell.load(Ordering::Acquire)));
        }
    }

    /// Whether a mapped doorbell is another one than noted.
    pub(crate) fn stirs(&self) -> bool {
        let Some(mapped) = &self.mapped else { return true };
        let changed = |(cell, rung): (&AtomicU32, &u32)| cell.load(Ordering::Relaxed) != *rung;
        // What the function looks at changes only while it is polled, and that was before the note.
        mapped.page.cells().iter().zip(&self.rung).any(changed)
    }

    /// After a client has gone: no routes, no memory, a fresh function, fresh doorbells.
    pub(crate) fn renew(&mut self) -> std::io::Result<()> {
        self.map.clear();
        self.function.reset();
        self.unroute();
        // Polled once: it may have been poked meanwhile, and the reset has a step to take.
        self.busy = true;
        self.watching = false;
        self.deadline = None;
        match &self.mapped {
            Some(mapped) => mapped.page.renew(mapped.offset),
            None => Ok(()),
        }
    }

    /// Every interrupt: MSI-X vectors, error, device request, the pin; and what unmasks the pin.
    pub(crate) fn lines(&self) -> impl Iterator<Item = &Line> {
        let others = [&self.error, &self.request, &self.sink.pin, &self.unmasking];
        self.sink.lines().iter().chain(others)
    }

    /// Takes every interrupt route away.
    pub(crate) fn unroute(&self) {
        self.lines().for_each(Line::clear);
        self.note_unmasking();
    }

    /// The eventfd by which the client unmasks the pin may be another one.
    pub(crate) fn note_unmasking(&self) {
        self.unmasking_changed.store(true, Ordering::Relaxed);
    }

    /// Whether it may be, since this was asked last.
    pub(crate) fn take_unmasking_changed(&mut self) -> bool {
        std::mem::take(self.unmasking_changed.get_mut())
    }

    /// The client's eventfd for unmasking the pin is readable. False: it is one that never ends.
    pub(crate) fn unmask_pin(&self) -> bool {
        let drained = self.unmasking.routed().is_none_or(|file| drain(&file));
        self.sink.pin.unmask();
        drained
    }
}

fn find_doorbells(
    (page, doorbells): (Arc<SharedPage>, Doorbells),
    bars: &[Bar],
) -> std::io::Result<Option<Mapped>> {
    let ranges = bars.iter().filter_map(|bar| Some((bar, bar.doorbell_page.clone()?)));
    let Some((bar, range)) = ranges.into_iter().next() else { return Ok(None) };
    if page.len() > range.end.saturating_sub(range.start) {
        let text = "more doorbells than the function's doorbell page holds";
        return Err(std::io::Error::new(std::io::ErrorKind::InvalidInput, text));
    }
    // A predecessor's client has mapped the one that is there.
    if page.offset() != range.start {
        page.renew(range.start)?;
    }
    Ok(Some(Mapped { page, doorbells, bar: bar.index, offset: range.start }))
}
