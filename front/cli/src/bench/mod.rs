//! `slipway bench`: `startup` is here; `block`, `packet`, `socket`, `vmm`, `memory`, `cgroups`,
//! `attach`, `roots`, `density` and `function` are modules of their own, with their targets and
//! guests.

mod arms;
mod attach;
mod block;
mod cgroups;
mod density;
mod function;
mod interruptible;
mod memory;
mod nic;
mod packet;
mod packet_target;
mod reports;
mod roots;
pub mod scratch;
mod socket;
mod subjects;
mod target;
mod vm;
mod vmm;

use std::process::Command;

use anyhow::{Context, Result, bail};
use futures_util::future::{join_all, try_join_all};
use slipway_bench::{Environment, Own, StartupReport, Watch, fault_lines, void_note};
use slipway_runtime::{Config, SandboxClient, v1};
use slipway_telemetry::{Timeline, monotonic_ns};

pub use attach::attach;
pub use block::block;
pub use cgroups::cgroups;
pub use density::density;
pub use function::function;
pub use memory::{memory, user as memory_user};
pub use packet::packet;
pub use packet_target::serve as packet_target;
pub use roots::roots;
pub use socket::{load as socket_load, socket};
pub use target::serve as target;
pub use vmm::vmm;

use crate::args::{NodeArgs, Pull, StartupArgs};
use crate::client::connect;
use crate::progress::stage_spinner;
use crate::run::{self, Fetched, Start};
use crate::session::{SessionSettings, Sink};
use crate::{image, report, volume};

/// Discards the sandboxes' output, which is not measured.
struct DiscardedOutput;

impl Sink for DiscardedOutput {
    fn write(&mut self, _: bool, _: &[u8]) -> std::io::Result<()> {
        Ok(())
    }
}

/// Starts sandboxes at once, whose output nobody reads. Returns the outcome of each.
async fn start_at_once(client: &SandboxClient, specs: Vec<v1::RunSpec>) -> Vec<Result<Start>> {
    let spinner = stage_spinner(specs.len() as u32);
    let starts = specs.into_iter().map(|spec| {
        let (client, spinner) = (client.clone(), spinner.clone());
        async move {
            let wishes = SessionSettings { stdin: false, tty: false };
            run::start(client, spec, wishes, &mut DiscardedOutput, spinner).await
        }
    });
    let started = join_all(starts).await;
    spinner.finish_and_clear();
    started
}

/// Starts sandboxes round after round. Prints, writes and compares the results.
pub fn startup(node: &NodeArgs, config: &Config, args: &StartupArgs) -> Result<i32> {
    match args.has_turns() {
        true => arms::arms(node, config, args),
        false => crate::block_on(at_once(node, config, args)),
    }
}

/// Starts sandboxes in one way, and shows where the time went.
async fn at_once(node: &NodeArgs, config: &Config, args: &StartupArgs) -> Result<i32> {
    let (files, before) = (args.files(), args.compare.as_deref().map(read).transpose()?);
    reports::check(&files)?;
    let client = connect(node, config).await?;
    let image = image::ensure(config, &args.image, Pull::Missing).await?;
    let digest = image.digest.to_string();
    let (mut rounds, mut reasons) = (Vec::new(), Vec::new());
    for number in 1..=args.rounds {
        if !args.json {
            eprintln!("round {number} of {}", args.rounds);
        }
        let watch = Watch::begin(Own::Node);
        rounds.push(round(&client, config, args, &digest).await?);
        reasons.push(watch.end(None));
    }
    let accelerator = accelerator(args.accel.as_deref());
    let mut measured = StartupReport::new(environment(accelerator), command_line(), rounds);
    measured.add_void(reasons);
    if let Some(path) = &files.data(args.svg.as_deref()) {
        std::fs::write(path, measured.to_json()?)
            .with_context(|| format!("cannot write {}", path.display()))?;
        eprintln!("Report written to {}", path.display());
    }
    let last = measured.timelines.last().cloned().unwrap_or_default();
    if let Some(path) = &args.svg {
        let conditions = measured.environment.line() + &void_note(&measured.faults);
        report::write(path, &last, &args.image, Some(&conditions))?;
    }
    if args.json {
        crate::out::print(format_args!("{}", measured.to_json()?));
    } else {
        report::show(&measured.statistics, &last);
        eprint!("{}", fault_lines(&measured.faults));
    }
    if let Some(before) = before {
        crate::say!("{}", slipway_bench::compare(&before, &measured));
    }
    Ok(0)
}

