//! `slipway bench memory`: measures recycled memory for sandboxes beside new memory.

use std::ffi::OsString;
use std::sync::Arc;

use anyhow::{Context, Result};
use slipway_bench::block::native::Cpus;
use slipway_bench::memory::{
    Gate, Gated, Giver, Keeping, MemoryLoad, MemoryPlan, MemoryReport, MemorySubject, Source,
    memory_table, serve_user,
};

use super::reports::{self, View};
use super::subjects;
use crate::args::{MemoryArgs, MemoryUserArgs};

/// The names of the subjects, with descriptions. There are three kinds: memory that is given to a
/// program ("new" to "pre100"), memory that begins as a template ("private" to "fork-ahead"), and a
/// device's accesses ("plain" to "given"). Others of a kind are compared with its first.
const SUBJECTS: [(&str, &str); 14] = [
    ("new", "new pages of the kernel, in a file in memory; huge ones of hugetlbfs"),
    ("new-thp", "new transparent huge pages, which no device can be given"),
    ("pool", "recycled memory, zeroed when it is touched and not before"),
    (
        "pool-ahead",
        "recycled memory as soon as its last user is gone; a thread zeroes ahead of the touches",
    ),
    ("pool-zeroed", "recycled memory after the same thread had time to zero all of it"),
    ("pre10", "FastIOV's baseline: 10 % zeroed beforehand, the rest before memory is given"),
    ("pre50", "the same with 50 %"),
    ("pre100", "the same with 100 %"),
    ("private", "a private mapping of a template, which no device can be given"),
    ("fork", "memory of the pool that begins as a template, copied when it is touched"),
    ("fork-ahead", "the same; the pages that are touched are copied ahead, beside the touches"),
    ("plain", "a device's accesses to memory that is not the pool's"),
    ("late", "the same to memory of the pool, clean, of which the pool may still zero other parts"),
    ("given", "the same when all of the memory was given"),
];
/// The loads: sizes of memory with their size of pages, a working set of a template's pages, and
/// accesses of a device.
const LOADS: [&str; 16] = [
    "128M-4k",
    "256M-4k",
    "512M-4k",
    "1G-4k",
    "4G-4k",
    "16G-4k",
    "128M-2m",
    "512M-2m",
    "1G-2m",
    "4G-2m",
    "16G-2m",
    "512M-3072p",
    "gate-block",
    "gate-pin",
    "gate-word",
    "gate-stream",
];
/// The loads of a quick run.
const QUICK: [&str; 4] = ["32M-4k", "32M-2m", "32M-256p", "gate-block"];
/// The number of turns with a device's load for each turn with another load: these turns are short,
/// and their differences are small.
const GATE_ROUNDS: u32 = 6;

/// Runs `slipway bench memory`: lists subjects and loads, measures, or shows an earlier report.
/// Returns the exit status.
pub fn memory(args: &MemoryArgs) -> Result<i32> {
    if args.list {
        return Ok(subjects::list(&SUBJECTS, &loads(args)?));
    }
    reports::complete(&reports::show(&VIEW, &args.report, || run(args))?)
}

/// Runs `slipway bench memory-user`: the program to which memory is given. Returns the exit status.
pub fn user(args: &MemoryUserArgs) -> Result<i32> {
    serve_user(&args.specification)?;
    Ok(0)
}

/// The view of these reports.
const VIEW: View<MemoryReport> = View::of(MemoryReport::picture, memory_table);

/// Returns the loads that the user named, or those of a whole or a quick run.
fn loads(args: &MemoryArgs) -> Result<Vec<MemoryLoad>> {
    subjects::loads(&args.load, if args.quick { &QUICK } else { &LOADS })
}

/// Makes the subjects that the user named, or all.
fn subjects(args: &MemoryArgs) -> Result<Vec<Box<MemorySubject>>> {
    let chosen = subjects::chosen("subject", &args.only, &SUBJECTS, |(name, _)| name)?;
    let (keeping, cpus) = (Arc::new(Keeping::start()?), Cpus::split(1)?);
    let pages = Gated::pages()?;
    let program = slipway_bench::slipway().context("which program this is")?;
    let program: [OsString; 3] = [program.into(), "bench".into(), "memory-user".into()];
    let giver = |named, source| -> Result<Box<MemorySubject>> {
        Ok(Box::new(Giver::new(named, source, &keeping, &program, &cpus)))
    };
    let gated = |named, gate| -> Result<Box<MemorySubject>> {
        Ok(Box::new(Gated::new(named, gate, &pages, &cpus)?))
    };
    let subject = |named: (&'static str, &'static str)| match named.0 {
        "new" => giver(named, Source::New),
        "new-thp" => giver(named, Source::NewTransparent),
        "pool" => giver(named, Source::Pool),
        "pool-ahead" => giver(named, Source::PoolAhead),
        "pool-zeroed" => giver(named, Source::PoolZeroed),
        "pre10" => giver(named, Source::Pre(10)),
        "pre50" => giver(named, Source::Pre(50)),
        "pre100" => giver(named, Source::Pre(100)),
        "private" => giver(named, Source::Private),
        "fork" => giver(named, Source::Fork),
        "fork-ahead" => giver(named, Source::ForkAhead),
        "plain" => gated(named, Gate::Absent),
        "late" => gated(named, Gate::Closed),
        _ => gated(named, Gate::Open),
    };
    chosen.into_iter().map(subject).collect()
}

/// Measures.
fn run(args: &MemoryArgs) -> Result<MemoryReport> {
    let rounds = if args.quick { args.rounds.min(2) } else { args.rounds };
    let gate_rounds = if args.quick { rounds } else { GATE_ROUNDS * rounds };
    let plan =
        MemoryPlan { gate_rounds: Some(gate_rounds), ..MemoryPlan::new(loads(args)?, rounds) };
    subjects::report(subjects(args)?, plan, "none".to_owned())
}
