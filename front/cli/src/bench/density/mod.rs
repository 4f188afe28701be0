//! `slipway bench density`: measures what sandboxes take of the host, more and more of them, while
//! they idle.

mod fleet;

use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail, ensure};
use slipway_bench::density::{
    Burst, DensityPoint, DensityReport, Processes, Quantity, Series, available_bytes,
    compare_density, density_plot, density_table, shortage,
};
use slipway_bench::{Own, SavedReport, Watch};
use slipway_runtime::{Config, v1};
use slipway_telemetry::monotonic_ns;

use self::fleet::{Clients, Fleet};
use super::reports::{self, View};
use crate::args::{DensityArgs, DensityEngine, NodeArgs, Pull, Switched};
use crate::client::{answer, connect, connect_plane, connect_templates};
use crate::fork::EndSignals;
use crate::image;
use crate::out::OWN_FAILURE;

/// The length of a look at whether sandboxes idle.
const LOOK: Duration = Duration::from_secs(1);
/// The longest time that they are given to become idle.
const PATIENCE: Duration = Duration::from_secs(60);
/// The processor time that a VMM which idles may use during a look.
const IDLE: Duration = Duration::from_millis(10);
/// The least memory that a sandbox is expected to take, bytes.
const LEAST: f64 = (1 << 20) as f64;
/// The factor by which the next sandboxes may take more than those before.
const MARGIN: f64 = 1.25;

/// Measures, or shows an earlier report.
pub async fn density(node: &NodeArgs, config: &Config, args: &DensityArgs) -> Result<i32> {
    reports::check(&args.report)?;
    let (measured, left) = match &args.image {
        Some(image) if args.report.report.is_none() => {
            let (report, left) = measure(node, config, args, image).await?;
            if args.report.json && !report.stopped.is_empty() {
                crate::complain(&anyhow!("stopped {}", report.stopped));
            }
            (Some(report), left)
        }
        _ => (None, false),
    };
    reports::show(&VIEW, &args.report, || measured.context("nothing was measured"))?;
    Ok(if left { OWN_FAILURE } else { 0 })
}

/// The view of these reports.
const VIEW: View<DensityReport> = View {
    title: |report| {
        let hollow = if report.is_hollow() { ", hollow" } else { "" };
        let begun = if report.forks { "forks of a template" } else { "each booted" };
        let memory = crate::size::show(report.memory_bytes);
        let what = format!("Idle sandboxes{hollow} of {memory} on {}, {begun}", report.engine);
        let points = report.sandboxes.points.iter().chain(&report.replicas.points);
        let bursts = points.flat_map(|point| &point.bursts);
        let rounds = bursts.map(|burst| burst.lasts().len()).max().unwrap_or(0);
        let lines = "thin lines: from the least to the greatest sandbox, or round of starts";
        let medians = format!("medians of {rounds} rounds of starts; {lines}");
        format!("{what}\n{}\n{medians}", report.environment.line())
    },
    picture: density_plot,
    table: density_table,
    differences: |before, now, _| compare_density(before, now),
};

/// Measures, and removes everything that was made for that, whatever happens. Returns the report,
/// and `true` if something is left, which an error has been printed about.
async fn measure(
    node: &NodeArgs,
    config: &Config,
    args: &DensityArgs,
    image: &str,
) -> Result<(DensityReport, bool)> {
    let digest = image::ensure(config, image, Pull::Missing).await?.digest.to_string();
    let spec = spec(args, image, &digest)?;
    let mut clients = Clients {
        sandboxes: connect(node, config).await?,
        plane: connect_plane(node, config).await?,
        templates: connect_templates(node, config).await?,
    };
    let status = answer(clients.sandboxes.status(v1::Empty {}).await)?;
    let memory_bytes = if spec.memory_bytes > 0 { spec.memory_bytes } else { status.memory_bytes };
    let mut fleet = Fleet::new(clients, status.pid, spec);
    let mut report = DensityReport {
        format: DensityReport::FORMAT,
        environment: super::environment(accelerator(args)),
        command: super::command_line(),
        image: image.to_owned(),
        engine: String::new(),
        forks: args.fork,
        memory_bytes,
        sandboxes: Series::default(),
        replicas: Series::default(),
        stopped: String::new(),
    };
    let mut ends = EndSignals::catch()?;
    // The daemon saves a machine to the end even if nobody waits, so a signal does not end this.
    let begun = if args.fork { fleet.make_template().await } else { Ok(()) };
    let outcome = match begun {
        Ok(()) => tokio::select! {
            outcome = take(&mut fleet, args, &mut report) => outcome,
            () = ends.next() => Err(anyhow!("interrupted")),
        },
        Err(error) => Err(error),
    };
    let ended = fleet.end().await;
    if let Err(error) = &ended {
        crate::complain(error);
    }
    outcome?;
    Ok((report, ended.is_err()))
}

