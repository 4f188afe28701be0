//! The frames that a sink or a ping receives: counts for each run, and latencies.

use std::collections::BTreeMap;
use std::time::Instant;

use slipway_telemetry::Histogram;

use crate::Sequence;
use crate::figures::{Figures, Latency};
use crate::frame::Probe;

/// The most runs that a sink tells apart. Frames of further runs count as others'.
const RUNS: usize = 1024;

/// The counts of the frames that a sink or a ping received.
#[derive(Default)]
pub(crate) struct ReceivedFrames {
    /// The frames of each run, by its id.
    runs: BTreeMap<u16, Sequence>,
    /// Latencies since the last report.
    second: Histogram,
    /// Latencies before the last report.
    latency: Histogram,
    /// The number of frames of runs.
    pub frames: u64,
    /// The bytes of frames of runs.
    pub bytes: u64,
    /// The number of frames that belong to no run, or to one beyond [`RUNS`].
    pub others: u64,
    /// The time before a sink took the first frame of a run from the wire, if any has come.
    pub first: Option<Instant>,
    /// The time after a sink took the last frame of a run from the wire, if any has come.
    pub last: Option<Instant>,
}

impl ReceivedFrames {
    /// Counts a frame of `len` bytes that begins with `frame` and came at `now_ns`.
    #[inline]
    pub(crate) fn look(&mut self, frame: &[u8], len: usize, now_ns: u64) {
        let Some(probe) = Probe::read(frame) else {
            self.others += 1;
            return;
        };
        if self.runs.len() == RUNS && !self.runs.contains_key(&probe.id) {
            self.others += 1;
            return;
        }
        self.runs.entry(probe.id).or_default().see(probe.number);
        self.frames += 1;
        self.bytes += len as u64;
        // A sender on another host has another clock.
        if let Some(took) = now_ns.checked_sub(probe.time_ns) {
            self.second.record(took);
        }
    }

    /// Returns the sum of a count over all runs.
    pub(crate) fn sum(&self, of: impl Fn(&Sequence) -> u64) -> u64 {
        self.runs.values().map(of).fold(0, u64::saturating_add)
    }

    /// Returns the latencies that were recorded since the last call, or `None` if there are none.
    pub(crate) fn take_second(&mut self) -> Option<Latency> {
        let latency = Latency::of(&self.second);
        self.latency.merge(&self.second);
        self.second.clear();
        latency
    }

    /// Returns the time in seconds from the first frame of a run to the last; 0 without frames.
    pub(crate) fn seconds(&self) -> f64 {
        self.first.zip(self.last).map_or(0.0, |(first, last)| (last - first).as_secs_f64())
    }

    /// Returns the figures of a run that took `seconds`.
    pub(crate) fn figures(mut self, seconds: f64) -> Figures {
        self.take_second();
        Figures {
            lost: Some(self.sum(Sequence::lost)),
            late: Some(self.sum(Sequence::late)),
            duplicates: Some(self.sum(Sequence::duplicates)),
            others: Some(self.others),
            latency_ns: Latency::of(&self.latency),
            ..Figures::new(seconds, self.frames, self.bytes)
        }
    }
}
