//! Turns: in each round of a load, each subject that takes the load runs it once, so that a drift
//! of the machine meets all subjects alike.
//!
//! A subject that fails with a load has no further turn with it, and all others go on. Before each
//! turn the host ends what earlier turns left it to do and this process becomes idle, and then the
//! machine is looked at: figures of a machine that is busy with something else are void.

use std::fmt::Display;
use std::time::{Duration, Instant};

use anyhow::Result;
use serde::{Deserialize, Serialize};

use crate::cpu_time::own_time;

/// The time for which the machine is looked at before a turn.
const LOOK: Duration = Duration::from_millis(50);
/// The processors' time that an idle process may use during such a look.
const IDLE: Duration = Duration::from_millis(2);
/// The longest time that this process is given to become idle.
const PATIENCE: Duration = Duration::from_secs(20);
/// The part of all processors that others may use before a turn is void.
const MOST_BUSY: f64 = 0.2;
/// The part of all processors' time that a hypervisor may take away during a turn.
const MOST_STOLEN: f64 = 0.05;

/// A turn that is about to begin.
#[derive(Clone, Copy, Debug)]
pub struct Turn<'a, L> {
    /// The subject's name.
    pub subject: &'a str,
    /// The load.
    pub load: &'a L,
    /// The number of the round, from 0.
    pub round: u32,
    /// The number of turns done so far.
    pub done: usize,
    /// The number of turns in all, if none fails.
    pub turns: usize,
}

/// A turn that counts for nothing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fault {
    /// The subject's name.
    pub subject: String,
    /// The load, as in tables.
    pub load: String,
    /// The number of the round, from 0.
    pub round: u32,
    /// The reason.
    pub reason: String,
    /// `true` if the turn failed. `false` if it was measured on a busy machine, or on one that was
    /// not done with earlier turns.
    pub failed: bool,
}

/// The results of turns.
#[derive(Debug)]
pub struct Turns<R> {
    /// The results, in the order of the turns.
    pub runs: Vec<R>,
    /// Turns that failed, and turns that are void.
    pub faults: Vec<Fault>,
}

/// The subjects' side of [`take_turns`].
pub trait Subjects {
    /// The load of a turn.
    type Load: Display;
    /// The result of a turn.
    type Run;

    /// Returns the number of subjects.
    fn count(&self) -> usize;

    /// Returns the name of a subject.
    fn name(&self, subject: usize) -> String;

    /// Returns whether a subject can run this load.
    fn takes(&self, subject: usize, load: &Self::Load) -> bool;

    /// Waits until the host has ended what earlier turns left it to do. Returns the reason why the
    /// turn that follows is void if the host does not end it.
    fn settle(&self, _subject: usize) -> Option<String> {
        None
    }

    /// Runs a turn.
    ///
    /// # Errors
    /// A sentence about the failure.
    fn run(&mut self, subject: usize, load: &Self::Load, round: u32) -> Result<Self::Run>;
}

/// Gives every subject its turns. Calls `before` at the start of each.
pub fn take_turns<S: Subjects>(
    subjects: &mut S,
    loads: &[S::Load],
    rounds: u32,
    mut before: impl FnMut(Turn<'_, S::Load>),
) -> Turns<S::Run> {
    let turns = loads.iter().map(|load| able(subjects, load).len()).sum::<usize>();
    let turns = turns * rounds as usize;
    let (mut taken, mut done) = (Turns { runs: Vec::new(), faults: Vec::new() }, 0);
    for load in loads {
        let mut able = able(subjects, load);
        for round in 0..rounds {
            able.retain(|&one| {
                before(Turn { subject: &subjects.name(one), load, round, done, turns });
                done += 1;
                take_turn(subjects, one, load, round, &mut taken)
            });
        }
    }
    taken
}

/// Runs a turn of the subject `one`, and adds what came of it to `taken`. Returns whether the
/// subject may have further turns with the load.
fn take_turn<S: Subjects>(
    subjects: &mut S,
    one: usize,
    load: &S::Load,
    round: u32,
    taken: &mut Turns<S::Run>,
) -> bool {
    let (subject, text) = (subjects.name(one), load.to_string());
    let fault = |reason, failed| Fault { subject, load: text, round, reason, failed };
    let unsettled = subjects.settle(one);
    let busy = busy_with_others();
    let begun = Processors::read();
    match subjects.run(one, load, round) {
        Ok(run) => {
            taken.runs.push(run);
            let stolen = begun.zip(Processors::read()).map(|(a, b)| b.since(a).stolen());
            let reason = unsettled.or_else(|| disturbance(busy, stolen));
            taken.faults.extend(reason.map(|reason| fault(reason, false)));
            true
        }
        Err(error) => {
            taken.faults.push(fault(format!("{error:#}"), true));
            false
        }
    }
}

/// Returns the subjects that can run a load.
fn able<S: Subjects>(subjects: &S, load: &S::Load) -> Vec<usize> {
    (0..subjects.count()).filter(|one| subjects.takes(*one, load)).collect()
}

/// Returns the reason why a turn is void, given the part of the processors that was busy before it
/// and the part that was taken away during it. Returns `None` if the turn counts.
fn disturbance(busy: Option<f64>, stolen: Option<f64>) -> Option<String> {
    let percent = |part: f64| (part * 100.0).round();
    let busy = busy.filter(|part| *part > MOST_BUSY);
    let busy = busy.map(|part| format!("others used {} % of the processors", percent(part)));
    let stolen = stolen.filter(|part| *part > MOST_STOLEN).map(percent);
    busy.or_else(|| stolen.map(|part| format!("{part} % of the processors' time was stolen")))
}

/// A subject in a report.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Described {
    /// The name in tables.
    pub name: String,
    /// The description.
    pub about: String,
}

