//! `slipway socket top`: shows what tenants send and receive, and their shares of the executors
//! that carry to other nodes.

use std::collections::HashMap;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Result;
use slipway_sgiov::{SharesView, TenantReport, TenantShare};

use super::show::report;
use crate::args::SocketTopArgs;
use crate::size::show;
use crate::table::{columns, printable, table};

/// The time between two requests to the engine: it reports the shares since the request before, so
/// one comes this long before the one that is shown.
const BEFORE: Duration = Duration::from_millis(50);

/// The figures of one interval.
#[derive(serde::Serialize)]
struct IntervalView<'a> {
    tenants: &'a [Rate],
    /// The shares, or `None` if nothing carries to other nodes, or this user may not see them.
    shares: Option<&'a SharesView>,
}

/// Prints tenants' rates and shares, interval after interval.
pub fn top(args: &SocketTopArgs, socket: &Path) -> Result<i32> {
    let mut last = (Instant::now(), report(socket)?);
    let mut left = args.count;
    while left != Some(0) {
        std::thread::sleep(args.interval.saturating_sub(BEFORE));
        report(socket)?;
        std::thread::sleep(BEFORE.min(args.interval));
        let now = (Instant::now(), report(socket)?);
        let rates = rates(&last.1.tenants, &now.1.tenants, (now.0 - last.0).as_secs_f64());
        let shares = now.1.shares.as_ref();
        if args.json {
            crate::say!("{}", serde_json::to_string(&IntervalView { tenants: &rates, shares })?);
        } else {
            crate::out::print(format_args!("{}\n", as_table(&rates)));
            if let Some(view) = shares.filter(|view| !view.tenants.is_empty()) {
                crate::out::print(format_args!("{}\n", shares_table(view)));
            }
        }
        (last, left) = (now, left.map(|left| left - 1));
    }
    Ok(0)
}

/// Returns the relative difference between a tenant's rate and its rate by the formula: 0.02 is 2 %
/// more.
fn off(share: &TenantShare) -> f64 {
    if share.formula > 0.0 { share.rate / share.formula - 1.0 } else { 0.0 }
}

fn shares_table(view: &SharesView) -> String {
    let percent = |part: f64| format!("{:.1} %", part * 100.0);
    let rate = |bytes: f64| format!("{}/s", show(bytes as u64));
    let fixed =
        ["TENANT", "WEIGHT", "CAP", "RATE", "FORMULA", "OFF", "DOMINANT", "FORMULA", "LIMITED BY"];
    let resources: Vec<String> = view.resources.iter().map(|one| printable(&one.name)).collect();
    let header: Vec<&str> = fixed.into_iter().chain(resources.iter().map(String::as_str)).collect();
    let row = |share: &TenantShare| {
        let cap = share.cap.map_or("-".into(), |cap| rate(cap as f64));
        let mut row = vec![
            printable(&share.tenant),
            format!("{}", share.weight),
            cap,
            rate(share.rate),
            rate(share.formula),
            format!("{:+.1} %", off(share) * 100.0),
            percent(share.dominant),
            percent(share.dominant_by_formula),
            printable(&share.limited_by),
        ];
        row.extend(share.resources.iter().map(|part| percent(*part)));
        row
    };
    let rows: Vec<_> = view.tenants.iter().map(row).collect();
    let mut text = columns(&header, &rows);
    for one in &view.executors {
        let (name, resource) = (printable(&one.name), printable(&one.resource));
        text += &format!("{name} at {resource}: {}\n", rate(one.capacity));
    }
    text
}

/// A tenant's traffic between two reports.
#[derive(serde::Serialize)]
struct Rate {
    tenant: String,
    endpoints: u32,
    /// Bytes per second.
    sent: u64,
    /// Bytes per second.
    received: u64,
    /// Share of the bytes that all tenants sent, 0 to 1.
    share: f64,
}

fn rates(before: &[TenantReport], now: &[TenantReport], seconds: f64) -> Vec<Rate> {
    let before: HashMap<&str, &TenantReport> =
        before.iter().map(|tenant| (tenant.name.as_str(), tenant)).collect();
    let rate = |tenant: &TenantReport| {
        // A tenant that is new, or whose counter started again, has sent its whole count since
        // then.
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

    #[test]
    fn shares_are_beside_what_the_formula_gives() {
        let (resources, executors) = (
            vec![("core", None), ("node2", Some(1_000_000))],
            vec![("seal", "core"), ("transport", "node2")],
        );
        let view = SharesView {
            resources: resources
                .into_iter()
                .map(|(name, rate)| slipway_sgiov::ResourceShare {
                    name: name.into(),
                    used: 0.5,
                    rate,
                })
                .collect(),
            executors: executors
                .into_iter()
                .map(|(name, resource)| slipway_sgiov::ExecutorCapacity {
                    name: name.into(),
                    resource: resource.into(),
                    capacity: 1e9,
                })
                .collect(),
            tenants: vec![TenantShare {
                tenant: "web".into(),
                weight: 2.0,
                cap: None,
                bytes: 1,
                rate: 510_000.0,
                formula: 500_000.0,
                resources: vec![0.125, 0.51],
                dominant: 0.51,
                dominant_by_formula: 0.5,
                limited_by: "node2".into(),
            }],
        };
        let text = shares_table(&view);
        let line = text.lines().nth(1).unwrap_or_default();
        for word in ["web", "+2.0 %", "51.0 %", "50.0 %", "12.5 %", "node2"] {
            assert!(line.contains(word), "{word}: {text}");
        }
        assert!(text.contains("transport at node2: "), "{text}");
    }

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
