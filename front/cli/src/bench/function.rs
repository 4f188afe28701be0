//! `slipway bench function`: bursts of requests to functions that scale in different ways.

use std::ffi::OsString;
use std::sync::Arc;

use anyhow::{Context, Result};
use slipway_bench::Subject;
use slipway_bench::function::{
    FunctionLoad, FunctionPlan, FunctionReport, FunctionSettings, FunctionSubject, FunctionWay,
    Scaling, function_plot, function_table,
};

use super::reports::{self, View};
use super::subjects;
use crate::args::{BenchFunctionArgs, MachineArgs, NodeArgs, Switched};

/// The subjects to measure, with descriptions.
const SUBJECTS: [(&str, &str); 3] = [
    ("horizontal", "each replica has a sandbox of its own (RunD)"),
    ("vertical", "replicas in the sandboxes that are there, and no further sandbox"),
    ("both", "replicas in sandboxes with room, else further sandboxes (RunD-V)"),
];
/// The loads of RunD-V's figures 16 and 17; figure 18 counts what both make.
const LOADS: [&str; 8] =
    ["s1-q24", "s2-q24", "s4-q24", "s8-q24", "s16-q24", "s4-q8", "s4-q16", "s4-q32"];
const QUICK: [&str; 1] = ["s1-q2"];
/// The load before the first turn: what a node makes once is made with it.
const WARM_UP: FunctionLoad = FunctionLoad { sandboxes: 1, requests: 1 };

/// Measures, or shows an earlier report.
pub fn function(node: &NodeArgs, args: &BenchFunctionArgs) -> Result<i32> {
    if args.list {
        return Ok(subjects::list(&SUBJECTS, &loads(args)?));
    }
    reports::complete(&reports::show(&VIEW, &args.report, || run(node, args))?)
}

/// The view of these reports.
const VIEW: View<FunctionReport> = View::of(function_plot, function_table);

fn loads(args: &BenchFunctionArgs) -> Result<Vec<FunctionLoad>> {
    subjects::loads(&args.load, if args.quick { &QUICK } else { &LOADS })
}

fn scaling(name: &str) -> Scaling {
    match name {
        "horizontal" => Scaling::Horizontal,
        "vertical" => Scaling::Vertical,
        _ => Scaling::Both,
    }
}

fn run(node: &NodeArgs, args: &BenchFunctionArgs) -> Result<FunctionReport> {
    let rounds = if args.quick { args.rounds.min(2) } else { args.rounds };
    let plan = FunctionPlan::new(loads(args)?, rounds);
    let settings = Arc::new(settings(node, args)?);
    let way = |name, about| FunctionWay::new(name, about, scaling(name), &settings);
    if !args.quick {
        way("vertical", "").run(&WARM_UP).context("the first sandbox")?;
    }
    let chosen = subjects::chosen("subject", &args.only, &SUBJECTS, |(name, _)| name)?;
    let subject = |(name, about)| -> Box<FunctionSubject> { Box::new(way(name, about)) };
    let accelerator = super::accelerator(args.machine.accel.as_deref());
    subjects::report(chosen.into_iter().map(subject).collect(), plan, accelerator)
}

fn settings(node: &NodeArgs, args: &BenchFunctionArgs) -> Result<FunctionSettings> {
    let mut options = machine(&args.machine);
    options.extend(option("--from", &args.from));
    options.extend(option("--network", &args.network));
    for (name, bytes) in
        [("--replica-memory", args.replica_memory), ("--bind-memory", args.bind_memory)]
    {
        if let Some(bytes) = bytes {
            options.extend(option(name, bytes.to_string()));
        }
    }
    let command = match &args.command[..] {
        [] => vec!["true".to_owned()],
        command => command.to_vec(),
    };
    Ok(FunctionSettings {
        program: program(node)?,
        options,
        image: args.image.clone().context("which image")?,
        command,
        replicas: args.replicas_per_sandbox,
        sandboxes: args.max_sandboxes,
    })
}

/// Returns the program `slipway` with the options of the node.
fn program(node: &NodeArgs) -> Result<Vec<OsString>> {
    let program = slipway_bench::slipway().context("which program this is")?;
    let mut words: Vec<OsString> = vec![program.into()];
    words.extend(option("--config", &node.config));
    for (name, folder) in [("--run-dir", &node.run_dir), ("--data-dir", &node.data_dir)] {
        if let Some(folder) = folder {
            words.extend(option(name, folder));
        }
    }
    Ok(words)
}

/// Returns the words of an option with a value.
fn option(name: &str, value: impl Into<OsString>) -> [OsString; 2] {
    [name.into(), value.into()]
}

/// Returns the options of a machine, as the user gave them.
fn machine(machine: &MachineArgs) -> Vec<OsString> {
    let number = |value: Option<u32>| value.map(|value| value.to_string().into());
    let size = |value: Option<u64>| value.map(|value| value.to_string().into());
    let all: [(&str, Option<OsString>); 7] = [
        ("--memory", size(machine.memory)),
        ("--max-memory", size(machine.max_memory)),
        ("--layers", size(machine.layers)),
        ("--cpus", machine.cpus.map(|cpus| cpus.to_string().into())),
        ("--max-cpus", number(machine.max_cpus)),
        ("--kernel", machine.kernel.clone().map(Into::into)),
        ("--accel", machine.accel.clone().map(Into::into)),
    ];
    let given = all.into_iter().filter_map(|(name, value)| Some(option(name, value?)));
    let reporting: Option<OsString> = machine.free_page_reporting.map(|switched| match switched {
        Switched::On => "--free-page-reporting".into(),
        Switched::Off => "--free-page-reporting=off".into(),
    });
    given.flatten().chain(reporting).collect()
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{BenchCli, BenchCommand};

    fn parsed(words: &[&str]) -> Option<(NodeArgs, BenchFunctionArgs)> {
        let all = ["slipway-bench", "function"].iter().chain(words);
        let cli = BenchCli::try_parse_from(all).ok()?;
        match cli.command {
            BenchCommand::Function(args) => Some((cli.node, *args)),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn servers_have_the_options_of_the_user() {
        let words = ["--memory", "64M", "--bind-memory", "32M", "--run-dir", "/r", "debian:12"];
        let words = [&words[..], &["--", "sh", "-c", "true"]].concat();
        let (node, args) = parsed(&words).unwrap();
        let settings = settings(&node, &args).unwrap();
        let texts = |words: &[OsString]| -> Vec<String> {
            words.iter().map(|word| word.to_string_lossy().into_owned()).collect()
        };
        let options = ["--memory", "67108864", "--from", "auto", "--network", "none"];
        let options = [&options[..], &["--bind-memory", "33554432"]].concat();
        assert_eq!(texts(&settings.options), options);
        assert_eq!(texts(&settings.program[3..5]), ["--run-dir", "/r"]);
        assert_eq!(settings.command, ["sh", "-c", "true"]);
        assert_eq!((settings.replicas, settings.sandboxes), (8, 32));
    }

    #[test]
    fn loads_are_the_papers_and_an_image_is_needed() {
        let (_, args) = parsed(&["x"]).unwrap();
        assert_eq!(loads(&args).unwrap().len(), LOADS.len());
        let (_, quick) = parsed(&["--quick", "x"]).unwrap();
        assert_eq!(loads(&quick).unwrap()[0].to_string(), "s1-q2");
        assert!(parsed(&[]).is_none() && parsed(&["--list"]).is_some());
        assert!(parsed(&["--load", "s0-q1", "x"]).is_none());
        assert_eq!(SUBJECTS.map(|(name, _)| scaling(name))[1], Scaling::Vertical);
    }
}
