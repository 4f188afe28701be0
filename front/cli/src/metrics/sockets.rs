//! Metrics of the socket engine, which is a process of its own and gives its report to root.
//!
//! Network namespaces come and go with containers, so no metric has a series for each of them:
//! `slipway socket ls` shows them.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use prometheus_client::encoding::DescriptorEncoder;
use slipway_runtime::Config;
use slipway_sgiov::{GuestReport, Report};

use super::encoding::{Sum, counters, gauges, single};

/// The longest wait for the engine: figures of others do not wait for one that is stopped.
const PATIENCE: Duration = Duration::from_secs(1);

/// Asks the node's socket engine for its report. Returns `None` if none answers in time.
pub(super) async fn ask(config: &Config) -> Option<Report> {
    let socket = config.run_dir.join("socket.sock");
    let (sender, report) = tokio::sync::oneshot::channel();
    // A call that is given up ends half a minute later at most, by its own deadlines. The runtime,
    // and with it the command's end, would wait for one of its own threads until then.
    let ask = move || drop(sender.send(slipway_sgiov::report(&socket).ok()));
    std::thread::Builder::new().name("socket-report".to_owned()).spawn(ask).ok()?;
    tokio::time::timeout(PATIENCE, report).await.ok()?.ok()?
}

/// Encodes whether an engine answers, and what it serves.
pub(super) fn encode(to: &mut DescriptorEncoder<'_>, report: Option<&Report>) -> fmt::Result {
    let help = "Whether a socket engine answers";
    gauges(to, ("socket_engine_up", help, None), single(u64::from(report.is_some())))?;
    let Some(report) = report else { return Ok(()) };
    let present: [Sum<Report>; 8] = [
        ("socket_families", "Families of processes that use the socket engine", |all| {
            all.families.len() as u64
        }),
        ("socket_processes", "Processes of these families", |all| {
            all.families.iter().map(|one| one.processes as u64).sum()
        }),
        ("socket_endpoints", "Open endpoints of these families", |all| {
            all.families.iter().map(|one| one.endpoints as u64).sum()
        }),
        ("socket_connections", "Connections that the socket engine knows", |all| {
            all.connections_in_all as u64
        }),
        ("socket_arenas", "Arenas: memory that two families share", |all| all.links as u64),
        ("socket_tickets", "Tickets that no process has used yet", |all| all.tickets as u64),
        ("socket_guests", "Guests with a socket function", |all| all.guests.len() as u64),
        ("socket_reload_failed", "Whether the last reload of policy and links failed", |all| {
            u64::from(all.reloads.error.is_some())
        }),
    ];
    for (name, help, value) in present {
        gauges(to, (name, help, None), single(value(report)))?;
    }
    let sums: [Sum<Report>; 3] = [
        ("socket_sent_bytes", "Bytes that programs sent past the kernel", |all| all.sent),
        ("socket_received_bytes", "Bytes that programs received so", |all| all.received),
        ("socket_reloads", "Reloads of policy and links", |all| all.reloads.tried),
    ];
    for (name, help, value) in sums {
        counters(to, (name, help), single(value(report)))?;
    }
    encode_guests(to, &report.guests)
}

/// The sums of the guests with one name.
#[derive(Default)]
struct Guest {
    running: u64,
    streams: u64,
    sent: u64,
    received: u64,
}

/// Encodes the streams and bytes of each guest. Guests with the same name are one series: an answer
/// with two samples of one series is refused as a whole.
fn encode_guests(to: &mut DescriptorEncoder<'_>, guests: &[GuestReport]) -> fmt::Result {
    let mut all = BTreeMap::<&str, Guest>::new();
    for one in guests {
        let guest = all.entry(&one.name).or_default();
        guest.running += u64::from(one.running);
        guest.streams = guest.streams.saturating_add(one.streams);
        guest.sent = guest.sent.wrapping_add(one.sent);
        guest.received = guest.received.wrapping_add(one.received);
    }
    let each = |value: fn(&Guest) -> u64| {
        all.iter().map(move |(name, guest)| ([("guest", *name)], value(guest)))
    };
    let help = "Whether the engine in a guest runs";
    gauges(to, ("socket_guest_running", help, None), each(|one| one.running))?;
    let help = "Open streams of a guest's programs";
    gauges(to, ("socket_guest_streams", help, None), each(|one| one.streams))?;
    let help = "Bytes that a guest's programs sent";
    counters(to, ("socket_guest_sent_bytes", help), each(|one| one.sent))?;
    let help = "Bytes that a guest's programs received";
    counters(to, ("socket_guest_received_bytes", help), each(|one| one.received))
}
