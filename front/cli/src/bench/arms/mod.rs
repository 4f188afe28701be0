//! `slipway bench startup --arms`: starts sandboxes with and without networks in turn.

mod cni;
mod own_daemon;
mod pool;
mod runc;
mod turn;
mod way;
mod wires;

use std::rc::Rc;
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use slipway_bench::arms::{
    Arm, ArmExtra, ArmPlan, ArmSubject, ArmsReport, Point, arms_plot, arms_table,
};
use slipway_runtime::{Config, v1};
use slipway_telemetry::Timeline;
use tokio::sync::Mutex;

use self::cni::BridgePlugin;
use self::own_daemon::OwnDaemon;
use self::pool::Pool;
use self::runc::Runc;
use self::turn::Turns;
use self::way::Way;
use self::wires::Wires;
use super::interruptible::Interruptible;
use super::reports::{self, View};
use super::{subjects, tell};
use crate::args::{Engine, NodeArgs, Pull, StartupArgs};
use crate::client::{connect, connect_functions};
use crate::image;
use crate::run::Start;

/// The network of the sandboxes that have one, unless the user names another.
const NETWORK: &str = "default";

/// Returns the name of the pool of this process, and of the memory port that keeps the network's
/// switch for the pool.
fn own() -> String {
    format!("bench-startup-{}", std::process::id())
}

/// The view of these reports.
const VIEW: View<ArmsReport> = View {
    title: |report| {
        let hollow = if report.is_hollow() { "hollow sandboxes" } else { "sandboxes" };
        let counts: Vec<_> = report.plan.loads.iter().map(Point::to_string).collect();
        let (counts, arms) = (counts.join("; "), report.subjects.len());
        let ways = if arms == 1 { "in one way" } else { "with and without a network" };
        let what = format!("Starts of {hollow}, {counts}, {ways}");
        reports::titled(&what, &report.environment, report.plan.rounds, "turn", "")
    },
    ..View::of(arms_plot, arms_table)
};

/// Measures, and shows the report.
pub(super) fn arms(node: &NodeArgs, config: &Config, args: &StartupArgs) -> Result<i32> {
    reports::complete(&reports::show(&VIEW, &args.files(), || measure(node, config, args))?)
}

/// Measures, and returns the report. Removes everything that was made for that, whatever happens.
fn measure(node: &NodeArgs, config: &Config, args: &StartupArgs) -> Result<ArmsReport> {
    let (mut arms, points) = (ways(args), points(args));
    turn::check(&arms, args.engine == Engine::Hollow, args.vf_pool.as_deref())?;
    let calls = Rc::new(Interruptible::new()?);
    let (client, functions, image) = calls.wait(async {
        let client = connect(node, config).await?;
        let functions = connect_functions(node, config).await?;
        let image = image::ensure(config, &args.image, Pull::Missing).await?;
        anyhow::Ok((client, functions, image))
    })?;
    let spec = spec(args, &image.digest.to_string())?;
    let volumes = u32::try_from(spec.volumes.len() + spec.shares.len())?;
    let most = points.iter().map(|point| point.count).max().unwrap_or(1);
    let network = args.network.clone().unwrap_or_else(|| NETWORK.to_owned());
    ensure!(network != "none", "--network none is the way none: --arms none");
    own_daemon::check(&arms, config, &network, most)?;
    let has_own = arms.iter().any(|arm| arm.has_own_daemon());
    ensure!(!(has_own && image.lazy), "two daemons cannot fetch the rest of {}", args.image);
    let runc = runc_or_skip(&mut arms, || Runc::make(&image));
    ensure!(!arms.is_empty(), "no way is left to measure");
    let plugin = plugin_or_ip(&mut arms, BridgePlugin::find);
    let wires = match arms.iter().any(|arm| arm.is_in_namespace()) {
        true => Some(Arc::new(Wires::make(most, plugin)?)),
        false => None,
    };
    let takes_of_pool = |arm: &Arm| arm.takes_of_pool() && !arm.has_own_daemon();
    let pool = match arms.iter().any(takes_of_pool) {
        true => Some(calls.wait_to_end(Pool::make(node, config, &network, most))?),
        false => None,
    };
    let mut turns = Turns {
        client,
        functions,
        spec,
        network,
        waits: args.wait_network,
        hardware: args.vf_pool.clone(),
        wires,
        runc: runc.map(Arc::new),
        daemons: Vec::new(),
        devset: Mutex::default(),
    };
    let started = calls.wait(start_daemons(&mut turns.daemons, &arms, config, most));
    let turns = Rc::new(turns);
    let measured = started.and_then(|()| take_turns(&calls, &turns, args, &arms, points));
    let measured = calls.check().and(measured);
    let is_whole =
        measured.as_ref().is_ok_and(|report| report.faults.iter().all(|fault| !fault.failed));
    let turns = Rc::into_inner(turns).context("a way goes on after its turns")?;
    let closed = calls.wait_to_end(close(turns, pool, !is_whole));
    if let (Err(_), Err(error)) = (&measured, &closed) {
        // The first error is the one that tells.
        crate::complain(error);
    }
    let mut report = measured?;
    closed?;
    report.extra = ArmExtra { image: args.image.clone(), volumes, waits: args.wait_network };
    Ok(report)
}

