//! `slipway socket ls` and `top`: what an engine serves.

use std::collections::HashMap;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result};
use slipway_sgiov::{Report, TenantReport};

use crate::args::{SocketLsArgs, SocketTopArgs};
use crate::size::show;
use crate::table::{printable, table};

fn report(socket: &Path) -> Result<Report> {
    slipway_sgiov::report(socket)
        .with_context(|| format!("no socket engine answers at {}", socket.display()))
}

/// Programs, listeners and connections.
pub fn list(args: &SocketLsArgs) -> Result<i32> {
    let report = report(&args.engine.socket)?;
    if args.json {
        crate::say!("{}", serde_json::to_string_pretty(&report)?);
        return Ok(0);
    }
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
    let rows: Vec<_> = rows.collect();
    let header = ["PID", "PROGRAM", "TENANT", "PROCESSES", "SOCKETS", "SENT", "RECEIVED"];
    crate::out::print(format_args!("{}", table(header, &rows)));
    let rows = report.listeners.iter().map(|there| {
        let waiting = format!("{}/{}", there.waiting, there.backlog);
        [there.address.clone(), there.pid.to_string(), there.tenant.clone(), waiting]
    });
    let rows: Vec<_> = rows.collect();
    crate::out::print(format_args!("\n{}", table(["LISTENS", "PID", "TENANT", "WAITING"], &rows)));
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
    let rows: Vec<_> = rows.collect();
    let header = ["FROM", "PID", "TO", "PID", "SENT", "RECEIVED"];
    crate::out::print(format_args!("\n{}", table(header, &rows)));
    let more = report.connections_in_all.saturating_sub(report.connections.len());
    if more > 0 {
        crate::say!("and {more} connections more");
    }
    Ok(0)
}

/// Rates of tenants, look after look.
pub fn top(args: &SocketTopArgs) -> Result<i32> {
    let mut last = (Instant::now(), report(&args.engine.socket)?);
    let mut left = args.count;
    while left != Some(0) {
        std::thread::sleep(args.interval);
        let now = (Instant::now(), report(&args.engine.socket)?);
        let rates = rates(&last.1.tenants, &now.1.tenants, (now.0 - last.0).as_secs_f64());
        if args.json {
            crate::say!("{}", serde_json::to_string(&rates)?);
        } else {
            crate::out::print(format_args!("{}\n", as_table(&rates)));
        }
        (last, left) = (now, left.map(|left| left - 1));
    }
    Ok(0)
}

/// What a tenant did between two looks.
#[derive(serde::Serialize)]
struct Rate {
    tenant: String,
    endpoints: u32,
    /// Bytes a second.
    sent: u64,
    /// Bytes a second.
    received: u64,
    /// Of all bytes that were sent, 0 to 1.
    share: f64,
}

fn rates(before: &[TenantReport], now: &[TenantReport], seconds: f64) -> Vec<Rate> {
    let before: HashMap<&str, &TenantReport> =
        before.iter().map(|tenant| (tenant.name.as_str(), tenant)).collect();
    let rate = |tenant: &TenantReport| {
        // Who was not there before has sent all that he has since then; who has begun anew, too.
        let since = |count: fn(&TenantReport) -> u64| {
            let was = before.get(tenant.name.as_str()).map_or(0, |tenant| count(tenant));
            let moved = count(tenant).checked_sub(was).unwrap_or(count(tenant));
            (moved as f64 / seconds.max(1e-9)) as u64
        };
        let (sent, received) = (since(|tenant| tenant.sent), since(|tenant| tenant.received));
        let (tenant, endpoints) = (tenant.name.clone(), tenant.endpoints);
        Rate { tenant, endpoints, sent, received, share: 0.0 }
    };
    let mut all: Vec<Rate> = now.iter().map(rate).collect();
    let sum = all.iter().map(|rate| rate.sent as f64).sum::<f64>();
    for rate in all.iter_mut().filter(|_| sum > 0.0) {
        rate.share = rate.sent as f64 / sum;
    }
    all
}

fn as_table(rates: &[Rate]) -> String {
    let row = |rate: &Rate| {
        let (sent, received) =
            (format!("{}/s", show(rate.sent)), format!("{}/s", show(rate.received)));
        let share = format!("{:.1} %", rate.share * 100.0);
        [rate.tenant.clone(), rate.endpoints.to_string(), sent, received, share]
    };
    let rows: Vec<_> = rates.iter().map(row).collect();
    table(["TENANT", "SOCKETS", "SENT", "RECEIVED", "SHARE"], &rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tenant(name: &str, sent: u64, received: u64) -> TenantReport {
        let (addresses, families, endpoints) = (Vec::new(), 1, 2);
        TenantReport { name: name.into(), addresses, families, endpoints, sent, received }
    }

    #[test]
    fn rates_are_what_moved_since() {
        let before = [tenant("a", 100, 50), tenant("b", 900, 0)];
        let now = [tenant("a", 400, 60), tenant("b", 100, 0), tenant("c", 0, 8)];
        let rates = rates(&before, &now, 2.0);
        let numbers: Vec<_> = rates.iter().map(|rate| (rate.sent, rate.received)).collect();
        assert_eq!(numbers, [(150, 5), (50, 0), (0, 4)]);
        assert!((rates[0].share - 0.75).abs() < 1e-9);
        assert!(as_table(&rates).lines().nth(1).is_some_and(|line| line.ends_with("75.0 %")));
    }
}
