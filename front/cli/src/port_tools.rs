//! `slipway port impair`, `capture` and `trace`: degrade a port's link, and show its traffic.

use std::io::{IsTerminal, Write};
use std::path::Path;

use anyhow::{Context, Result, bail};
use slipway_plane_api::{PlaneClient, v1};
use slipway_runtime::{Config, v1 as sandbox_v1};

use crate::args::{CaptureArgs, Direction, ImpairArgs, NodeArgs, TraceArgs};
use crate::client::{answer, connect, connect_plane, refused};
use crate::table::table;

/// Finds the port named `text`: NETWORK/PORT, a sandbox, SANDBOX:INTERFACE for a further interface
/// of it, or the plane's own name for the port.
pub async fn reference(node: &NodeArgs, config: &Config, text: &str) -> Result<v1::PortReference> {
    let (switch, port) = text.split_once('/').unwrap_or(("", text));
    let mut sandboxes = connect(node, config).await?;
    let (name, interface) = port.split_once(':').unwrap_or((port, ""));
    let named = sandbox_v1::Name { name: name.to_owned() };
    let found = sandboxes.inspect(named).await.ok().and_then(|reply| reply.into_inner().sandbox);
    let found = found.filter(|sandbox| is_meant(sandbox, name));
    let functions = found.and_then(|sandbox| function(sandbox, interface));
    let port = functions.unwrap_or_else(|| port.to_owned());
    Ok(v1::PortReference { switch: switch.to_owned(), port })
}

/// Returns the plane's id of the function of a sandbox's interface; without a name, of the first.
fn function(sandbox: sandbox_v1::Sandbox, interface: &str) -> Option<String> {
    if interface.is_empty() {
        return Some(sandbox.network_function).filter(|id| !id.is_empty());
    }
    let mut further = sandbox.further_interfaces.into_iter();
    further.find(|one| one.name == interface).map(|one| one.network_function)
}

/// Returns the plane's ids of a sandbox's functions, and the names of their ports.
pub fn names(sandbox: sandbox_v1::Sandbox) -> Vec<(String, String)> {
    let sandbox_v1::Sandbox { name, network_function, further_interfaces, .. } = sandbox;
    let further = further_interfaces
        .into_iter()
        .map(|one| (one.network_function, format!("{name}:{}", one.name)))
        .collect::<Vec<_>>();
    std::iter::once((network_function, name)).chain(further).collect()
}

/// Returns whether `text`, by which `sandbox` was found, really names it. A sandbox is also found
/// by the beginning of its id, but a number names a port.
fn is_meant(sandbox: &sandbox_v1::Sandbox, text: &str) -> bool {
    sandbox.name == text || sandbox.id == text || text.parse::<u32>().is_err()
}

fn direction(direction: Direction) -> v1::PortDirection {
    match direction {
        Direction::Both => v1::PortDirection::Both,
        Direction::Sent => v1::PortDirection::Sent,
        Direction::Received => v1::PortDirection::Received,
    }
}

/// Runs `slipway port impair`.
pub async fn impair(node: &NodeArgs, config: &Config, args: &ImpairArgs) -> Result<i32> {
    let port = reference(node, config, &args.port).await?;
    if !args.clear && args.loss.is_none() && args.delay.is_none() && args.rate.is_none() {
        bail!("nothing to do to the port: give --loss, --delay or --rate, or --clear");
    }
    if args.rate == Some(0) {
        bail!("a rate of 0 would let nothing pass: --loss 100% says so");
    }
    let nanoseconds = |time: Option<std::time::Duration>| {
        time.map_or(0, |time| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX))
    };
    let impairment = (!args.clear).then(|| v1::Impairment {
        loss: args.loss.unwrap_or(0.0),
        delay_ns: nanoseconds(args.delay),
        jitter_ns: nanoseconds(args.jitter),
        bytes_per_second: args.rate.unwrap_or(0),
        byte_burst: args.burst.unwrap_or(0),
        queue: args.queue.unwrap_or(0),
        direction: direction(args.direction).into(),
        seed: args.seed.unwrap_or(0),
    });
    let mut plane = connect_plane(node, config).await?;
    let request = v1::ImpairPortRequest { port: Some(port), impairment };
    let reply = plane.impair_port(request).await.map_err(refused)?;
    let said = reply.get_ref().impairment.as_ref().map_or("as it is".to_owned(), describe);
    crate::say!("{}: {said}", args.port);
    Ok(0)
}

/// Describes an impairment in a few words.
pub fn describe(impairment: &v1::Impairment) -> String {
    let mut words = Vec::new();
    if impairment.loss > 0.0 {
        words.push(format!("loss {}%", impairment.loss * 100.0));
    }
    let time = std::time::Duration::from_nanos;
    if impairment.delay_ns > 0 {
        words.push(format!("delay {:?}", time(impairment.delay_ns)));
    }
    if impairment.jitter_ns > 0 {
        words.push(format!("jitter {:?}", time(impairment.jitter_ns)));
    }
    if impairment.bytes_per_second > 0 {
        words.push(format!("rate {} kbit/s", impairment.bytes_per_second * 8 / 1000));
    }
    match impairment.direction() {
        v1::PortDirection::Both => {}
        v1::PortDirection::Sent => words.push("sent".to_owned()),
        v1::PortDirection::Received => words.push("received".to_owned()),
    }
    words.join(" ")
}

