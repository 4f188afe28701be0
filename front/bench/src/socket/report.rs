//! A report of a measurement of sockets, with the context needed to judge and repeat it.

use std::time::Duration;

use anyhow::Result;
use serde::{Deserialize, Serialize};

use super::turn::turn;
use super::{App, AppRun, Cost, Parts, PartsRun, SocketLoad, SocketMeasured, Traffic, Way};
use crate::environment::Environment;
use crate::json::SavedReport;
use crate::statistics::median;
use crate::turns::{Described, Fault, Subjects, Turn, Turns, take_turns};

/// The loads and times of a measurement.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SocketPlan {
    /// The loads, one after the other.
    pub loads: Vec<SocketLoad>,
    /// The number of turns of each subject with each load.
    pub rounds: u32,
    /// The time of load before each measurement.
    pub warm_up: Duration,
    /// The measured time of each turn.
    pub time: Duration,
}

/// One turn of one subject.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SocketRun {
    /// The subject's name.
    pub subject: String,
    /// The load.
    pub load: SocketLoad,
    /// The number of the round, from 0.
    pub round: u32,
    /// The result.
    pub measured: SocketMeasured,
}

/// All results of one command, stored as JSON.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SocketReport {
    /// Version of this format: [`SavedReport::FORMAT`].
    pub format: u32,
    /// The machine and the versions of programs.
    pub environment: Environment,
    /// The command that measured, as it was typed.
    pub command: String,
    /// The loads and times.
    pub plan: SocketPlan,
    /// The subjects, in the order of their turns.
    pub subjects: Vec<Described>,
    /// The turns.
    pub runs: Vec<SocketRun>,
    /// Turns that failed, and turns that are void.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub faults: Vec<Fault>,
    /// The work of two linked engines, measured alone after turns with them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub parts: Vec<PartsRun>,
    /// The turns of existing programs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub apps: Vec<AppRun>,
}

/// Medians over the rounds of one subject with one load.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SocketFigures {
    /// Bytes per second.
    pub bytes: f64,
    /// Messages, or round trips, per second.
    pub messages: f64,
    /// Round trips that 50, 99 and 99.9 % do not exceed, ns.
    pub latency: Option<[f64; 3]>,
    /// Processors kept busy by programs, engines and the kernel together.
    pub cores: f64,
    /// Processor time of all of them per byte, ns; infinite without bytes.
    pub cpu_per_byte: f64,
    /// Processor time of the two programs alone per byte, ns.
    pub programs_per_byte: f64,
    /// Processor time of the engines per byte, ns.
    pub engines_per_byte: f64,
    /// Context switches of all processes per message; with idle sockets per second.
    pub switches: f64,
    /// With idle sockets, memory for each pair of sockets, bytes.
    pub memory: Option<f64>,
    /// The least and the greatest of the rounds: bytes per second, the median round trip in ns, or
    /// with idle sockets the processors kept busy.
    pub range: (f64, f64),
    /// `range` relative to the median.
    pub spread: f64,
}

impl SocketFigures {
    /// Returns the rate by which subjects are compared: bytes per second, or for a ping-pong the
    /// rate of the median round trip. For idle sockets it means nothing.
    pub fn main(&self) -> f64 {
        self.latency.map_or(self.bytes, |[p50, ..]| 1e9 / p50.max(1.0))
    }

    /// Returns the processors needed for 10 Gbit/s.
    pub fn cores_per_10_gbits(&self) -> f64 {
        self.cpu_per_byte * 1.25
    }

    /// Returns processor seconds per GiB: of all processes, of the two programs, of the engines.
    pub fn seconds_per_gib(&self) -> [f64; 3] {
        [self.cpu_per_byte, self.programs_per_byte, self.engines_per_byte]
            .map(|ns| ns * f64::from(1 << 30) / 1e9)
    }
}

/// The ways with the times of their turns, and the work of engines alone.
struct Timed<'a> {
    ways: &'a [Way],
    plan: &'a SocketPlan,
    parts: Vec<PartsRun>,
}

impl Subjects for Timed<'_> {
    type Load = SocketLoad;
    type Run = SocketRun;

    fn count(&self) -> usize {
        self.ways.len()
    }

    fn name(&self, subject: usize) -> String {
        self.ways[subject].name.to_owned()
    }

    fn takes(&self, subject: usize, load: &SocketLoad) -> bool {
        self.ways[subject].takes(load)
    }

    fn run(&mut self, subject: usize, load: &SocketLoad, round: u32) -> Result<SocketRun> {
        let (way, SocketPlan { warm_up, time, .. }) = (&self.ways[subject], self.plan);
        let measured = turn(way, load, *warm_up, *time)?;
        let (subject, load) = (way.name.to_owned(), *load);
        if Parts::belong(way, &load) {
            let parts = Parts::measure(way, *warm_up, *time)?;
            self.parts.push(PartsRun { subject: subject.clone(), load, round, parts });
        }
        Ok(SocketRun { subject, load, round, measured })
    }
}

