//! The model of measurements: a [`Subject`] runs loads in turn, each [`Run`] has a result, and
//! [`Figure`]s of the results are compared.
//!
//! A benchmark is a type of loads, a type of results ([`Measured`]) with its figures, and subjects.
//! The report ([`Measurement`]) has everything that is needed to judge and repeat it. Its tables,
//! its picture and its comparison with another one are in the module `presentation`, once for all
//! benchmarks.

use std::fmt::Display;
use std::time::Duration;

use anyhow::Result;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::Times;
use crate::environment::Environment;
use crate::figure::{Figure, OverRounds};
use crate::json::SavedReport;
use crate::outside::Own;
use crate::turns::{Described, Fault, LeftOut, Subjects, Turn, Turns, take_turns};

/// The result of a turn.
pub trait Measured: Clone + 'static {
    /// The load of a turn.
    type Load: Copy + PartialEq + Display + 'static;

    /// The kind of report, for errors.
    const KIND: &'static str;
    /// The beginning of the title of a report's picture: what the picture shows.
    const SHOWS: &'static str = Self::KIND;
    /// The word for a turn in the titles of pictures, in the singular.
    const TURN: &'static str = "turn";
    /// The version of the report's format.
    const FORMAT: u32 = 1;
    /// `true` if plans have one round by design. Comparisons then cannot estimate the noise.
    const HAS_ONE_ROUND: bool = false;

    /// Checks the values of a parsed result as far as their types allow wrong ones.
    ///
    /// # Errors
    /// The result contradicts itself.
    fn check(&self) -> Result<()> {
        Ok(())
    }

    /// Returns the figures by which subjects with a load are compared. Tables show them with their
    /// spread, and pictures as bars.
    fn figures(load: &Self::Load) -> &'static [Figure<Self::Load, Self>];

    /// Returns further figures of a load, which tables show behind those that are compared.
    fn further(_load: &Self::Load) -> &'static [Figure<Self::Load, Self>] {
        &[]
    }

    /// Returns the name of a load in pictures.
    fn title(load: &Self::Load) -> String {
        load.to_string()
    }

    /// Returns whether turns with a load have their own number of rounds ([`Plan::gate_rounds`]).
    fn is_gate(_load: &Self::Load) -> bool {
        false
    }

    /// Returns the part of the turn, 0 to 1, for which a measuring thread waited for its processor.
    /// Returns `None` if such threads share processors with others of the measurement.
    fn waited(&self) -> Option<f64> {
        None
    }
}

/// A subject that can be measured.
pub trait Subject {
    /// The load of a turn.
    type Load;
    /// The result of a turn.
    type Measured;

    /// Returns the name for tables.
    fn name(&self) -> &str;

    /// Returns a sentence that describes the subject.
    fn about(&self) -> String;

    /// Returns whether the load fits this subject, whatever the host.
    fn takes(&self, _load: &Self::Load) -> bool {
        true
    }

    /// Returns what this host lacks for the load, and the remedy, or `None` if it lacks nothing.
    fn lacks(&self, _load: &Self::Load) -> Option<String> {
        None
    }

    /// Waits until the host has finished the work that earlier turns left to it. Returns the reason
    /// why the next turn is void if the host does not finish, and otherwise `None`.
    fn settle(&self) -> Option<String> {
        None
    }

    /// Returns whether the subject takes no further turns, because a signal has ended the
    /// measurement.
    fn is_ended(&self) -> bool {
        false
    }

    /// Runs a turn.
    ///
    /// # Errors
    /// A sentence about the obstacle.
    fn run(&mut self, load: &Self::Load) -> Result<Self::Measured>;

    /// Returns the processes that do the work of the subject's turns.
    fn own(&self) -> Own {
        Own::Children
    }
}

/// A subject of any type, with this type of load and of result.
pub type AnySubject<L, M> = dyn Subject<Load = L, Measured = M>;

