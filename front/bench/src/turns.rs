//! Turns: in each round of a load, each subject that takes the load runs it once, so that a drift
//! of the machine meets all subjects alike.
//!
//! A subject that fails with a load has no further turn with it, and all others go on. Before each
//! turn the host ends what earlier turns left it to do and this process becomes idle. The machine
//! is looked at then and during the turn ([`Watch`]): figures of a machine that is busy with
//! something else are void.

use std::fmt::Display;

use anyhow::Result;
use serde::{Deserialize, Serialize};

use crate::outside::Own;
use crate::svg::printable;
use crate::watch::Watch;

/// The reason of a turn that was not tried: an earlier one, with a smaller load, has failed.
pub const NOT_TRIED: &str = "not tried after an earlier failure";

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

/// A load that this host cannot run with a subject.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeftOut {
    /// The subject's name.
    pub subject: String,
    /// The load, as in tables.
    pub load: String,
    /// The thing that the host lacks, and the remedy.
    pub reason: String,
}

impl LeftOut {
    /// Formats the line for readers of a table.
    pub(crate) fn line(&self) -> String {
        format!("LEFT OUT: {} with {}: {}\n", self.subject, self.load, self.reason)
    }
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

    /// Returns the number of rounds with this load, if it has one of its own.
    fn rounds(&self, _load: &Self::Load) -> Option<u32> {
        None
    }

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

    /// Returns whether a subject has no further turns, such as after a signal.
    fn is_ended(&self, _subject: usize) -> bool {
        false
    }

    /// Returns the processes that do the work of a subject's turns: others should be idle.
    fn own(&self, _subject: usize) -> Own {
        Own::Children
    }

    /// Returns the part of a turn for which a measuring thread waited for its processor. Returns
    /// `None` if such threads share processors with others of the measurement.
    fn waited(&self, _run: &Self::Run) -> Option<f64> {
        None
    }
}

