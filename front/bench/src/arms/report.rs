//! A report of starts by several ways, with the context needed to judge and repeat it.

use std::fmt;

use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};
use slipway_telemetry::Timeline;

use super::Arm;
use crate::figure::{Figure, OverRounds, time};
use crate::measurement::{AnySubject, Measured, Measurement, Plan};
use crate::slices;
use crate::statistics::{Statistics, percentile, statistics, time_in};

/// The stages that have to do with functions and the memory they reach: FastIOV's *VF-related*
/// (section 3.2: `dma-ram`, `dma-image`, `vfio-dev`, `vf-driver`) and the interface's own.
const OF_FUNCTIONS: [&str; 7] =
    ["dma-ram", "dma-image", "vf-attach", "vf-driver", "network", INTERFACE, RESET];
/// The stage in which an interface of the kernel's is made for a sandbox.
pub const INTERFACE: &str = "interface";
/// The stage in which a start waits as long as a function-level reset takes, and for its turn.
pub const RESET: &str = "vf-reset";

/// The load of a turn: how many sandboxes start at once, and how large they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Point {
    /// The number of sandboxes started at once.
    pub count: u32,
    /// The memory of each sandbox in bytes; 0 stands for the node's setting.
    pub memory_bytes: u64,
}

impl fmt::Display for Point {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at once", self.count)?;
        match self.memory_bytes >> 20 {
            0 => Ok(()),
            mib => write!(f, ", {mib} MiB each"),
        }
    }
}

/// Starts one after the other, each after the one before it was removed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Singles {
    /// The time of each start in ns, from its request to the end of its last stage.
    pub times_ns: Vec<u64>,
    /// The time in ns that the machine's processors were busy in all these starts together, without
    /// the removals between them, with everything that runs on the machine.
    pub busy_ns: u64,
}

/// The result of a turn: sandboxes that were started together.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ArmMeasured {
    /// The timelines of the sandboxes; times count from the common request.
    pub timelines: Vec<Timeline>,
    /// The machine's processors.
    pub processors: u32,
    /// The time in ns that the machine's processors were busy from the request to the last
    /// sandbox's end of its last stage, with everything that runs on the machine.
    pub busy_ns: u64,
    /// As many starts one after the other, if they were asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub singles: Option<Singles>,
}

impl ArmMeasured {
    /// Returns the times of the sandboxes in ns, in ascending order.
    pub(super) fn times(&self) -> Vec<u64> {
        let mut times: Vec<u64> = self.timelines.iter().map(slices::end_ns).collect();
        times.sort_unstable();
        times
    }

    /// Returns the mean of a time over the sandboxes, ns.
    fn mean(&self, time: fn(&Timeline) -> u64) -> Option<f64> {
        self.each(self.timelines.iter().map(|one| time(one) as f64).sum())
    }

    /// Returns the part of each sandbox of what all of them have together.
    fn each(&self, all: f64) -> Option<f64> {
        (!self.timelines.is_empty()).then(|| all / self.timelines.len() as f64)
    }

    /// Returns a percentile of the times, ns.
    fn percentile(&self, percent: usize) -> Option<f64> {
        (!self.timelines.is_empty()).then(|| percentile(&self.times(), percent) as f64)
    }

    /// Returns the time until the last of those at once was there, over what the single starts take
    /// of all processors together. 1 if starts at once need no more work and keep all processors
    /// busy.
    fn over_singles(&self) -> Option<f64> {
        let single = self.singles.as_ref()?.busy_ns as f64 / f64::from(self.processors.max(1));
        Some(self.percentile(100)? / single.max(1.0))
    }
}

/// A figure of starts.
pub(super) type ArmFigure = Figure<Point, ArmMeasured>;

/// The mean time of a sandbox, ns.
pub(super) const MEAN: ArmFigure = ArmFigure {
    beside: &[ArmFigure { text: |ns| format!("{} in functions", time(ns)), ..FUNCTIONS }],
    ..ArmFigure::less("mean", "mean time", |_, turn| turn.mean(slices::end_ns), time)
};
/// The 99th percentile of the sandboxes' times, ns.
pub(super) const P99: ArmFigure =
    ArmFigure::less("p99", "99th percentile", |_, turn| turn.percentile(99), time);
/// The mean time of the stages of functions, ns.
const FUNCTIONS: ArmFigure =
    ArmFigure::less("functions", "stages of functions", |_, turn| turn.mean(functions_ns), time);
