//! `slipway bench block`: measures disks.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use slipway_bench::Times;
use slipway_bench::block::native::{Bare, Cpus, Neighbours, Pair, Session};
use slipway_bench::block::{
    BlockReport, BlockSubject, Pattern, Plan, RocksPlan, RocksReport, Subject, Workload,
    block_table, compare_blocks, curves, plot, timed,
};

use super::reports::{self, View, write};
use super::subjects;
use super::target::{BenchDisk, Target};
use super::vm;
use crate::args::{BlockArgs, DiskKind, Doorbells, NodeArgs};

/// The configurations that need no VM, with descriptions.
const NATIVE: [(&str, &str); 4] = [
    ("bare", "our driver on a queue pair in shared memory whose other end only copies: the floor"),
    ("mapped", "our driver over the vfio-user socket of a target, doorbells in a mapped page"),
    ("shadow", "the same, doorbells trapped and shadowed, as Linux' driver rings in a VM"),
    ("trapped", "the same, doorbells trapped: a message for each"),
];

/// Warm-up and measured time of a turn of a quick run with guests: fio measures in whole seconds.
const QUICK_GUESTS: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(1));
/// Warm-up and measured time of a turn of a quick run without guests.
const QUICK: (Duration, Duration) = (Duration::from_millis(20), Duration::from_millis(100));

/// Measures, or shows an earlier report.
pub fn block(node: &NodeArgs, args: &BlockArgs) -> Result<i32> {
    if args.list {
        list(args);
        return Ok(0);
    }
    let measure = || if is_native(args) { native(args) } else { guests(node, args) };
    let mut files = args.report.clone();
    if files.svg.is_none() {
        files.output = reports::data(&files, args.curves.as_deref())?;
    }
    let report = reports::show(&VIEW, &files, measure)?;
    if let Some(path) = &args.curves {
        write(path, &curves(&report, &VIEW.title_of(&report))?)?;
    }
    reports::complete(&report)
}

/// The view of these reports.
const VIEW: View<BlockReport> = View {
    title: |report| {
        let what = format!("Commands on a disk: {}", report.extra.disk);
        reports::heading(&what, &report.environment, report.plan.rounds, report.plan.time())
    },
    picture: |report, title| {
        // RocksDB's results have curves only.
        let draw = if report.extra.rocksdb.is_some() { curves } else { plot };
        draw(report, title)
    },
    table: block_table,
    differences: |before, now, colour| compare_blocks(before, now).table(colour),
};

fn list(args: &BlockArgs) {
    crate::say!("configurations:");
    for (name, about) in vm::CONFIGURATIONS {
        crate::say!("  {name:<16} {about}");
    }
    crate::say!("configurations with --native:");
    for (name, about) in NATIVE {
        crate::say!("  {name:<14} {about}");
    }
    crate::say!("workloads, unless --workload names others:");
    for workload in workloads(args) {
        crate::say!("  {workload}");
    }
}

/// Returns whether to measure without guests: the user said so, or named configurations or options
/// that imply it.
fn is_native(args: &BlockArgs) -> bool {
    let known = |name: &String| NATIVE.iter().any(|(known, _)| known == name);
    let named = !args.only.is_empty() && args.only.iter().all(known);
    let beside = !args.neighbour.is_empty();
    args.native || beside || named || !args.socket.is_empty() || !args.target.is_empty()
}

/// Returns the loads that the user named, or the default ones, at the depths and with the threads
/// that the user named.
fn workloads(args: &BlockArgs) -> Vec<Workload> {
    let base = match args.workload.as_slice() {
        [] if is_native(args) || args.quick => own_workloads(args),
        [] => guests_workloads(args),
        asked => asked.to_vec(),
    };
    let mut loads = Vec::new();
    for load in base {
        let or = |asked: &[u32], own| if asked.is_empty() { vec![own] } else { asked.to_vec() };
        for threads in or(&args.threads, load.threads) {
            loads.extend(or(&args.depths, load.depth).into_iter().map(|depth| Workload {
                depth,
                threads,
                ..load
            }));
        }
    }
    let mut seen = std::collections::BTreeSet::new();
    loads.retain(|load| seen.insert(*load));
    loads
}

/// Returns the thesis' four patterns, at fewer depths and with fewer threads than there: 24 loads.
fn guests_workloads(args: &BlockArgs) -> Vec<Workload> {
    let or = |asked: &[u32], own: &[u32]| if asked.is_empty() { own.to_vec() } else { vec![1] };
    let (depths, threads) = (or(&args.depths, &[1, 4, 16]), or(&args.threads, &[1, 2]));
    let mut loads = Vec::new();
    for pattern in [Pattern::RandRead, Pattern::Read, Pattern::RandWrite, Pattern::Write] {
        for &threads in &threads {
            let load = |&depth| Workload { pattern, block_size: 4096, depth, threads };
            loads.extend(depths.iter().map(load));
        }
    }
    loads
}