/// Starts the daemons of the ways that have their own.
async fn start_daemons(
    daemons: &mut Vec<OwnDaemon>,
    arms: &[Arm],
    config: &Config,
    most: u32,
) -> Result<()> {
    for (place, arm) in (1..).zip(arms.iter().filter(|arm| arm.has_own_daemon())) {
        let started = OwnDaemon::start(*arm, config, place, most).await;
        daemons.push(started.with_context(|| format!("the daemon of the way {arm}"))?);
    }
    Ok(())
}

/// Takes all turns.
fn take_turns(
    calls: &Rc<Interruptible>,
    turns: &Rc<Turns>,
    args: &StartupArgs,
    arms: &[Arm],
    points: Vec<Point>,
) -> Result<ArmsReport> {
    let accelerator = match args.engine {
        Engine::Hollow => "hollow".to_owned(),
        Engine::Guests => super::accelerator(args.accel.as_deref()),
    };
    let processors = super::machine_processors();
    let subject = |arm: &Arm| -> Box<ArmSubject> {
        let (turns, calls) = (Rc::clone(turns), Rc::clone(calls));
        let (arm, is_single, warm) = (*arm, args.single, Vec::new());
        Box::new(Way { arm, is_single, processors, turns, calls, warm })
    };
    let subjects = arms.iter().map(subject).collect();
    let plan = ArmPlan::new(points, args.rounds);
    subjects::report_telling(subjects, plan, accelerator, |turn| tell(args, turn))
}

/// Ends the daemons of the measurement's own, and removes the pool of the node's daemon, after the
/// sandboxes and the peer's containers that are there if the measurement was broken off.
async fn close(turns: Turns, pool: Option<Pool>, broken_off: bool) -> Result<()> {
    let mut closed = match broken_off {
        true => own_daemon::remove_left(&turns.client).await,
        false => Ok(()),
    };
    if let Some(runc) = turns.runc.filter(|_| broken_off) {
        closed = closed.and(runc.remove_left().await);
    }
    for daemon in turns.daemons {
        closed = closed.and(daemon.end().await);
    }
    if let Some(pool) = pool {
        closed = closed.and(pool.remove().await);
    }
    closed
}

/// Makes what the ways of runc need. Without that, says so, and takes them out of `arms`.
fn runc_or_skip(arms: &mut Vec<Arm>, make: impl FnOnce() -> Result<Runc>) -> Option<Runc> {
    if !arms.iter().any(|arm| arm.is_runc()) {
        return None;
    }
    match make() {
        Ok(made) => Some(made),
        Err(error) => {
            for arm in arms.iter().filter(|arm| arm.is_runc()) {
                eprintln!("SKIPPED: the way {arm}: {error:#}");
            }
            arms.retain(|arm| !arm.is_runc());
            None
        }
    }
}

/// Finds the plugin that the way runc-cni needs. Without it, says so, and measures the way runc in
/// its place.
fn plugin_or_ip(
    arms: &mut Vec<Arm>,
    find: impl FnOnce() -> Result<BridgePlugin>,
) -> Option<BridgePlugin> {
    let place = arms.iter().position(|arm| *arm == Arm::RuncCni)?;
    match find() {
        Ok(plugin) => Some(plugin),
        Err(error) => {
            eprintln!("SKIPPED: the way runc-cni: {error:#}");
            eprintln!("THE WAY runc IS MEASURED IN ITS PLACE: ip(8) makes its interfaces, not CNI");
            match arms.contains(&Arm::Runc) {
                true => arms.retain(|arm| *arm != Arm::RuncCni),
                false => arms[place] = Arm::Runc,
            }
            None
        }
    }
}