/// Runs `slipway port capture`.
pub async fn capture(node: &NodeArgs, config: &Config, args: &CaptureArgs) -> Result<i32> {
    let to_output = args.write == Path::new("-");
    if to_output && std::io::stdout().is_terminal() {
        bail!("a capture is no text: name a file (-w FILE.pcapng), or pipe it: | tcpdump -r -");
    }
    let port = reference(node, config, &args.port).await?;
    let mut plane = connect_plane(node, config).await?;
    let mut chunks = begin_capture(&mut plane, port, args).await?;
    let mut file: Box<dyn Write> = match to_output {
        true => Box::new(std::io::stdout()),
        false => Box::new(create(&args.write)?),
    };
    let (mut captured, mut missed, mut told) = (0, 0, false);
    loop {
        let chunk = tokio::select! {
            chunk = chunks.message() => chunk.map_err(refused)?,
            interrupted = tokio::signal::ctrl_c() => {
                interrupted?;
                None
            }
        };
        let Some(chunk) = chunk else { break };
        match file.write_all(&chunk.pcapng).and_then(|()| file.flush()) {
            // The reader of the capture has left.
            Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => break,
            written => written.with_context(|| format!("cannot write {}", args.write.display()))?,
        }
        (captured, missed) = (chunk.captured, chunk.missed);
        if !told {
            // The first chunk reports that the capture has begun.
            eprintln!("capturing on {}", args.port);
            told = true;
        }
    }
    eprintln!("{captured} frames captured, {missed} not captured for want of room");
    Ok(0)
}

fn create(path: &Path) -> Result<std::fs::File> {
    std::fs::File::create(path).with_context(|| format!("cannot write {}", path.display()))
}

async fn begin_capture(
    plane: &mut PlaneClient,
    port: v1::PortReference,
    args: &CaptureArgs,
) -> Result<tonic::Streaming<v1::CaptureChunk>> {
    let request = v1::CapturePortRequest {
        port: Some(port),
        snap_bytes: args.snaplen.unwrap_or(0),
        count: args.count.unwrap_or(0),
        direction: direction(args.direction).into(),
    };
    answer(plane.capture_port(request).await)
}

/// Runs `slipway port trace`.
///
/// A frame's line arrives as text: `host/fabric/src/capture.rs` makes it by the `Display` of
/// `slipway_switch::decorators::Summary`, and that by those of the views of `spec/ethernet-spec`.
/// Only the time before it is formatted here.
pub async fn trace(node: &NodeArgs, config: &Config, args: &TraceArgs) -> Result<i32> {
    let port = reference(node, config, &args.port).await?;
    let mut plane = connect_plane(node, config).await?;
    let request = v1::TracePortRequest {
        port: Some(port),
        headers_per_second: args.lines,
        direction: direction(args.direction).into(),
    };
    let mut reports = answer(plane.trace_port(request).await)?;
    let end = tokio::time::sleep(args.duration.unwrap_or(std::time::Duration::MAX));
    tokio::pin!(end);
    let mut last = v1::TraceReport::default();
    loop {
        let report = tokio::select! {
            biased;
            () = &mut end => None,
            interrupted = tokio::signal::ctrl_c() => {
                interrupted?;
                None
            }
            report = reports.message() => report.map_err(refused)?,
        };
        let Some(report) = report else { break };
        for frame in &report.frames {
            crate::say!("{} {}", clock(frame.time_ns), frame.header);
        }
        last = report;
    }
    let rows: Vec<_> = last.counts.iter().map(count_row).collect();
    crate::out::print(format_args!("{}", table(["DIRECTION", "KIND", "FRAMES", "BYTES"], &rows)));
    if last.untold > 0 {
        crate::say!("{} frames were counted and not printed", last.untold);
    }
    Ok(0)
}

/// Formats the time of day, UTC.
fn clock(time_ns: u64) -> String {
    let (seconds, micros) = (time_ns / 1_000_000_000, time_ns % 1_000_000_000 / 1000);
    let of_day = seconds % 86_400;
    format!("{:02}:{:02}:{:02}.{micros:06}", of_day / 3600, of_day / 60 % 60, of_day % 60)
}

fn count_row(count: &v1::TraceCount) -> [String; 4] {
    let direction = if count.direction() == v1::PortDirection::Sent { "sent" } else { "received" };
    [
        direction.to_owned(),
        count.kind.clone(),
        count.frames.to_string(),
        crate::size::show(count.bytes),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_a_port_unless_a_sandbox_has_just_that_name() {
        let sandbox = |name: &str| sandbox_v1::Sandbox {
            id: "1234abcd".into(),
            name: name.into(),
            ..Default::default()
        };
        for port in ["1", "12", "1234"] {
            assert!(!is_meant(&sandbox("web"), port), "{port}");
        }
        for (name, text) in [("web", "web"), ("7", "7"), ("web", "1234a"), ("web", "1234abcd")] {
            assert!(is_meant(&sandbox(name), text), "{text}");
        }
    }

    #[test]
    fn each_interface_of_a_sandbox_has_a_port_by_its_name() {
        let further = |name: &str, function: &str| sandbox_v1::FurtherInterface {
            name: name.into(),
            network_function: function.into(),
        };
        let sandbox = sandbox_v1::Sandbox {
            name: "web".into(),
            network_function: "1.net".into(),
            further_interfaces: vec![further("net1", "1.net1")],
            ..Default::default()
        };
        let found = |interface: &str| function(sandbox.clone(), interface);
        assert_eq!(found("").as_deref(), Some("1.net"));
        assert_eq!((found("net1").as_deref(), found("net2")), (Some("1.net1"), None));
        assert_eq!(function(sandbox_v1::Sandbox::default(), ""), None);
        let names = names(sandbox);
        let both = [("1.net", "web"), ("1.net1", "web:net1")];
        assert!(names.iter().map(|(id, name)| (id.as_str(), name.as_str())).eq(both), "{names:?}");
    }
}
