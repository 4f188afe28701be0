//! What a run reports.

use serde::Serialize;
use slipway_telemetry::Histogram;

/// Latencies in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Latency {
    /// The shortest.
    pub min: u64,
    /// Half of them were shorter.
    pub p50: u64,
    /// 90 % were shorter.
    pub p90: u64,
    /// 99 % were shorter.
    pub p99: u64,
    /// 99.9 % were shorter.
    pub p999: u64,
    /// The longest.
    pub max: u64,
}

impl Latency {
    /// Of what was recorded; None: nothing was.
    pub fn of(histogram: &Histogram) -> Option<Self> {
        (histogram.count() > 0).then(|| Self {
            min: histogram.least(),
            p50: histogram.percentile(50.0),
            p90: histogram.percentile(90.0),
            p99: histogram.percentile(99.0),
            p999: histogram.percentile(99.9),
            max: histogram.greatest(),
        })
    }
}

/// Figures of a second, or of a whole run.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Figures {
    /// How long it took, in seconds.
    pub seconds: f64,
    /// Frames: sent, or received by a sink; of a ping those that came back.
    pub frames: u64,
    /// Their bytes, without check sequences.
    pub bytes: u64,
    /// Frames in a second.
    pub pps: f64,
    /// Their bits in a second, in 10^9.
    pub gbit_s: f64,
    /// Frames that did not arrive; absent where that cannot be told.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lost: Option<u64>,
    /// Frames that came after later ones.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub late: Option<u64>,
    /// Frames that came again.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub duplicates: Option<u64>,
    /// Frames that were of nobody's run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub others: Option<u64>,
    /// Frames that the interface refused.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub refused: Option<u64>,
    /// Of a sink from the making of a frame to its arrival, of a ping there and back.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub latency_ns: Option<Latency>,
}

impl Figures {
    /// With rates.
    pub fn new(seconds: f64, frames: u64, bytes: u64) -> Self {
        let per = if seconds > 0.0 { 1.0 / seconds } else { 0.0 };
        Self {
            seconds,
            frames,
            bytes,
            pps: frames as f64 * per,
            gbit_s: bytes as f64 * 8.0 * per / 1e9,
            ..Self::default()
        }
    }
}