fn accelerator(args: &DensityArgs) -> String {
    match args.engine {
        Some(DensityEngine::Hollow) => "hollow".to_owned(),
        _ => super::accelerator(args.machine.accel.as_deref()),
    }
}

/// Returns what each sandbox is started with, but for its name.
fn spec(args: &DensityArgs, image: &str, digest: &str) -> Result<v1::RunSpec> {
    let machine = &args.machine;
    let is_hollow = args.engine == Some(DensityEngine::Hollow);
    let forks_what = args.engine.is_some_and(|engine| engine != DensityEngine::Vmm);
    ensure!(!(args.fork && forks_what), "only slipway-vmm begins with a template: --engine vmm");
    let accelerator = match (is_hollow, &machine.accel) {
        (true, Some(_)) => bail!("--engine hollow has no processor: leave --accel out"),
        (true, None) => "hollow".to_owned(),
        (false, accel) => accel.clone().unwrap_or_default(),
    };
    let kernel = machine.kernel.as_deref().map(crate::spec::absolute).transpose()?;
    Ok(v1::RunSpec {
        image: image.to_owned(),
        image_digest: digest.to_owned(),
        memory_bytes: machine.memory.unwrap_or(0),
        max_memory_bytes: machine.max_memory.unwrap_or(0),
        layers_bytes: machine.layers.unwrap_or(0),
        cpus: machine.cpus.unwrap_or(0),
        max_cpus: machine.max_cpus.unwrap_or(0),
        free_page_reporting: machine.free_page_reporting.map(Switched::is_on),
        kernel: kernel.unwrap_or_default(),
        accelerator,
        network: args.network.clone(),
        command: vec!["sleep".to_owned(), "1000000".to_owned()],
        // No entry point, whatever the image's is.
        entrypoint: Some(String::new()),
        boots: true,
        detach: true,
        ..v1::RunSpec::default()
    })
}

/// Takes all measurements into `report`.
async fn take(fleet: &mut Fleet, args: &DensityArgs, report: &mut DensityReport) -> Result<()> {
    let each = warm_up(fleet, args, report).await?;
    let (sandboxes, stopped) = sandboxes(fleet, args, each).await?;
    report.sandboxes = sandboxes;
    report.stopped = stopped.unwrap_or_default();
    if !args.replicas.is_empty()
        && let Err(error) = replicas(fleet, args, report).await
    {
        let before = if report.stopped.is_empty() { "" } else { "; " };
        report.stopped += &format!("{before}containers of a pod: {error:#}");
    }
    Ok(())
}

/// Starts two sandboxes and removes them: what a node makes once is made by the first. Returns what
/// the second took, bytes.
async fn warm_up(fleet: &mut Fleet, args: &DensityArgs, report: &mut DensityReport) -> Result<f64> {
    if let Some(reason) = shortage(available_bytes(), 2, report.memory_bytes) {
        bail!("{reason}");
    }
    fleet.grow(1).await?;
    report.engine = fleet.engine().await?;
    let expected = args.engine.map_or(&*report.engine, |engine| engine.program());
    ensure!(
        report.engine == expected,
        "this node's daemon runs sandboxes on {}, not on {expected}: `vmm` in its settings says so",
        report.engine
    );
    let mut second = begin(fleet).await?;
    fleet.grow(2).await?;
    let processes = fleet.processes().await?;
    second.points.push(DensityPoint { count: 1, ..point(fleet, &processes, args).await? });
    fleet.clear().await?;
    Ok(largest(&second).unwrap_or(LEAST))
}

