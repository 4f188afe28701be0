//! `slipway socket ls`: lists what an engine serves.

use std::path::Path;

use anyhow::{Context, Result};
use slipway_sgiov::Report;

use crate::args::SocketLsArgs;
use crate::size::show;
use crate::table::{printable, table};

pub(super) fn report(socket: &Path) -> Result<Report> {
    slipway_sgiov::report(socket)
        .with_context(|| format!("no socket engine answers at {}", socket.display()))
}

/// Lists guests with a socket function.
fn guests(report: &Report) -> String {
    let rows = report.guests.iter().map(|guest| {
        let state = if guest.running { "running" } else { "-" };
        [
            printable(&guest.name),
            printable(&guest.tenant),
            guest.addresses.join(","),
            state.into(),
            guest.streams.to_string(),
            guest.listeners.len().to_string(),
            show(guest.sent),
            show(guest.received),
        ]
    });
    let rows: Vec<_> = rows.collect();
    let header =
        ["GUEST", "TENANT", "ADDRESSES", "STATE", "SOCKETS", "LISTENS", "SENT", "RECEIVED"];
    table(header, &rows)
}

/// Lists programs, guests, listeners and connections.
pub fn list(args: &SocketLsArgs, socket: &Path) -> Result<i32> {
    let report = report(socket)?;
    if args.json {
        crate::out::json(&report)?;
        return Ok(0);
    }
    crate::out::print(format_args!("{}", families(&report)));
    if !report.guests.is_empty() {
        crate::out::print(format_args!("\n{}", guests(&report)));
    }
    crate::out::print(format_args!("\n{}", listeners(&report)));
    crate::out::print(format_args!("\n{}", connections(&report)));
    let more = report.connections_in_all.saturating_sub(report.connections.len());
    if more > 0 {
        crate::say!("and {more} connections more");
    }
    Ok(0)
}

fn families(report: &Report) -> String {
    let rows = report.families.iter().map(|family| {
        let (processes, sockets) = (family.processes.to_string(), family.endpoints.to_string());
        let (sent, received) = (show(family.sent), show(family.received));
        [
            family.pid.to_string(),
            printable(&family.program),
            family.tenant.clone(),
            processes,
            sockets,
            sent,
            received,
        ]
    });
    let header = ["PID", "PROGRAM", "TENANT", "PROCESSES", "SOCKETS", "SENT", "RECEIVED"];
    table(header, &rows.collect::<Vec<_>>())
}

fn listeners(report: &Report) -> String {
    let rows = report.listeners.iter().map(|there| {
        let waiting = format!("{}/{}", there.waiting, there.backlog);
        [there.address.clone(), there.pid.to_string(), there.tenant.clone(), waiting]
    });
    table(["LISTENS", "PID", "TENANT", "WAITING"], &rows.collect::<Vec<_>>())
}

fn connections(report: &Report) -> String {
    let pid = |pid: i32| if pid == 0 { "-".into() } else { pid.to_string() };
    let rows = report.connections.iter().map(|there| {
        let (sent, received) = (show(there.sent), show(there.received));
        [
            there.from.clone(),
            pid(there.from_pid),
            there.to.clone(),
            pid(there.to_pid),
            sent,
            received,
        ]
    });
    let header = ["FROM", "PID", "TO", "PID", "SENT", "RECEIVED"];
    table(header, &rows.collect::<Vec<_>>())
}