/// The loads and rounds of a measurement.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan<L> {
    /// The loads, one after the other. Earlier reports of disks have another name for them.
    #[serde(alias = "workloads")]
    pub loads: Vec<L>,
    /// The number of turns of each subject with each load.
    pub rounds: u32,
    /// The number of turns of each subject with a load of a gate ([`Measured::is_gate`]). There are
    /// many short turns of these, since their differences are small. `None` stands for `rounds`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gate_rounds: Option<u32>,
    /// The times of each turn, if the plan sets them.
    #[serde(flatten)]
    pub times: Option<Times>,
}

impl<L> Plan<L> {
    /// Makes a plan of turns that end by themselves.
    pub fn new(loads: Vec<L>, rounds: u32) -> Self {
        Self { loads, rounds, gate_rounds: None, times: None }
    }

    /// Makes a plan of turns that last as long as `times` say.
    pub fn timed(loads: Vec<L>, rounds: u32, times: Times) -> Self {
        Self { times: Some(times), ..Self::new(loads, rounds) }
    }

    /// Returns the measured time of each turn, or zero if the turns end by themselves.
    pub fn time(&self) -> Duration {
        self.times.map_or(Duration::ZERO, |times| times.time)
    }
}

/// One turn of one subject.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Run<L, M> {
    /// The subject's name.
    pub subject: String,
    /// The load. Earlier reports of disks have another name for it.
    #[serde(alias = "workload")]
    pub load: L,
    /// The number of the round, from 0.
    pub round: u32,
    /// The result.
    pub measured: M,
}

/// The further results of a benchmark that has none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NoExtra {}

/// All results of one command, stored as JSON.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Measurement<L, M, E = NoExtra> {
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
    /// Loads that this host cannot run.
    #[serde(default)]
    pub left_out: Vec<LeftOut>,
    /// Further results of a type that this benchmark alone has.
    #[serde(flatten)]
    pub extra: E,
}

/// The subjects of a measurement, with the turns that this host cannot run.
struct All<'a, L, M> {
    subjects: &'a mut [Box<AnySubject<L, M>>],
    plan: &'a Plan<L>,
    left_out: Vec<LeftOut>,
}

impl<M: Measured> Subjects for All<'_, M::Load, M> {
    type Load = M::Load;
    type Run = Run<M::Load, M>;

    fn count(&self) -> usize {
        self.subjects.len()
    }

    fn name(&self, subject: usize) -> String {
        self.subjects[subject].name().to_owned()
    }

    fn rounds(&self, load: &M::Load) -> Option<u32> {
        self.plan.gate_rounds.filter(|_| M::is_gate(load))
    }

    fn takes(&self, subject: usize, load: &M::Load) -> bool {
        let (subject, text) = (&self.subjects[subject], load.to_string());
        let lacks = |out: &LeftOut| out.subject == subject.name() && out.load == text;
        subject.takes(load) && !self.left_out.iter().any(lacks)
    }

    fn settle(&self, subject: usize) -> Option<String> {
        self.subjects[subject].settle()
    }

    fn is_ended(&self, subject: usize) -> bool {
        self.subjects[subject].is_ended()
    }

    fn run(&mut self, subject: usize, load: &M::Load, round: u32) -> Result<Run<M::Load, M>> {
        let subject = &mut self.subjects[subject];
        let measured = subject.run(load)?;
        Ok(Run { subject: subject.name().to_owned(), load: *load, round, measured })
    }

    fn own(&self, subject: usize) -> Own {
        self.subjects[subject].own()
    }

    fn waited(&self, run: &Run<M::Load, M>) -> Option<f64> {
        run.measured.waited()
    }
}