/// Returns what each sandbox took at the last point, as far as processes or the host have it,
/// bytes. Returns `None` if no point has sandboxes.
fn largest(series: &Series) -> Option<f64> {
    let last = series.points.last().filter(|point| point.count > 0)?;
    let each = |quantity| series.each(last, quantity);
    Some(each(Quantity::Pss).max(each(Quantity::Host)).max(LEAST))
}

/// Measures sandboxes, by their counts, as many as fit. Returns the reason why there are no more of
/// them, if the user asked for more. `each` is what one is expected to take, bytes.
async fn sandboxes(
    fleet: &mut Fleet,
    args: &DensityArgs,
    each: f64,
) -> Result<(Series, Option<String>)> {
    let mut series = begin(fleet).await?;
    let mut counts = args.deployed.clone();
    counts.sort_unstable();
    counts.dedup();
    let beside = args.burst.iter().max().copied().unwrap_or(0);
    for count in counts {
        let each = (largest(&series).unwrap_or(each) * MARGIN) as u64;
        let more = count.saturating_sub(fleet.count()).saturating_add(beside);
        let missing = shortage(available_bytes(), more, each);
        let reached = match missing {
            None => deployed(fleet, args, count).await,
            Some(reason) => Err(anyhow!("{reason}")),
        };
        match reached {
            Ok(point) => series.points.push(point),
            Err(error) if series.points.is_empty() => return Err(error),
            Err(error) => return Ok((series, Some(format!("before {count}: {error:#}")))),
        }
    }
    Ok((series, None))
}

/// Measures `count` sandboxes, of which some idle already.
async fn deployed(fleet: &mut Fleet, args: &DensityArgs, count: u32) -> Result<DensityPoint> {
    tell(args, &format!("{count} deployed"));
    fleet.grow(count).await?;
    let processes = fleet.processes().await?;
    let mut point = point(fleet, &processes, args).await?;
    for at_once in &args.burst {
        let (watch, mut rounds) = (Watch::begin(Own::Node), Vec::new());
        for _ in 0..args.rounds {
            rounds.push(fleet.burst(*at_once).await?);
        }
        point.bursts.push(Burst { at_once: *at_once, rounds });
        let reason = watch.end(None);
        point.void.extend(reason.map(|reason| format!("starts of {at_once}: {reason}")));
    }
    Ok(point)
}

/// Measures containers of one pod into `report`, by their counts, an empty pod first.
async fn replicas(fleet: &mut Fleet, args: &DensityArgs, report: &mut DensityReport) -> Result<()> {
    fleet.clear().await?;
    report.replicas = begin(fleet).await?;
    if let Some(reason) = shortage(available_bytes(), 1, report.memory_bytes) {
        bail!("{reason}");
    }
    let pod = fleet.pod().await?;
    let mut counts = args.replicas.clone();
    counts.push(0);
    counts.sort_unstable();
    counts.dedup();
    let mut there = 0;
    for count in counts {
        tell(args, &format!("{count} replicas"));
        let (watch, mut rounds) = (Watch::begin(Own::Node), Vec::new());
        while there < count {
            rounds.push(vec![fleet.replica(&pod).await?]);
            there += 1;
        }
        let reason = watch.end(None);
        let processes = fleet.processes().await?;
        let mut point = DensityPoint { count, ..point(fleet, &processes, args).await? };
        if !rounds.is_empty() {
            point.void.extend(reason.map(|reason| format!("starts of 1: {reason}")));
            point.bursts.push(Burst { at_once: 1, rounds });
        }
        report.replicas.points.push(point);
    }
    Ok(())
}