impl Described {
    /// Describes a subject.
    pub(crate) fn new(name: &str, about: String) -> Self {
        Self { name: name.to_owned(), about }
    }
}

/// Formats what readers of a table must know about faults: a line for each subject and load that
/// failed, and one for all turns on a busy machine.
pub fn fault_lines(faults: &[Fault]) -> String {
    let mut lines = String::new();
    for fault in faults.iter().filter(|fault| fault.failed) {
        let Fault { subject, load, reason, .. } = fault;
        lines.push_str(&format!("FAILED: {subject} with {load}: {reason}\n"));
    }
    let void: Vec<&Fault> = faults.iter().filter(|fault| !fault.failed).collect();
    if let Some(Fault { subject, load, reason, .. }) = void.first() {
        let (count, plural) = (void.len(), if void.len() == 1 { "" } else { "s" });
        lines.push_str(&format!(
            "VOID: {count} turn{plural} on a busy machine, first {subject} with {load}: {reason}\n"
        ));
    }
    lines
}

/// Formats what stands below the tables of a report: its faults, and what each subject is.
pub(crate) fn foot(faults: &[Fault], subjects: &[Described]) -> String {
    let mut text = fault_lines(faults);
    for Described { name, about } in subjects {
        text.push_str(&format!("{name}: {about}\n"));
    }
    text
}

/// Time of all processors since boot, in the kernel's ticks (proc(5), `/proc/stat`).
#[derive(Clone, Copy, Debug)]
struct Processors {
    busy: u64,
    stolen: u64,
    all: u64,
}

impl Processors {
    fn read() -> Option<Self> {
        Self::parse(&std::fs::read_to_string("/proc/stat").ok()?)
    }

    fn parse(text: &str) -> Option<Self> {
        let words = text.lines().next()?.strip_prefix("cpu ")?.split_ascii_whitespace();
        let ticks: Vec<u64> = words.take(8).map(|word| word.parse().ok()).collect::<Option<_>>()?;
        let [user, nice, system, idle, wait, irq, softirq, stolen] = ticks.try_into().ok()?;
        let busy = user + nice + system + irq + softirq + stolen;
        Some(Self { busy, stolen, all: busy + idle + wait })
    }

    fn since(self, before: Self) -> Self {
        Self {
            busy: self.busy.saturating_sub(before.busy),
            stolen: self.stolen.saturating_sub(before.stolen),
            all: self.all.saturating_sub(before.all),
        }
    }

    fn stolen(self) -> f64 {
        self.stolen as f64 / self.all.max(1) as f64
    }

    /// Returns the part of all processors' time that other processes used, given the time that
    /// this one used meanwhile.
    fn others(self, own: Duration) -> f64 {
        let own = own.as_secs_f64() * rustix::param::clock_ticks_per_second() as f64;
        (self.busy as f64 - own).max(0.0) / self.all.max(1) as f64
    }
}

/// A look at the machine's processors while something is measured.
#[derive(Clone, Copy, Debug)]
pub struct Watch(Option<Processors>);

impl Watch {
    /// Begins to look.
    pub fn begin() -> Self {
        Self(Processors::read())
    }

    /// Returns the reason why what was measured meanwhile is void: others used too much of the
    /// processors, or a hypervisor took too much away. `own` is the processors' time that was
    /// measured; `None` if it is not known, and then others are not looked at. Returns `None` if
    /// it counts.
    pub fn disturbance(self, own: Option<Duration>) -> Option<String> {
        let passed = Processors::read()?.since(self.0?);
        disturbance(own.map(|own| passed.others(own)), Some(passed.stolen()))
    }
}

/// Returns the part of all processors' time that other processes use, seen for [`LOOK`]. Waits
/// first until this process is idle: its threads may still free the memory of the turn before.
fn busy_with_others() -> Option<f64> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let (before, own) = (Processors::read()?, own_time());
        std::thread::sleep(LOOK);
        let (passed, own) = (Processors::read()?.since(before), own_time().saturating_sub(own));
        if own < IDLE || Instant::now() > deadline {
            return Some(passed.others(own));
        }
    }
}