/// Returns the turns that this host cannot run.
fn left_out<L: Display, M>(subjects: &[Box<AnySubject<L, M>>], loads: &[L]) -> Vec<LeftOut> {
    let of_load = |load: &L| {
        let able = subjects.iter().filter(|subject| subject.takes(load));
        let out = able.filter_map(|subject| {
            let (subject, reason) = (subject.name().to_owned(), subject.lacks(load)?);
            Some(LeftOut { subject, load: load.to_string(), reason })
        });
        out.collect::<Vec<_>>()
    };
    loads.iter().flat_map(of_load).collect()
}

impl<M: Measured, E: Default> Measurement<M::Load, M, E>
where
    Self: SavedReport,
{
    /// Gives every subject its turns, and makes a report of them. Calls `before` at the start of
    /// each turn.
    pub fn take(
        environment: Environment,
        command: impl Into<String>,
        plan: Plan<M::Load>,
        subjects: &mut [Box<AnySubject<M::Load, M>>],
        before: impl FnMut(Turn<'_, M::Load>),
    ) -> Self {
        let described = subjects.iter().map(|one| Described::new(one.name(), one.about()));
        let (described, left_out) = (described.collect(), left_out(subjects, &plan.loads));
        let mut all = All { subjects, plan: &plan, left_out };
        let Turns { runs, faults } = take_turns(&mut all, &plan.loads, plan.rounds, before);
        let left_out = all.left_out;
        let (format, command, subjects) = (Self::FORMAT, command.into(), described);
        let extra = E::default();
        Self { format, environment, command, plan, subjects, runs, faults, left_out, extra }
    }
}

impl<L, M, E> Measurement<L, M, E> {
    /// Returns whether the sandboxes were hollow: no guest code ran.
    pub fn is_hollow(&self) -> bool {
        self.environment.accelerator == "hollow"
    }
}

impl<M: Measured, E> Measurement<M::Load, M, E> {
    /// Returns the results of one subject with one load, in the order of the rounds.
    pub(crate) fn turns<'a>(
        &'a self,
        load: &'a M::Load,
        subject: &'a str,
    ) -> impl Iterator<Item = &'a M> + Clone + 'a {
        let fits = move |run: &&Run<M::Load, M>| run.subject == subject && run.load == *load;
        self.runs.iter().filter(fits).map(|run| &run.measured)
    }

    /// Returns the values of a figure for one subject with one load, in the order of the rounds.
    pub(crate) fn values(
        &self,
        load: &M::Load,
        subject: &str,
        figure: &Figure<M::Load, M>,
    ) -> Vec<f64> {
        self.turns(load, subject).filter_map(|one| (figure.of)(load, one)).collect()
    }

    /// Returns the median and the range of a figure over the rounds, or `None` if no turn has it.
    pub fn over_rounds(
        &self,
        load: &M::Load,
        subject: &str,
        figure: &Figure<M::Load, M>,
    ) -> Option<OverRounds> {
        OverRounds::of(self.values(load, subject, figure))
    }
}

