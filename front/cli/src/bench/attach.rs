//! `slipway bench attach`: measures how soon many owners have virtual functions.

use anyhow::{Result, ensure};
use slipway_bench::attach::{
    AttachLoad, AttachPlan, AttachReport, AttachSubject, OneLock, Pooled, VfLocks, attach_plot,
    attach_table, compare_attaches,
};
use slipway_bench::{Fault, measure};

use super::reports::{self, Report};
use super::subjects;
use crate::args::AttachArgs;
use crate::progress;

/// The subjects to measure, with descriptions.
const SUBJECTS: [(&str, &str); 3] = [
    ("one-lock", "one lock for all functions of a set, as VFIO's before FastIOV"),
    ("vf-locks", "a lock for each function, as in FastIOV"),
    ("pool", "functions that were reset before they are asked for"),
];
/// The load of a quick run.
const QUICK: &str = "n20-256k-5ms";
const QUICK_ROUNDS: u32 = 2;

/// Measures, or shows an earlier report.
pub fn attach(args: &AttachArgs) -> Result<i32> {
    if args.list {
        subjects::list(&SUBJECTS, &loads(args)?);
        return Ok(0);
    }
    reports::complete(&reports::show(&args.report, || run(args))?)
}

impl Report for AttachReport {
    fn title(&self) -> String {
        let what = "Virtual functions for many owners at once, hollow devices";
        reports::titled(what, &self.environment, self.plan.rounds, "turn", "")
    }

    fn picture(&self, title: &str) -> Result<String> {
        attach_plot(self, title)
    }

    fn table(&self, colour: bool) -> String {
        attach_table(self, colour)
    }

    fn faults(&self) -> &[Fault] {
        &self.faults
    }

    fn since(&self, before: &Self, _colour: bool) -> String {
        compare_attaches(before, self)
    }
}

fn loads(args: &AttachArgs) -> Result<Vec<AttachLoad>> {
    if args.quick { subjects::loads(&[], &[QUICK]) } else { Ok(args.load.clone()) }
}

fn run(args: &AttachArgs) -> Result<AttachReport> {
    let rounds = if args.quick { args.rounds.min(QUICK_ROUNDS) } else { args.rounds };
    let plan = AttachPlan { loads: loads(args)?, rounds };
    let chosen = subjects::chosen("subject", &args.only, &SUBJECTS, |(name, _)| name)?;
    let subject = |(name, _): (&str, &str)| -> Box<AttachSubject> {
        match name {
            "one-lock" => Box::new(OneLock),
            "vf-locks" => Box::new(VfLocks),
            _ => Box::new(Pooled),
        }
    };
    let mut subjects: Vec<_> = chosen.into_iter().map(subject).collect();
    ensure!(!subjects.is_empty(), "there is nothing to measure");
    let bar = progress::turns();
    let turns = measure(&mut subjects, &plan, |turn| progress::turn(&bar, &turn));
    bar.finish_and_clear();
    let turns = subjects::measured(turns)?;
    let environment = super::environment("none".to_owned());
    Ok(AttachReport::new(environment, super::command_line(), plan, &subjects, turns))
}
