//! Measures what tracing costs a sandbox's own load: commands per second untraced, traced on the
//! host, and traced in the guest, too, in turn.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use slipway_bench::human;
use slipway_plane_api::{PlaneClient, v1};
use slipway_runtime::SandboxClient;
use slipway_runtime::v1 as sandbox_v1;

use super::{overhead, resolve};
use crate::args::{NodeArgs, SnoopArgs};
use crate::client::{answer, connect, connect_plane, refused};
use crate::table::table;

/// The number of turns of each kind.
const ROUNDS: usize = 9;
/// The length of a turn, and the time before it until the change has taken effect.
const TURN: Duration = Duration::from_millis(500);
const SETTLE: Duration = Duration::from_millis(200);
/// The longest time that a turn is extended while no command has completed, on a busy machine.
/// After that the load counts as absent.
const PATIENCE: Duration = Duration::from_secs(10);
/// The time between reports, the default of `slipway snoop`.
const INTERVAL_MS: u32 = 1000;

/// The tracing during a turn.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Snoop {
    Off,
    Host,
    HostAndGuest,
}

/// The mean time of a command in each turn of one kind, ns.
struct SnoopTurns {
    snoop: Snoop,
    name: &'static str,
    turns: Vec<f64>,
}

struct Sandbox {
    name: String,
    endpoint: String,
    every: u32,
    sandboxes: SandboxClient,
    plane: PlaneClient,
}

/// Measures the overheads and prints them.
pub async fn measure(
    node: &NodeArgs,
    config: &slipway_runtime::Config,
    args: &SnoopArgs,
) -> Result<i32> {
    let mut sandboxes = connect(node, config).await?;
    let mut plane = connect_plane(node, config).await?;
    let target = resolve(&mut sandboxes, &mut plane, args.target()).await?;
    if !target.is_sandbox {
        bail!("\"{}\" is no sandbox: only a guest says how many commands it had", args.target());
    }
    let name = args.target().to_owned();
    let every = args.every.unwrap_or(0);
    let mut sandbox = Sandbox { name, endpoint: target.endpoint, every, sandboxes, plane };
    let kinds =
        [(Snoop::Off, "off"), (Snoop::Host, "host"), (Snoop::HostAndGuest, "host and guest")];
    let mut kinds = kinds.map(|(snoop, name)| SnoopTurns { snoop, name, turns: Vec::new() });
    for _ in 0..ROUNDS {
        for kind in &mut kinds {
            kind.turns.push(sandbox.turn(kind.snoop).await?);
        }
    }
    show(&kinds, args)?;
    Ok(0)
}

impl Sandbox {
    /// Returns the mean time of a command while `snoop` is on, ns.
    async fn turn(&mut self, snoop: Snoop) -> Result<f64> {
        let request = self.request();
        let host = match snoop {
            Snoop::Off => None,
            _ => Some(overhead::start(&mut self.plane, request).await?),
        };
        let guest = match snoop {
            Snoop::HostAndGuest => Some(self.trace().await?),
            _ => None,
        };
        // Nothing reads the reports: few fit into a turn, and the sender blocks with the rest.
        tokio::time::sleep(SETTLE).await;
        let (from, before) = (Instant::now(), self.commands().await?);
        let (mut took, mut commands) = (Duration::ZERO, 0);
        while commands == 0 && took < PATIENCE {
            tokio::time::sleep(TURN).await;
            (took, commands) = (from.elapsed(), self.commands().await?.saturating_sub(before));
        }
        drop((host, guest));
        if commands == 0 {
            bail!("sandbox \"{}\" has no load on its disks: put one on them first", self.name);
        }
        Ok(took.as_nanos() as f64 / commands as f64)
    }

    fn request(&self) -> v1::SnoopRequest {
        let (id, every) = (self.endpoint.clone(), self.every);
        v1::SnoopRequest { id, interval_ms: INTERVAL_MS, every }
    }

    /// Starts tracing in the guest, and retries until the last turn's tracing has ended.
    async fn trace(&mut self) -> Result<tonic::Streaming<sandbox_v1::GuestReport>> {
        let mut patience = 500;
        loop {
            let name = self.name.clone();
            let request = sandbox_v1::SnoopGuestRequest { name, interval_ms: INTERVAL_MS };
            match self.sandboxes.snoop_guest(request).await {
                Ok(reply) => return Ok(reply.into_inner()),
                Err(_) if patience > 0 => patience -= 1,
                Err(status) => return Err(refused(status)),
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    async fn commands(&mut self) -> Result<u64> {
        let name = sandbox_v1::Name { name: self.name.clone() };
        let stats = answer(self.sandboxes.stats(name).await)?;
        Ok(stats.reads.saturating_add(stats.writes))
    }
}

/// Returns the overhead of `kind` over `base`, in percent. It is the median of the ratios of each
/// round, so that changes from round to round cancel out.
fn overhead(base: &SnoopTurns, kind: &SnoopTurns) -> f64 {
    let ratios = base.turns.iter().zip(&kind.turns).map(|(base, kind)| kind / base);
    (median(ratios.collect()) - 1.0) * 100.0
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

fn show(kinds: &[SnoopTurns; 3], args: &SnoopArgs) -> Result<()> {
    let [off, host, both] = kinds;
    let (by_host, by_guest) = (overhead(off, host), overhead(host, both));
    if args.json {
        let turns: serde_json::Map<_, _> =
            kinds.iter().map(|kind| (kind.name.to_owned(), kind.turns.clone().into())).collect();
        let percent = serde_json::json!({ "host": by_host, "guest": by_guest });
        let all = serde_json::json!({ "command_ns": turns, "overhead_percent": percent });
        crate::say!("{}", serde_json::to_string(&all)?);
        return Ok(());
    }
    let human = |nanos: f64| human(nanos.round() as u64);
    let rows = kinds.each_ref().map(|kind| {
        let least = kind.turns.iter().copied().fold(f64::INFINITY, f64::min);
        let most = kind.turns.iter().copied().fold(0.0, f64::max);
        [kind.name.into(), human(median(kind.turns.clone())), human(least), human(most)]
    });
    crate::out::print(format_args!("{}", table(["SNOOP", "COMMAND", "LEAST", "MOST"], &rows)));
    crate::say!("host: overhead {by_host:+.1} % ({ROUNDS} rounds)");
    crate::say!("the guest's tracing: overhead {by_guest:+.1} % more");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_overhead_is_within_rounds() {
        let kind =
            |turns: &[f64]| SnoopTurns { snoop: Snoop::Off, name: "x", turns: turns.to_vec() };
        // The machine is half as fast in the second round, and the third round has an outlier.
        let (off, on) = (kind(&[100.0, 200.0, 100.0]), kind(&[110.0, 220.0, 900.0]));
        assert!((overhead(&off, &on) - 10.0).abs() < 1e-9);
        assert_eq!(overhead(&off, &off), 0.0);
    }
}
