//! A report of starts by several ways, with the context needed to judge and repeat it.

use serde::{Deserialize, Serialize};
use slipway_telemetry::Timeline;

use super::Arm;
use crate::environment::Environment;
use crate::json::SavedReport;
use crate::slices;
use crate::statistics::{Statistics, median, percentile, range, statistics, time_in};
use crate::turns::Fault;

/// The stages that have to do with functions and the memory they reach: FastIOV's *VF-related*
/// (section 3.2: `dma-ram`, `dma-image`, `vfio-dev`, `vf-driver`) and the interface's own.
const OF_FUNCTIONS: [&str; 7] =
    ["dma-ram", "dma-image", "vf-attach", "vf-driver", "network", INTERFACE, RESET];
/// The stage in which an interface of the kernel's is made for a sandbox.
pub const INTERFACE: &str = "interface";
/// The stage in which a start waits as long as a function-level reset takes, and for its turn.
pub const RESET: &str = "vf-reset";

/// How many sandboxes start at once, and how large they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Point {
    /// The number of sandboxes started at once.
    pub count: u32,
    /// The memory of each sandbox in bytes; 0 stands for the node's setting.
    pub memory_bytes: u64,
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

/// A turn of a way.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ArmRound {
    /// The way.
    pub arm: Arm,
    /// The number of sandboxes that were started at once, and the memory of each.
    #[serde(flatten)]
    pub point: Point,
    /// The number of the round, from 0.
    pub round: u32,
    /// The timelines of the sandboxes; times count from the common request.
    pub timelines: Vec<Timeline>,
    /// The time in ns that the machine's processors were busy from the request to the last
    /// sandbox's end of its last stage, with everything that runs on the machine.
    pub busy_ns: u64,
    /// As many starts one after the other, if they were asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub singles: Option<Singles>,
}

/// The figures of a way over all rounds of a point.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ArmFigures {
    /// Mean time of a sandbox, ns.
    pub mean_ns: u64,
    /// The least and the greatest of the rounds' means, ns.
    pub mean_range_ns: (u64, u64),
    /// Median, ns.
    pub p50_ns: u64,
    /// 99th percentile, ns.
    pub p99_ns: u64,
    /// The least and the greatest of the rounds' 99th percentiles, ns.
    pub p99_range_ns: (u64, u64),
    /// The mean time of the stages of functions, ns.
    pub functions_ns: u64,
    /// The mean of `busy_ns` for each sandbox, ns.
    pub busy_ns: u64,
    /// The least and the greatest of the rounds' `busy_ns` for each sandbox, ns.
    pub busy_range_ns: (u64, u64),
    /// The mean over that of starts without a network: the median of the rounds' ratios. `None`
    /// if those were not measured.
    pub mean_ratio: Option<f64>,
    /// The least and the greatest of the rounds' ratios of the mean.
    pub mean_ratio_range: (f64, f64),
    /// The ratio of the 99th percentiles, as `mean_ratio`.
    pub p99_ratio: Option<f64>,
    /// The least and the greatest of the rounds' ratios of the 99th percentile.
    pub p99_ratio_range: (f64, f64),
}

/// A measurement of starts by several ways, stored as JSON. Figures are of reports with one point:
/// [`ArmsReport::at`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ArmsReport {
    /// Version of this format: [`SavedReport::FORMAT`].
    pub format: u32,
    /// The machine and the versions of programs.
    pub environment: Environment,
    /// The command that measured, as it was typed.
    pub command: String,
    /// The numbers of sandboxes started at once and their memories, in the order of the turns.
    pub points: Vec<Point>,
    /// The machine's processors.
    pub processors: u32,
    /// The number of volumes of each sandbox.
    pub volumes: u32,
    /// Set if a container began only when its network could be used.
    pub waits: bool,
    /// The ways, in the order of their turns.
    pub arms: Vec<Arm>,
    /// The turns.
    pub rounds: Vec<ArmRound>,
    /// Turns that are void.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub faults: Vec<Fault>,
}

