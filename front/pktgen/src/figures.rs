//! The figures that a run reports.

use serde::Serialize;
use slipway_telemetry::Histogram;

/// Distribution of latencies, in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Latency {
    /// The shortest latency.
    pub min: u64,
    /// The median.
    pub p50: u64,
    /// The 90th percentile.
    pub p90: u64,
    /// The 99th percentile.
    pub p99: u64,
    /// The 99.9th percentile.
    pub p999: u64,
    /// The longest latency.
    pub max: u64,
}

impl Latency {
    /// Returns the distribution in `histogram`, or `None` if nothing was recorded.
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

/// Figures of one second, or of a whole run.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Figures {
    /// The duration in seconds.
    pub seconds: f64,
    /// The number of frames that were sent, that a sink received, or that came back to a ping.
    pub frames: u64,
    /// The bytes of those frames, without check sequences.
    pub bytes: u64,
    /// Frames per second.
    pub pps: f64,
    /// 10^9 bits per second.
    pub gbit_s: f64,
    /// The number of frames that did not arrive; absent where that cannot be told.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lost: Option<u64>,
    /// The number of frames that came after later ones.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub late: Option<u64>,
    /// The number of frames that had come before.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub duplicates: Option<u64>,
    /// The number of frames that belong to no run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub others: Option<u64>,
    /// The number of frames that the interface refused.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub refused: Option<u64>,
    /// Latencies: for a sink from the making of a frame to its arrival, for a ping there and back.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub latency_ns: Option<Latency>,
}

impl Figures {
    /// Makes figures with rates.
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
