//! `slipway function load`: a load of invocations, and how long their answers took.
//!
//! A load is open: requests are sent at their times, whether or not earlier ones have answers. The
//! latency of a request counts from the time at which it was to be sent, so one that had to wait
//! for its turn is not flattered. Each has a connection of its own.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Result;
use http_body_util::Full;
use hyper::body::Bytes;
use hyper::header::HOST;
use hyper::{Request, StatusCode};
use serde::Serialize;
use slipway_bench::{human, percentile};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

use super::exchange::exchange_head;
use super::http::REPLICA;
use crate::args::FunctionLoadArgs;
use crate::table::table;
use crate::target::Target;

/// The most requests without an answer at once; further ones are sent late.
const MOST_OPEN: usize = 4096;
/// The most bytes of an answer.
const LARGEST: usize = 64 << 20;

/// The requests of a load.
struct Load {
    target: Target,
    data: Bytes,
    timeout: Duration,
}

/// The end of a request.
struct Shot {
    latency_ns: u64,
    /// The replica that answered, if it is known, or the kind of error.
    outcome: Result<Option<String>, String>,
}

/// The figures of a part of the load.
#[derive(Debug, PartialEq, Eq, Serialize)]
struct Figures {
    load: String,
    sent: usize,
    answered: usize,
    /// Latencies of requests that have an answer.
    p50_ns: u64,
    p99_ns: u64,
    max_ns: u64,
    /// Replicas that answered.
    replicas: usize,
    /// Sandboxes of these replicas.
    sandboxes: usize,
    /// Requests without an answer of the function, by the status or the kind of error.
    errors: BTreeMap<String, usize>,
}

/// Runs `slipway function load`. Returns status 1 if a request had no answer of the function.
///
/// # Errors
/// If the figures cannot be written.
pub async fn load(args: &FunctionLoadArgs) -> Result<i32> {
    let data = Bytes::from(args.data.clone().unwrap_or_default());
    let (target, timeout) = (args.url.clone(), args.timeout);
    let load = Arc::new(Load { target, data, timeout });
    let mut all = Vec::new();
    if let Some(rate) = args.rate {
        let shots = steady(&load, rate, args.duration).await;
        all.push(figures(format!("{rate} per second"), &shots));
    }
    for count in &args.bursts {
        let shots = burst(&load, *count).await;
        all.push(figures(format!("burst of {count}"), &shots));
    }
    if args.json {
        crate::out::json(&all)?;
    } else {
        let rows: Vec<_> = all.iter().map(row).collect();
        let header =
            ["LOAD", "SENT", "ANSWERED", "P50", "P99", "MAX", "REPLICAS", "SANDBOXES", "ERRORS"];
        crate::out::print(format_args!("{}", table(header, &rows)));
    }
    Ok(i32::from(all.iter().any(|figures| figures.answered < figures.sent)))
}

/// Sends `rate` requests a second for the time `duration`, at equal distances.
async fn steady(load: &Arc<Load>, rate: u32, duration: Duration) -> Vec<Shot> {
    let (begin, distance) = (Instant::now(), Duration::from_secs(1) / rate);
    let (mut shots, mut open) = (Vec::new(), JoinSet::new());
    let mut at = begin;
    while at < begin + duration {
        tokio::time::sleep_until(at.into()).await;
        if open.len() >= MOST_OPEN
            && let Some(Ok(shot)) = open.join_next().await
        {
            shots.push(shot);
        }
        open.spawn(shoot(Arc::clone(load), at));
        at += distance;
    }
    shots.extend(open.join_all().await);
    shots
}

/// Sends `count` requests at once.
async fn burst(load: &Arc<Load>, count: u32) -> Vec<Shot> {
    let begin = Instant::now();
    let open: JoinSet<_> = (0..count).map(|_| shoot(Arc::clone(load), begin)).collect();
    open.join_all().await
}

