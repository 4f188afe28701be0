//! `slipway bench startup --arms`: starts sandboxes with and without network functions, in turn.

use anyhow::{Context, Result, bail};
use futures_util::future::try_join_all;
use slipway_bench::SavedReport;
use slipway_bench::arms::{Arm, ArmRound, ArmsReport, arms_plot, arms_table, compare_arms};
use slipway_plane_api::network_v1;
use slipway_runtime::{Config, SandboxClient, v1};
use slipway_telemetry::{Timeline, monotonic_ns};

use super::reports::{self, View};
use crate::args::{Engine, NodeArgs, Pull, ReportArgs, StartupArgs};
use crate::client::{connect, connect_functions, connect_networks, refused};
use crate::run::Start;
use crate::{image, vf};

/// The network of the sandboxes that have one.
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
        let count = report.count;
        let what = format!("Starts of {count} {hollow} at once, with and without a network");
        let rounds = report.rounds.iter().map(|one| one.round + 1).max().unwrap_or(0);
        reports::titled(&what, &report.environment, rounds, "turn", "")
    },
    picture: arms_plot,
    table: arms_table,
    differences: |before, now, _| compare_arms(before, now),
};

/// Measures, and shows the report.
pub(super) async fn arms(node: &NodeArgs, config: &Config, args: &StartupArgs) -> Result<i32> {
    let files = ReportArgs {
        report: None,
        output: args.output.clone(),
        svg: args.svg.clone(),
        compare: args.compare.clone(),
        json: args.json,
    };
    reports::check(&files)?;
    let measured = measure(node, config, args).await?;
    reports::show(&VIEW, &files, || Ok(measured))?;
    Ok(0)
}

/// Measures, and returns the report.
async fn measure(node: &NodeArgs, config: &Config, args: &StartupArgs) -> Result<ArmsReport> {
    let client = connect(node, config).await?;
    let image = image::ensure(config, &args.image, Pull::Missing).await?;
    let spec = spec(args, &image.digest.to_string())?;
    let arms = ways(args);
    let pool = match arms.contains(&Arm::Pool) {
        true => Some(Pool::make(node, config, args.count).await?),
        false => None,
    };
    let measured = rounds(&client, args, &arms, &spec, pool.as_ref()).await;
    let closed = match pool {
        Some(pool) => pool.remove().await,
        None => Ok(()),
    };
    let rounds = measured?;
    closed?;
    let accelerator = match args.engine {
        Engine::Hollow => "hollow".to_owned(),
        Engine::Guests => super::accelerator(args.machine.accel.as_deref()),
    };
    Ok(ArmsReport {
        format: ArmsReport::FORMAT,
        environment: super::environment(accelerator),
        command: super::command_line(),
        count: args.count,
        memory_bytes: spec.memory_bytes,
        waits: spec.wait_network,
        arms,
        rounds,
    })
}

/// Returns the ways that the user named, or those that need no pool.
fn ways(args: &StartupArgs) -> Vec<Arm> {
    let mut arms = args.arms.clone();
    if arms.is_empty() {
        arms = vec![Arm::None, Arm::Slipway];
    }
    arms.dedup();
    arms
}

fn spec(args: &StartupArgs, digest: &str) -> Result<v1::RunSpec> {
    let machine = &args.machine;
    let accelerator = match (args.engine, &machine.accel) {
        (Engine::Hollow, Some(_)) => bail!("--engine hollow has no processor: leave --accel out"),
        (Engine::Hollow, None) => "hollow".to_owned(),
        (Engine::Guests, accel) => accel.clone().unwrap_or_default(),
    };
    let kernel = machine.kernel.as_deref().map(std::path::absolute).transpose()?;
    Ok(v1::RunSpec {
        image: args.image.clone(),
        image_digest: digest.to_owned(),
        memory_bytes: machine.memory.unwrap_or(0),
        cpus: machine.cpus.unwrap_or(0),
        max_cpus: machine.max_cpus.unwrap_or(0),
        kernel: kernel.map(|path| path.to_string_lossy().into_owned()).unwrap_or_default(),
        accelerator,
        command: vec!["sleep".to_owned(), "1000000".to_owned()],
        detach: true,
        wait_network: args.wait_network,
        ..v1::RunSpec::default()
    })
}

/// Returns the spec of a sandbox that starts in a way.
fn of_arm(arm: Arm, spec: &v1::RunSpec) -> v1::RunSpec {
    let network = if arm == Arm::None { "none" } else { NETWORK };
    v1::RunSpec {
        network: network.to_owned(),
        wait_network: spec.wait_network && arm != Arm::None,
        vf_pool: if arm == Arm::Pool { own() } else { String::new() },
        ..spec.clone()
    }
}

