//! A report of a measurement of disks, with the context needed to judge and repeat it.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{
    Measured, Plan, RocksJob, RocksPlan, RocksReport, RocksRun, RocksSubject, Run, Subject,
    Workload,
};
use crate::environment::Environment;
use crate::json::SavedReport;
use crate::panels::CurvePoint;
use crate::statistics::{median, range};
use crate::turns::{Described, Fault, Turns};

/// All results of one command, stored as JSON.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BlockReport {
    /// Version of this format: [`SavedReport::FORMAT`].
    pub format: u32,
    /// The machine and the versions of programs.
    pub environment: Environment,
    /// The command that measured, as it was typed.
    pub command: String,
    /// The disk behind the subjects, in a few words.
    pub disk: String,
    /// The loads and times.
    pub plan: Plan,
    /// The subjects, in the order of their turns.
    pub subjects: Vec<Described>,
    /// The turns.
    pub runs: Vec<Run>,
    /// Turns that failed, and turns that are void.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub faults: Vec<Fault>,
    /// Results of RocksDB on file systems on the subjects' disks, if that was measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rocksdb: Option<RocksReport>,
}

/// Medians over the rounds of one subject with one load.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Figures {
    /// Commands per second.
    pub iops: f64,
    /// Bytes per second.
    pub bytes_per_second: f64,
    /// Mean latency, ns.
    pub mean_ns: f64,
    /// Latencies that 50, 99 and 99.9 % of the commands do not exceed, ns.
    pub percentiles_ns: [f64; 3],
    /// CPU time of the target per command, ns.
    pub target_cpu_ns: Option<f64>,
}

impl Measured {
    /// Returns the commands per second.
    pub fn iops(&self) -> f64 {
        self.latency.count() as f64 * 1e9 / self.elapsed_ns.max(1) as f64
    }

    /// Returns the figures of this single turn.
    pub fn figures(&self) -> Figures {
        let count = self.latency.count().max(1) as f64;
        Figures {
            iops: self.iops(),
            bytes_per_second: self.bytes as f64 * 1e9 / self.elapsed_ns.max(1) as f64,
            mean_ns: self.latency.mean(),
            percentiles_ns: [50.0, 99.0, 99.9].map(|p| self.latency.percentile(p) as f64),
            target_cpu_ns: self.target_cpu_ns.map(|spent| spent as f64 / count),
        }
    }
}

impl SavedReport for BlockReport {
    const KIND: &'static str = "disks";

    fn format(&self) -> u32 {
        self.format
    }

    fn faults(&self) -> &[Fault] {
        &self.faults
    }
}

impl BlockReport {
    /// Makes a report of `runs`.
    pub fn new(
        environment: Environment,
        command: impl Into<String>,
        disk: impl Into<String>,
        plan: Plan,
        subjects: &[Box<dyn Subject>],
        turns: Turns<Run>,
    ) -> Self {
        let described = subjects.iter().map(|one| Described::new(one.name(), one.about()));
        Self {
            format: Self::FORMAT,
            environment,
            command: command.into(),
            disk: disk.into(),
            plan,
            subjects: described.collect(),
            runs: turns.runs,
            faults: turns.faults,
            rocksdb: None,
        }
    }

    /// Makes a report of RocksDB on `subjects`.
    pub fn of_rocksdb(
        environment: Environment,
        command: impl Into<String>,
        disk: impl Into<String>,
        subjects: &[Box<dyn RocksSubject>],
        rocksdb: RocksReport,
    ) -> Self {
        let described = subjects.iter().map(|one| Described::new(one.name(), one.about()));
        let RocksPlan { rounds, time, .. } = rocksdb.plan;
        Self {
            format: Self::FORMAT,
            environment,
            command: command.into(),
            disk: disk.into(),
            plan: Plan { workloads: Vec::new(), rounds, warm_up: Duration::ZERO, time },
            subjects: described.collect(),
            runs: Vec::new(),
            faults: Vec::new(),
            rocksdb: Some(rocksdb),
        }
    }

