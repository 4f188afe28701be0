//! A measurement of packets with what is needed to judge and to repeat it.

use std::time::Duration;

use anyhow::Result;
use serde::{Deserialize, Serialize};

use super::PacketLoad;
use crate::block::Described;
use crate::json;
use crate::report::Environment;
use crate::statistics::median;

/// What a turn gave.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PacketMeasured {
    /// Frames that the source sent; where a peer does not tell, those delivered.
    pub sent: u64,
    /// Frames that the sinks had.
    pub delivered: u64,
    /// How long it took, ns.
    pub elapsed_ns: u64,
    /// How a neighbour fared, where the load has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub neighbour: Option<Neighbour>,
}

/// How a neighbour fared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Neighbour {
    /// Frames that were due, those that its own ring had no room for included.
    pub offered: u64,
    /// Frames that its sink had.
    pub delivered: u64,
}

/// What is measured.
pub trait PacketSubject {
    /// Its name in tables.
    fn name(&self) -> &str;

    /// What it is, in a sentence.
    fn about(&self) -> String;

    /// Whether it can carry the load.
    fn takes(&self, load: &PacketLoad) -> bool;

    /// Carries it, `warm_up` without being measured, then for `time`.
    ///
    /// # Errors
    /// What stands in the way, with the next step.
    fn run(
        &mut self,
        load: &PacketLoad,
        warm_up: Duration,
        time: Duration,
    ) -> Result<PacketMeasured>;
}

/// What is done.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PacketPlan {
    /// The loads, one after the other.
    pub loads: Vec<PacketLoad>,
    /// Turns of each subject with each load.
    pub rounds: u32,
    /// Of each turn before it is measured.
    pub warm_up: Duration,
    /// Of each turn.
    pub time: Duration,
}

/// One turn of one subject.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PacketRun {
    /// Whose turn.
    pub subject: String,
    /// With which load.
    pub load: PacketLoad,
    /// From 0.
    pub round: u32,
    /// What it gave.
    pub measured: PacketMeasured,
}

/// Everything measured by one command. Kept as JSON.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PacketReport {
    /// Version of this format: [`PacketReport::FORMAT`].
    pub format: u32,
    /// Where and with what.
    pub environment: Environment,
    /// The command that measured, as it was typed.
    pub command: String,
    /// What was done.
    pub plan: PacketPlan,
    /// Who was measured, in the order of their turns.
    pub subjects: Vec<Described>,
    /// Turn by turn.
    pub runs: Vec<PacketRun>,
}

/// Medians over the rounds of one subject with one load.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PacketFigures {
    /// Frames delivered a second.
    pub delivered: f64,
    /// Frames sent a second.
    pub sent: f64,
    /// Bits delivered a second, frames only.
    pub bits: f64,
    /// How far the rounds lie apart, from the least to the most, as a part of their median.
    pub spread: f64,
    /// The part of a neighbour's frames that was delivered, in the worst round; where there was one.
    pub neighbour: Option<f64>,
}

/// A turn about to begin.
#[derive(Clone, Copy, Debug)]
pub struct PacketTurn<'a> {
    /// Turns that are over.
    pub done: usize,
    /// All of them.
    pub turns: usize,
    /// With which load.
    pub load: &'a PacketLoad,
    /// Whose it is.
    pub subject: &'a str,
}

/// Has the subjects take turns: in a round of a load each has one.
///
/// # Errors
/// A subject's.
pub fn measure_packets(
    subjects: &mut [Box<dyn PacketSubject>],
    plan: &PacketPlan,
    mut before: impl FnMut(PacketTurn<'_>),
) -> Result<Vec<PacketRun>> {
    let able = |load: &PacketLoad| subjects.iter().filter(|subject| subject.takes(load)).count();
    let turns = plan.loads.iter().map(able).sum::<usize>() * plan.rounds as usize;
    let mut runs: Vec<PacketRun> = Vec::new();
    for load in &plan.loads {
        for round in 0..plan.rounds {
            for subject in subjects.iter_mut().filter(|subject| subject.takes(load)) {
                before(PacketTurn { done: runs.len(), turns, load, subject: subject.name() });
                let measured = subject.run(load, plan.warm_up, plan.time)?;
                let subject = subject.name().to_owned();
                runs.push(PacketRun { subject, load: *load, round, measured });
            }
        }
    }
    Ok(runs)
}

impl PacketReport {
    /// Version of the JSON that [`to_json`](Self::to_json) writes.
    pub const FORMAT: u32 = 1;

    /// A report of `runs`.
    pub fn new(
        environment: Environment,
        command: impl Into<String>,
        plan: PacketPlan,
        subjects: &[Box<dyn PacketSubject>],
        runs: Vec<PacketRun>,
    ) -> Self {
        let described = subjects
            .iter()
            .map(|subject| Described { name: subject.name().to_owned(), about: subject.about() });
        let subjects = described.collect();
        Self { format: Self::FORMAT, environment, command: command.into(), plan, subjects, runs }
    }

    /// Medians over the rounds; None where there was no turn.
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
        let apart = delivered.last()? - delivered.first()?;
        let middle = median(delivered);
        Some(PacketFigures {
            delivered: middle,
            sent: median(sent),
            bits: middle * f64::from(load.bytes) * 8.0,
            spread: apart / middle.max(f64::MIN_POSITIVE),
            neighbour,
        })
    }

    /// As JSON, ended by a newline.
    ///
    /// # Errors
    /// None in practice; serialisation reports its own.
    pub fn to_json(&self) -> Result<String> {
        json::write(self)
    }

    /// From JSON.
    ///
    /// # Errors
    /// When it is no such report, or of another format version.
    pub fn from_json(text: &str) -> Result<Self> {
        json::read(text, "packets", Self::FORMAT, |report: &Self| report.format)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A report of subjects with these rates, round by round, in frames a second.
    pub(crate) fn report(subjects: &[(&str, &[u64])]) -> PacketReport {
        let load = PacketLoad::default();
        let mut runs = Vec::new();
        for (name, rates) in subjects {
            for (round, rate) in (0..).zip(*rates) {
                let (sent, elapsed_ns) = (2 * rate, 1_000_000_000);
                let neighbour = Some(Neighbour { offered: 100, delivered: 100 - u64::from(round) });
                let measured = PacketMeasured { sent, delivered: *rate, elapsed_ns, neighbour };
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
        }
    }

    #[test]
    fn figures_are_medians_and_survive_json() {
        let report = report(&[("switch", &[30, 10, 20]), ("link", &[])]);
        let figures = report.figures(&PacketLoad::default(), "switch").unwrap();
        assert_eq!((figures.delivered, figures.sent, figures.bits), (20.0, 40.0, 20.0 * 512.0));
        assert_eq!((figures.spread, figures.neighbour), (1.0, Some(0.98)));
        assert_eq!(report.figures(&PacketLoad::default(), "link"), None);
        assert_eq!(PacketReport::from_json(&report.to_json().unwrap()).unwrap(), report);
        assert!(PacketReport::from_json("{}").is_err());
    }
}