/// Returns the ways that the user named, each once, or those that need no pool.
fn ways(args: &StartupArgs) -> Vec<Arm> {
    let mut arms: Vec<Arm> = Vec::new();
    for arm in &args.arms {
        if !arms.contains(arm) {
            arms.push(*arm);
        }
    }
    if arms.is_empty() { vec![Arm::None, Arm::Slipway] } else { arms }
}

/// Returns each number of sandboxes with each memory, in the order in which the user named them.
fn points(args: &StartupArgs) -> Vec<Point> {
    let memories: &[u64] = match args.memory.as_slice() {
        // The node's setting.
        [] => &[0],
        named => named,
    };
    let mut points = Vec::new();
    for memory_bytes in memories {
        for count in &args.count {
            let point = Point { count: *count, memory_bytes: *memory_bytes };
            if !points.contains(&point) {
                points.push(point);
            }
        }
    }
    points
}

fn spec(args: &StartupArgs, digest: &str) -> Result<v1::RunSpec> {
    let accelerator = match (args.engine, &args.accel) {
        (Engine::Hollow, Some(_)) => bail!("--engine hollow has no processor: leave --accel out"),
        (Engine::Hollow, None) => "hollow".to_owned(),
        (Engine::Guests, accel) => accel.clone().unwrap_or_default(),
    };
    Ok(v1::RunSpec {
        accelerator,
        command: vec!["sleep".to_owned(), "1000000".to_owned()],
        detach: true,
        ..super::machine_of(args, digest)?
    })
}

/// Returns the timeline of a sandbox that runs.
pub(super) fn timeline(start: Start) -> Result<Timeline> {
    match (start.timeline, start.exit) {
        (Some(timeline), None) => Ok(timeline),
        (_, Some(exit)) => bail!("sandbox {} ended: {}", start.name, exit.reason),
        _ => bail!("sandbox {} did not run", start.name),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{BenchCli, BenchCommand};

    fn args(words: &str) -> StartupArgs {
        let all = ["slipway-bench", "startup", "debian:12"].into_iter();
        match BenchCli::try_parse_from(all.chain(words.split_whitespace())).unwrap().command {
            BenchCommand::Startup(args) => *args,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn each_number_is_measured_with_each_memory() {
        let one = |count, memory_bytes| Point { count, memory_bytes };
        assert_eq!(points(&args("--engine hollow")), [one(4, 0)]);
        let found = points(&args("--count 10,50,10 --memory 1M,2M"));
        let expected = [(10, 1_u64), (50, 1), (10, 2), (50, 2)];
        assert_eq!(found, expected.map(|(count, mib)| one(count, mib << 20)));
    }

    #[test]
    fn without_a_plugin_the_interfaces_of_runc_are_made_by_ip() {
        let without = |asked: &[Arm]| {
            let mut arms = asked.to_vec();
            assert!(plugin_or_ip(&mut arms, || bail!("not installed")).is_none());
            arms
        };
        assert_eq!(without(&[Arm::RuncCni, Arm::None]), [Arm::Runc, Arm::None]);
        assert_eq!(without(&[Arm::RuncCni, Arm::Runc]), [Arm::Runc]);
        let mut arms = vec![Arm::Pool, Arm::Runc];
        assert!(plugin_or_ip(&mut arms, || panic!("not needed")).is_none());
        assert!(runc_or_skip(&mut arms, || bail!("no runc")).is_none());
        assert_eq!(arms, [Arm::Pool]);
    }

    #[test]
    fn sandboxes_are_what_the_user_asked_for() {
        let asked = args("--engine hollow --cpus 2 --volume data:64M:/data --volume b:1G");
        let of = spec(&asked, "sha256:1").unwrap();
        assert_eq!((of.accelerator.as_str(), of.cpus, of.volumes.len()), ("hollow", 2, 2));
        assert_eq!((of.volumes[0].mount_point.as_str(), of.detach), ("/data", true));
        assert_eq!(ways(&asked), [Arm::None, Arm::Slipway]);
        assert_eq!(ways(&args("--arms veth,pool,veth")), [Arm::Veth, Arm::Pool]);
        assert!(spec(&args("--engine hollow --accel tcg"), "sha256:1").is_err());
    }
}
