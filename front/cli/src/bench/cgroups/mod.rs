//! `slipway bench cgroups`: measures how soon a process is in a control group of its own.

mod idle;

use std::sync::Arc;

use anyhow::{Result, ensure};
use slipway_bench::cgroups::{
    CgroupLoad, CgroupPlan, CgroupReport, CgroupSubject, CgroupWay, Joint, Sleepers, Version, Way,
    cgroup_differences, cgroup_plot, cgroup_table,
};
use slipway_cgroup::Moves;

use super::reports::{self, View};
use super::subjects;
use crate::args::CgroupsArgs;
use crate::daemon::raise_descriptor_limit;

/// The subjects to measure, with descriptions.
const SUBJECTS: [(&str, &str); 16] = [
    ("create", "version 1: the group is made, its limits are set, a process moves in"),
    ("pool", "the same with a group of the pool, in the order of arrival"),
    ("create-fifo", "as create, in the order of arrival"),
    ("pool-no-fifo", "as pool, in no order"),
    ("create-self", "as create, but the process moves itself"),
    ("pool-self", "as pool, but the process moves itself, as Slipway's VMMs do"),
    ("mkdir", "version 1: the group is made, and nothing else"),
    ("take", "the same with a group of the pool"),
    ("create-v2", "version 2: the group is made, its limits are set, a process moves in"),
    ("pool-v2", "the same with a group of the pool, in the order of arrival"),
    ("mkdir-v2", "version 2: the group is made, and nothing else"),
    ("take-v2", "the same with a group of the pool"),
    ("joint", "RunD-V's joint controllers: as create, in one hierarchy; only if named by --only"),
    ("joint-pool", "the same with a group of the pool, in the order of arrival; only if named"),
    ("joint-mkdir", "RunD-V's joint controllers: the group is made; only if named"),
    ("joint-take", "the same with a group of the pool; only if named"),
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
    differences: |before, now, _| cgroup_differences(before, now),
    ..View::of(cgroup_plot, cgroup_table)
};

fn loads(args: &CgroupsArgs) -> Result<Vec<CgroupLoad>> {
    subjects::loads(&args.load, if args.quick { &QUICK } else { &LOADS })
}

fn way(name: &str) -> Way {
    let name = name.strip_suffix("-v2").unwrap_or(name);
    match name.strip_prefix("joint-").unwrap_or(name) {
        "create" | "joint" => Way::Create,
        "create-fifo" => Way::CreateFifo,
        "pool" => Way::Pool,
        "pool-no-fifo" => Way::PoolNoFifo,
        "create-self" => Way::CreateSelf,
        "pool-self" => Way::PoolSelf,
        "mkdir" => Way::Mkdir,
        _ => Way::Take,
    }
}

fn is_joint(name: &str) -> bool {
    name.starts_with("joint")
}

/// Mounts the joint hierarchy if subjects in it were named. Says so if the host cannot have it.
///
/// # Errors
/// Subjects of version 2, from which the joint hierarchy takes the controllers, were named too.
fn joint(args: &CgroupsArgs, chosen: &[(&str, &str)]) -> Result<Option<Arc<Joint>>> {
    if args.only.is_empty() || !chosen.iter().any(|(name, _)| is_joint(name)) {
        return Ok(None);
    }
    ensure!(
        !chosen.iter().any(|(name, _)| name.ends_with("-v2")),
        "a joint hierarchy takes the controllers from version 2: measure the two in separate runs"
    );
    match Joint::mount() {
        Ok(joint) => Ok(Some(Arc::new(joint))),
        Err(error) => {
            eprintln!("SKIPPED: joint: {error:#}");
            Ok(None)
        }
    }
}

fn subjects(args: &CgroupsArgs, sleepers: &Arc<Sleepers>) -> Result<Vec<Box<CgroupSubject>>> {
    let plain = |name: &String| name.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_');
    ensure!(args.controllers.iter().all(plain), "a controller has a name such as memory");
    let mut chosen = subjects::chosen("subject", &args.only, &SUBJECTS, |(name, _)| name)?;
    let joint = joint(args, &chosen)?;
    if joint.is_none() {
        chosen.retain(|(name, _)| !is_joint(name));
    }
    let mut subjects: Vec<Box<CgroupSubject>> = Vec::new();
    for (name, about) in chosen {
        let second = name.ends_with("-v2");
        let version = match &joint {
            Some(joint) if is_joint(name) => Version::Joint(Arc::clone(joint)),
            _ if second => Version::V2,
            _ => Version::V1(args.controllers.clone()),
        };
        let needs = || match second {
            true => "cgroup v2 in /sys/fs/cgroup".to_owned(),
            false => {
                format!("the v1 hierarchies {} in /sys/fs/cgroup", args.controllers.join(", "))
            }
        };
        let subject = CgroupWay::new(name, about, way(name), &version, sleepers);
        let able = subjects::able(name, &args.only, subject.ok_or_else(needs))?;
        subjects.extend(able.map(|subject| -> Box<CgroupSubject> { Box::new(subject) }));
    }
    Ok(subjects)
}

fn run(args: &CgroupsArgs) -> Result<CgroupReport> {
    ensure!(rustix::process::geteuid().is_root(), "control groups are made by root: use sudo");
    let rounds = if args.quick { args.rounds.min(2) } else { args.rounds };
    let plan = CgroupPlan::new(loads(args)?, rounds);
    let most = plan.loads.iter().map(|load| load.groups).max().unwrap_or(0);
    // A socket to each process.
    raise_descriptor_limit();
    let sleepers = Arc::new(Sleepers::start(most)?);
    let favours_moves = Moves::of_host().ok().map(|moves| moves.favoured);
    let mut report: CgroupReport =
        subjects::report(subjects(args, &sleepers)?, plan, "none".to_owned())?;
    report.extra.favours_moves = favours_moves;
    Ok(report)
}