/// Gives every subject its turns, `rounds` with each load that has no number of its own, until it
/// is ended. Calls `before` at the start of each.
pub fn take_turns<S: Subjects>(
    subjects: &mut S,
    loads: &[S::Load],
    rounds: u32,
    mut before: impl FnMut(Turn<'_, S::Load>),
) -> Turns<S::Run> {
    let turns_of = |load: &S::Load| {
        able(subjects, load).len() * subjects.rounds(load).unwrap_or(rounds) as usize
    };
    let turns: usize = loads.iter().map(turns_of).sum();
    let (mut taken, mut done) = (Turns { runs: Vec::new(), faults: Vec::new() }, 0);
    for load in loads {
        let mut able = able(subjects, load);
        for round in 0..subjects.rounds(load).unwrap_or(rounds) {
            able.retain(|&one| {
                // The look at the machine before a turn takes time, too.
                if subjects.is_ended(one) {
                    return false;
                }
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
    let watch = Watch::begin_when_idle(subjects.own(one));
    match subjects.run(one, load, round) {
        Ok(run) => {
            let disturbed = watch.end(subjects.waited(&run));
            taken.runs.push(run);
            taken.faults.extend(unsettled.or(disturbed).map(|reason| fault(reason, false)));
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
/// failed, one for all loads that were not tried with a subject ([`NOT_TRIED`]), and one for all
/// turns on a busy machine.
pub fn fault_lines(faults: &[Fault]) -> String {
    let mut lines = String::new();
    let failed = faults.iter().filter(|fault| fault.failed);
    let (not_tried, tried): (Vec<&Fault>, Vec<&Fault>) =
        failed.partition(|fault| fault.reason == NOT_TRIED);
    for fault in tried {
        let Fault { subject, load, reason, .. } = fault;
        // It may have a guest's words in it.
        let reason = printable(reason);
        lines.push_str(&format!("FAILED: {subject} with {load}: {reason}\n"));
    }
    for of_subject in not_tried.chunk_by(|one, next| one.subject == next.subject) {
        let Some(Fault { subject, load, reason, .. }) = of_subject.first() else { continue };
        let further = match of_subject.len() {
            1 => load.clone(),
            count => format!("{count} further loads, first {load}"),
        };
        lines.push_str(&format!("FAILED: {subject} with {further}: {reason}\n"));
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

/// Formats the number of turns on a busy machine as the end of a picture's title: "; VOID: 2 turns
/// on a busy machine". The text is empty if there is none.
pub fn void_note(faults: &[Fault]) -> String {
    match faults.iter().filter(|fault| !fault.failed).count() {
        0 => String::new(),
        1 => "; VOID: 1 turn on a busy machine".to_owned(),
        count => format!("; VOID: {count} turns on a busy machine"),
    }
}

/// Formats what stands below the tables of a report: its faults, and what each subject is.
pub(crate) fn foot(faults: &[Fault], subjects: &[Described]) -> String {
    let mut text = fault_lines(faults);
    for Described { name, about } in subjects {
        text.push_str(&format!("{name}: {about}\n"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Subjects that count their turns; `fails` fails in its second turn, and `ends` has no third.
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

        fn is_ended(&self, subject: usize) -> bool {
            self.0[subject] == ("ends", 2)
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
    fn a_subject_that_is_ended_has_no_further_turns_and_no_faults() {
        let mut subjects = Counted(vec![("ends", 0), ("works", 0)]);
        let mut begun = Vec::new();
        let turns = take_turns(&mut subjects, &[1, 2], 3, |turn| {
            begun.push(turn.subject.to_owned());
        });
        let of = |name: &str| begun.iter().filter(|one| *one == name).count();
        assert_eq!((of("ends"), of("works"), turns.runs.len()), (2, 6, 8));
        assert!(turns.faults.iter().all(|fault| !fault.failed));
    }

    #[test]
    fn loads_that_were_not_tried_have_one_line_for_each_subject() {
        let fault = |subject: &str, load: &str, reason: &str| Fault {
            subject: subject.into(),
            load: load.into(),
            round: 0,
            reason: reason.into(),
            failed: true,
        };
        let not_tried = [("a", "2"), ("a", "4"), ("b", "4")];
        let not_tried = not_tried.map(|(subject, load)| fault(subject, load, NOT_TRIED));
        let faults = [vec![fault("a", "1", "no memory")], not_tried.to_vec()].concat();
        let lines = "FAILED: a with 1: no memory\n\
                     FAILED: a with 2 further loads, first 2: not tried after an earlier failure\n\
                     FAILED: b with 4: not tried after an earlier failure\n";
        assert_eq!(fault_lines(&faults), lines);
    }

    #[test]
    fn reasons_have_no_control_characters() {
        let [subject, load] = ["a", "b"].map(str::to_owned);
        let reason = "it ended: \x1b[2J\nx".to_owned();
        let fault = Fault { subject, load, round: 0, reason, failed: true };
        assert_eq!(fault_lines(&[fault]), "FAILED: a with b: it ended:  [2J x\n");
    }

    #[test]
    fn a_turn_is_void_while_the_host_is_not_done_with_those_before() {
        let turns = take_turns(&mut Counted(vec![("leaves", 0)]), &[1], 2, |_| {});
        assert_eq!(turns.runs.len(), 2);
        let reasons = turns.faults.iter().map(|fault| (fault.reason.as_str(), fault.failed));
        assert_eq!(reasons.collect::<Vec<_>>(), [("the host is not done", false); 2]);
    }

    #[test]
    fn void_turns_are_counted() {
        let fault = |round, failed| Fault {
            subject: "a".into(),
            load: "b".into(),
            round,
            reason: "others used 50 % of the processors".into(),
            failed,
        };
        let line = "VOID: 2 turns on a busy machine, first a with b: others used 50 % of the \
                    processors\n";
        assert_eq!(fault_lines(&[fault(0, false), fault(1, false)]), line);
        assert_eq!(void_note(&[fault(0, true)]), "");
        assert_eq!(void_note(&[fault(0, false)]), "; VOID: 1 turn on a busy machine");
        assert!(void_note(&[fault(0, false), fault(1, false)]).contains(": 2 turns on"));
    }

    /// Subjects whose only thread waits for most of its time.
    struct Starved;

    impl Subjects for Starved {
        type Load = u32;
        type Run = ();

        fn count(&self) -> usize {
            1
        }

        fn name(&self, _: usize) -> String {
            "starved".to_owned()
        }

        fn takes(&self, _: usize, _: &u32) -> bool {
            true
        }

        fn run(&mut self, _: usize, _: &u32, _: u32) -> Result<()> {
            Ok(())
        }

        fn waited(&self, _: &()) -> Option<f64> {
            Some(0.9)
        }
    }

    #[test]
    fn a_turn_of_a_starved_thread_is_void() {
        let turns = take_turns(&mut Starved, &[1], 1, |_| {});
        assert_eq!((turns.runs.len(), turns.faults.len()), (1, 1));
        assert!(!turns.faults[0].failed, "{:?}", turns.faults);
    }
}
