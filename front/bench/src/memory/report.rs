//! A report of a measurement of memory, with the context needed to judge and repeat it.

use anyhow::Result;
use serde::{Deserialize, Serialize};

use super::MemoryLoad;
use crate::environment::Environment;
use crate::json::SavedReport;
use crate::statistics::median;
use crate::turns::{Described, Fault, Subjects, Turn, Turns, take_turns};

/// The result of a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MemoryMeasured {
    /// A sandbox took memory and touched all of it, which was zeros.
    Given {
        /// Time from the request until the memory could be touched, ns.
        ready_ns: u64,
        /// Time from then until each page was written to, ns.
        touch_ns: u64,
    },
    /// A sandbox took memory and touched some of it, which was as it is to begin.
    Set {
        /// Time from the request until the memory could be touched, ns.
        ready_ns: u64,
        /// Time from then until all of these pages were written to, ns.
        touch_ns: u64,
        /// The median of the times of a page's first touch, ns.
        fault_ns: u64,
        /// The memory that the sandbox had of its own then, bytes.
        own_bytes: u64,
    },
    /// A device accessed memory.
    Accessed {
        /// The number of accesses, at least 1.
        count: u64,
        /// Time of all accesses together, ns.
        elapsed_ns: u64,
    },
}

/// A time that is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quantity {
    /// From the request until memory may be touched.
    Ready,
    /// From then until each page was written to.
    Touch,
    /// The first touch of one page.
    Fault,
    /// One access of a device.
    Access,
}

impl Quantity {
    /// Returns the quantities of a load.
    pub(super) fn of(load: &MemoryLoad) -> &'static [Self] {
        match load {
            MemoryLoad::Give { .. } => &[Self::Ready, Self::Touch],
            MemoryLoad::Set { .. } => &[Self::Ready, Self::Touch, Self::Fault],
            MemoryLoad::Gate(_) => &[Self::Access],
        }
    }

    /// Returns the name for tables.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Ready => "ready",
            Self::Touch => "touch",
            Self::Fault => "fault",
            Self::Access => "access",
        }
    }

    /// Returns the time in a result in ns, or `None` if the result has no such time.
    fn ns(self, measured: &MemoryMeasured) -> Option<f64> {
        use MemoryMeasured::{Given, Set};
        match (self, *measured) {
            (Self::Ready, Given { ready_ns, .. } | Set { ready_ns, .. }) => Some(ready_ns as f64),
            (Self::Touch, Given { touch_ns, .. } | Set { touch_ns, .. }) => Some(touch_ns as f64),
            (Self::Fault, Set { fault_ns, .. }) => Some(fault_ns as f64),
            (Self::Access, MemoryMeasured::Accessed { count, elapsed_ns }) => {
                Some(elapsed_ns as f64 / count.max(1) as f64)
            }
            _ => None,
        }
    }
}

/// Memory that can be measured.
pub trait MemorySubject {
    /// Returns the name for tables.
    fn name(&self) -> &str;

    /// Describes the subject in a sentence.
    fn about(&self) -> String;

    /// Returns whether the load is one for this subject, on any host.
    fn takes(&self, load: &MemoryLoad) -> bool;

    /// Returns what this host lacks for the load, and the remedy, or `None` if it lacks nothing.
    fn lacks(&self, load: &MemoryLoad) -> Option<String>;

    /// Runs the load once.
    ///
    /// # Errors
    /// An obstacle, or memory that was not zero.
    fn run(&mut self, load: &MemoryLoad) -> Result<MemoryMeasured>;
}

/// The loads and rounds of a measurement.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryPlan {
    /// The loads, one after the other.
    pub loads: Vec<MemoryLoad>,
    /// The number of turns of each subject with each load that gives memory.
    pub rounds: u32,
    /// The number of turns of each subject with each load of a device: many short ones, since
    /// differences are small.
    pub gate_rounds: u32,
}

impl MemoryPlan {
    fn rounds_of(&self, load: &MemoryLoad) -> u32 {
        match load {
            MemoryLoad::Give { .. } | MemoryLoad::Set { .. } => self.rounds,
            MemoryLoad::Gate(_) => self.gate_rounds,
        }
    }
}

/// One turn of one subject.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryRun {
    /// The subject's name.
    pub subject: String,
    /// The load.
    pub load: MemoryLoad,
    /// The number of the round, from 0.
    pub round: u32,
    /// The result.
    pub measured: MemoryMeasured,
}

/// A subject that this host cannot run with a load.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeftOut {
    /// The subject's name.
    pub subject: String,
    /// The load.
    pub load: MemoryLoad,
    /// The thing that the host lacks, and the remedy.
    pub reason: String,
}