/// The time that processors were busy for each sandbox, ns.
pub(super) const BUSY: ArmFigure = ArmFigure::less(
    "CPU each",
    "processor time of each",
    |_, turn| turn.each(turn.busy_ns as f64),
    time,
);
/// Starts at once in relation to single ones.
pub(super) const OVER_SINGLES: ArmFigure = ArmFigure::less(
    "at once, over CPU / processors",
    "time of all, over CPU of as many single starts / processors",
    |_, turn| turn.over_singles(),
    |ratio| format!("{ratio:.2}"),
);
/// The figures of single starts.
pub(super) const SINGLES: [ArmFigure; 4] = [
    ArmFigure::less(
        "one alone",
        "a single start",
        |_, turn| {
            let times = &turn.singles.as_ref()?.times_ns;
            let sum: f64 = times.iter().map(|ns| *ns as f64).sum();
            Some(sum / times.len().max(1) as f64)
        },
        time,
    ),
    ArmFigure::less(
        "CPU of all singles",
        "processor time of all single starts",
        |_, turn| Some(turn.singles.as_ref()?.busy_ns as f64),
        time,
    ),
    ArmFigure::less("at once, until the last", "time of all", |_, turn| turn.percentile(100), time),
    OVER_SINGLES,
];

impl Measured for ArmMeasured {
    type Load = Point;

    const KIND: &'static str = "start-up";
    const FORMAT: u32 = 3;

    fn check(&self) -> Result<()> {
        let mut stages = self.timelines.iter().flat_map(|one| &one.stages);
        ensure!(stages.all(|one| one.start_ns <= one.end_ns), "a stage ends before it begins");
        Ok(())
    }

    fn figures(_: &Point) -> &'static [ArmFigure] {
        const COMPARED: &[ArmFigure] = &[MEAN, P99];
        COMPARED
    }

    fn further(_: &Point) -> &'static [ArmFigure] {
        const P50: ArmFigure =
            ArmFigure::less("p50", "median", |_, turn| turn.percentile(50), time);
        const FURTHER: &[ArmFigure] = &[P50, FUNCTIONS, BUSY];
        FURTHER
    }
}

/// The properties of all sandboxes of a report.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ArmExtra {
    /// The image.
    pub image: String,
    /// The number of volumes of each sandbox.
    pub volumes: u32,
    /// Set if a container began only when its network could be used.
    pub waits: bool,
}

/// A way to start that can be measured.
pub type ArmSubject = AnySubject<Point, ArmMeasured>;
/// The loads and rounds of a measurement.
pub type ArmPlan = Plan<Point>;
/// All results of one command, stored as JSON. The subjects have the names of ways ([`Arm`]).
pub type ArmsReport = Measurement<Point, ArmMeasured, ArmExtra>;

impl ArmsReport {
    /// Returns the ways, in the order of their turns.
    pub(super) fn arms(&self) -> Vec<Arm> {
        self.subjects.iter().filter_map(|one| one.name.parse().ok()).collect()
    }

    /// Returns the timelines of all turns.
    pub fn timelines(&self) -> Vec<Timeline> {
        self.runs.iter().flat_map(|run| run.measured.timelines.iter().cloned()).collect()
    }

    /// Returns the statistics of the stages of a way.
    pub(super) fn stages(&self, load: &Point, arm: &str) -> Statistics {
        let timelines = self.turns(load, arm).flat_map(|turn| turn.timelines.iter().cloned());
        statistics(&timelines.collect::<Vec<_>>())
    }

    /// Returns a figure over that of starts without a network in the same round. Returns `None` if
    /// those were not measured.
    pub(super) fn to_none(
        &self,
        load: &Point,
        arm: &str,
        figure: &ArmFigure,
    ) -> Option<OverRounds> {
        let floor = self.values(load, Arm::None.name(), figure);
        let values = self.values(load, arm, figure).into_iter().zip(floor);
        OverRounds::of(values.map(|(value, floor)| value / floor.max(1.0)).collect())
    }
}

