//! A report of a measurement of control groups, with the context needed to judge and repeat it.

use anyhow::Result;
use serde::{Deserialize, Serialize};

use super::CgroupLoad;
use super::subjects::{CgroupMeasured, CgroupSubject};
use crate::block::Described;
use crate::json;
use crate::report::Environment;
use crate::statistics::percentile;
use crate::turns::{Fault, Subjects, Turn, Turns, take_turns};

/// The loads and rounds of a measurement.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CgroupPlan {
    /// The loads, one after the other.
    pub loads: Vec<CgroupLoad>,
    /// The number of turns of each subject with each load.
    pub rounds: u32,
}

/// One turn of one subject.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CgroupRun {
    /// The subject's name.
    pub subject: String,
    /// The load.
    pub load: CgroupLoad,
    /// The number of the round, from 0.
    pub round: u32,
    /// The result.
    pub measured: CgroupMeasured,
}

/// All results of one command, stored as JSON.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CgroupReport {
    /// Version of this format: [`CgroupReport::FORMAT`].
    pub format: u32,
    /// The machine and the versions of programs.
    pub environment: Environment,
    /// The command that measured, as it was typed.
    pub command: String,
    /// The loads and rounds.
    pub plan: CgroupPlan,
    /// The subjects, in the order of their turns.
    pub subjects: Vec<Described>,
    /// The turns.
    pub runs: Vec<CgroupRun>,
    /// Turns that failed, and turns that are void.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub faults: Vec<Fault>,
}

/// Medians over the rounds of one subject with one load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CgroupFigures {
    /// Median of the time for all groups, ns.
    pub total_ns: u64,
    /// The least and the greatest of that time, ns.
    pub range_ns: (u64, u64),
    /// Median of the rounds' medians of a request, ns.
    pub p50_ns: u64,
    /// Median of the rounds' 99th percentiles of a request, ns.
    pub p99_ns: u64,
    /// The least and the greatest of the rounds' 99th percentiles, ns.
    pub p99_range_ns: (u64, u64),
    /// Median of the CPU time to fill the pool, ns.
    pub refill_ns: Option<u64>,
}

struct Asked<'a>(&'a [CgroupSubject]);

impl Subjects for Asked<'_> {
    type Load = CgroupLoad;
    type Run = CgroupRun;

    fn count(&self) -> usize {
        self.0.len()
    }

    fn name(&self, subject: usize) -> String {
        self.0[subject].name().to_owned()
    }

    fn takes(&self, _subject: usize, _load: &CgroupLoad) -> bool {
        true
    }

    fn run(&mut self, subject: usize, load: &CgroupLoad, round: u32) -> Result<CgroupRun> {
        let subject = &self.0[subject];
        let measured = subject.run(load)?;
        Ok(CgroupRun { subject: subject.name().to_owned(), load: *load, round, measured })
    }
}