/// All results of one command, stored as JSON.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MemoryReport {
    /// Version of this format: [`SavedReport::FORMAT`].
    pub format: u32,
    /// The machine and the versions of programs.
    pub environment: Environment,
    /// The command that measured, as it was typed.
    pub command: String,
    /// The loads and rounds.
    pub plan: MemoryPlan,
    /// The subjects, in the order of their turns.
    pub subjects: Vec<Described>,
    /// The results of all turns, in their order.
    pub runs: Vec<MemoryRun>,
    /// Turns that failed or are void.
    pub faults: Vec<Fault>,
    /// Loads that this host cannot run.
    #[serde(default)]
    pub left_out: Vec<LeftOut>,
}

/// A time of one subject with one load over the rounds, in ns.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MemoryFigures {
    /// The median.
    pub median_ns: f64,
    /// The least and the greatest.
    pub range_ns: (f64, f64),
}

struct Given<'a> {
    subjects: &'a mut [Box<dyn MemorySubject>],
    left_out: &'a [LeftOut],
}

impl Subjects for Given<'_> {
    type Load = MemoryLoad;
    type Run = MemoryRun;

    fn count(&self) -> usize {
        self.subjects.len()
    }

    fn name(&self, subject: usize) -> String {
        self.subjects[subject].name().to_owned()
    }

    fn takes(&self, subject: usize, load: &MemoryLoad) -> bool {
        let subject = &self.subjects[subject];
        let lacks = |out: &LeftOut| out.subject == subject.name() && out.load == *load;
        subject.takes(load) && !self.left_out.iter().any(lacks)
    }

    fn run(&mut self, subject: usize, load: &MemoryLoad, round: u32) -> Result<MemoryRun> {
        let subject = &mut self.subjects[subject];
        let measured = subject.run(load)?;
        Ok(MemoryRun { subject: subject.name().to_owned(), load: *load, round, measured })
    }
}

