//! The guest's part of a latency, spent in programs, the block layer and the NVMe driver, measured
//! by the kernel's own tracepoints. Nothing is traced unless a client listens.
//!
//! `tracefs` enables tracepoints and reads their rings, `ring` parses the rings' pages, and `pairs`
//! makes durations of the events.

mod pairs;
mod ring;
mod tracefs;

use std::path::Path;
use std::time::Duration;

use anyhow::{Result, bail};
use rustix::time::{ClockId, clock_gettime};
use slipway_agent_protocol::v1::{TraceLatency, TraceReply};
use tokio::sync::mpsc;
use tonic::Status;

use pairs::{Class, Latencies, Pairs};
use tracefs::Tracing;

/// The interval at which the rings are emptied.
const READ: Duration = Duration::from_millis(100);

/// The time that an earlier trace has to stop. The end of its listener is noticed here a moment
/// after the listener has ended.
const LETTING_GO: Duration = Duration::from_secs(3);
/// The pause between two attempts to start.
const AGAIN: Duration = Duration::from_millis(20);

/// Returns CLOCK_MONOTONIC, the clock of the traces, in ns.
fn now() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    time.tv_sec.unsigned_abs() * 1_000_000_000 + time.tv_nsec.unsigned_abs()
}

/// Starts to trace. The latencies of each `interval` are sent to `sender` until its receiver is
/// dropped.
///
/// # Errors
/// The kernel cannot trace, or another trace runs already.
pub async fn start(
    sysfs: &Path,
    interval: Duration,
    sender: mpsc::Sender<Result<TraceReply, Status>>,
) -> Result<()> {
    let begun = tokio::time::Instant::now();
    let tracing = loop {
        match Tracing::start(sysfs)? {
            Some(tracing) => break tracing,
            None if begun.elapsed() > LETTING_GO => bail!("somebody traces this guest already"),
            None => tokio::time::sleep(AGAIN).await,
        }
    };
    tokio::spawn(run(tracing, interval, sender));
    Ok(())
}

async fn run(
    mut tracing: Tracing,
    interval: Duration,
    sender: mpsc::Sender<Result<TraceReply, Status>>,
) {
    let mut pairs = Pairs::default();
    let (mut from_ns, mut losses) = (now(), 0);
    loop {
        tokio::select! {
            () = sender.closed() => return,
            () = tokio::time::sleep(READ.min(interval)) => {}
        }
        tracing.read(&mut pairs);
        let to_ns = now();
        if Duration::from_nanos(to_ns.saturating_sub(from_ns)) < interval {
            continue;
        }
        let seen = pairs.take();
        let lost = tracing.losses - std::mem::replace(&mut losses, tracing.losses);
        let latencies = Class::ALL.into_iter().filter_map(|class| latency(class, &seen));
        let reply = TraceReply { from_ns, to_ns, latencies: latencies.collect(), losses: lost };
        from_ns = to_ns;
        if sender.send(Ok(reply)).await.is_err() {
            return;
        }
    }
}

/// Returns the latencies of one class. Returns `None` if it had no commands.
fn latency(class: Class, seen: &[Latencies; 4]) -> Option<TraceLatency> {
    let of_class = seen.each_ref().map(|kind| &kind[class as usize]);
    if of_class.iter().all(|histogram| histogram.count() == 0) {
        return None;
    }
    let opcode = match class {
        Class::Read => "read",
        Class::Write => "write",
        Class::Flush => "flush",
        Class::Other => "other",
    };
    let [driver, block, application, between] =
        of_class.map(|histogram| serde_json::to_string(histogram).unwrap_or_default());
    Some(TraceLatency { opcode: opcode.into(), driver, block, application, between })
}