impl<M, E> SavedReport for Measurement<M::Load, M, E>
where
    M: Measured + Serialize + DeserializeOwned,
    M::Load: Serialize + DeserializeOwned,
    E: Serialize + DeserializeOwned,
{
    const FORMAT: u32 = M::FORMAT;
    const KIND: &'static str = M::KIND;

    fn faults(&self) -> &[Fault] {
        &self.faults
    }

    fn check(&self) -> Result<()> {
        self.runs.iter().try_for_each(|run| run.measured.check())
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::fmt::Debug;
    use std::str::FromStr;

    use super::*;

    impl<M: Measured, E: Default> Measurement<M::Load, M, E>
    where
        Self: SavedReport,
    {
        /// Makes a report with these loads, of subjects with these values, round by round, the same
        /// with each load. `measured` makes the result of a load, a subject and a round.
        pub(crate) fn sample<T>(
            command: &str,
            loads: &[&str],
            subjects: &[(&str, &[T])],
            measured: impl Fn(&M::Load, (&str, u32), &T) -> M,
        ) -> Self
        where
            M::Load: FromStr<Err: Debug>,
        {
            let loads = loads.iter().map(|text| text.parse().unwrap()).collect();
            Self::sample_of(command, loads, subjects, measured)
        }

        /// Makes a report as [`Self::sample`], with loads that are not parsed from text.
        pub(crate) fn sample_of<T>(
            command: &str,
            loads: Vec<M::Load>,
            subjects: &[(&str, &[T])],
            measured: impl Fn(&M::Load, (&str, u32), &T) -> M,
        ) -> Self {
            let mut runs = Vec::new();
            for load in &loads {
                for &(name, values) in subjects {
                    for (round, value) in (0..).zip(values) {
                        let (subject, load) = (name.to_owned(), *load);
                        let measured = measured(&load, (name, round), value);
                        runs.push(Run { subject, load, round, measured });
                    }
                }
            }
            let described = |(name, _): &(&str, &[T])| Described::new(name, "<&>".to_owned());
            Self {
                format: Self::FORMAT,
                environment: Environment::default(),
                command: command.to_owned(),
                plan: Plan::new(loads, 3),
                subjects: subjects.iter().map(described).collect(),
                runs,
                faults: Vec::new(),
                left_out: Vec::new(),
                extra: E::default(),
            }
        }
    }

    /// The time of a turn, ns.
    #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
    pub(crate) struct Taken(pub u64);

    type Report = Measurement<u32, Taken>;

    const TAKEN: Figure<u32, Taken> =
        Figure::less("taken", "the time", |_, one| Some(one.0 as f64), |ns| format!("{ns} ns"));
    const RATE: Figure<u32, Taken> = Figure {
        name: "rate",
        about: "the rate",
        more_is_better: true,
        of: |_, one| Some(1e9 / one.0 as f64),
        text: |rate| format!("{rate:.0}/s"),
        beside: &[TAKEN],
    };

    impl Measured for Taken {
        type Load = u32;

        const KIND: &'static str = "times";

        fn figures(_: &u32) -> &'static [Figure<u32, Self>] {
            const BOTH: &[Figure<u32, Taken>] = &[TAKEN, RATE];
            BOTH
        }

        fn is_gate(load: &u32) -> bool {
            *load > 5
        }
    }

    /// A subject that takes loads above 3, and whose host lacks something for load 4.
    struct Picky;

    impl Subject for Picky {
        type Load = u32;
        type Measured = Taken;

        fn name(&self) -> &str {
            "picky"
        }

        fn about(&self) -> String {
            String::new()
        }

        fn takes(&self, load: &u32) -> bool {
            *load > 3
        }

        fn lacks(&self, load: &u32) -> Option<String> {
            (*load == 4).then(|| "needs a pin".to_owned())
        }

        fn run(&mut self, load: &u32) -> Result<Taken> {
            Ok(Taken(u64::from(*load) + 1))
        }
    }

    #[test]
    fn a_load_that_the_host_cannot_run_is_named_and_gates_have_their_own_rounds() {
        let plan = Plan { gate_rounds: Some(2), ..Plan::new(vec![3, 4, 5, 6], 1) };
        let mut subjects: Vec<Box<AnySubject<u32, Taken>>> = vec![Box::new(Picky)];
        let mut turns = Vec::new();
        let report = Report::take(Environment::default(), "test", plan, &mut subjects, |turn| {
            turns.push((turn.done, turn.turns))
        });
        assert_eq!(turns, [(0, 3), (1, 3), (2, 3)]);
        let loads = report.runs.iter().map(|run| (run.load, run.round));
        assert_eq!(loads.collect::<Vec<_>>(), [(5, 0), (6, 0), (6, 1)]);
        assert!(report.obstacles().starts_with("LEFT OUT: picky with 4: needs a pin\n"));
        assert_eq!(Report::from_json(&report.to_json().unwrap()).unwrap(), report);
    }
}
