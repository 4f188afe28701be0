//! The target of `slipway bench packet` with devices: a process of its own that serves two network
//! functions on one switch, and that the measuring process ends.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use anyhow::{Context, Result, ensure};
use clap::ValueEnum;
use slipway_bench::block::native::pin;
use slipway_bench::packet::{Devices, FunctionCounts, Model, Served, Source, TargetCounts, Wanted};
use slipway_plane::{Plane, Settings};
use slipway_plane_api::v1;

use crate::args::{PacketModelArg, PacketTargetArgs};

/// The line that a target prints once its sockets listen.
const READY: &str = "ready";
/// The line with which a target is asked for its counts.
const COUNT: &str = "count";
/// The switch's name.
const SWITCH: &str = "bench";

/// A running target. Dropping it ends it.
struct Target {
    child: Child,
    /// Standard input of the target, which ends when the pipe closes.
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Drop for Target {
    fn drop(&mut self) {
        // The target holds nothing that needs an orderly end.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Served for Target {
    fn counts(&mut self) -> Result<TargetCounts> {
        writeln!(self.input, "{COUNT}").context("the target has ended")?;
        Ok(serde_json::from_str(&self.line()?)?)
    }
}

impl Target {
    fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        Ok(line)
    }
}

/// Starts a target.
pub fn start(wanted: &Wanted<'_>) -> Result<Box<dyn Served>> {
    let program = slipway_bench::slipway().context("which program this is")?;
    let mut command = Command::new(program);
    command.args(["bench", "packet-target", "--directory"]).arg(wanted.directory);
    let model = match wanted.model {
        Model::Virtio => PacketModelArg::Virtio,
        Model::E1000 => PacketModelArg::E1000,
        Model::E1000Csb => PacketModelArg::E1000Csb,
    };
    let name = model.to_possible_value().context("a model without a name")?;
    command.args(["--model", name.get_name()]);
    if let Some(source) = &wanted.source {
        command.args(["--offered", &source.rate.to_string()]);
        command.args(["--bytes", &source.bytes.to_string()]);
    }
    for cpu in &wanted.cpus.target {
        command.args(["--cpu", &cpu.to_string()]);
    }
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().context("cannot start the target")?;
    let pipes = child.stdin.take().zip(child.stdout.take());
    let (input, output) = pipes.context("a target without pipes")?;
    let mut target = Target { child, input, output: BufReader::new(output) };
    ensure!(target.line()?.trim() == READY, "the target did not come up");
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
    for number in 1..=2 {
        plane.create(&endpoint(number, &directory, args.model))?;
    }
    if let Some(rate) = args.offered {
        let switch = plane.fabric().switch(SWITCH)?;
        Source { bytes: args.bytes, rate }.attach(&switch.handle)?;
    }
    println!("{READY}");
    // The process that started this one holds the pipe's other end, which closes when that process
    // ends in any way.
    for line in std::io::stdin().lock().lines() {
        ensure!(line?.trim() == COUNT, "an unknown command");
        println!("{}", serde_json::to_string(&counts(&plane))?);
        std::io::stdout().flush()?;
    }
    Ok(0)
}

/// Returns the request for the function `number`, whose socket is in `directory`.
fn endpoint(number: u64, directory: &Path, model: PacketModelArg) -> v1::CreateEndpointRequest {
    let model = match model {
        PacketModelArg::Virtio => v1::NetworkModel::Virtio,
        PacketModelArg::E1000 => v1::NetworkModel::E1000,
        PacketModelArg::E1000Csb => v1::NetworkModel::E1000Csb,
    };
    v1::CreateEndpointRequest {
        id: number.to_string(),
        socket_path: directory.join(number.to_string()).to_string_lossy().into_owned(),
        virtio_net: Some(v1::VirtioNet {
            switch: SWITCH.to_owned(),
            mac: Devices::mac(number),
            spoof_check: true,
            model: model.into(),
            ..Default::default()
        }),
        ..Default::default()
    }
}

fn counts(plane: &Plane) -> TargetCounts {
    let ports: Vec<_> = plane.list_switches().into_iter().flat_map(|one| one.ports).collect();
    let source = ports.iter().find(|port| port.name == Source::NAME);
    let offered = source.map_or(0, |port| port.frames_in);
    let registers = |counters: &v1::E1000Counters| {
        let named = counters.registers.iter();
        let named = named.map(|one| (one.register.clone(), (one.reads, one.writes)));
        let announced = (counters.announced > 0).then_some(counters.announced);
        // Tails, or kicks with the block.
        named.chain(announced.map(|writes| ("by events".to_owned(), (0, writes)))).collect()
    };
    let function = |counters: &v1::E1000Counters| FunctionCounts {
        registers: registers(counters),
        kicks: counters.kicks,
        interrupts: counters.interrupts,
        sent: counters.frames_sent,
        received: counters.frames_received,
    };
    let functions = ports.iter().filter_map(|port| port.e1000.as_ref()).map(function).collect();
    TargetCounts { functions, offered }
}