/// Returns the time in which at least one stage of a function ran.
fn functions_ns(timeline: &Timeline) -> u64 {
    let stages = timeline.stages.iter().filter(|stage| OF_FUNCTIONS.contains(&&*stage.name));
    let mut renamed = Timeline::new("");
    stages.for_each(|stage| renamed.record("functions", stage.start_ns, stage.end_ns));
    time_in(&renamed, "functions").unwrap_or(0)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::json::SavedReport;
    use crate::turns::Described;

    pub const POINT: Point = Point { count: 2, memory_bytes: 0 };

    /// Returns a report with these loads. Two sandboxes of a way end at these times, round by
    /// round, with the second load at twice these times, and so on.
    pub fn report_of(loads: &[Point], arms: &[(Arm, &[[u64; 2]])]) -> ArmsReport {
        let arms: Vec<_> = arms.iter().map(|(arm, ends)| (arm.name(), *ends)).collect();
        let place = |load: &Point| loads.iter().position(|one| one == load).unwrap() as u64 + 1;
        let all = loads.to_vec();
        let mut report = ArmsReport::sample_of("bench startup", all, &arms, |load, _, ends| {
            let timeline = |end: u64| {
                let mut timeline = Timeline::new("a");
                timeline.record("cgroup", 0, end / 2);
                timeline.record("vf-attach", end / 2, end);
                timeline.record("dma-ram", end / 2, end / 2 + 1);
                timeline
            };
            let timelines = ends.iter().map(|end| timeline(end * place(load))).collect();
            ArmMeasured { timelines, processors: 2, busy_ns: 8, singles: None }
        });
        let about = |one: &Described| one.name.parse::<Arm>().unwrap().about().to_owned();
        report.subjects.iter_mut().for_each(|one| one.about = about(one));
        report.environment.accelerator = "hollow".into();
        report.extra.waits = true;
        report
    }

    /// Returns a report of two sandboxes at once.
    pub fn report(arms: &[(Arm, &[[u64; 2]])]) -> ArmsReport {
        report_of(&[POINT], arms)
    }

    #[test]
    fn ratios_are_to_the_same_rounds_starts_without_a_network() {
        let none = (Arm::None, &[[100, 100], [200, 200]][..]);
        let report = report(&[none, (Arm::Slipway, &[[100, 140], [240, 280]])]);
        let of = |figure| report.over_rounds(&POINT, "slipway", figure).unwrap();
        assert_eq!((of(&MEAN).median, of(&MEAN).range), (190.0, (120.0, 260.0)));
        assert_eq!((of(&P99).median, of(&P99).range), (210.0, (140.0, 280.0)));
        let further = ArmMeasured::further(&POINT).iter();
        let further: Vec<f64> = further.map(|one| of(one).median).collect();
        assert_eq!(further, [170.0, 95.0, 4.0]);
        let ratio = |arm: &str, figure| report.to_none(&POINT, arm, figure);
        let mean = ratio("slipway", &MEAN).unwrap();
        assert_eq!((mean.median, mean.range), (1.25, (1.2, 1.3)));
        assert_eq!(ratio("slipway", &P99).unwrap().median, 1.4);
        assert_eq!(ratio("none", &MEAN).unwrap().median, 1.0);
        assert_eq!(ratio("pool", &MEAN), None);
    }

    #[test]
    fn starts_at_once_are_over_the_work_of_single_ones() {
        let mut report = report(&[(Arm::Slipway, &[[100, 150], [120, 250]])]);
        let of = |report: &ArmsReport, figure| report.over_rounds(&POINT, "slipway", figure);
        assert_eq!(of(&report, &OVER_SINGLES), None);
        for run in &mut report.runs {
            run.measured.singles = Some(Singles { times_ns: vec![70, 90], busy_ns: 200 });
        }
        let found = SINGLES.each_ref().map(|one| of(&report, one).unwrap());
        // Two processors do the work of 200 ns in 100 ns.
        assert_eq!(found.map(|one| one.median), [80.0, 200.0, 200.0, 2.0]);
        assert_eq!(found[3].range, (1.5, 2.5));
    }

    #[test]
    fn a_report_survives_json() {
        let report = report(&[(Arm::Pool, &[[1, 2], [3, 4]])]);
        assert_eq!(report.to_none(&POINT, "pool", &MEAN), None);
        assert_eq!(ArmsReport::from_json(&report.to_json().unwrap()).unwrap(), report);
        assert!(ArmsReport::from_json("{}").is_err());
        let mut backwards = report;
        backwards.runs[0].measured.timelines[0].stages[0].start_ns = u64::MAX;
        assert!(ArmsReport::from_json(&backwards.to_json().unwrap()).is_err());
    }

    #[test]
    fn loads_have_their_memory_in_their_names() {
        assert_eq!(POINT.to_string(), "2 at once");
        let large = Point { memory_bytes: 512 << 20, ..POINT };
        assert_eq!(large.to_string(), "2 at once, 512 MiB each");
        let both = report_of(&[POINT, large], &[(Arm::None, &[[100, 100]])]);
        let mean = |load| both.over_rounds(load, "none", &MEAN).unwrap().median;
        assert_eq!((mean(&POINT), mean(&large)), (100.0, 200.0));
    }
}
