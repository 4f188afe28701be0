//! `slipway bench`: each benchmark is a module, with its targets and guests; `arms` is a part of
//! `startup`.

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
mod removal;
mod reports;
mod roots;
pub mod scratch;
mod socket;
mod startup;
mod subjects;
mod target;
mod vm;
mod vmm;

use std::process::Command;

use anyhow::Result;
use futures_util::future::join_all;
use slipway_bench::arms::Point;
use slipway_bench::{Environment, Turn};
use slipway_runtime::{SandboxClient, v1};

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
pub use startup::startup;
pub use target::serve as target;
pub use vmm::vmm;

use crate::args::StartupArgs;
use crate::progress::stage_spinner;
use crate::run::{self, Start};
use crate::session::{Event, SessionSettings, Sink};
use crate::volume;

/// Discards the sandboxes' output, which is not measured.
struct DiscardedOutput;

impl Sink for DiscardedOutput {
    fn write(&mut self, _: bool, _: &[u8]) -> std::io::Result<()> {
        Ok(())
    }
}

/// Starts sandboxes at once, whose output nobody reads. Calls `tell` with each event of their
/// sessions. Returns the outcome of each.
async fn start_at_once(
    client: &SandboxClient,
    specs: Vec<v1::RunSpec>,
    tell: impl Fn(&Event),
) -> Vec<Result<Start>> {
    let (spinner, tell) = (stage_spinner(specs.len() as u32), &tell);
    let starts = specs.into_iter().map(|spec| {
        let (client, spinner) = (client.clone(), spinner.clone());
        async move {
            let wishes = SessionSettings { stdin: false, tty: false };
            let sink = &mut DiscardedOutput;
            run::start_with(client, None, spec, wishes, sink, spinner, tell).await
        }
    });
    let started = join_all(starts).await;
    spinner.finish_and_clear();
    started
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

/// Says which turn begins, unless standard error is for errors only.
fn tell(args: &StartupArgs, turn: &Turn<'_, Point>) {
    if !args.json {
        let Turn { subject, load, round, .. } = turn;
        eprintln!("round {} of {}: {subject}, {load}", round + 1, args.rounds);
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

/// Returns the number of the machine's processors.
fn machine_processors() -> u32 {
    processors(&std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default())
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
