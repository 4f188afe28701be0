//! `slipway bench cgroups`: measures how soon a process is in a control group of its own.

mod idle;

use std::sync::Arc;

use anyhow::{Result, bail, ensure};
use slipway_bench::cgroups::{
    CgroupLoad, CgroupPlan, CgroupReport, CgroupSubject, CgroupWay, Sleepers, Version, Way,
    cgroup_plot, cgroup_table, compare_cgroups,
};

use super::reports::{self, View};
use super::subjects;
use crate::args::CgroupsArgs;

/// The subjects to measure, with descriptions.
const SUBJECTS: [(&str, &str); 10] = [
    ("create", "version 1: the group is made, its limits are set, a process moves in"),
    ("pool", "the same with a group of the pool, in the order of arrival"),
    ("create-fifo", "as create, in the order of arrival"),
    ("pool-no-fifo", "as pool, in no order"),
    ("mkdir", "version 1: the group is made, and nothing else"),
    ("take", "the same with a group of the pool"),
    ("create-v2", "version 2: the group is made, its limits are set, a process moves in"),
    ("pool-v2", "the same with a group of the pool, in the order of arrival"),
    ("mkdir-v2", "version 2: the group is made, and nothing else"),
    ("take-v2", "the same with a group of the pool"),
];
/// The loads of RunD-V, section IV.A.
const LOADS: [&str; 3] = ["2000-t1", "2000-t50", "2000-t200"];
const QUICK: [&str; 1] = ["50-t4"];

/// Measures, or shows an earlier report.
pub fn cgroups(args: &CgroupsArgs) -> Result<i32> {
    if !args.idle.is_empty() {
        return idle::idle(args);
    }
    if args.list {
        return Ok(subjects::list(&SUBJECTS, &loads(args)?));
    }
    reports::complete(&reports::show(&VIEW, &args.report, || run(args))?)
}

/// The view of these reports.
const VIEW: View<CgroupReport> = View {
    title: |report| {
        let what = "Control groups, from request to a process inside";
        reports::titled(what, &report.environment, report.plan.rounds, "turn", "")
    },
    picture: cgroup_plot,
    table: cgroup_table,
    differences: |before, now, _| compare_cgroups(before, now),
};

fn loads(args: &CgroupsArgs) -> Result<Vec<CgroupLoad>> {
    subjects::loads(&args.load, if args.quick { &QUICK } else { &LOADS })
}

fn way(name: &str) -> Way {
    match name.strip_suffix("-v2").unwrap_or(name) {
        "create" => Way::Create,
        "create-fifo" => Way::CreateFifo,
        "pool" => Way::Pool,
        "pool-no-fifo" => Way::PoolNoFifo,
        "mkdir" => Way::Mkdir,
        _ => Way::Take,
    }
}

fn subjects(args: &CgroupsArgs, sleepers: &Arc<Sleepers>) -> Result<Vec<Box<CgroupSubject>>> {
    let plain = |name: &String| name.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_');
    ensure!(args.controllers.iter().all(plain), "a controller has a name such as memory");
    let chosen = subjects::chosen("subject", &args.only, &SUBJECTS, |(name, _)| name)?;
    let mut subjects: Vec<Box<CgroupSubject>> = Vec::new();
    for (name, about) in chosen {
        let second = name.ends_with("-v2");
        let version = if second { Version::V2 } else { Version::V1(args.controllers.clone()) };
        let needs = if second {
            "cgroup v2".to_owned()
        } else {
            format!("the v1 hierarchies {}", args.controllers.join(", "))
        };
        match CgroupWay::new(name, about, way(name), &version, sleepers) {
            Some(subject) => subjects.push(Box::new(subject)),
            None if !args.only.is_empty() => bail!("{name} needs {needs} in /sys/fs/cgroup"),
            None => eprintln!("Left out: {name} (needs {needs} in /sys/fs/cgroup)"),
        }
    }
    Ok(subjects)
}

fn run(args: &CgroupsArgs) -> Result<CgroupReport> {
    ensure!(rustix::process::geteuid().is_root(), "control groups are made by root: use sudo");
    let rounds = if args.quick { args.rounds.min(2) } else { args.rounds };
    let plan = CgroupPlan { loads: loads(args)?, rounds };
    let most = plan.loads.iter().map(|load| load.groups).max().unwrap_or(0);
    let sleepers = Arc::new(Sleepers::start(most)?);
    subjects::report(subjects(args, &sleepers)?, plan, "none".to_owned())
}
