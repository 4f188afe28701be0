//! `slipway bench block`.

use std::io::IsTerminal;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use slipway_bench::block::native::{Bare, Cpus, Session};
use slipway_bench::block::{
    BlockReport, Pattern, Plan, Run, Subject, Turn, Workload, block_table, compare_blocks, measure,
    plot,
};

use super::target::{BenchDisk, Doorbells, Target};
use crate::args::BlockArgs;

/// Configurations that need no VM, with what they are.
const NATIVE: [(&str, &str); 4] = [
    ("bare", "our driver on a queue pair in shared memory whose other end only copies: the floor"),
    ("mapped", "our driver over the vfio-user socket of a target, doorbells in a mapped page"),
    ("shadow", "the same, doorbells trapped and shadowed, as Linux' driver rings in a VM"),
    ("trapped", "the same, doorbells trapped: a message for each"),
];

/// What a turn of a quick run takes.
const QUICK: (Duration, Duration) = (Duration::from_millis(20), Duration::from_millis(100));

/// Measures, or shows an earlier report.
pub fn block(args: &BlockArgs) -> Result<i32> {
    if args.list {
        list(args);
        return Ok(0);
    }
    let before = args.compare.as_deref().map(read).transpose()?;
    let report = match &args.report {
        Some(path) => read(path)?,
        None => measured(args)?,
    };
    if let Some(path) = &args.output {
        write(path, &report.to_json()?)?;
    }
    if let Some(path) = &args.svg {
        let title = format!("{} on {}", report.disk, report.environment.machine);
        write(path, &plot(&report, &title)?)?;
    }
    let colour = std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none();
    if args.json {
        crate::out::print(format_args!("{}", report.to_json()?));
    } else {
        crate::out::print(format_args!("{}", block_table(&report, colour)));
    }
    if let Some(before) = before {
        let table = compare_blocks(&before, &report).table(colour && !args.json);
        // Standard output is the report's then.
        if args.json { eprint!("{table}") } else { crate::say!("\n{table}") }
    }
    Ok(0)
}

fn read(path: &Path) -> Result<BlockReport> {
    let text = std::fs::read_to_string(path);
    let text = text.with_context(|| format!("cannot read {}", path.display()))?;
    BlockReport::from_json(&text).with_context(|| format!("{} is no report", path.display()))
}

fn write(path: &Path, text: &str) -> Result<()> {
    std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
    eprintln!("Written: {}", path.display());
    Ok(())
}

fn list(args: &BlockArgs) {
    crate::say!("configurations:");
    for (name, about) in NATIVE {
        crate::say!("  {name:<8} {about}");
    }
    crate::say!("workloads, unless --workload names others:");
    for workload in workloads(args) {
        crate::say!("  {workload}");
    }
}

/// What is asked for, or the thesis' loads: every pattern, one in flight and many.
fn workloads(args: &BlockArgs) -> Vec<Workload> {
    if !args.workload.is_empty() {
        return args.workload.clone();
    }
    let load = |pattern, block_size, depth| Workload { pattern, block_size, depth, threads: 1 };
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

fn plan(args: &BlockArgs) -> Plan {
    let (warm_up, time) = if args.quick {
        QUICK
    } else {
        (Duration::from_secs_f64(args.warm_up), Duration::from_secs_f64(args.time))
    };
    let rounds = if args.quick { args.rounds.min(3) } else { args.rounds };
    Plan { workloads: workloads(args), rounds, warm_up, time }
}

fn measured(args: &BlockArgs) -> Result<BlockReport> {
    let plan = plan(args);
    let disk = BenchDisk::prepare(&args.disk)?;
    let cpus = Cpus::split(1)?;
    // Targets end when they are dropped, after the sessions on them.
    let mut targets = Vec::new();
    let mut subjects: Vec<Box<dyn Subject>> = Vec::new();
    for name in configurations(args)? {
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
    ensure!(!subjects.is_empty(), "there is nothing to measure");
    let runs = take_turns(&mut subjects, &plan)?;
    let environment = super::environment("none".to_owned());
    let command = super::command_line();
    Ok(BlockReport::new(environment, command, disk.name(), plan, &subjects, runs))
}

/// The configurations asked for, each once, in the order of the list.
fn configurations(args: &BlockArgs) -> Result<Vec<&'static str>> {
    let known = NATIVE.map(|(name, _)| name);
    if let Some(unknown) = args.only.iter().find(|name| !known.contains(&name.as_str())) {
        bail!("there is no configuration \"{unknown}\"; --list shows them");
    }
    let wanted = |name: &&str| args.only.is_empty() || args.only.iter().any(|own| own == name);
    Ok(known.into_iter().filter(wanted).collect())
}

fn doorbells(configuration: &str) -> Doorbells {
    if configuration == "mapped" { Doorbells::Mapped } else { Doorbells::Trapped }
}

fn session(name: &str, socket: &Path, cpus: &Cpus, plan: &Plan, fill: bool) -> Result<Session> {
    let mut session = Session::connect(name, socket, cpus.clone(), &plan.workloads)
        .with_context(|| format!("configuration {name}"))?;
    if fill {
        session.fill().with_context(|| format!("filling the disk of {name}"))?;
    }
    if name == "shadow" {
        session.shadow_doorbells()?;
    }
    Ok(session)
}

fn take_turns(subjects: &mut [Box<dyn Subject>], plan: &Plan) -> Result<Vec<Run>> {
    let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
    let style = ProgressStyle::with_template("{elapsed} [{bar:30}] {pos}/{len} {msg}");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    let runs = measure(subjects, plan, |turn: Turn<'_>| {
        bar.set_length(turn.turns as u64);
        bar.set_position(turn.done as u64);
        bar.set_message(format!("{} {}", turn.workload, turn.subject));
    });
    bar.finish_and_clear();
    runs
}
