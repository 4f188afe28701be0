//! Measures subjects, in turn.

use std::time::Duration;

use anyhow::{Result, ensure};
use slipway_load::{Measured, Times, Workload};

use crate::duration::thousands;
use crate::figure::{Figure, time};
use crate::measurement::{self, AnySubject};
use crate::outside::Own;

/// A figure of disks.
pub(super) type BlockFigure = Figure<Workload, Measured>;

/// Commands per second.
pub(super) const IOPS: BlockFigure =
    BlockFigure::more("IOPS", "commands a second", |_, turn| Some(turn.iops()), thousands);
/// The mean latency, ns.
pub(super) const MEAN: BlockFigure =
    BlockFigure::less("mean", "mean latency", |_, turn| Some(turn.latency.mean()), time);
/// The latencies that 50, 99 and 99.9 % of the commands do not exceed, ns.
pub(super) const P50: BlockFigure = BlockFigure::less(
    "p50",
    "p50 of the latency",
    |_, turn| Some(turn.latency.percentile(50.0) as f64),
    time,
);
pub(super) const P99: BlockFigure = BlockFigure::less(
    "p99",
    "p99 of the latency",
    |_, turn| Some(turn.latency.percentile(99.0) as f64),
    time,
);
pub(super) const P999: BlockFigure = BlockFigure::less(
    "p99.9",
    "p99.9 of the latency",
    |_, turn| Some(turn.latency.percentile(99.9) as f64),
    time,
);
/// The p99 without the delay by which the client may have seen completions late, ns.
pub(super) const P99_AT_LEAST: BlockFigure = BlockFigure::less(
    "p99 at least",
    "p99 of the latency, at least",
    |_, turn| Some(turn.at_least.as_ref()?.percentile(99.0) as f64),
    time,
);
/// The commands per second of the neighbour.
pub(super) const NEIGHBOUR: BlockFigure = BlockFigure::more(
    "neighbour IOPS",
    "commands of the neighbour a second",
    |_, turn| Some(turn.each_second(turn.neighbour_commands?)),
    thousands,
);
/// Bytes per second.
const BYTES: BlockFigure = BlockFigure::more(
    "MB/s",
    "bytes a second",
    |_, turn| Some(turn.each_second(turn.bytes)),
    |bytes| format!("{:.0}", bytes / 1e6),
);
/// CPU time of the target per command, ns.
pub(super) const TARGET_CPU: BlockFigure = BlockFigure::less(
    "target CPU",
    "processor time of the target for a command",
    |_, turn| Some(turn.target_cpu_ns? as f64 / turn.latency.count().max(1) as f64),
    time,
);

impl measurement::Measured for Measured {
    type Load = Workload;

    const KIND: &'static str = "disks";

    fn figures(_: &Workload) -> &'static [BlockFigure] {
        const COMPARED: &[BlockFigure] = &[IOPS];
        COMPARED
    }

    fn further(_: &Workload) -> &'static [BlockFigure] {
        const FURTHER: &[BlockFigure] = &[BYTES, MEAN, P50, P99, P999, TARGET_CPU];
        FURTHER
    }

    fn waited(&self) -> Option<f64> {
        let elapsed_ns = self.elapsed_ns.max(1) as f64;
        self.waited_ns.map(|waited_ns| waited_ns as f64 / elapsed_ns)
    }
}

/// The loads and times of a measurement.
pub type Plan = measurement::Plan<Workload>;
/// One turn of one subject.
pub type Run = measurement::Run<Workload, Measured>;
/// A target with the times of its turns.
pub type BlockSubject = AnySubject<Workload, Measured>;

/// A target that can be put under load.
pub trait Subject {
    /// Returns the short name for tables.
    fn name(&self) -> &str;

    /// Describes the subject in a sentence.
    fn about(&self) -> String;

    /// Returns whether the subject can run this load.
    fn takes(&self, workload: &Workload) -> bool {
        let _ = workload;
        true
    }

    /// Runs the load for `warm_up`, then for `time`, which is measured.
    ///
    /// # Errors
    /// A sentence about the failure; an error of a single command is one.
    fn run(&mut self, workload: &Workload, warm_up: Duration, time: Duration) -> Result<Measured>;

    /// Returns the processes that do the work of its turns.
    fn own(&self) -> Own {
        Own::Children
    }
}

/// A target with the times of its turns.
struct Timed {
    subject: Box<dyn Subject>,
    times: Times,
}

/// Makes a subject of a measurement, whose turns last as long as `times` say.
pub fn timed(subject: Box<dyn Subject>, times: Times) -> Box<BlockSubject> {
    Box::new(Timed { subject, times })
}

impl measurement::Subject for Timed {
    type Load = Workload;
    type Measured = Measured;

    fn name(&self) -> &str {
        self.subject.name()
    }

    fn about(&self) -> String {
        self.subject.about()
    }

    fn takes(&self, load: &Workload) -> bool {
        self.subject.takes(load)
    }

    fn run(&mut self, load: &Workload) -> Result<Measured> {
        let Times { warm_up, time } = self.times;
        let measured = self.subject.run(load, warm_up, time)?;
        ensure!(measured.latency.count() > 0, "not one command ended within {time:?}");
        Ok(measured)
    }

    fn own(&self) -> Own {
        self.subject.own()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::block::BlockReport;
    use crate::environment::Environment;

    /// A target that completes no command.
    struct Stuck;

    impl Subject for Stuck {
        fn name(&self) -> &str {
            "stuck"
        }

        fn about(&self) -> String {
            String::new()
        }

        fn run(&mut self, _: &Workload, _: Duration, time: Duration) -> Result<Measured> {
            Ok(Measured { elapsed_ns: time.as_nanos() as u64, ..Measured::default() })
        }
    }

    #[test]
    fn a_turn_without_a_command_is_no_measurement() {
        let times = Times { warm_up: Duration::ZERO, time: Duration::from_secs(1) };
        let plan = Plan::timed(vec!["read-4k-d1".parse().unwrap()], 2, times);
        let mut subjects = [timed(Box::new(Stuck), times)];
        let report = BlockReport::take(Environment::default(), "x", plan, &mut subjects, |_| {});
        assert!(report.runs.is_empty());
        let lines = crate::fault_lines(&report.faults);
        assert!(lines.starts_with("FAILED: stuck with read-4k-d1-t1: not one command"), "{lines}");
    }
}