/// Returns a series without points: the memory that is taken before its first sandbox.
async fn begin(fleet: &mut Fleet) -> Result<Series> {
    let processes = fleet.processes().await?;
    wait_until_idle(&processes).await?;
    Ok(Series { before: fleet.memory(&processes).await?, points: Vec::new() })
}

/// Measures the sandboxes that are there, when they idle.
async fn point(
    fleet: &mut Fleet,
    processes: &Processes,
    args: &DensityArgs,
) -> Result<DensityPoint> {
    let settled = wait_until_idle(processes).await?;
    let taken = fleet.memory(processes).await?;
    let (watch, began, before) = (Watch::begin(Own::Node), monotonic_ns(), processes.cpu()?);
    tokio::time::sleep(Duration::from_secs_f64(args.idle)).await;
    let idle = processes.cpu()?.since(before);
    let idle_ns = monotonic_ns().saturating_sub(began).max(1);
    let reason = watch.end(None);
    let void = reason.map(|reason| format!("idle: {reason}")).into_iter().collect();
    let (guest_used, count, bursts) = (fleet.guest_used().await, fleet.count(), Vec::new());
    Ok(DensityPoint { count, taken, guest_used, settled, idle_ns, idle, bursts, void })
}

/// Waits until VMMs idle. Returns `false` if they do not in time.
async fn wait_until_idle(processes: &Processes) -> Result<bool> {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let most = LOOK.as_nanos() as u64 * cores as u64 / 2;
    let each = IDLE.as_nanos() as u64;
    let allowed = each.saturating_mul(processes.vmms.len() as u64 + 1).min(most);
    let mut waited = Duration::ZERO;
    loop {
        let before = processes.cpu()?;
        tokio::time::sleep(LOOK).await;
        waited += LOOK;
        // The first look is at what has just been started.
        if waited > LOOK && processes.cpu()?.since(before).own() <= allowed {
            return Ok(true);
        }
        if waited >= PATIENCE {
            return Ok(false);
        }
    }
}

/// Says what is measured next, unless standard error is for errors only.
fn tell(args: &DensityArgs, what: &str) {
    if !args.report.json {
        eprintln!("{what}");
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{BenchCli, BenchCommand};

    fn args(words: &[&str]) -> DensityArgs {
        let all = ["slipway-bench", "density"].iter().chain(words);
        match BenchCli::try_parse_from(all).unwrap().command {
            BenchCommand::Density(args) => *args,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn sandboxes_are_what_the_user_asked_for() {
        let asked = args(&["debian:12", "--engine", "hollow", "--memory", "128M"]);
        let of = spec(&asked, "debian:12", "sha256:1").unwrap();
        assert_eq!((of.accelerator.as_str(), of.memory_bytes), ("hollow", 128 << 20));
        assert_eq!((of.network.as_str(), of.detach), ("none", true));
        assert_eq!((asked.deployed, asked.burst), (vec![1, 2, 4, 8], vec![1]));
        let both = args(&["x", "--engine", "hollow", "--accel", "kvm"]);
        assert!(spec(&both, "x", "").unwrap_err().to_string().contains("leave --accel out"));
        for engine in ["hollow", "qemu"] {
            let forked = args(&["x", "--engine", engine, "--fork"]);
            assert!(spec(&forked, "x", "").unwrap_err().to_string().contains("slipway-vmm"));
        }
        assert!(spec(&args(&["x", "--engine", "vmm", "--fork"]), "x", "").is_ok());
    }

    #[test]
    fn an_image_or_a_report_is_needed() {
        let parsed = |words: &[&str]| {
            BenchCli::try_parse_from(["slipway-bench", "density"].iter().chain(words)).is_ok()
        };
        assert!(!parsed(&[]) && parsed(&["--report", "a.json"]) && parsed(&["x"]));
        assert!(parsed(&["x", "--deployed", "0,1000"]) && !parsed(&["x", "--deployed", "5000"]));
        assert!(!parsed(&["x", "--replicas", "100"]));
    }
}
