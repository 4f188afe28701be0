//! A report of a measurement of packets, with the context needed to judge and repeat it.

use std::time::Duration;

use anyhow::Result;
use serde::{Deserialize, Serialize};

use super::{FunctionCounts, PacketLoad, Times};
use crate::environment::Environment;
use crate::json::SavedReport;
use crate::statistics::median;
use crate::turns::{Described, Fault, Subjects, Turn, Turns, take_turns};

/// The result of a turn.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PacketMeasured {
    /// Frames that the source sent, or those delivered if a peer does not report that.
    pub sent: u64,
    /// Frames that the sinks received.
    pub delivered: u64,
    /// The measured time, ns.
    pub elapsed_ns: u64,
    /// The neighbour's result, if the load has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub neighbour: Option<Neighbour>,
    /// The work of the e1000 functions that the frames passed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub work: Option<Work>,
    /// The time for which the sending thread waited for a processor that it shares with no other of
    /// the measurement, ns, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waited_ns: Option<u64>,
}

/// The work of two e1000 functions, which they have counted themselves.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Work {
    /// The function of the sender.
    pub one: FunctionCounts,
    /// The function of the receiver.
    pub two: FunctionCounts,
}

/// A neighbour's result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Neighbour {
    /// Frames that were due, including those that had no room in the neighbour's own ring.
    pub offered: u64,
    /// Frames that the neighbour's sink received.
    pub delivered: u64,
}

/// A target that can be put under load.
pub trait PacketSubject {
    /// Returns the name for tables.
    fn name(&self) -> &str;

    /// Describes the subject in a sentence.
    fn about(&self) -> String;

    /// Returns whether the subject can carry the load.
    fn takes(&self, load: &PacketLoad) -> bool;

    /// Runs the load for the warm-up without measuring, and then measures.
    ///
    /// # Errors
    /// An obstacle, with a hint at the remedy.
    fn run(&mut self, load: &PacketLoad, times: Times) -> Result<PacketMeasured>;
}

/// The loads and times of a measurement.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PacketPlan {
    /// The loads, one after the other.
    pub loads: Vec<PacketLoad>,
    /// The number of turns of each subject with each load.
    pub rounds: u32,
    /// The time of load before each measurement.
    pub warm_up: Duration,
    /// The measured time of each turn.
    pub time: Duration,
}

/// One turn of one subject.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PacketRun {
    /// The subject's name.
    pub subject: String,
    /// The load.
    pub load: PacketLoad,
    /// The number of the round, from 0.
    pub round: u32,
    /// The result.
    pub measured: PacketMeasured,
}

/// All results of one command, stored as JSON.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PacketReport {
    /// Version of this format: [`SavedReport::FORMAT`].
    pub format: u32,
    /// The machine and the versions of programs.
    pub environment: Environment,
    /// The command that measured, as it was typed.
    pub command: String,
    /// The loads and times.
    pub plan: PacketPlan,
    /// The subjects, in the order of their turns.
    pub subjects: Vec<Described>,
    /// The turns.
    pub runs: Vec<PacketRun>,
    /// Turns that failed, and turns that are void.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub faults: Vec<Fault>,
}

/// Medians over the rounds of one subject with one load.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PacketFigures {
    /// Frames delivered per second.
    pub delivered: f64,
    /// Frames sent per second.
    pub sent: f64,
    /// Bits delivered per second, counting frames only.
    pub bits: f64,
    /// The least and the greatest of the rounds, in frames delivered per second.
    pub range: (f64, f64),
    /// The part of a neighbour's frames that was delivered in the worst round, if there was a
    /// neighbour.
    pub neighbour: Option<f64>,
}

/// The subjects with the times of their turns.
struct Timed<'a> {
    subjects: &'a mut [Box<dyn PacketSubject>],
    plan: &'a PacketPlan,
}

impl Subjects for Timed<'_> {
    type Load = PacketLoad;
    type Run = PacketRun;

    fn count(&self) -> usize {
        self.subjects.len()
    }

    fn name(&self, subject: usize) -> String {
        self.subjects[subject].name().to_owned()
    }

    fn takes(&self, subject: usize, load: &PacketLoad) -> bool {
        self.subjects[subject].takes(load)
    }

    fn run(&mut self, subject: usize, load: &PacketLoad, round: u32) -> Result<PacketRun> {
        let subject = &mut self.subjects[subject];
        let times = Times { warm_up: self.plan.warm_up, time: self.plan.time };
        let measured = subject.run(load, times)?;
        Ok(PacketRun { subject: subject.name().to_owned(), load: *load, round, measured })
    }

    fn waited(&self, PacketRun { measured, .. }: &PacketRun) -> Option<f64> {
        let elapsed_ns = measured.elapsed_ns.max(1) as f64;
        measured.waited_ns.map(|waited_ns| waited_ns as f64 / elapsed_ns)
    }
}