impl SavedReport for ArmsReport {
    const FORMAT: u32 = 2;
    const KIND: &'static str = "starts by several ways";

    fn format(&self) -> u32 {
        self.format
    }

    fn faults(&self) -> &[Fault] {
        &self.faults
    }

    fn check(&self) -> anyhow::Result<()> {
        let mut stages = self.rounds.iter().flat_map(|round| &round.timelines);
        let backwards = stages.any(|one| one.stages.iter().any(|one| one.start_ns > one.end_ns));
        anyhow::ensure!(!backwards, "a stage ends before it begins");
        let known = self.rounds.iter().all(|round| self.points.contains(&round.point));
        anyhow::ensure!(known, "a turn has a number of sandboxes that the report does not name");
        Ok(())
    }
}

impl ArmsReport {
    /// Returns whether the sandboxes had no processors.
    pub fn is_hollow(&self) -> bool {
        self.environment.accelerator == "hollow"
    }

    /// Returns the part of the report with this number of sandboxes of this memory.
    pub fn at(&self, point: Point) -> Self {
        let rounds = self.rounds.iter().filter(|round| round.point == point);
        let name = self.name_of(point);
        let faults = self.faults.iter().filter(|fault| fault.load == name);
        Self {
            format: self.format,
            environment: self.environment.clone(),
            command: self.command.clone(),
            points: vec![point],
            processors: self.processors,
            volumes: self.volumes,
            waits: self.waits,
            arms: self.arms.clone(),
            rounds: rounds.cloned().collect(),
            faults: faults.cloned().collect(),
        }
    }

    /// Adds the faults of void turns, given the reason of each turn that is void, in the order of
    /// [`rounds`](Self::rounds).
    pub fn add_void(&mut self, reasons: impl IntoIterator<Item = Option<String>>) {
        for (round, reason) in self.rounds.iter().zip(reasons) {
            let (subject, load) = (round.arm.name().to_owned(), self.name_of(round.point));
            let fault = |reason| Fault { subject, load, round: round.round, reason, failed: false };
            self.faults.extend(reason.map(fault));
        }
    }

    /// Returns the name of a point, with the memory if there are several memories.
    pub fn name_of(&self, point: Point) -> String {
        let one_memory = self.points.iter().all(|one| one.memory_bytes == point.memory_bytes);
        match one_memory {
            true => format!("{} at once", point.count),
            false => format!("{} at once, {} MiB each", point.count, point.memory_bytes >> 20),
        }
    }

    /// Returns all timelines of a way.
    pub fn timelines(&self, arm: Arm) -> Vec<Timeline> {
        self.of(arm).flat_map(|round| round.timelines.iter().cloned()).collect()
    }

    /// Returns the statistics of the stages of a way.
    pub fn stages(&self, arm: Arm) -> Statistics {
        statistics(&self.timelines(arm))
    }

    /// Returns the times of all sandboxes of a way in ns, in ascending order.
    pub fn times(&self, arm: Arm) -> Vec<u64> {
        sorted(self.of(arm).flat_map(|round| &round.timelines))
    }

    /// Returns the mean time of a sandbox of a way in each round, ns.
    pub(super) fn means(&self, arm: Arm) -> Vec<f64> {
        self.of(arm).map(|round| mean(&sorted(&round.timelines)) as f64).collect()
    }

