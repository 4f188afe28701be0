//! A report of a measurement of disks, with the context needed to judge and repeat it.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{Measured, Plan, RocksJob, RocksReport, RocksRun, RocksSubject, Workload};
use crate::Times;
use crate::environment::Environment;
use crate::json::SavedReport;
use crate::measurement::Measurement;
use crate::panels::CurvePoint;
use crate::statistics::{median, range};
use crate::turns::Described;

/// All results of one command, stored as JSON.
pub type BlockReport = Measurement<Workload, Measured, BlockExtra>;

/// Results that reports of disks alone have.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct BlockExtra {
    /// The disk behind the subjects, in a few words.
    pub disk: String,
    /// Results of RocksDB on file systems on the subjects' disks, if that was measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rocksdb: Option<RocksReport>,
}

impl BlockReport {
    /// Makes a report of RocksDB on `subjects`.
    pub fn of_rocksdb(
        environment: Environment,
        command: impl Into<String>,
        disk: impl Into<String>,
        subjects: &[Box<dyn RocksSubject>],
        rocksdb: RocksReport,
    ) -> Self {
        let described = subjects.iter().map(|one| Described::new(one.name(), one.about()));
        let times = Times { warm_up: Duration::ZERO, time: rocksdb.plan.time };
        Self {
            format: Self::FORMAT,
            environment,
            command: command.into(),
            plan: Plan::timed(Vec::new(), rocksdb.plan.rounds, times),
            subjects: described.collect(),
            runs: Vec::new(),
            faults: Vec::new(),
            left_out: Vec::new(),
            extra: BlockExtra { disk: disk.into(), rocksdb: Some(rocksdb) },
        }
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

    use super::super::measure::{IOPS, MEAN, P50, TARGET_CPU};
    use super::*;

    /// Makes a report in which each subject has these mean latencies, round by round.
    pub(crate) fn report(subjects: &[(&str, &[u64])]) -> BlockReport {
        let loads = ["randread-4k-d1-t1"];
        let mut report = BlockReport::sample("bench block", &loads, subjects, |_, _, &ns| {
            let mut latency = Histogram::new();
            latency.record_many(ns, 1_000);
            latency.record_many(ns * 10, 2);
            let elapsed_ns = latency.sum() as u64;
            let target_cpu_ns = Some(elapsed_ns / 2);
            Measured { latency, bytes: 4_104_192, elapsed_ns, target_cpu_ns, ..Measured::default() }
        });
        let times = Times { warm_up: Duration::ZERO, time: Duration::from_millis(1) };
        report.plan = Plan::timed(report.plan.loads, 3, times);
        report.extra.disk = "ram:64M".to_owned();
        report
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
        let mut report = report(&[("host", &[])]);
        report.extra.rocksdb = Some(RocksReport { plan, runs });
        report.plan.loads.clear();
        report
    }

    #[test]
    fn rocksdb_survives_json_and_gives_medians_and_spread() {
        let report = with_rocksdb();
        assert_eq!(BlockReport::from_json(&report.to_json().unwrap()).unwrap(), report);
        let rocksdb = report.extra.rocksdb.unwrap();
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
        assert!(error.to_string().contains("format is 9"), "{error}");
    }

    #[test]
    fn figures_are_medians_over_rounds() {
        let report = report(&[("mapped", &[900, 100, 110])]);
        let load = report.plan.loads[0];
        let of = |figure| report.over_rounds(&load, "mapped", figure).unwrap();
        let (iops, mean) = (of(&IOPS), of(&MEAN));
        assert_eq!(of(&P50).median, 110.0);
        assert!((mean.median - 111.98).abs() < 0.1, "{mean:?}");
        assert!((iops.median * mean.median / 1e9 - 1.0).abs() < 1e-6, "one in flight");
        assert!((of(&TARGET_CPU).median - mean.median / 2.0).abs() < 1.0);
        let spread = iops.spread().unwrap();
        assert!((spread - (110.0 / 100.0 - 110.0 / 900.0)).abs() < 0.02, "{spread}");
        assert_eq!(report.over_rounds(&load, "nobody", &IOPS), None);
        assert_eq!(median(vec![4.0, 1.0, 2.0, 3.0]), 2.5);
    }

    #[test]
    fn a_report_of_an_earlier_version_is_read() {
        let now = report(&[("mapped", &[200])]);
        let text = now.to_json().unwrap();
        let then = text.replace(r#""load":"#, r#""workload":"#).replace("loads", "workloads");
        assert_eq!(BlockReport::from_json(&then).unwrap(), now);
    }
}