/// Returns the time in nanoseconds for which the machine's processors were busy since boot, all of
/// them together. Returns `None` where the kernel does not say.
pub fn busy_ns() -> Option<u64> {
    let ticks = Processors::read()?.busy;
    Some(ticks.saturating_mul(1_000_000_000) / rustix::param::clock_ticks_per_second().max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Subjects that count their turns; `fails` fails in its second turn.
    struct Counted(Vec<(&'static str, u32)>);

    impl Subjects for Counted {
        type Load = u32;
        type Run = (&'static str, u32, u32);

        fn count(&self) -> usize {
            self.0.len()
        }

        fn name(&self, subject: usize) -> String {
            self.0[subject].0.to_owned()
        }

        fn takes(&self, subject: usize, load: &u32) -> bool {
            self.0[subject].0 != "picky" || *load == 1
        }

        fn settle(&self, subject: usize) -> Option<String> {
            (self.0[subject].0 == "leaves").then(|| "the host is not done".to_owned())
        }

        fn run(&mut self, subject: usize, load: &u32, round: u32) -> Result<Self::Run> {
            let (name, turns) = &mut self.0[subject];
            *turns += 1;
            anyhow::ensure!(*name != "fails" || *turns != 2, "lost its way");
            Ok((name, *load, round))
        }
    }

    #[test]
    fn subjects_take_turns_within_a_round() {
        let mut subjects = Counted(vec![("any", 0), ("picky", 0)]);
        let mut seen = 0;
        let turns = take_turns(&mut subjects, &[1, 2], 2, |turn| {
            assert_eq!((turn.done, turn.turns), (seen, 6));
            seen += 1;
        });
        let all = [("any", 1, 0), ("picky", 1, 0), ("any", 1, 1), ("picky", 1, 1)];
        assert_eq!(turns.runs, [&all[..], &[("any", 2, 0), ("any", 2, 1)]].concat());
        assert!(turns.faults.iter().all(|fault| !fault.failed));
    }

    #[test]
    fn a_subject_that_fails_stops_no_other() {
        let mut subjects = Counted(vec![("fails", 0), ("works", 0)]);
        let turns = take_turns(&mut subjects, &[1, 2], 3, |_| {});
        let of = |name| turns.runs.iter().filter(|run| run.0 == name).count();
        // One turn with the first load, and all with the second.
        assert_eq!((of("fails"), of("works")), (1 + 3, 6));
        let failed: Vec<_> = turns.faults.into_iter().filter(|fault| fault.failed).collect();
        assert_eq!(fault_lines(&failed), "FAILED: fails with 1: lost its way\n");
    }

    #[test]
    fn a_turn_is_void_while_the_host_is_not_done_with_those_before() {
        let turns = take_turns(&mut Counted(vec![("leaves", 0)]), &[1], 2, |_| {});
        assert_eq!(turns.runs.len(), 2);
        let reasons = turns.faults.iter().map(|fault| (fault.reason.as_str(), fault.failed));
        assert_eq!(reasons.collect::<Vec<_>>(), [("the host is not done", false); 2]);
    }

    #[test]
    fn a_busy_machine_makes_figures_void() {
        assert_eq!(disturbance(Some(0.1), Some(0.01)), None);
        assert_eq!(disturbance(None, None), None);
        let busy = disturbance(Some(0.5), None).unwrap();
        assert_eq!(busy, "others used 50 % of the processors");
        let stolen = disturbance(Some(0.1), Some(0.25)).unwrap();
        assert_eq!(stolen, "25 % of the processors' time was stolen");
        let fault = |round| Fault {
            subject: "a".into(),
            load: "b".into(),
            round,
            reason: busy.clone(),
            failed: false,
        };
        let line = "VOID: 2 turns on a busy machine, first a with b: others used 50 % of the \
                    processors\n";
        assert_eq!(fault_lines(&[fault(0), fault(1)]), line);
    }

    #[test]
    fn a_watch_knows_others_by_the_time_that_is_not_ours() {
        assert_eq!(Watch(None).disturbance(None), None);
        // All processors' time since boot is more than nothing and, with all of it as our own, no
        // others had any.
        let boot = Watch(Some(Processors { busy: 0, stolen: 0, all: 0 }));
        let all = boot.disturbance(Some(Duration::from_secs(1 << 40)));
        assert!(all.is_none_or(|reason| reason.ends_with("was stolen")));
    }

    #[test]
    fn time_of_this_process_is_not_that_of_others() {
        let ticks = rustix::param::clock_ticks_per_second();
        let passed = Processors { busy: ticks, stolen: 0, all: 2 * ticks };
        assert_eq!(passed.others(Duration::ZERO), 0.5);
        assert_eq!(passed.others(Duration::from_millis(500)), 0.25);
        // The kernel counts whole ticks, and the clock counts nanoseconds.
        assert_eq!(passed.others(Duration::from_secs(2)), 0.0);
    }

    #[test]
    fn processors_are_parsed() {
        let text = "cpu  10 1 5 100 4 1 1 2 0 0\ncpu0 1 1 1 1 1 1 1 1 0 0\n";
        let first = Processors::parse(text).unwrap();
        assert_eq!((first.busy, first.stolen, first.all), (20, 2, 124));
        assert!(Processors::parse("intr 1").is_none());
        assert!(Processors::read().is_some());
    }
}
