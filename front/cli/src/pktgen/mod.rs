//! `slipway pktgen`: sends, receives and bounces packets.
//!
//! A thread of its own does the work. The calling one waits for ^C, which ends the run with its
//! summary.

mod args;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use slipway_ethernet_spec::Mac;
use slipway_pktgen::{
    Figures, Latency, Limits, MemoryWire, Plan, PortWire, Vary, Wire, ping, pong, sink, source,
};
use slipway_runtime::Config;

pub use args::PktgenCommand;
use args::{LimitArgs, OwnArgs, PlanArgs, Varied, WireArgs};

/// Runs `slipway pktgen …`.
pub async fn command(config: &Config, command: &PktgenCommand) -> Result<i32> {
    let (wire, limits) = match command {
        PktgenCommand::Source { wire, limits, .. }
        | PktgenCommand::Sink { wire, limits, .. }
        | PktgenCommand::Ping { wire, limits, .. }
        | PktgenCommand::Pong { wire, limits, .. } => (wire, limits),
    };
    ensure!(
        limits.time != Some(Duration::ZERO),
        "--time 0 ends before it begins; leave it out to go on until ^C"
    );
    let (name, place) = place(config, wire);
    let job = PktgenRun::of(command, name, limits)?;
    let stop = Arc::new(AtomicBool::new(false));
    let told = Arc::clone(&stop);
    // A wire's resources stay on one thread.
    let run = tokio::task::spawn_blocking(move || job.run(&place, &told));
    tokio::pin!(run);
    loop {
        tokio::select! {
            done = &mut run => return done?,
            signal = tokio::signal::ctrl_c() => {
                signal?;
                // A second ^C ends the program at once.
                if stop.swap(true, Ordering::Relaxed) {
                    return Ok(130);
                }
            }
        }
    }
}

/// The kind of wire that frames are sent to and received from, and its name.
enum WireKind {
    Port(PathBuf),
    Tap(String),
    Interface(String),
}

fn place(config: &Config, args: &WireArgs) -> (String, WireKind) {
    if let Some(tap) = &args.tap {
        return (format!("TAP interface {tap}"), WireKind::Tap(tap.clone()));
    }
    if let Some(interface) = &args.interface {
        return (format!("interface {interface}"), WireKind::Interface(interface.clone()));
    }
    // The parser ensures that one of the three is given.
    let name = args.port.clone().unwrap_or_default();
    let path = match name.contains('/') {
        true => PathBuf::from(&name),
        false => config.ports_dir().join(format!("{name}.sock")),
    };
    (format!("memory port {name}"), WireKind::Port(path))
}

impl WireKind {
    fn open(&self, name: &str) -> Result<Box<dyn Wire>> {
        Ok(match self {
            Self::Port(path) if !path.exists() => bail!(
                "there is no {name}; `slipway port ls` lists ports, `slipway port create` makes one"
            ),
            Self::Port(path) => Box::new(MemoryWire::connect(path)?),
            Self::Tap(name) => Box::new(PortWire::tap(name)?),
            Self::Interface(name) => Box::new(PortWire::interface(name)?),
        })
    }
}

/// The run to do.
enum PktgenRole {
    Source(Plan),
    Sink(Mac),
    Ping(Plan, Duration),
    Pong(Mac),
}

struct PktgenRun {
    kind: PktgenRole,
    /// The user gave the address.
    asked: bool,
    wire: String,
    count: Option<u64>,
    time: Option<Duration>,
    json: bool,
}

impl PktgenRun {
    fn of(command: &PktgenCommand, wire: String, limits: &LimitArgs) -> Result<Self> {
        let random = random()?;
        let own = |own: &OwnArgs| own.mac.unwrap_or(Mac::local(u64::from(random)));
        let (kind, asked) = match command {
            PktgenCommand::Source { plan, burst, .. } => {
                (PktgenRole::Source(self::plan(plan, *burst, random)), false)
            }
            PktgenCommand::Ping { plan, timeout, .. } => {
                (PktgenRole::Ping(self::plan(plan, 1, random), *timeout), false)
            }
            PktgenCommand::Sink { own: args, .. } => {
                (PktgenRole::Sink(own(args)), args.mac.is_some())
            }
            PktgenCommand::Pong { own: args, .. } => {
                (PktgenRole::Pong(own(args)), args.mac.is_some())
            }
        };
        let LimitArgs { count, time, json } = *limits;
        Ok(Self { kind, asked, wire, count, time, json })
    }