/// Gives every subject its turns. Calls `before` at the start of each. Returns the results, and the
/// turns that this host cannot run.
pub fn measure_memory(
    subjects: &mut [Box<dyn MemorySubject>],
    plan: &MemoryPlan,
    mut before: impl FnMut(Turn<'_, MemoryLoad>),
) -> (Turns<MemoryRun>, Vec<LeftOut>) {
    let left_out = left_out(subjects, &plan.loads);
    let mut given = Given { subjects, left_out: &left_out };
    let able = |load| (0..given.count()).filter(|one| given.takes(*one, load)).count();
    let turns_of = |load| able(load) * plan.rounds_of(load) as usize;
    let (turns, mut done) = (plan.loads.iter().map(turns_of).sum(), 0);
    let mut all = Turns { runs: Vec::new(), faults: Vec::new() };
    for load in &plan.loads {
        let one = std::slice::from_ref(load);
        let taken = take_turns(&mut given, one, plan.rounds_of(load), |turn| {
            before(Turn { done, turns, ..turn });
            done += 1;
        });
        all.runs.extend(taken.runs);
        all.faults.extend(taken.faults);
    }
    (all, left_out)
}

fn left_out(subjects: &[Box<dyn MemorySubject>], loads: &[MemoryLoad]) -> Vec<LeftOut> {
    let of_load = |load: &MemoryLoad| {
        let able = subjects.iter().filter(|subject| subject.takes(load));
        let out = able.filter_map(|subject| {
            let (subject, reason) = (subject.name().to_owned(), subject.lacks(load)?);
            Some(LeftOut { subject, load: *load, reason })
        });
        out.collect::<Vec<_>>()
    };
    loads.iter().flat_map(of_load).collect()
}

impl SavedReport for MemoryReport {
    const KIND: &'static str = "memory";

    fn format(&self) -> u32 {
        self.format
    }

    fn faults(&self) -> &[Fault] {
        &self.faults
    }
}

impl MemoryReport {
    /// Makes a report of the results of [`measure_memory`].
    pub fn new(
        environment: Environment,
        command: impl Into<String>,
        plan: MemoryPlan,
        subjects: &[Box<dyn MemorySubject>],
        (turns, left_out): (Turns<MemoryRun>, Vec<LeftOut>),
    ) -> Self {
        let described = subjects.iter().map(|one| Described::new(one.name(), one.about()));
        let subjects = described.collect();
        let (format, command, Turns { runs, faults }) = (Self::FORMAT, command.into(), turns);
        Self { format, environment, command, plan, subjects, runs, faults, left_out }
    }

    /// Returns a time of one subject with one load in ns, in the order of the rounds.
    pub(super) fn times(&self, load: &MemoryLoad, subject: &str, quantity: Quantity) -> Vec<f64> {
        let fits = |run: &&MemoryRun| run.subject == subject && run.load == *load;
        let runs = self.runs.iter().filter(fits);
        runs.filter_map(|run| quantity.ns(&run.measured)).collect()
    }

    /// Returns a time over the rounds, or `None` if it was not measured.
    pub fn figures(
        &self,
        load: &MemoryLoad,
        subject: &str,
        quantity: Quantity,
    ) -> Option<MemoryFigures> {
        let times = self.times(load, subject, quantity);
        let least = times.iter().copied().reduce(f64::min)?;
        let most = times.iter().copied().reduce(f64::max)?;
        Some(MemoryFigures { median_ns: median(times), range_ns: (least, most) })
    }

    /// Returns the memory in bytes that sandboxes had of their own after they had touched some, the
    /// median over the rounds, or `None` if it was not measured.
    pub(super) fn own_bytes(&self, load: &MemoryLoad, subject: &str) -> Option<f64> {
        let fits = |run: &&MemoryRun| run.subject == subject && run.load == *load;
        let own = |run: &MemoryRun| match run.measured {
            MemoryMeasured::Set { own_bytes, .. } => Some(own_bytes as f64),
            _ => None,
        };
        let all: Vec<f64> = self.runs.iter().filter(fits).filter_map(own).collect();
        (!all.is_empty()).then(|| median(all))
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Makes a report of subjects with these times in microseconds, round by round: of memory until
    /// it is ready, and ten times as long until it is touched, and the same number of nanoseconds
    /// for an access.
    pub(crate) fn report(loads: &[&str], subjects: &[(&str, &[u64])]) -> MemoryReport {
        let loads: Vec<MemoryLoad> = loads.iter().map(|text| text.parse().unwrap()).collect();
        let mut runs = Vec::new();
        for (load, (name, times)) in loads.iter().flat_map(|l| subjects.iter().map(move |s| (l, s)))
        {
            for (round, us) in (0..).zip(*times) {
                let measured = match load {
                    MemoryLoad::Give { bytes, .. } => MemoryMeasured::Given {
                        ready_ns: us * 1000,
                        touch_ns: us * 10_000 * (bytes >> 20),
                    },
                    MemoryLoad::Set { pages, .. } => MemoryMeasured::Set {
                        ready_ns: us * 1000,
                        touch_ns: us * pages,
                        fault_ns: *us,
                        own_bytes: pages << 12,
                    },
                    MemoryLoad::Gate(_) => {
                        MemoryMeasured::Accessed { count: 1000, elapsed_ns: us * 1000 }
                    }
                };
                runs.push(MemoryRun { subject: (*name).to_owned(), load: *load, round, measured });
            }
        }
        let described =
            |(name, _): &(&str, _)| Described { name: (*name).to_owned(), about: "<&>".into() };
        MemoryReport {
            format: MemoryReport::FORMAT,
            environment: Environment::default(),
            command: "bench memory".into(),
            plan: MemoryPlan { loads, rounds: 3, gate_rounds: 3 },
            subjects: subjects.iter().map(described).collect(),
            runs,
            faults: Vec::new(),
            left_out: Vec::new(),
        }
    }

    #[test]
    fn figures_are_medians_and_survive_json() {
        let report = report(&["128M-4k", "gate-pin"], &[("pool", &[30, 10, 20]), ("none", &[])]);
        let [give, gate] = report.plan.loads[..] else { panic!("two loads") };
        let of = |load, name, quantity| report.figures(load, name, quantity);
        let ready = MemoryFigures { median_ns: 20_000.0, range_ns: (10_000.0, 30_000.0) };
        assert_eq!(of(&give, "pool", Quantity::Ready), Some(ready));
        assert_eq!(of(&gate, "pool", Quantity::Access).unwrap().median_ns, 20.0);
        assert_eq!(of(&gate, "pool", Quantity::Touch), None);
        assert_eq!(of(&give, "none", Quantity::Ready), None);
        assert_eq!(MemoryReport::from_json(&report.to_json().unwrap()).unwrap(), report);
        assert!(MemoryReport::from_json("{}").is_err());
    }

    /// A subject that takes one load and lacks something for another.
    struct Picky;

    impl MemorySubject for Picky {
        fn name(&self) -> &str {
            "picky"
        }

        fn about(&self) -> String {
            String::new()
        }

        fn takes(&self, load: &MemoryLoad) -> bool {
            matches!(load, MemoryLoad::Gate(_))
        }

        fn lacks(&self, load: &MemoryLoad) -> Option<String> {
            (load.to_string() == "gate-pin").then(|| "needs a pin".to_owned())
        }

        fn run(&mut self, _: &MemoryLoad) -> Result<MemoryMeasured> {
            Ok(MemoryMeasured::Accessed { count: 1, elapsed_ns: 1 })
        }
    }

    #[test]
    fn a_load_that_the_host_cannot_run_is_named_with_the_reason() {
        let loads = ["128M-4k", "gate-pin", "gate-word"].map(|text| text.parse().unwrap());
        let plan = MemoryPlan { loads: loads.to_vec(), rounds: 1, gate_rounds: 2 };
        let mut subjects: Vec<Box<dyn MemorySubject>> = vec![Box::new(Picky)];
        let (turns, left_out) = measure_memory(&mut subjects, &plan, |_| {});
        assert!(turns.runs.iter().all(|run| run.load == loads[2]));
        assert_eq!(turns.runs.len(), 2);
        let (subject, reason) = ("picky".to_owned(), "needs a pin".to_owned());
        assert_eq!(left_out, [LeftOut { subject, load: loads[1], reason }]);
    }
}