/// Sends a request that is due at `due`.
async fn shoot(load: Arc<Load>, due: Instant) -> Shot {
    let outcome = match tokio::time::timeout(load.timeout, request(&load)).await {
        Ok(Ok((StatusCode::OK, replica))) => Ok(replica),
        Ok(Ok((status, _))) => Err(status.as_u16().to_string()),
        Ok(Err(_)) => Err("connection".to_owned()),
        Err(_) => Err("time-out".to_owned()),
    };
    let latency_ns = u64::try_from(due.elapsed().as_nanos()).unwrap_or(u64::MAX);
    Shot { latency_ns, outcome }
}

/// Sends a request. Returns its status, and the replica that had it.
async fn request(load: &Load) -> Result<(StatusCode, Option<String>)> {
    let Load { target, data, .. } = load;
    let stream = TcpStream::connect(target.authority.as_str()).await?;
    let request = Request::post(target.path.as_str()).header(HOST, target.authority.as_str());
    let request = request.body(Full::new(data.clone()))?;
    // Thousands of answers may come at once.
    let answer = exchange_head(stream, request, LARGEST).await?;
    let replica = answer.headers().get(REPLICA).and_then(|name| name.to_str().ok());
    Ok((answer.status(), replica.map(str::to_owned)))
}

fn figures(load: String, shots: &[Shot]) -> Figures {
    let answered = || shots.iter().filter(|shot| shot.outcome.is_ok());
    let mut latencies: Vec<_> = answered().map(|shot| shot.latency_ns).collect();
    latencies.sort_unstable();
    let replicas = shots.iter().filter_map(|shot| shot.outcome.as_ref().ok()?.as_deref());
    let replicas: BTreeSet<_> = replicas.collect();
    let pods = replicas.iter().filter_map(|name| Some(name.split_once('/')?.0));
    let mut errors: BTreeMap<String, usize> = BTreeMap::new();
    for error in shots.iter().filter_map(|shot| shot.outcome.as_ref().err()) {
        *errors.entry(error.clone()).or_default() += 1;
    }
    Figures {
        load,
        sent: shots.len(),
        answered: latencies.len(),
        p50_ns: percentile(&latencies, 50),
        p99_ns: percentile(&latencies, 99),
        max_ns: percentile(&latencies, 100),
        replicas: replicas.len(),
        sandboxes: pods.collect::<BTreeSet<_>>().len(),
        errors,
    }
}

fn row(figures: &Figures) -> [String; 9] {
    let errors = figures.errors.iter().map(|(kind, count)| format!("{count} of {kind}"));
    [
        figures.load.clone(),
        figures.sent.to_string(),
        figures.answered.to_string(),
        human(figures.p50_ns),
        human(figures.p99_ns),
        human(figures.max_ns),
        figures.replicas.to_string(),
        figures.sandboxes.to_string(),
        errors.collect::<Vec<_>>().join(", "),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_counted_by_kind_and_are_no_latencies() {
        let shot = |ns, outcome: Result<Option<&str>, &str>| Shot {
            latency_ns: ns,
            outcome: outcome.map(|name| name.map(str::to_owned)).map_err(str::to_owned),
        };
        let shots = [
            shot(30, Ok(Some("f-1/r2"))),
            shot(10, Ok(Some("f-1/r1"))),
            shot(20, Ok(Some("f-2/r3"))),
            shot(15, Ok(None)),
            shot(1, Err("503")),
            shot(2, Err("503")),
            shot(900, Err("time-out")),
        ];
        let expected = Figures {
            load: "x".to_owned(),
            sent: 7,
            answered: 4,
            p50_ns: 15,
            p99_ns: 30,
            max_ns: 30,
            replicas: 3,
            sandboxes: 2,
            errors: [("503".to_owned(), 2), ("time-out".to_owned(), 1)].into(),
        };
        assert_eq!(figures("x".to_owned(), &shots), expected);
        assert_eq!(figures("x".to_owned(), &[]).p99_ns, 0);
    }
}
