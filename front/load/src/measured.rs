//! The result of a load on a disk.

use serde::{Deserialize, Serialize};
use slipway_telemetry::Histogram;

/// The result of one turn.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// Latencies in ns, from writing a command to seeing its completion. One value for each command
    /// that ended during the measured time.
    pub latency: Histogram,
    /// Bytes that these commands moved.
    pub bytes: u64,
    /// The measured time, ns.
    pub elapsed_ns: u64,
    /// CPU time that the target's process used meanwhile, ns, if there is such a process.
    pub target_cpu_ns: Option<u64>,
    /// Lower bounds of the same latencies, up to the last poll that did not see the completion.
    /// Measured if the client has more work than polling, which delays it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at_least: Option<Histogram>,
    /// The number of commands that a neighbour completed meanwhile, if there was one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub neighbour_commands: Option<u64>,
    /// The longest time for which a thread of the load waited for a processor that it shares with
    /// no other of the measurement, ns. Measured by the native load if there are enough processors.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waited_ns: Option<u64>,
}

impl Measured {
    /// Returns the commands per second.
    pub fn iops(&self) -> f64 {
        self.each_second(self.latency.count())
    }

    /// Returns `count` for each second of the turn.
    pub fn each_second(&self, count: u64) -> f64 {
        count as f64 * 1e9 / self.elapsed_ns.max(1) as f64
    }
}
