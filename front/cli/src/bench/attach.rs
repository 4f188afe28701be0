//! `slipway bench attach`: measures how soon many owners have virtual functions.

use anyhow::Result;
use slipway_bench::attach::{
    AttachLoad, AttachPlan, AttachReport, AttachSubject, OneLock, Pooled, VfLocks, attach_plot,
    attach_table,
};

use super::reports::{self, View};
use super::subjects;
use crate::args::AttachArgs;

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
        return Ok(subjects::list(&SUBJECTS, &loads(args)?));
    }
    reports::complete(&reports::show(&VIEW, &args.report, || run(args))?)
}

/// The view of these reports.
const VIEW: View<AttachReport> = View::of(attach_plot, attach_table);

fn loads(args: &AttachArgs) -> Result<Vec<AttachLoad>> {
    if args.quick { subjects::loads(&[], &[QUICK]) } else { Ok(args.load.clone()) }
}

fn run(args: &AttachArgs) -> Result<AttachReport> {
    let rounds = if args.quick { args.rounds.min(QUICK_ROUNDS) } else { args.rounds };
    let plan = AttachPlan::new(loads(args)?, rounds);
    let chosen = subjects::chosen("subject", &args.only, &SUBJECTS, |(name, _)| name)?;
    let subject = |(name, _): (&str, &str)| -> Box<AttachSubject> {
        match name {
            "one-lock" => Box::new(OneLock),
            "vf-locks" => Box::new(VfLocks),
            _ => Box::new(Pooled),
        }
    };
    subjects::report(chosen.into_iter().map(subject).collect(), plan, "none".to_owned())
}
