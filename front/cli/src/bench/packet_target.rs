//! The target of `slipway bench packet` with devices: a process of its own that serves two network
//! functions on one switch, and that the measuring process ends.

use std::any::Any;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};

use anyhow::{Context, Result, ensure};
use slipway_bench::block::native::{Cpus, pin};
use slipway_bench::packet::Devices;
use slipway_plane::{Plane, Settings};
use slipway_plane_api::v1;

use crate::args::PacketTargetArgs;

/// The line that a target prints once its sockets listen.
const READY: &str = "ready";
/// The switch's name.
const SWITCH: &str = "bench";

/// A running target. Dropping it ends it.
struct Target {
    child: Child,
    /// Standard input of the target, which ends when the pipe closes.
    _lifeline: Option<ChildStdin>,
}

impl Drop for Target {
    fn drop(&mut self) {
        // The target holds nothing that needs an orderly end.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Starts a target with its sockets in `directory`.
pub fn start(directory: &Path, cpus: &Cpus) -> Result<Box<dyn Any>> {
    let program = slipway_bench::slipway().context("which program this is")?;
    let mut command = Command::new(program);
    command.args(["bench", "packet-target", "--directory"]).arg(directory);
    for cpu in &cpus.target {
        command.args(["--cpu", &cpu.to_string()]);
    }
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().context("cannot start the target")?;
    let (lifeline, output) = (child.stdin.take(), child.stdout.take());
    let target = Target { child, _lifeline: lifeline };
    let mut line = String::new();
    if let Some(output) = output {
        BufReader::new(output).read_line(&mut line)?;
    }
    ensure!(line.trim() == READY, "the target did not come up");
    Ok(Box::new(target))
}

/// `slipway bench packet-target`: serves until standard input ends. For `bench packet` alone.
pub fn serve(args: &PacketTargetArgs) -> Result<i32> {
    if !args.cpu.is_empty() {
        pin(&args.cpu)?;
    }
    let plane = Plane::new(Settings::default())?;
    plane.fabric().create_switch(&v1::CreateSwitchRequest {
        name: SWITCH.to_owned(),
        ..Default::default()
    })?;
    let directory = std::path::absolute(&args.directory)?;
    for number in 1..=2_u64 {
        plane.create(&v1::CreateEndpointRequest {
            id: number.to_string(),
            socket_path: directory.join(number.to_string()).to_string_lossy().into_owned(),
            virtio_net: Some(v1::VirtioNet {
                switch: SWITCH.to_owned(),
                mac: Devices::mac(number),
                spoof_check: true,
                ..Default::default()
            }),
            ..Default::default()
        })?;
    }
    println!("{READY}");
    std::io::stdout().flush()?;
    // The process that started this one holds the pipe's other end, which closes when that process
    // ends in any way.
    std::io::copy(&mut std::io::stdin().lock().take(u64::MAX), &mut std::io::sink())?;
    Ok(0)
}