    fn run(mut self, place: &WireKind, stop: &AtomicBool) -> Result<i32> {
        let mut wire = place.open(&self.wire)?;
        self.take_address(wire.mac())?;
        let limits = Limits { count: self.count, time: self.time, stop };
        let (mut every, mut seconds) = (Vec::new(), 0);
        let (json, lossy) = (self.json, !matches!(self.kind, PktgenRole::Source(_)));
        let mut report = |figures: &Figures| {
            seconds += 1;
            if json {
                every.push(figures.clone());
            } else {
                crate::say!("{seconds:>4} s  {}", line(figures, lossy));
            }
        };
        if !json {
            crate::say!("{}", self.title());
        }
        let wire = &mut *wire;
        let total = match &self.kind {
            PktgenRole::Source(plan) => source(wire, plan, limits, &mut report),
            PktgenRole::Sink(mac) => sink(wire, *mac, limits, &mut report),
            PktgenRole::Ping(plan, timeout) => ping(wire, plan, *timeout, limits, &mut report),
            PktgenRole::Pong(mac) => pong(wire, *mac, limits, &mut report),
        }?;
        if json {
            let all = serde_json::json!({
                "mode": self.mode(),
                "wire": self.wire,
                "mac": self.mac().map(|mac| mac.to_string()),
                "total": total,
                "every": every,
            });
            crate::out::json(&all)?;
        } else {
            crate::say!("{}", self.summary(&total));
        }
        // A ping without any answer has failed.
        let silent = matches!(self.kind, PktgenRole::Ping(..)) && total.frames == 0;
        Ok(i32::from(silent))
    }

    /// Takes over the address that the wire is bound to.
    fn take_address(&mut self, bound: Option<Mac>) -> Result<()> {
        let asked = self.asked;
        if let (PktgenRole::Sink(mac) | PktgenRole::Pong(mac), Some(bound)) =
            (&mut self.kind, bound)
        {
            ensure!(!asked || *mac == bound, "the port's address is {bound}; leave --mac out");
            *mac = bound;
        }
        Ok(())
    }

    fn mode(&self) -> &'static str {
        match self.kind {
            PktgenRole::Source(_) => "source",
            PktgenRole::Sink(_) => "sink",
            PktgenRole::Ping(..) => "ping",
            PktgenRole::Pong(_) => "pong",
        }
    }

    /// Returns the address that receives, or `None` for a run that sends.
    fn mac(&self) -> Option<Mac> {
        match self.kind {
            PktgenRole::Sink(mac) | PktgenRole::Pong(mac) => Some(mac),
            PktgenRole::Source(_) | PktgenRole::Ping(..) => None,
        }
    }

    fn title(&self) -> String {
        let (mode, wire) = (self.mode(), &self.wire);
        match &self.kind {
            PktgenRole::Source(plan) | PktgenRole::Ping(plan, _) => {
                format!("{mode} at {wire}, to {}", plan.to)
            }
            PktgenRole::Sink(mac) | PktgenRole::Pong(mac) => {
                format!("{mode} at {wire}, address {mac}")
            }
        }
    }

    fn summary(&self, total: &Figures) -> String {
        let verb = match self.kind {
            PktgenRole::Source(_) => "sent",
            PktgenRole::Sink(_) => "received",
            PktgenRole::Ping(..) => "answered:",
            PktgenRole::Pong(_) => "sent back",
        };
        let rates = format!("{:.3} Mpps, {:.3} Gbit/s", total.pps / 1e6, total.gbit_s);
        let mut text = format!("{verb} {} frames in {:.2} s: {rates}", total.frames, total.seconds);
        let counts = [
            ("lost", total.lost),
            ("late", total.late),
            ("twice", total.duplicates),
            ("of others", total.others),
            ("refused by the interface", total.refused),
        ];
        for (what, count) in counts {
            if let Some(count) = count {
                text += &format!(", {count} {what}");
            }
        }
        if let Some(latency) = &total.latency_ns {
            text += &format!("\nlatency in us: {}", latencies(latency));
        }
        text
    }
}

/// Returns a random id for this run, not 0.
fn random() -> Result<u16> {
    let mut bytes = [0; 2];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())
        .context("no random numbers")?;
    Ok(u16::from_ne_bytes(bytes).max(1))
}

fn plan(args: &PlanArgs, burst: u32, id: u16) -> Plan {
    let varies = |what| args.vary.contains(&what);
    Plan {
        to: args.to,
        from: args.from,
        sizes: args.size.clone(),
        rate: args.rate,
        burst,
        flows: args.flows,
        vary: Vary { mac: varies(Varied::Mac), ip: varies(Varied::Ip), port: varies(Varied::Port) },
        id,
    }
}

/// Formats the line about one second.
fn line(figures: &Figures, lossy: bool) -> String {
    let mut text = format!("{:>8.3} Mpps  {:>8.3} Gbit/s", figures.pps / 1e6, figures.gbit_s);
    if let (true, Some(lost)) = (lossy, figures.lost) {
        text += &format!("  lost {lost}");
    }
    if let Some(latency) = &figures.latency_ns {
        text += &format!("  p50 {:.1} us  p99 {:.1} us", us(latency.p50), us(latency.p99));
    }
    text
}

fn latencies(latency: &Latency) -> String {
    let all = [
        ("min", latency.min),
        ("p50", latency.p50),
        ("p90", latency.p90),
        ("p99", latency.p99),
        ("p99.9", latency.p999),
        ("max", latency.max),
    ];
    all.map(|(name, ns)| format!("{name} {:.1}", us(ns))).join(", ")
}

fn us(ns: u64) -> f64 {
    ns as f64 / 1e3
}
