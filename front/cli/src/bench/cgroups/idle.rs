//! `slipway bench cgroups --idle`: measures what groups cost the host while their processes sleep.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, ensure};
use slipway_bench::cgroups::Sleepers;
use slipway_bench::cgroups::idle::{
    Grouping, IdleGroups, IdlePlan, IdleReport, IdleSubject, idle_table,
};

use crate::args::CgroupsArgs;
use crate::bench::reports::{self, View};
use crate::bench::subjects;
use crate::daemon::raise_descriptor_limit;

/// The subjects to measure, with descriptions.
const SUBJECTS: [(&str, &str); 6] = [
    ("one", "version 1: all processes are in one group of the controller cpu"),
    ("each", "version 1: each process is in a group of its own of the controller cpu"),
    ("each-no-cpu", "version 1: each is in a group of its own of the controller memory alone"),
    ("one-v2", "version 2: all processes are in one group"),
    ("each-v2", "version 2: each process is in a group of its own"),
    ("each-no-cpu-v2", "version 2: the same, without the controller cpu"),
];
/// The time for which each of the two figures of a turn is measured.
const WINDOW: Duration = Duration::from_secs(5);
const QUICK: Duration = Duration::from_millis(250);

/// Measures, or shows an earlier report.
pub(super) fn idle(args: &CgroupsArgs) -> Result<i32> {
    if args.list {
        return Ok(subjects::list(&SUBJECTS, &args.idle));
    }
    reports::complete(&reports::show(&VIEW, &args.report, || run(args))?)
}

/// The view of these reports.
const VIEW: View<IdleReport> = View::of(IdleReport::picture, idle_table);

fn grouping(name: &str) -> Grouping {
    match name.strip_suffix("-v2").unwrap_or(name) {
        "one" => Grouping::One,
        "each" => Grouping::Each,
        _ => Grouping::EachWithoutCpu,
    }
}

fn subjects(
    args: &CgroupsArgs,
    window: Duration,
    sleepers: &Arc<Sleepers>,
) -> Result<Vec<Box<IdleSubject>>> {
    let chosen = subjects::chosen("subject", &args.only, &SUBJECTS, |(name, _)| name)?;
    let mut subjects: Vec<Box<IdleSubject>> = Vec::new();
    for (name, about) in chosen {
        let second = name.ends_with("-v2");
        let needs = match second {
            true => "cgroup v2 with the controller cpu in /sys/fs/cgroup",
            false => "the v1 hierarchies cpu and memory in /sys/fs/cgroup",
        };
        let subject = IdleGroups::new((name, about), grouping(name), second, window, sleepers);
        let able = subjects::able(name, &args.only, subject.ok_or(needs))?;
        subjects.extend(able.map(|subject| -> Box<IdleSubject> { Box::new(subject) }));
    }
    Ok(subjects)
}

fn run(args: &CgroupsArgs) -> Result<IdleReport> {
    ensure!(rustix::process::geteuid().is_root(), "control groups are made by root: use sudo");
    let rounds = if args.quick { args.rounds.min(2) } else { args.rounds };
    let window = if args.quick { QUICK } else { WINDOW };
    let plan = IdlePlan::new(args.idle.clone(), rounds);
    let most = plan.loads.iter().map(|load| load.groups).max().unwrap_or(0);
    // A pipe to each process.
    raise_descriptor_limit();
    let sleepers = Arc::new(Sleepers::on_pipes(most)?);
    subjects::report(subjects(args, window, &sleepers)?, plan, "none".to_owned())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use crate::args::{BenchCli, BenchCommand};

    #[test]
    fn loads_are_what_was_asked_for_or_the_papers() {
        let loads = |words: &[&str]| -> Vec<String> {
            let all = ["slipway-bench", "cgroups"].iter().chain(words);
            match BenchCli::try_parse_from(all).unwrap().command {
                BenchCommand::Cgroups(args) => args.idle.iter().map(ToString::to_string).collect(),
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(loads(&["--idle", "--quick"]), ["1-w1", "500-w1", "2000-w1"]);
        assert_eq!(loads(&["--idle", "20-w0,7"]), ["20-w0", "7-w1"]);
        assert!(loads(&["--quick"]).is_empty());
        let both = ["slipway-bench", "cgroups", "--idle", "20", "--load", "2000-t1"];
        assert!(BenchCli::try_parse_from(both).is_err());
    }
}