    /// Returns the turns of `subject` with `workload`, in the order of their rounds.
    pub fn turns<'a>(
        &'a self,
        workload: &'a Workload,
        subject: &'a str,
    ) -> impl Iterator<Item = &'a Run> {
        self.runs.iter().filter(move |run| run.subject == subject && run.workload == *workload)
    }

    /// Returns medians over the rounds, or `None` if there was no turn.
    pub fn figures(&self, workload: &Workload, subject: &str) -> Option<Figures> {
        let turns: Vec<Figures> =
            self.turns(workload, subject).map(|run| run.measured.figures()).collect();
        if turns.is_empty() {
            return None;
        }
        let over = |value: &dyn Fn(&Figures) -> f64| median(turns.iter().map(value).collect());
        let cpu: Vec<f64> = turns.iter().filter_map(|turn| turn.target_cpu_ns).collect();
        Some(Figures {
            iops: over(&|turn| turn.iops),
            bytes_per_second: over(&|turn| turn.bytes_per_second),
            mean_ns: over(&|turn| turn.mean_ns),
            percentiles_ns: [0, 1, 2].map(|at| over(&|turn| turn.percentiles_ns[at])),
            target_cpu_ns: (!cpu.is_empty()).then(|| median(cpu)),
        })
    }

    /// Returns the least and the greatest of the rounds' IOPS, or `None` if there was no turn.
    pub fn range(&self, workload: &Workload, subject: &str) -> Option<(f64, f64)> {
        self.range_of(workload, subject, |figures| figures.iops)
    }

    /// Returns the least and the greatest of a figure over the rounds, or `None` if there was no
    /// turn.
    pub(super) fn range_of(
        &self,
        workload: &Workload,
        subject: &str,
        figure: impl Fn(&Figures) -> f64,
    ) -> Option<(f64, f64)> {
        let turns = self.turns(workload, subject);
        let all: Vec<f64> = turns.map(|run| figure(&run.measured.figures())).collect();
        (!all.is_empty()).then(|| range(&all))
    }

    /// Returns the range of the rounds' IOPS relative to their median. Returns `None` if there was
    /// only one turn or none.
    pub fn spread(&self, workload: &Workload, subject: &str) -> Option<f64> {
        let iops: Vec<f64> = self.turns(workload, subject).map(|run| run.measured.iops()).collect();
        let (least, most) = self.range(workload, subject)?;
        (iops.len() > 1).then(|| (most - least) / median(iops).max(f64::MIN_POSITIVE))
    }

    /// Returns the median over the rounds of p99, ns, without the delay by which the client may
    /// have seen completions late. Returns `None` if that was not measured.
    pub fn p99_at_least(&self, workload: &Workload, subject: &str) -> Option<f64> {
        let each = self
            .turns(workload, subject)
            .filter_map(|run| Some(run.measured.at_least.as_ref()?.percentile(99.0) as f64));
        let each: Vec<f64> = each.collect();
        (!each.is_empty()).then(|| median(each))
    }

    /// Returns the median over the rounds of the commands per second of the neighbour of `subject`,
    /// or `None` if there was no neighbour.
    pub fn neighbour_iops(&self, workload: &Workload, subject: &str) -> Option<f64> {
        let each = self.turns(workload, subject).filter_map(|run| {
            let seconds = run.measured.elapsed_ns.max(1) as f64 / 1e9;
            Some(run.measured.neighbour_commands? as f64 / seconds)
        });
        let each: Vec<f64> = each.collect();
        (!each.is_empty()).then(|| median(each))
    }
}