/// Takes all turns. The first round is not counted: what a node makes once is made in it.
async fn rounds(
    client: &SandboxClient,
    args: &StartupArgs,
    arms: &[Arm],
    spec: &v1::RunSpec,
    pool: Option<&Pool>,
) -> Result<Vec<ArmRound>> {
    let mut rounds = Vec::new();
    for number in 0..=args.rounds {
        for arm in arms {
            if !args.json {
                eprintln!("round {number} of {}: {arm}", args.rounds);
            }
            let count = if number == 0 { args.count.min(4) } else { args.count };
            let turn = turn(client, &of_arm(*arm, spec), count).await;
            let (timelines, busy_ns) = turn.with_context(|| format!("{arm}"))?;
            if let Some(round) = number.checked_sub(1) {
                rounds.push(ArmRound { arm: *arm, round, timelines, busy_ns });
            }
            if let Some(pool) = pool {
                pool.settle().await?;
            }
        }
    }
    Ok(rounds)
}

/// Starts `count` sandboxes at once, and removes them when all have started. Returns their
/// timelines, and the time for which the processors were busy meanwhile.
async fn turn(
    client: &SandboxClient,
    spec: &v1::RunSpec,
    count: u32,
) -> Result<(Vec<Timeline>, u64)> {
    let busy = || slipway_bench::busy_ns().unwrap_or(0);
    let specs = (0..count).map(|number| {
        // Of hundreds of names that a node makes up, two may be the same.
        v1::RunSpec { name: format!("{}-{number}", own()), ..spec.clone() }
    });
    let specs = specs.collect();
    let (began, busy_before) = (monotonic_ns(), busy());
    let started = super::start_at_once(client, specs).await;
    let busy_ns = busy().saturating_sub(busy_before);
    let names = started.iter().flatten().map(|start| start.name.clone());
    let removed = try_join_all(names.map(|name| remove(client.clone(), name))).await;
    let timelines = started.into_iter().map(|start| timeline(start?));
    let timelines = timelines.collect::<Result<Vec<_>>>()?;
    removed?;
    Ok((slipway_bench::aligned(timelines, began), busy_ns))
}

/// Returns the timeline of a sandbox that runs.
pub(super) fn timeline(start: Start) -> Result<Timeline> {
    match (start.timeline, start.exit) {
        (Some(timeline), None) => Ok(timeline),
        (_, Some(exit)) => bail!("sandbox {} ended: {}", start.name, exit.reason),
        _ => bail!("sandbox {} did not run", start.name),
    }
}

/// Removes a sandbox, whether it runs or not.
pub(super) async fn remove(mut client: SandboxClient, name: String) -> Result<()> {
    let request = v1::RemoveRequest { name, force: true };
    client.remove(request).await.map_err(refused)?;
    Ok(())
}

/// The pool of virtual functions of the measurement, on the switch of its network.
struct Pool {
    networks: slipway_plane_api::NetworkClient,
    functions: slipway_plane_api::VfClient,
}

impl Pool {
    /// Makes the pool, with a function for each of `count` sandboxes.
    async fn make(node: &NodeArgs, config: &Config, count: u32) -> Result<Self> {
        let mut networks = connect_networks(node, config).await?;
        let functions = connect_functions(node, config).await?;
        let port = network_v1::CreatePortRequest {
            network: NETWORK.to_owned(),
            name: own(),
            ..Default::default()
        };
        networks.create_port(port).await.map_err(refused)?;
        let request = network_v1::GetNetworkRequest { name: NETWORK.to_owned() };
        let network = networks.get_network(request).await.map_err(refused)?;
        let mtu = network.into_inner().mtu;
        let mut pool = Self { networks, functions };
        // A network's switch has its name.
        let made = vf::make_nics(&mut pool.functions, &own(), NETWORK, count, mtu).await;
        if let Err(error) = made {
            // The first error is the one that tells.
            let _ = pool.remove().await;
            return Err(error);
        }
        Ok(pool)
    }

    /// Waits until all functions are ready again.
    async fn settle(&self) -> Result<()> {
        vf::settled(&mut self.functions.clone(), &own()).await.map(drop)
    }

    async fn remove(mut self) -> Result<()> {
        let pool = vf::remove(&mut self.functions, &own()).await;
        let request = network_v1::RemovePortRequest { name: own() };
        let port = self.networks.remove_port(request).await;
        pool.and(port.map(drop).map_err(refused))
    }
}