/// Gives every way its turns. Calls `before` at the start of each.
pub fn measure_sockets(
    ways: &[Way],
    plan: &SocketPlan,
    before: impl FnMut(Turn<'_, SocketLoad>),
) -> (Turns<SocketRun>, Vec<PartsRun>) {
    let mut timed = Timed { ways, plan, parts: Vec::new() };
    let turns = take_turns(&mut timed, &plan.loads, plan.rounds, before);
    (turns, timed.parts)
}

/// The ways, with the time of a turn of a program.
struct WithApps<'a> {
    ways: Vec<&'a Way>,
    time: Duration,
}

impl Subjects for WithApps<'_> {
    type Load = App;
    type Run = AppRun;

    fn count(&self) -> usize {
        self.ways.len()
    }

    fn name(&self, subject: usize) -> String {
        self.ways[subject].name.to_owned()
    }

    fn takes(&self, _: usize, _: &App) -> bool {
        true
    }

    fn run(&mut self, subject: usize, app: &App, round: u32) -> Result<AppRun> {
        app.run(self.ways[subject], round, self.time)
    }
}

/// Gives every way without TLS turns with each of `apps`. Calls `before` at the start of each.
pub fn measure_apps(
    ways: &[Way],
    apps: &[App],
    (rounds, time): (u32, Duration),
    before: impl FnMut(Turn<'_, App>),
) -> Turns<AppRun> {
    let ways = ways.iter().filter(|way| way.tls.is_none()).collect();
    take_turns(&mut WithApps { ways, time }, apps, rounds, before)
}

/// Returns the processor time per byte of `turn`, ns.
fn per_byte(cost: Cost, turn: &SocketMeasured) -> f64 {
    cost.cpu_ns as f64 / turn.bytes as f64
}

impl SavedReport for SocketReport {
    const KIND: &'static str = "sockets";

    fn format(&self) -> u32 {
        self.format
    }

    fn faults(&self) -> &[Fault] {
        &self.faults
    }
}

impl SocketReport {
    /// Makes a report of `runs`.
    pub fn new(
        environment: Environment,
        command: impl Into<String>,
        plan: SocketPlan,
        ways: &[Way],
        (turns, parts): (Turns<SocketRun>, Vec<PartsRun>),
    ) -> Self {
        let described =
            |way: &Way| Described { name: way.name.to_owned(), about: way.about.clone() };
        let subjects = ways.iter().map(described).collect();
        let (format, command, apps) = (Self::FORMAT, command.into(), Vec::new());
        let Turns { runs, faults } = turns;
        Self { format, environment, command, plan, subjects, runs, faults, parts, apps }
    }

    /// Returns the median rate of `app`, the range of its rounds relative to that, and the
    /// processors that its servers kept busy. Returns `None` if there was no turn.
    pub fn app(&self, app: App, subject: &str) -> Option<[f64; 3]> {
        let turns = self.apps.iter().filter(|run| run.app == app && run.subject == subject);
        let busy = |run: &AppRun| run.server.cpu_ns as f64 / run.elapsed_ns.max(1) as f64;
        let (mut rates, cores): (Vec<f64>, Vec<f64>) =
            turns.map(|run| (run.rate, busy(run))).unzip();
        rates.sort_by(f64::total_cmp);
        let apart = rates.last()? - rates.first()?;
        let middle = median(rates);
        Some([middle, apart / middle.max(f64::MIN_POSITIVE), median(cores)])
    }

    /// Returns medians over the rounds of the parts of engines' work, and of the ratio between the
    /// engines' processor time per byte and the parts' sum in the same round. Returns `None` if
    /// they were not measured.
    pub fn parts(&self, load: &SocketLoad, subject: &str) -> Option<(Parts, f64)> {
        let all = self.parts.iter().filter(|run| run.subject == subject && run.load == *load);
        let all: Vec<&PartsRun> = all.collect();
        let engines = |run: &PartsRun| {
            let mut turns = self.runs.iter().filter(|turn| turn.subject == subject);
            let turn = turns.find(|turn| turn.load == *load && turn.round == run.round);
            turn.map_or(0.0, |turn| per_byte(turn.measured.engine, &turn.measured))
        };
        if all.is_empty() {
            return None;
        }
        let middle =
            |of: &dyn Fn(&PartsRun) -> f64| median(all.iter().map(|run| of(run)).collect());
        let parts = Parts {
            copy: middle(&|run| run.parts.copy),
            seal: middle(&|run| run.parts.seal),
            open: middle(&|run| run.parts.open),
            transport: middle(&|run| run.parts.transport),
        };
        Some((parts, middle(&|run| engines(run) / run.parts.sum())))
    }

    /// Returns medians over the rounds, or `None` if there was no turn.
    pub fn figures(&self, load: &SocketLoad, subject: &str) -> Option<SocketFigures> {
        let turns = self.runs.iter().filter(|run| run.subject == subject && run.load == *load);
        let turns: Vec<&SocketMeasured> = turns.map(|run| &run.measured).collect();
        if turns.is_empty() {
            return None;
        }
        let middle = |of: &dyn Fn(&SocketMeasured) -> f64| middle(&turns, of);
        let (size, is_idle) = (f64::from(load.bytes.max(1)), load.traffic == Traffic::Idle);
        let main: Vec<f64> = turns.iter().map(|turn| main_figure(turn, is_idle)).collect();
        let (least, most) = main.iter().fold((f64::MAX, 0.0_f64), |(least, most), value| {
            (least.min(*value), most.max(*value))
        });
        let messages = |turn: &SocketMeasured| match is_idle {
            true => turn.elapsed_ns as f64 / 1e9,
            false => turn.bytes as f64 / size,
        };
        let memory = |turn: &SocketMeasured| turn.memory_bytes.unwrap_or(0) as f64;
        Some(SocketFigures {
            bytes: middle(&rate),
            messages: middle(&|turn| rate(turn) / size),
            latency: latency(&turns),
            cores: middle(&cores),
            cpu_per_byte: middle(&|turn| per_byte(of_all(turn), turn)),
            programs_per_byte: middle(&|turn| per_byte(of_programs(turn), turn)),
            engines_per_byte: middle(&|turn| per_byte(turn.engine, turn)),
            switches: middle(&|turn| of_all(turn).switches as f64 / messages(turn)),
            memory: is_idle.then(|| middle(&memory) / f64::from(load.sockets)),
            range: (least, most),
            spread: (most - least) / median(main).max(f64::MIN_POSITIVE),
        })
    }
}

/// Returns the median of `of` over the turns.
fn middle(turns: &[&SocketMeasured], of: &dyn Fn(&SocketMeasured) -> f64) -> f64 {
    median(turns.iter().map(|turn| of(turn)).collect())
}

/// Returns what the two programs of a turn cost.
fn of_programs(turn: &SocketMeasured) -> Cost {
    turn.client.plus(turn.server)
}

/// Returns what programs, engines and the kernel cost in a turn.
fn of_all(turn: &SocketMeasured) -> Cost {
    of_programs(turn).plus(turn.engine).plus(turn.kernel)
}

/// Returns the bytes per second of a turn.
fn rate(turn: &SocketMeasured) -> f64 {
    turn.bytes as f64 * 1e9 / turn.elapsed_ns.max(1) as f64
}

/// Returns the processors that were kept busy in a turn.
fn cores(turn: &SocketMeasured) -> f64 {
    of_all(turn).cpu_ns as f64 / turn.elapsed_ns.max(1) as f64
}

/// Returns the figure whose range over the rounds is shown: as [`SocketFigures::range`].
fn main_figure(turn: &SocketMeasured, is_idle: bool) -> f64 {
    match &turn.latency {
        _ if is_idle => cores(turn),
        Some(latency) => latency.percentile(50.0) as f64,
        None => rate(turn),
    }
}

/// Returns medians of the percentiles of round trips, as [`SocketFigures::latency`]. Returns `None`
/// if a turn measured none.
fn latency(turns: &[&SocketMeasured]) -> Option<[f64; 3]> {
    turns.iter().all(|turn| turn.latency.is_some()).then(|| {
        [50.0, 99.0, 99.9].map(|percent| {
            middle(turns, &|turn| {
                turn.latency.as_ref().map_or(0, |latency| latency.percentile(percent)) as f64
            })
        })
    })
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Makes a report of subjects with these rates in bytes per second, round by round, and with
    /// one load. Each byte costs a nanosecond of client, server, engine and kernel each.
    pub(crate) fn report(load: &str, subjects: &[(&str, &[u64])]) -> SocketReport {
        let load: SocketLoad = load.parse().unwrap();
        let mut runs = Vec::new();
        for (name, rates) in subjects {
            for (round, rate) in (0..).zip(*rates) {
                let cost = Cost { cpu_ns: *rate, switches: 1 };
                let latency = load.is_latency().then(|| {
                    let mut latency = slipway_telemetry::Histogram::new();
                    latency.record(1_000_000_000 / rate);
                    latency
                });
                let measured = SocketMeasured {
                    bytes: *rate,
                    elapsed_ns: 1_000_000_000,
                    client: cost,
                    server: cost,
                    engine: cost,
                    kernel: cost,
                    latency,
                    memory_bytes: (load.traffic == Traffic::Idle).then_some(1 << 20),
                };
                runs.push(SocketRun { subject: (*name).to_owned(), load, round, measured });
            }
        }
        let described =
            |(name, _): &(&str, _)| Described { name: (*name).to_owned(), about: "<&>".into() };
        let time = Duration::from_secs(1);
        SocketReport {
            format: SocketReport::FORMAT,
            environment: Environment::default(),
            command: "bench socket".into(),
            plan: SocketPlan { loads: vec![load], rounds: 3, warm_up: Duration::ZERO, time },
            subjects: subjects.iter().map(described).collect(),
            runs,
            faults: Vec::new(),
            parts: Vec::new(),
            apps: Vec::new(),
        }
    }

    #[test]
    fn engines_are_judged_by_the_parts_of_their_round() {
        let mut report = report("stream-128b-c1", &[("linked", &[1000, 2000, 3000])]);
        let load = report.plan.loads[0];
        assert_eq!(report.parts(&load, "linked"), None);
        for (round, open) in [(0, 1.0), (1, 2.0), (2, 3.0)] {
            let parts = Parts { copy: 0.25, seal: 0.0, open, transport: 0.5 };
            report.parts.push(PartsRun { subject: "linked".into(), load, round, parts });
        }
        // A byte cost the engines a nanosecond in each round.
        let (parts, ratio) = report.parts(&load, "linked").unwrap();
        assert_eq!((parts.open, parts.sum(), ratio), (2.0, 3.0, 1.0 / 3.0));
        assert_eq!(SocketReport::from_json(&report.to_json().unwrap()).unwrap(), report);
    }

    #[test]
    fn figures_are_medians_and_survive_json() {
        let report = report("stream-128b-c1", &[("tcp", &[3000, 1000, 2000]), ("none", &[])]);
        let load = report.plan.loads[0];
        let figures = report.figures(&load, "tcp").unwrap();
        assert_eq!((figures.bytes, figures.messages, figures.spread), (2000.0, 15.625, 1.0));
        assert_eq!((figures.cpu_per_byte, figures.programs_per_byte), (4.0, 2.0));
        assert_eq!((figures.engines_per_byte, figures.latency), (1.0, None));
        assert_eq!(figures.cores_per_10_gbits(), 5.0);
        assert_eq!(figures.switches, 4.0 * 128.0 / 2000.0);
        assert_eq!(report.figures(&load, "none"), None);
        assert_eq!(SocketReport::from_json(&report.to_json().unwrap()).unwrap(), report);
        assert!(SocketReport::from_json("{}").is_err());
    }

    #[test]
    fn rates_of_programs_are_medians() {
        let mut report = report("idle-c1", &[("tcp", &[])]);
        for (round, rate) in [(0, 30.0), (1, 10.0), (2, 20.0)] {
            let (subject, server) = ("tcp".to_owned(), Cost { cpu_ns: 500_000_000, switches: 0 });
            let elapsed_ns = 1_000_000_000;
            report.apps.push(AppRun { subject, app: App::Redis, round, rate, server, elapsed_ns });
        }
        assert_eq!(report.app(App::Redis, "tcp"), Some([20.0, 1.0, 0.5]));
        assert_eq!(report.app(App::Redis, "none"), None);
        assert_eq!(report.app(App::Nginx, "tcp"), None);
        assert_eq!(SocketReport::from_json(&report.to_json().unwrap()).unwrap(), report);
    }

    #[test]
    fn a_ping_pong_is_judged_by_its_latency_and_idle_sockets_by_their_memory() {
        let turns = report("pingpong-64b-busy", &[("tcp", &[1_000_000])]);
        let figures = turns.figures(&turns.plan.loads[0], "tcp").unwrap();
        let [p50, p99, p999] = figures.latency.unwrap();
        assert!((p50 - 1000.0).abs() < 10.0 && p50 == p99 && p99 == p999, "{figures:?}");
        let idle = report("idle-c1024", &[("tcp", &[1])]);
        let figures = idle.figures(&idle.plan.loads[0], "tcp").unwrap();
        assert_eq!((figures.memory, figures.switches), (Some(1024.0), 4.0));
    }
}