fn read(path: &std::path::Path) -> Result<StartupReport> {
    let text = std::fs::read_to_string(path);
    let text = text.with_context(|| format!("cannot read {}", path.display()))?;
    StartupReport::from_json(&text).with_context(|| format!("{} is no report", path.display()))
}

async fn round(
    client: &SandboxClient,
    config: &Config,
    args: &StartupArgs,
    digest: &str,
) -> Result<Vec<Timeline>> {
    let began = monotonic_ns();
    // The image is in the cache: each round finds it there, as each `run` does.
    let digest = image::ensure(config, digest, Pull::Never).await?.digest.to_string();
    let fetched = Fetched { began, ended: monotonic_ns() };
    let count = args.count.first().copied().unwrap_or(1);
    let spinner = stage_spinner(count);
    let spec = v1::RunSpec {
        command: vec!["true".to_owned()],
        remove: true,
        network: args.network.clone().unwrap_or_else(|| "none".to_owned()),
        memory_bytes: args.memory.first().copied().unwrap_or(0),
        ..machine_of(args, &digest)?
    };
    let starts = (0..count).map(|_| {
        let (client, spec, spinner) = (client.clone(), spec.clone(), spinner.clone());
        async move {
            let wishes = SessionSettings { stdin: false, tty: false };
            let start = run::start(client, spec, wishes, &mut DiscardedOutput, spinner).await?;
            timeline(start)
        }
    });
    let timelines = try_join_all(starts).await;
    spinner.finish_and_clear();
    Ok(fetched.align(timelines?))
}

/// Returns what all sandboxes of a measurement of start-up have, but for their memory and network.
fn machine_of(args: &StartupArgs, digest: &str) -> Result<v1::RunSpec> {
    let kernel = args.kernel.as_deref().map(std::path::absolute).transpose()?;
    Ok(v1::RunSpec {
        image: args.image.clone(),
        image_digest: digest.to_owned(),
        cpus: args.cpus.unwrap_or(0),
        max_cpus: args.max_cpus.unwrap_or(0),
        kernel: kernel.map(|path| path.to_string_lossy().into_owned()).unwrap_or_default(),
        accelerator: args.accel.clone().unwrap_or_default(),
        volumes: volume::disks(&args.volume),
        shares: volume::shares(&args.volume),
        boots: true,
        ..v1::RunSpec::default()
    })
}

fn timeline(start: Start) -> Result<Timeline> {
    match (start.timeline, start.exit) {
        (Some(timeline), Some(exit)) if exit.status == 0 => Ok(timeline),
        (_, Some(exit)) => {
            bail!("sandbox {} ended with status {}: {}", start.name, exit.status, exit.reason)
        }
        _ => bail!("sandbox {} did not run", start.name),
    }
}

fn command_line() -> String {
    std::env::args().collect::<Vec<_>>().join(" ")
}

/// Returns how guests run: as the user said, or as this machine can.
fn accelerator(said: Option<&str>) -> String {
    match said {
        Some(said) if said != "auto" => said.to_owned(),
        _ if slipway_hypervisor::accel::probe_without_boot().is_ok() => "kvm".to_owned(),
        _ => "tcg".to_owned(),
    }
}

fn environment(accelerator: String) -> Environment {
    let uname = rustix::system::uname();
    Environment {
        machine: machine(),
        kernel: uname.release().to_string_lossy().into_owned(),
        accelerator,
        version: env!("CARGO_PKG_VERSION").to_owned(),
        commit: commit(),
    }
}

/// Returns the number of the machine's processors in the text of /proc/cpuinfo, at least 1.
fn processors(info: &str) -> u32 {
    let processors = info.lines().filter(|line| line.starts_with("processor"));
    processors.count().max(1) as u32
}

/// Describes the machine: processor, cores, memory.
fn machine() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = info.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    let model = model.map_or("unknown processor", |(_, model)| model);
    // The machine's processors, not only those that this thread may use.
    let cores = processors(&info);
    let memory = rustix::system::sysinfo();
    let bytes = (memory.totalram as u64).saturating_mul(u64::from(memory.mem_unit));
    format!("{model}, {cores} cores, {}", crate::size::show(bytes))
}

/// Returns the commit of the source tree that contains this program, or `None` outside of one.
fn commit() -> Option<String> {
    let dir = std::env::current_exe().ok()?.parent()?.to_path_buf();
    let output =
        Command::new("git").arg("-C").arg(dir).args(["rev-parse", "--short", "HEAD"]).output();
    let output = output.ok().filter(|output| output.status.success())?;
    Some(String::from_utf8(output.stdout).ok()?.trim().to_owned())
}