    /// Returns the figures of a way, or `None` if it was not measured.
    pub fn figures(&self, arm: Arm) -> Option<ArmFigures> {
        let times = self.times(arm);
        if times.is_empty() {
            return None;
        }
        // The least and the greatest of the rounds.
        let range_of = |figure: fn(&ArmRound) -> u64| {
            let all = self.of(arm).map(figure);
            (all.clone().min().unwrap_or(0), all.max().unwrap_or(0))
        };
        let mean_ratios = self.ratios(arm, mean);
        let p99_ratios = self.ratios(arm, |times| percentile(times, 99));
        let timelines = self.timelines(arm);
        let functions: Vec<u64> = timelines.iter().map(functions_ns).collect();
        let busy: u64 = self.of(arm).map(|round| round.busy_ns).sum();
        Some(ArmFigures {
            mean_ns: mean(&times),
            mean_range_ns: range_of(|round| mean(&sorted(&round.timelines))),
            p50_ns: percentile(&times, 50),
            p99_ns: percentile(&times, 99),
            p99_range_ns: range_of(|round| percentile(&sorted(&round.timelines), 99)),
            functions_ns: mean(&functions),
            busy_ns: busy / times.len() as u64,
            busy_range_ns: range_of(|round| round.busy_ns / round.timelines.len().max(1) as u64),
            mean_ratio_range: range(&mean_ratios),
            mean_ratio: (!mean_ratios.is_empty()).then(|| median(mean_ratios)),
            p99_ratio_range: range(&p99_ratios),
            p99_ratio: (!p99_ratios.is_empty()).then(|| median(p99_ratios)),
        })
    }

    /// Returns for each round a figure's ratio to that of starts without a network in the same
    /// round, as far as those were measured.
    fn ratios(&self, arm: Arm, figure: impl Fn(&[u64]) -> u64) -> Vec<f64> {
        let value = |round: &ArmRound| figure(&sorted(&round.timelines)) as f64;
        let ratio = |round: &ArmRound| {
            let floor = self.of(Arm::None).find(|other| other.round == round.round)?;
            Some(value(round) / value(floor).max(1.0))
        };
        self.of(arm).filter_map(ratio).collect()
    }

    pub(super) fn of(&self, arm: Arm) -> impl Iterator<Item = &ArmRound> + Clone {
        self.rounds.iter().filter(move |round| round.arm == arm)
    }
}

fn sorted<'a>(timelines: impl IntoIterator<Item = &'a Timeline>) -> Vec<u64> {
    let mut times: Vec<u64> = timelines.into_iter().map(slices::end_ns).collect();
    times.sort_unstable();
    times
}