/// Gives every subject its turns. Calls `before` at the start of each.
pub fn measure_cgroups(
    subjects: &[CgroupSubject],
    plan: &CgroupPlan,
    before: impl FnMut(Turn<'_, CgroupLoad>),
) -> Turns<CgroupRun> {
    take_turns(&mut Asked(subjects), &plan.loads, plan.rounds, before)
}

impl CgroupReport {
    /// The version of the JSON that [`to_json`](Self::to_json) writes.
    pub const FORMAT: u32 = 1;

    /// Makes a report of `turns`.
    pub fn new(
        environment: Environment,
        command: impl Into<String>,
        plan: CgroupPlan,
        subjects: &[CgroupSubject],
        turns: Turns<CgroupRun>,
    ) -> Self {
        let described = subjects
            .iter()
            .map(|subject| Described { name: subject.name().to_owned(), about: subject.about() });
        let subjects = described.collect();
        let (format, command, Turns { runs, faults }) = (Self::FORMAT, command.into(), turns);
        Self { format, environment, command, plan, subjects, runs, faults }
    }

    /// Returns the results of one subject with one load, in the order of the rounds.
    pub(super) fn turns<'a>(
        &'a self,
        load: &'a CgroupLoad,
        subject: &'a str,
    ) -> impl Iterator<Item = CgroupMeasured> + Clone + 'a {
        let fits = move |run: &&CgroupRun| run.subject == subject && run.load == *load;
        self.runs.iter().filter(fits).map(|run| run.measured)
    }

    /// Returns medians over the rounds, or `None` if there was no turn.
    pub fn figures(&self, load: &CgroupLoad, subject: &str) -> Option<CgroupFigures> {
        let sorted = |part: fn(CgroupMeasured) -> u64| {
            let mut values: Vec<u64> = self.turns(load, subject).map(part).collect();
            values.sort_unstable();
            values
        };
        let (totals, tails) = (sorted(|one| one.total_ns), sorted(|one| one.p99_ns));
        let refills = sorted(|one| one.refill_ns.unwrap_or(0));
        let has_pool = self.turns(load, subject).any(|one| one.refill_ns.is_some());
        Some(CgroupFigures {
            range_ns: (*totals.first()?, *totals.last()?),
            p99_range_ns: (*tails.first()?, *tails.last()?),
            total_ns: percentile(&totals, 50),
            p50_ns: percentile(&sorted(|one| one.p50_ns), 50),
            p99_ns: percentile(&tails, 50),
            refill_ns: has_pool.then(|| percentile(&refills, 50)),
        })
    }

    /// Formats the report as JSON with a newline at the end.
    ///
    /// # Errors
    /// None in practice; errors of serialisation are passed on.
    pub fn to_json(&self) -> Result<String> {
        json::write(self)
    }

    /// Parses a report from JSON.
    ///
    /// # Errors
    /// If `text` is no such report, or of another format version.
    pub fn from_json(text: &str) -> Result<Self> {
        json::read(text, "control groups", Self::FORMAT, |report: &Self| report.format)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Makes a report of subjects with these total times in milliseconds, round by round. A subject
    /// called `pool` has a refill of 1 ms.
    pub(crate) fn report(subjects: &[(&str, &[u64])]) -> CgroupReport {
        let load: CgroupLoad = "2000-t50".parse().unwrap();
        let mut runs = Vec::new();
        for (name, times) in subjects {
            for (round, ms) in (0..).zip(*times) {
                let measured = CgroupMeasured {
                    total_ns: ms * 1_000_000,
                    p50_ns: ms * 1_000,
                    p99_ns: ms * 10_000,
                    refill_ns: (*name == "pool").then_some(1_000_000),
                };
                runs.push(CgroupRun { subject: (*name).to_owned(), load, round, measured });
            }
        }
        let described =
            |(name, _): &(&str, _)| Described { name: (*name).to_owned(), about: "<&>".into() };
        CgroupReport {
            format: CgroupReport::FORMAT,
            environment: Environment::default(),
            command: "bench cgroups".into(),
            plan: CgroupPlan { loads: vec![load], rounds: 3 },
            subjects: subjects.iter().map(described).collect(),
            runs,
            faults: Vec::new(),
        }
    }

    #[test]
    fn figures_are_medians_and_survive_json() {
        let report = report(&[("create", &[30, 10, 20]), ("pool", &[5]), ("none", &[])]);
        let load = report.plan.loads[0];
        let create = report.figures(&load, "create").unwrap();
        assert_eq!((create.total_ns, create.p50_ns, create.p99_ns), (20_000_000, 20_000, 200_000));
        assert_eq!(create.range_ns, (10_000_000, 30_000_000));
        assert_eq!((create.p99_range_ns, create.refill_ns), ((100_000, 300_000), None));
        assert_eq!(report.figures(&load, "pool").unwrap().refill_ns, Some(1_000_000));
        assert_eq!(report.figures(&load, "none"), None);
        assert_eq!(CgroupReport::from_json(&report.to_json().unwrap()).unwrap(), report);
        assert!(CgroupReport::from_json("{}").is_err());
    }
}