impl RocksReport {
    /// Returns the turns of `subject` with `job`, in the order of their rounds.
    pub fn turns<'a>(
        &'a self,
        job: RocksJob,
        subject: &'a str,
    ) -> impl Iterator<Item = &'a RocksRun> {
        self.runs.iter().filter(move |run| run.job == job && run.subject == subject)
    }

    /// Returns the median over the rounds of the operations per second, or `None` if there was no
    /// turn.
    pub fn rate(&self, job: RocksJob, subject: &str) -> Option<f64> {
        let rates: Vec<f64> = self.turns(job, subject).map(|run| run.measured.rate()).collect();
        (!rates.is_empty()).then(|| median(rates))
    }

    /// Returns the least and the greatest of the rounds' rates, or `None` if there was no turn.
    pub fn spread(&self, job: RocksJob, subject: &str) -> Option<(f64, f64)> {
        let rates = self.turns(job, subject).map(|run| run.measured.rate());
        rates.fold(None, |spread: Option<(f64, f64)>, rate| {
            let (least, most) = spread.unwrap_or((rate, rate));
            Some((least.min(rate), most.max(rate)))
        })
    }

    /// Returns for each second the median and the range of the rounds that lasted so long.
    pub(super) fn over_time(&self, job: RocksJob, subject: &str) -> Vec<CurvePoint> {
        let mut seconds: std::collections::BTreeMap<u64, Vec<f64>> = Default::default();
        for &(at, rate) in self.turns(job, subject).flat_map(|run| &run.measured.over_time) {
            seconds.entry(at.max(0.0).round() as u64).or_default().push(rate);
        }
        let point = |(at, rates): (u64, Vec<f64>)| {
            let range = range(&rates);
            CurvePoint { at: at as f64, value: median(rates), range }
        };
        seconds.into_iter().map(point).collect()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use slipway_telemetry::Histogram;

    use super::*;

    /// Makes a report in which each subject has these mean latencies, round by round.
    pub(crate) fn report(subjects: &[(&str, &[u64])]) -> BlockReport {
        let workload: Workload = "randread-4k-d1-t1".parse().unwrap();
        let mut runs = Vec::new();
        for (name, rounds) in subjects {
            for (round, &ns) in (0..).zip(*rounds) {
                let mut latency = Histogram::new();
                latency.record_many(ns, 1_000);
                latency.record_many(ns * 10, 2);
                let elapsed_ns = latency.sum() as u64;
                let target_cpu_ns = Some(elapsed_ns / 2);
                let bytes = 4_104_192;
                let measured =
                    Measured { latency, bytes, elapsed_ns, target_cpu_ns, ..Measured::default() };
                runs.push(Run { subject: (*name).to_owned(), workload, round, measured });
            }
        }
        let described = subjects
            .iter()
            .map(|(name, _)| Described { name: (*name).to_owned(), about: "<&>".into() });
        let plan = Plan {
            workloads: vec![workload],
            rounds: 3,
            warm_up: Duration::ZERO,
            time: Duration::from_millis(1),
        };
        BlockReport {
            format: BlockReport::FORMAT,
            environment: Environment::default(),
            command: "bench block".into(),
            disk: "ram:64M".into(),
            plan,
            subjects: described.collect(),
            runs,
            faults: Vec::new(),
            rocksdb: None,
        }
    }

    /// Makes a report in which "host" filled two databases in each of two rounds.
    pub(crate) fn with_rocksdb() -> BlockReport {
        let plan = crate::block::rocksdb::tests::plan();
        let mut runs = Vec::new();
        for (round, rate) in [(0, 100.0), (1, 200.0)] {
            for compaction_threads in [1, 10] {
                let job = RocksJob { load: crate::block::RocksLoad::FillSeq, compaction_threads };
                // Only one round has a second entry.
                let mut over_time = vec![(1.0, rate), (2.0, 50.0)];
                over_time.truncate(2 - round as usize);
                let (operations, elapsed_ns) = (rate as u64, 1_000_000_000);
                let measured = crate::block::RocksMeasured { operations, elapsed_ns, over_time };
                runs.push(RocksRun { subject: "host".into(), job, round, measured });
            }
        }
        let rocksdb = Some(RocksReport { plan, runs });
        let empty = report(&[("host", &[])]);
        let plan = Plan { workloads: Vec::new(), ..empty.plan.clone() };
        BlockReport { rocksdb, plan, ..empty }
    }

    #[test]
    fn rocksdb_survives_json_and_gives_medians_and_spread() {
        let report = with_rocksdb();
        assert_eq!(BlockReport::from_json(&report.to_json().unwrap()).unwrap(), report);
        let rocksdb = report.rocksdb.unwrap();
        let job = rocksdb.plan.jobs().next().unwrap();
        assert_eq!(rocksdb.rate(job, "host"), Some(150.0));
        assert_eq!(rocksdb.spread(job, "host"), Some((100.0, 200.0)));
        assert_eq!((rocksdb.rate(job, "nobody"), rocksdb.spread(job, "nobody")), (None, None));
    }

    #[test]
    fn survives_json() {
        let report = report(&[("bare", &[100, 101, 102]), ("mapped", &[200, 210, 220])]);
        assert_eq!(BlockReport::from_json(&report.to_json().unwrap()).unwrap(), report);
        assert!(BlockReport::from_json("{}").is_err());
        let other = BlockReport { format: 9, ..report };
        let error = BlockReport::from_json(&other.to_json().unwrap()).unwrap_err();
        assert!(error.to_string().contains("format 9"), "{error}");
    }

    #[test]
    fn figures_are_medians_over_rounds() {
        let report = report(&[("mapped", &[900, 100, 110])]);
        let workload = report.plan.workloads[0];
        let figures = report.figures(&workload, "mapped").unwrap();
        assert_eq!(figures.percentiles_ns[0], 110.0);
        assert!((figures.mean_ns - 111.98).abs() < 0.1, "{figures:?}");
        assert!((figures.iops * figures.mean_ns / 1e9 - 1.0).abs() < 1e-6, "one in flight");
        assert!(figures.target_cpu_ns.is_some_and(|ns| (ns - figures.mean_ns / 2.0).abs() < 1.0));
        let spread = report.spread(&workload, "mapped").unwrap();
        assert!((spread - (110.0 / 100.0 - 110.0 / 900.0)).abs() < 0.02, "{spread}");
        assert_eq!(report.spread(&workload, "nobody"), None);
        assert_eq!(report.figures(&workload, "nobody"), None);
        assert_eq!(median(vec![4.0, 1.0, 2.0, 3.0]), 2.5);
    }
}