fn mean(values: &[u64]) -> u64 {
    let sum: u128 = values.iter().map(|value| u128::from(*value)).sum();
    (sum / values.len().max(1) as u128) as u64
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

    const POINT: Point = Point { count: 2, memory_bytes: 0 };

    /// Returns a report of two rounds of two sandboxes: those of an arm end at these times.
    pub fn report(arms: &[(Arm, [[u64; 2]; 2])]) -> ArmsReport {
        let mut rounds = Vec::new();
        for (arm, times) in arms {
            for (round, ends) in (0..).zip(times) {
                let timeline = |end: &u64| {
                    let mut timeline = Timeline::new("a");
                    timeline.record("cgroup", 0, end / 2);
                    timeline.record("vf-attach", end / 2, *end);
                    timeline.record("dma-ram", end / 2, end / 2 + 1);
                    timeline
                };
                let timelines = ends.iter().map(timeline).collect();
                let (arm, point) = (*arm, POINT);
                rounds.push(ArmRound { arm, point, round, timelines, busy_ns: 8, singles: None });
            }
        }
        let environment = Environment { accelerator: "hollow".into(), ..Environment::default() };
        ArmsReport {
            format: ArmsReport::FORMAT,
            environment,
            command: "bench startup".into(),
            points: vec![POINT],
            processors: 2,
            volumes: 0,
            waits: true,
            arms: arms.iter().map(|(arm, _)| *arm).collect(),
            rounds,
            faults: Vec::new(),
        }
    }

    #[test]
    fn ratios_are_to_the_same_rounds_starts_without_a_network() {
        let none = (Arm::None, [[100, 100], [200, 200]]);
        let report = report(&[none, (Arm::Slipway, [[100, 140], [240, 280]])]);
        let figures = report.figures(Arm::Slipway).unwrap();
        assert_eq!((figures.mean_ns, figures.mean_range_ns), (190, (120, 260)));
        assert_eq!((figures.p50_ns, figures.p99_ns), (140, 280));
        assert_eq!((figures.functions_ns, figures.busy_ns), (95, 4));
        assert_eq!((figures.p99_range_ns, figures.busy_range_ns), ((140, 280), (4, 4)));
        assert_eq!(figures.mean_ratio_range, (1.2, 1.3));
        assert_eq!(figures.mean_ratio, Some(1.25));
        assert_eq!(figures.p99_ratio, Some(1.4));
        assert_eq!(report.figures(Arm::None).unwrap().mean_ratio, Some(1.0));
        assert_eq!(report.figures(Arm::Pool), None);
    }

    #[test]
    fn void_turns_are_named() {
        let mut both = two_points(&[(Arm::Pool, [[1, 2], [3, 4]])]);
        both.add_void([None, Some("others".to_owned()), None, Some("stolen".to_owned())]);
        let told = |report: &ArmsReport| -> Vec<(String, u32)> {
            report.faults().iter().map(|one| (one.reason.clone(), one.round)).collect()
        };
        assert_eq!(told(&both), [("others".to_owned(), 1), ("stolen".to_owned(), 1)]);
        assert_eq!(told(&both.at(both.points[1])), [("stolen".to_owned(), 1)]);
        assert_eq!(both.faults[1].load, "4 at once");
        assert_eq!(ArmsReport::from_json(&both.to_json().unwrap()).unwrap(), both);
        let text = crate::arms::arms_table(&both, false);
        assert!(text.contains("VOID: 2 turns on a busy machine, first pool with 2 at"), "{text}");
    }

    #[test]
    fn a_report_survives_json() {
        let report = report(&[(Arm::Pool, [[1, 2], [3, 4]])]);
        assert_eq!(report.figures(Arm::Pool).unwrap().mean_ratio, None);
        assert_eq!(ArmsReport::from_json(&report.to_json().unwrap()).unwrap(), report);
        assert!(ArmsReport::from_json("{}").is_err());
        let mut backwards = report;
        backwards.rounds[0].timelines[0].stages[0].start_ns = u64::MAX;
        assert!(ArmsReport::from_json(&backwards.to_json().unwrap()).is_err());
    }

    /// Returns a report of two points, the second of which has four sandboxes and takes twice the
    /// time of the first.
    pub fn two_points(arms: &[(Arm, [[u64; 2]; 2])]) -> ArmsReport {
        let mut both = report(arms);
        let further = Point { count: 4, ..POINT };
        let double = |round: &ArmRound| {
            let mut round = ArmRound { point: further, ..round.clone() };
            let stages = round.timelines.iter_mut().flat_map(|one| &mut one.stages);
            stages.for_each(|stage| {
                (stage.start_ns, stage.end_ns) = (2 * stage.start_ns, 2 * stage.end_ns);
            });
            let again = round.timelines.clone();
            round.timelines.extend(again);
            round
        };
        let rounds: Vec<_> = both.rounds.iter().map(double).collect();
        both.rounds.extend(rounds);
        both.points.push(further);
        both
    }

    #[test]
    fn each_point_has_its_own_figures() {
        let both = two_points(&[(Arm::None, [[100, 100], [100, 100]])]);
        let mean = |point| both.at(point).figures(Arm::None).unwrap().mean_ns;
        assert_eq!(both.points.iter().map(|point| mean(*point)).collect::<Vec<_>>(), [100, 200]);
        assert_eq!(both.name_of(both.points[1]), "4 at once");
        assert_eq!(ArmsReport::from_json(&both.to_json().unwrap()).unwrap(), both);
        let mut memories = both.clone();
        memories.points.push(Point { count: 4, memory_bytes: 512 << 20 });
        assert_eq!(memories.name_of(memories.points[2]), "4 at once, 512 MiB each");
        let mut unknown = both;
        unknown.points.pop();
        let error = ArmsReport::from_json(&unknown.to_json().unwrap()).unwrap_err();
        assert!(error.to_string().contains("does not name"), "{error}");
    }
}
