//! A decorator in which frames wait: for a delay, or for a rate.
//!
//! Impairments use it, and the pacing of a port's receive rate.

use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

use slipway_rate::{Bucket, Rate};

use super::line::Line;
use super::random::Random;
use super::{Directions, Layer, Timed};
use crate::cutter::Cutter;
use crate::{BURST, Burst, Delivered, Drop, Pick, Port, PortStats, QueuesView};

/// Decides when a frame may go on.
pub trait Schedule: Send {
    /// Returns whether a frame that comes at `now` may wait. Otherwise it is dropped.
    fn admits(&self, now: Duration) -> bool {
        let _ = now;
        true
    }

    /// Returns when a frame of `len` bytes that comes at `now` may go on. Frames keep their order,
    /// whatever this returns.
    fn due(&mut self, now: Duration, len: usize) -> Duration;
}

/// A schedule that delays frames by a fixed time, or by a random one around it.
pub struct ByDelay {
    least: Duration,
    /// The largest random addition, in nanoseconds.
    spread: u64,
    random: Random,
}

impl ByDelay {
    /// Delays by `delay`, up to `jitter` (at most `delay`) more or less, uniformly distributed, the
    /// same for the same seed.
    pub fn new(delay: Duration, jitter: Duration, seed: u64) -> Self {
        let spread = u64::try_from(2 * jitter.as_nanos()).unwrap_or(u64::MAX - 1);
        Self { least: delay.saturating_sub(jitter), spread, random: Random::new(seed) }
    }
}

impl Schedule for ByDelay {
    fn due(&mut self, now: Duration, _: usize) -> Duration {
        let spread = if self.spread == 0 { 0 } else { self.random.below(self.spread + 1) };
        now + self.least + Duration::from_nanos(spread)
    }
}

/// A schedule that holds frames to a rate in bytes per second.
pub struct ByRate {
    bucket: Bucket,
    patience: Duration,
}

impl ByRate {
    /// Limits to this rate, with its burst. Frames wait as long as it takes.
    pub fn new(rate: Rate) -> Self {
        Self::within(rate, Duration::MAX)
    }

    /// Limits to this rate, with its burst. Frames that would wait for longer than `patience` are
    /// dropped.
    pub fn within(rate: Rate, patience: Duration) -> Self {
        Self { bucket: Bucket::new(rate), patience }
    }
}

impl Schedule for ByRate {
    fn admits(&self, now: Duration) -> bool {
        self.bucket.opens_at() <= now.saturating_add(self.patience)
    }

    fn due(&mut self, now: Duration, len: usize) -> Duration {
        let due = now.max(self.bucket.opens_at());
        self.bucket.take(len as u64, due);
        due
    }
}

/// Counts of frames that a queue dropped and that are not reported yet.
#[derive(Default)]
struct Dropped {
    frames: u64,
    bytes: u64,
}

/// The frames that wait in one direction.
struct Waiting<S> {
    schedule: S,
    line: Line,
    dropped: Dropped,
}

impl<S: Schedule> Waiting<S> {
    fn new(schedule: S, limit: usize) -> Self {
        Self { schedule, line: Line::new(limit), dropped: Dropped::default() }
    }

    fn push(&mut self, burst: &Burst, pick: Pick, now: Duration) {
        let schedule = &mut self.schedule;
        let waits =
            schedule.admits(now) && self.line.push(burst, pick, |len| schedule.due(now, len));
        if !waits {
            self.dropped.frames += 1;
            self.dropped.bytes += burst.len_of(pick) as u64;
        }
    }

    fn close(&mut self) {
        let (frames, bytes) = self.line.clear();
        self.dropped.frames += frames;
        self.dropped.bytes += bytes;
    }
}

/// A port in front of which frames wait in a bounded queue, one for each direction. Frames without
/// room in the queue are dropped and counted as [`Drop::Queue`], or as [`Drop::Rate`] in the layer
/// [`Layer::Pacing`].
pub struct Queued<S> {
    inner: Box<dyn Port>,
    layer: Layer,
    inward: Option<Waiting<S>>,
    outward: Option<Waiting<S>>,
    now: Duration,
    /// Frames between the queues and the port.
    passing: Burst,
    picks: Vec<Pick>,
    /// The results of deliveries made after the switch's own delivery had returned.
    late: PortStats,
}

impl<S: Schedule> Queued<S> {
    /// Wraps `inner`, as a part of an impairment. In each direction `limit` frames (at least 1) of
    /// 2,048 bytes on average may wait; `schedule` is called once for each direction.
    pub fn new(
        inner: Box<dyn Port>,
        ways: Directions,
        limit: usize,
        mut schedule: impl FnMut() -> S,
    ) -> Self {
        let mut waiting = |wanted: bool| wanted.then(|| Waiting::new(schedule(), limit.max(1)));
        Self {
            inner,
            layer: Layer::Impairment,
            inward: waiting(ways.inward),
            outward: waiting(ways.outward),
            now: Duration::ZERO,
            passing: Burst::new(),
            picks: Vec::with_capacity(BURST),
            late: PortStats::default(),
        }
    }