/// Returns every pattern, with one command in flight and with many.
fn own_workloads(args: &BlockArgs) -> Vec<Workload> {
    let load = |pattern, block_size, depth| Workload { pattern, block_size, depth, threads: 1 };
    if !args.neighbour.is_empty() {
        return vec![load(Pattern::RandRead, 4096, 1)];
    }
    if args.quick {
        let depths = [(Pattern::RandRead, 1), (Pattern::RandWrite, 1), (Pattern::RandRead, 32)];
        return depths.map(|(pattern, depth)| load(pattern, 4096, depth)).to_vec();
    }
    let mut loads = Vec::new();
    for pattern in [Pattern::RandRead, Pattern::RandWrite, Pattern::Read, Pattern::Write] {
        loads.extend([1, 8, 32, 128].map(|depth| load(pattern, 4096, depth)));
    }
    loads.push(load(Pattern::RandRw, 4096, 32));
    loads.extend([Pattern::Read, Pattern::Write].map(|pattern| load(pattern, 128 << 10, 32)));
    loads
}

/// Returns the times of each turn.
fn times(args: &BlockArgs) -> Times {
    let (warm_up, time) = match (args.quick, is_native(args)) {
        (true, true) => QUICK,
        (true, false) => QUICK_GUESTS,
        _ => (Duration::from_secs_f64(args.warm_up), Duration::from_secs_f64(args.time)),
    };
    Times { warm_up, time }
}

fn plan(args: &BlockArgs) -> Plan {
    let rounds = if args.quick { args.rounds.min(3) } else { args.rounds };
    Plan::timed(workloads(args), rounds, times(args))
}

fn rocks_plan(args: &BlockArgs) -> RocksPlan {
    let compaction_threads =
        if args.compaction.is_empty() { vec![1, 10] } else { args.compaction.clone() };
    RocksPlan {
        compaction_threads,
        keys: args.keys.unwrap_or(if args.quick { 5_000 } else { 200_000 }),
        value_bytes: 1024,
        time: Duration::from_secs_f64(if args.quick { 2.0 } else { args.time * 10.0 }),
        rounds: if args.quick { 1 } else { args.rounds },
    }
}

/// Measures on the host and in guests.
fn guests(node: &NodeArgs, args: &BlockArgs) -> Result<BlockReport> {
    let names = configurations(args, &vm::CONFIGURATIONS.map(|(name, _)| name))?;
    let names = vm::with_hardware(args, &names)?;
    let accelerator = super::accelerator(args.machine.accel.as_deref());
    if args.rocksdb {
        let (environment, command) = (super::environment(accelerator), super::command_line());
        let (plan, names) = (rocks_plan(args), vm::with_file_system(&names));
        // Room for a database, for the output of compaction, and for the file system's own data.
        let bytes = (plan.keys * 1040 * 4).next_multiple_of(1 << 20) + (256 << 20);
        let disk = args.disk.clone().unwrap_or(DiskKind::File("/var/tmp".into(), bytes));
        let machines = vm::Machines::new(node, args, vm::Medium::make(&disk, &names)?, &names, 2)?;
        let (subjects, turns) = vm::rocksdb(&machines, &names, &plan)?;
        let rocksdb = RocksReport { plan, runs: turns.runs };
        let disk = machines.disk();
        let report = BlockReport::of_rocksdb(environment, command, disk, &subjects, rocksdb);
        return Ok(BlockReport { faults: turns.faults, ..report });
    }
    let plan = plan(args);
    let disk = args.disk.clone().unwrap_or(DiskKind::File("/var/tmp".into(), 256 << 20));
    let threads = plan.loads.iter().map(|load| load.threads).max().unwrap_or(1);
    let machines =
        vm::Machines::new(node, args, vm::Medium::make(&disk, &names)?, &names, threads)?;
    let subjects = machines.subjects(&names)?;
    let mut report = report(args, plan, subjects, accelerator)?;
    report.extra.disk = machines.disk().to_owned();
    Ok(report)
}