/// Gives every subject its turns. Calls `before` at the start of each.
pub fn measure_packets(
    subjects: &mut [Box<dyn PacketSubject>],
    plan: &PacketPlan,
    before: impl FnMut(Turn<'_, PacketLoad>),
) -> Turns<PacketRun> {
    take_turns(&mut Timed { subjects, plan }, &plan.loads, plan.rounds, before)
}

impl PacketFigures {
    /// Returns the range of the rounds relative to their median.
    pub fn spread(&self) -> f64 {
        (self.range.1 - self.range.0) / self.delivered.max(f64::MIN_POSITIVE)
    }
}

impl SavedReport for PacketReport {
    const KIND: &'static str = "packets";

    fn format(&self) -> u32 {
        self.format
    }

    fn faults(&self) -> &[Fault] {
        &self.faults
    }
}

impl PacketReport {
    /// Makes a report of `runs`.
    pub fn new(
        environment: Environment,
        command: impl Into<String>,
        plan: PacketPlan,
        subjects: &[Box<dyn PacketSubject>],
        turns: Turns<PacketRun>,
    ) -> Self {
        let described = subjects.iter().map(|one| Described::new(one.name(), one.about()));
        let subjects = described.collect();
        let (format, command, Turns { runs, faults }) = (Self::FORMAT, command.into(), turns);
        Self { format, environment, command, plan, subjects, runs, faults }
    }

    /// Returns medians over the rounds, or `None` if there was no turn.
    pub fn figures(&self, load: &PacketLoad, subject: &str) -> Option<PacketFigures> {
        let turns = self.runs.iter().filter(|run| run.subject == subject && run.load == *load);
        let rate = |count: u64, run: &PacketRun| {
            count as f64 * 1e9 / run.measured.elapsed_ns.max(1) as f64
        };
        let share = |one: Neighbour| one.delivered as f64 / one.offered.max(1) as f64;
        let shares = turns.clone().filter_map(|run| run.measured.neighbour).map(share);
        let neighbour = shares.min_by(f64::total_cmp);
        let (mut delivered, sent): (Vec<f64>, Vec<f64>) = turns
            .map(|run| (rate(run.measured.delivered, run), rate(run.measured.sent, run)))
            .unzip();
        delivered.sort_by(f64::total_cmp);
        let range = (*delivered.first()?, *delivered.last()?);
        let middle = median(delivered);
        Some(PacketFigures {
            delivered: middle,
            sent: median(sent),
            bits: middle * f64::from(load.bytes) * 8.0,
            range,
            neighbour,
        })
    }

    /// Returns the work of the functions of one subject with one load, all rounds together. Returns
    /// `None` if it has none, or there was no turn.
    pub fn work(&self, load: &PacketLoad, subject: &str) -> Option<Work> {
        let turns = self.runs.iter().filter(|run| run.subject == subject && run.load == *load);
        let all = turns.filter_map(|run| run.measured.work.as_ref());
        all.fold(None, |sum: Option<Work>, work| {
            let mut sum = sum.unwrap_or_default();
            sum.one.add(&work.one);
            sum.two.add(&work.two);
            Some(sum)
        })
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Makes a report of subjects with these rates in frames per second, round by round.
    pub(crate) fn report(subjects: &[(&str, &[u64])]) -> PacketReport {
        let load = PacketLoad::default();
        let mut runs = Vec::new();
        for (name, rates) in subjects {
            for (round, rate) in (0..).zip(*rates) {
                let (sent, elapsed_ns) = (2 * rate, 1_000_000_000);
                let neighbour = Some(Neighbour { offered: 100, delivered: 100 - u64::from(round) });
                let delivered = *rate;
                let rest = PacketMeasured::default();
                let measured = PacketMeasured { sent, delivered, elapsed_ns, neighbour, ..rest };
                runs.push(PacketRun { subject: (*name).to_owned(), load, round, measured });
            }
        }
        let time = Duration::from_secs(1);
        PacketReport {
            format: PacketReport::FORMAT,
            environment: Environment::default(),
            command: "bench packet".into(),
            plan: PacketPlan { loads: vec![load], rounds: 3, warm_up: Duration::ZERO, time },
            subjects: subjects
                .iter()
                .map(|(name, _)| Described { name: (*name).to_owned(), about: "<&>".into() })
                .collect(),
            runs,
            faults: Vec::new(),
        }
    }

    #[test]
    fn figures_are_medians_and_survive_json() {
        let report = report(&[("switch", &[30, 10, 20]), ("link", &[])]);
        let figures = report.figures(&PacketLoad::default(), "switch").unwrap();
        assert_eq!((figures.delivered, figures.sent, figures.bits), (20.0, 40.0, 20.0 * 512.0));
        assert_eq!((figures.spread(), figures.neighbour), (1.0, Some(0.98)));
        assert_eq!(report.figures(&PacketLoad::default(), "link"), None);
        assert_eq!(PacketReport::from_json(&report.to_json().unwrap()).unwrap(), report);
        assert!(PacketReport::from_json("{}").is_err());
    }
}