    /// Returns the decorator as a part of another layer.
    pub(super) fn in_layer(self, layer: Layer) -> Self {
        Self { layer, ..self }
    }

    /// Gives the peer the frames that are due.
    fn flush(&mut self) {
        let Some(waiting) = &mut self.outward else { return };
        // While a frame waited, its peer may have lost the ability to complete it. The cutter takes
        // memory only then.
        let (mut any, mut cutter) = (false, Cutter::default());
        loop {
            self.passing.clear();
            let count = waiting.line.give(&mut self.passing, self.now, BURST);
            if count == 0 {
                break;
            }
            any = true;
            self.picks.clear();
            // A burst has at most 256 frames; their tags are inserted already.
            self.picks.extend((0..count as u16).map(|frame| Pick { frame, tci: 0 }));
            let inner = &mut *self.inner;
            self.late.count_out(&cutter.deliver(&self.passing, &self.picks, inner, 0));
            waiting.line.release();
        }
        if any {
            // See [`Port::notify`].
            fence(Ordering::SeqCst);
            self.inner.notify();
        }
    }
}

impl<S: Schedule> Timed for Queued<S> {
    fn tick(&mut self, now: Duration) -> bool {
        self.now = now;
        // Tick the inner port first: frames that go on then reach it at its present time.
        let due = self.inner.timed().is_some_and(|inner| inner.tick(now));
        self.flush();
        due || self
            .inward
            .as_ref()
            .and_then(|waiting| waiting.line.due())
            .is_some_and(|due| due <= now)
    }

    fn due(&mut self, inward: bool) -> Option<Duration> {
        let own = self.inward.as_ref().filter(|_| inward).and_then(|waiting| waiting.line.due());
        let out = self.outward.as_ref().and_then(|waiting| waiting.line.due());
        let inner = self.inner.timed().and_then(|inner| inner.due(inward));
        [own, out, inner].into_iter().flatten().min()
    }

    fn close(&mut self) {
        for waiting in [&mut self.inward, &mut self.outward].into_iter().flatten() {
            waiting.close();
        }
        if let Some(inner) = self.inner.timed() {
            inner.close();
        }
    }
}

impl<S: Schedule> Port for Queued<S> {
    super::forward_to_inner!();

    fn inspect(&self, view: &mut QueuesView) {
        let waiting =
            |queue: &Option<Waiting<S>>| queue.as_ref().map_or(0, |one| one.line.waiting());
        view.waiting_in += waiting(&self.inward);
        view.waiting_out += waiting(&self.outward);
        self.inner.inspect(view);
    }

    fn take(&mut self, burst: &mut Burst, limit: usize) -> bool {
        let Some(waiting) = &mut self.inward else { return self.inner.take(burst, limit) };
        self.passing.clear();
        let more = self.inner.take(&mut self.passing, limit);
        for frame in 0..self.passing.len() as u16 {
            waiting.push(&self.passing, Pick { frame, tci: 0 }, self.now);
        }
        // The frames' memory is the peer's again, so no span may refer to it.
        self.passing.release();
        self.inner.release();
        waiting.line.give(burst, self.now, limit);
        more || waiting.line.due().is_some_and(|due| due <= self.now)
    }

    fn release(&mut self) {
        match &mut self.inward {
            Some(waiting) => waiting.line.release(),
            None => self.inner.release(),
        }
    }

    fn deliver(&mut self, burst: &Burst, picks: &[Pick]) -> Delivered {
        let Some(waiting) = &mut self.outward else { return self.inner.deliver(burst, picks) };
        for pick in picks {
            waiting.push(burst, *pick, self.now);
        }
        self.flush();
        Delivered::default()
    }

    fn timed(&mut self) -> Option<&mut dyn Timed> {
        Some(self)
    }

    fn account(&mut self, stats: &mut PortStats) {
        self.inner.account(stats);
        stats.add_out(&std::mem::take(&mut self.late));
        let cause = if self.layer == Layer::Pacing { Drop::Rate } else { Drop::Queue };
        if let Some(waiting) = &mut self.inward {
            let Dropped { frames, bytes } = &mut waiting.dropped;
            stats.lose_in(cause, frames, bytes);
        }
        if let Some(waiting) = &mut self.outward {
            stats.drop_out(cause, std::mem::take(&mut waiting.dropped).frames);
        }
    }

    fn inner(&mut self) -> Option<(Layer, &mut Box<dyn Port>)> {
        Some((self.layer, &mut self.inner))
    }
}