/// Measures without any guest.
fn native(args: &BlockArgs) -> Result<BlockReport> {
    let plan = plan(args);
    let disk = args.disk.clone().unwrap_or(DiskKind::Ram(64 << 20));
    let disk = BenchDisk::prepare(&disk)?;
    let cpus = Cpus::split(1)?;
    // Dropping targets ends them, so they are dropped after the sessions on them.
    let mut targets = Vec::new();
    if !args.neighbour.is_empty() {
        let subjects = neighbours(args, &plan, &disk, &cpus, &mut targets)?;
        return native_report(args, plan, &disk, subjects);
    }
    let mut subjects: Vec<Box<dyn Subject>> = Vec::new();
    for name in configurations(args, &NATIVE.map(|(name, _)| name))? {
        subjects.push(match name {
            "bare" => Box::new(Bare::new(disk.bytes(), cpus.clone())),
            name => {
                let target = Target::start(&disk, doorbells(name), &cpus, None)?;
                let session = session(name, &target.socket, &cpus, &plan, disk.holds_data())?;
                targets.push(target);
                Box::new(session)
            }
        });
    }
    for other in &args.target {
        let target = Target::start(&disk, Doorbells::Mapped, &cpus, Some(&other.path))?;
        let session = session(&other.name, &target.socket, &cpus, &plan, disk.holds_data())?;
        targets.push(target);
        subjects.push(Box::new(session));
    }
    for other in &args.socket {
        let session = session(&other.name, &other.path, &cpus, &plan, args.fill);
        subjects.push(Box::new(session?));
    }
    native_report(args, plan, &disk, subjects)
}

/// Makes a target with two clients for each configuration. The quiet client is measured alone, and
/// beside each load of the noisy one.
fn neighbours(
    args: &BlockArgs,
    plan: &Plan,
    disk: &BenchDisk,
    cpus: &Cpus,
    targets: &mut Vec<Target>,
) -> Result<Vec<Box<dyn Subject>>> {
    let mut subjects: Vec<Box<dyn Subject>> = Vec::new();
    let names = configurations(args, &NATIVE.map(|(name, _)| name))?;
    // The bare queue pair has no target, so it cannot have two clients.
    for name in names.into_iter().filter(|name| *name != "bare") {
        let target = Target::start_pair(disk, doorbells(name), cpus)?;
        let pair = pair(name, &target, cpus, plan, (disk.holds_data(), &args.neighbour))?;
        targets.push(target);
        let beside = Neighbours::of(name, pair, &args.neighbour);
        subjects.extend(beside.into_iter().map(|one| Box::new(one) as Box<dyn Subject>));
    }
    Ok(subjects)
}

/// Takes the turns of subjects that need no guest, and makes the report.
fn native_report(
    args: &BlockArgs,
    plan: Plan,
    disk: &BenchDisk,
    subjects: Vec<Box<dyn Subject>>,
) -> Result<BlockReport> {
    let mut report = report(args, plan, subjects, "none".to_owned())?;
    report.extra.disk = disk.name();
    Ok(report)
}

/// Takes the turns, and makes the report without the name of the disk.
fn report(
    args: &BlockArgs,
    plan: Plan,
    subjects: Vec<Box<dyn Subject>>,
    accelerator: String,
) -> Result<BlockReport> {
    let times = times(args);
    let timed = |one| timed(one, times);
    let subjects: Vec<Box<BlockSubject>> = subjects.into_iter().map(timed).collect();
    subjects::report(subjects, plan, accelerator)
}

/// Returns those of the `known` configurations that the user named, each once, in the order of
/// `known`.
fn configurations(args: &BlockArgs, known: &[&'static str]) -> Result<Vec<&'static str>> {
    subjects::chosen("configuration", &args.only, known, |name| name)
}

fn doorbells(configuration: &str) -> Doorbells {
    if configuration == "mapped" { Doorbells::Mapped } else { Doorbells::Trapped }
}

fn session(name: &str, socket: &Path, cpus: &Cpus, plan: &Plan, fill: bool) -> Result<Session> {
    let mut session = Session::connect(name, socket, cpus.clone(), &plan.loads)
        .with_context(|| format!("configuration {name}"))?;
    if fill {
        session.fill().with_context(|| format!("filling the disk of {name}"))?;
    }
    if name == "shadow" {
        session.shadow_doorbells()?;
    }
    Ok(session)
}

/// Connects a quiet client and a noisy one to the same target.
fn pair(
    name: &str,
    target: &Target,
    cpus: &Cpus,
    plan: &Plan,
    (fill, loads): (bool, &[Workload]),
) -> Result<Pair> {
    let quiet = Plan { loads: Neighbours::all_of(&plan.loads), ..plan.clone() };
    let quiet = session(name, &target.socket, cpus, &quiet, fill)?;
    let loud = Plan { loads: loads.to_vec(), ..plan.clone() };
    // The disk is shared, and has its content by now.
    let noisy = session(name, &target.neighbour, cpus, &loud, false)?;
    Ok(Pair { quiet, noisy })
}
