//! Reports of measurements in which a turn of a subject has one result, with the context needed to
//! judge and repeat them.
//!
//! [`VmmReport`](crate::vmm::VmmReport), [`AttachReport`](crate::attach::AttachReport) and
//! [`CgroupReport`](crate::cgroups::CgroupReport) are of this kind. They differ in their loads,
//! their results, and the figures that are computed from these.

use std::fmt::Display;

use anyhow::Result;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::compare::{time_row, time_table};
use crate::duration::human;
use crate::environment::Environment;
use crate::json::SavedReport;
use crate::outside::Own;
use crate::table::titled;
use crate::turns::{Described, Fault, Subjects, Turn, Turns, take_turns};

/// The result of a turn.
pub trait Measured: Copy {
    /// The kind of report, for errors.
    const KIND: &'static str;
}

/// A subject that can be measured.
pub trait Subject {
    /// The load of a turn.
    type Load;
    /// The result of a turn.
    type Measured;

    /// Returns the name for tables.
    fn name(&self) -> &str;

    /// Describes the subject in a sentence.
    fn about(&self) -> String;

    /// Returns whether the subject can carry the load.
    fn takes(&self, _load: &Self::Load) -> bool {
        true
    }

    /// Waits until the host has ended what earlier turns left it to do. Returns the reason why the
    /// turn that follows is void if the host does not end it.
    fn settle(&self) -> Option<String> {
        None
    }

    /// Runs a turn.
    ///
    /// # Errors
    /// A sentence about the obstacle.
    fn run(&mut self, load: &Self::Load) -> Result<Self::Measured>;

    /// Returns the processes that do the work of its turns.
    fn own(&self) -> Own {
        Own::Children
    }
}

/// Subjects with the same kind of load and of result.
pub type AnySubject<L, M> = dyn Subject<Load = L, Measured = M>;

/// The loads and rounds of a measurement.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan<L> {
    /// The loads, one after the other.
    pub loads: Vec<L>,
    /// The number of turns of each subject with each load.
    pub rounds: u32,
}

/// One turn of one subject.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Run<L, M> {
    /// The subject's name.
    pub subject: String,
    /// The load.
    pub load: L,
    /// The number of the round, from 0.
    pub round: u32,
    /// The result.
    pub measured: M,
}

/// All results of one command, stored as JSON.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Measurement<L, M> {
    /// Version of this format: [`SavedReport::FORMAT`].
    pub format: u32,
    /// The machine and the versions of programs.
    pub environment: Environment,
    /// The command that measured, as it was typed.
    pub command: String,
    /// The loads and rounds.
    pub plan: Plan<L>,
    /// The subjects, in the order of their turns.
    pub subjects: Vec<Described>,
    /// The turns.
    pub runs: Vec<Run<L, M>>,
    /// Turns that failed, and turns that are void.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub faults: Vec<Fault>,
}

struct All<'a, L, M>(&'a mut [Box<AnySubject<L, M>>]);

impl<L: Copy + Display, M> Subjects for All<'_, L, M> {
    type Load = L;
    type Run = Run<L, M>;

    fn count(&self) -> usize {
        self.0.len()
    }

    fn name(&self, subject: usize) -> String {
        self.0[subject].name().to_owned()
    }

    fn takes(&self, subject: usize, load: &L) -> bool {
        self.0[subject].takes(load)
    }

    fn settle(&self, subject: usize) -> Option<String> {
        self.0[subject].settle()
    }

    fn run(&mut self, subject: usize, load: &L, round: u32) -> Result<Run<L, M>> {
        let subject = &mut self.0[subject];
        let measured = subject.run(load)?;
        Ok(Run { subject: subject.name().to_owned(), load: *load, round, measured })
    }

    fn own(&self, subject: usize) -> Own {
        self.0[subject].own()
    }
}

/// Gives every subject its turns. Calls `before` at the start of each.
pub fn measure<L: Copy + Display, M>(
    subjects: &mut [Box<AnySubject<L, M>>],
    plan: &Plan<L>,
    before: impl FnMut(Turn<'_, L>),
) -> Turns<Run<L, M>> {
    take_turns(&mut All(subjects), &plan.loads, plan.rounds, before)
}

impl<L, M> Measurement<L, M>
where
    Self: SavedReport,
{
    /// Makes a report of `turns`.
    pub fn new(
        environment: Environment,
        command: impl Into<String>,
        plan: Plan<L>,
        subjects: &[Box<AnySubject<L, M>>],
        turns: Turns<Run<L, M>>,
    ) -> Self {
        let described = subjects.iter().map(|one| Described::new(one.name(), one.about()));
        let subjects = described.collect();
        let (format, command, Turns { runs, faults }) = (Self::FORMAT, command.into(), turns);
        Self { format, environment, command, plan, subjects, runs, faults }
    }
}

impl<L: Display, M> Measurement<L, M> {
    /// Formats a table for each load of which `rows` returns any. The load is its title, the lines
    /// of `below` follow it, and an empty line ends it. Headings are bold if `colour`.
    pub(crate) fn tables<const N: usize>(
        &self,
        headings: &[&str; N],
        colour: bool,
        rows: impl Fn(&L) -> Vec<[String; N]>,
        below: impl Fn(&L) -> String,
    ) -> String {
        let table = |load: &L| {
            let rows = rows(load);
            let table = titled(&load.to_string(), headings, &rows, colour);
            (!rows.is_empty()).then(|| table + &below(load) + "\n")
        };
        self.plan.loads.iter().filter_map(table).collect()
    }

    /// Returns the rows of those subjects for which `row` returns one, by their names.
    pub(crate) fn rows<R>(&self, row: impl FnMut(&String) -> Option<R>) -> Vec<R> {
        self.subjects.iter().map(|one| &one.name).filter_map(row).collect()
    }
}

impl<L: PartialEq, M: Measured> Measurement<L, M> {
    /// Returns the results of one subject with one load, in the order of the rounds.
    pub(crate) fn turns<'a>(
        &'a self,
        load: &'a L,
        subject: &'a str,
    ) -> impl Iterator<Item = M> + Clone + 'a {
        let fits = move |run: &&Run<L, M>| run.subject == subject && run.load == *load;
        self.runs.iter().filter(fits).map(|run| run.measured)
    }
}

impl<L: PartialEq + Display, M: Measured> Measurement<L, M> {
    /// Formats a row for each load and subject that this report and `before` have, with the mean of
    /// a time in ns. A difference counts as real if it exceeds half the 99 % confidence interval of
    /// the means' difference (Welch).
    pub(crate) fn compare_times(&self, before: &Self, time_ns: impl Fn(M) -> u64) -> String {
        let mut rows = Vec::new();
        for load in &self.plan.loads {
            for subject in &self.subjects {
                let times = |report: &Self| -> Vec<f64> {
                    report.turns(load, &subject.name).map(|one| time_ns(one) as f64).collect()
                };
                let name = format!("{load} {}", subject.name);
                rows.extend(time_row(name, &times(before), &times(self), |ns| human(ns as u64)));
            }
        }
        time_table(&rows)
    }
}

impl<L, M> SavedReport for Measurement<L, M>
where
    L: Serialize + DeserializeOwned,
    M: Measured + Serialize + DeserializeOwned,
{
    const KIND: &'static str = M::KIND;

    fn format(&self) -> u32 {
        self.format
    }

    fn faults(&self) -> &[Fault] {
        &self.faults
    }
}
