//! A report of a measurement of sockets, with the context needed to judge and repeat it.

use std::rc::Rc;

use anyhow::Result;
use serde::{Deserialize, Serialize};

use super::turn::turn;
use super::{App, AppRun, Parts, SocketLoad, SocketMeasured, Traffic, Way, parts};
use crate::figure::OverRounds;
use crate::measurement::{AnySubject, Measurement, Plan, Subject};
use crate::statistics::median;
use crate::turns::{Subjects, Turn, Turns, take_turns};

/// A way that can be measured.
pub type SocketSubject = AnySubject<SocketLoad, SocketMeasured>;
/// The loads and times of a measurement.
pub type SocketPlan = Plan<SocketLoad>;
/// All results of one command, stored as JSON.
pub type SocketReport = Measurement<SocketLoad, SocketMeasured, SocketExtra>;

/// Results that reports of sockets alone have.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SocketExtra {
    /// The turns of existing programs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub apps: Vec<AppRun>,
}

impl Subject for Rc<Way> {
    type Load = SocketLoad;
    type Measured = SocketMeasured;

    fn name(&self) -> &str {
        self.name
    }

    fn about(&self) -> String {
        self.about.clone()
    }

    fn takes(&self, load: &SocketLoad) -> bool {
        // The cost of idle TLS sessions is of no interest, and their handshakes would take most of
        // the time.
        self.tls.is_none() || load.traffic != Traffic::Idle
    }

    fn run(&mut self, load: &SocketLoad) -> Result<SocketMeasured> {
        let mut measured = turn(self, load)?;
        if parts::belong(self, load) {
            measured.parts = Some(parts::measure(self)?);
        }
        Ok(measured)
    }
}

/// The ways that existing programs run over.
struct WithApps<'a>(Vec<&'a Way>);

impl Subjects for WithApps<'_> {
    type Load = App;
    type Run = AppRun;

    fn count(&self) -> usize {
        self.0.len()
    }

    fn name(&self, subject: usize) -> String {
        self.0[subject].name.to_owned()
    }

    fn takes(&self, _: usize, _: &App) -> bool {
        true
    }

    fn run(&mut self, subject: usize, app: &App, round: u32) -> Result<AppRun> {
        app.run(self.0[subject], round)
    }
}

/// Gives every way without TLS turns with each of `apps`. Calls `before` at the start of each.
pub fn measure_apps(
    ways: &[Rc<Way>],
    apps: &[App],
    rounds: u32,
    before: impl FnMut(Turn<'_, App>),
) -> Turns<AppRun> {
    let ways = ways.iter().map(|way| &**way).filter(|way| way.tls.is_none()).collect();
    take_turns(&mut WithApps(ways), apps, rounds, before)
}

impl SocketReport {
    /// Returns the rate of `app`, and the median of the processors that its servers kept busy.
    /// Returns `None` if there was no turn.
    pub fn app(&self, app: App, subject: &str) -> Option<(OverRounds, f64)> {
        let turns = self.extra.apps.iter().filter(|run| run.app == app && run.subject == subject);
        let busy = |run: &AppRun| run.server.cpu_ns as f64 / run.elapsed_ns.max(1) as f64;
        let (rates, cores): (Vec<f64>, Vec<f64>) = turns.map(|run| (run.rate, busy(run))).unzip();
        Some((OverRounds::of(rates)?, median(cores)))
    }

    /// Returns medians over the rounds of the parts of engines' work, and of the ratio between the
    /// engines' processor time per byte and the parts' sum in the same round. Returns `None` if
    /// they were not measured.
    pub fn parts(&self, load: &SocketLoad, subject: &str) -> Option<(Parts, f64)> {
        let turns = self.turns(load, subject);
        let all: Vec<_> = turns.filter_map(|turn| Some((turn, turn.parts?))).collect();
        let middle = |of: fn(&SocketMeasured, Parts) -> f64| {
            median(all.iter().map(|(turn, parts)| of(turn, *parts)).collect())
        };
        let parts = Parts {
            copy: middle(|_, parts| parts.copy),
            seal: middle(|_, parts| parts.seal),
            open: middle(|_, parts| parts.open),
            transport: middle(|_, parts| parts.transport),
        };
        let ratio = middle(|turn, parts| turn.per_byte(turn.engine) / parts.sum());
        (!all.is_empty()).then_some((parts, ratio))
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use slipway_telemetry::Histogram;

    use super::super::Cost;
    use super::super::measured::{
        BANDWIDTH, CORES_AT_REST, MEMORY, ROUND_TRIP, SWITCHES, SWITCHES_AT_REST,
    };
    use super::*;
    use crate::figure::Figure;
    use crate::json::SavedReport;
    use crate::measurement::Measured;
    use crate::pictures::fair;

    /// Makes a report of subjects with these rates in bytes per second, round by round, and with
    /// one load. Each byte costs a nanosecond of client, server, engine and kernel each.
    pub(crate) fn report(load: &str, subjects: &[(&str, &[u64])]) -> SocketReport {
        SocketReport::sample("bench socket", &[load], subjects, |load, _, rate| {
            let cost = Cost { cpu_ns: *rate, switches: 1 };
            let latency = load.is_latency().then(|| {
                let mut latency = Histogram::new();
                latency.record(1_000_000_000 / rate);
                latency
            });
            SocketMeasured {
                bytes: *rate,
                elapsed_ns: 1_000_000_000,
                client: cost,
                server: cost,
                engine: cost,
                kernel: cost,
                latency,
                memory_bytes: (load.traffic == Traffic::Idle).then_some(1 << 20),
                parts: None,
            }
        })
    }

    /// Returns the median of a figure of `tcp` with the report's load.
    fn median_of(
        report: &SocketReport,
        figure: &Figure<SocketLoad, SocketMeasured>,
    ) -> Option<f64> {
        Some(report.over_rounds(&report.plan.loads[0], "tcp", figure)?.median)
    }

    #[test]
    fn engines_are_judged_by_the_parts_of_their_round() {
        let mut report = report("stream-128b-c1", &[("linked", &[1000, 2000, 3000])]);
        let load = report.plan.loads[0];
        assert_eq!(report.parts(&load, "linked"), None);
        for (run, open) in report.runs.iter_mut().zip([1.0, 2.0, 3.0]) {
            run.measured.parts = Some(Parts { copy: 0.25, seal: 0.0, open, transport: 0.5 });
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
        let bandwidth = report.over_rounds(&load, "tcp", &BANDWIDTH).unwrap();
        assert_eq!((bandwidth.median, bandwidth.spread()), (2000.0, Some(1.0)));
        let further = SocketMeasured::further(&load);
        let medians: Vec<_> = further.iter().map(|one| median_of(&report, one).unwrap()).collect();
        let gib = f64::from(1 << 30) / 1e9;
        let switches = 4.0 * 128.0 / 2000.0;
        assert_eq!(medians[..3], [15.625, 8e-6, 5.0]);
        assert_eq!(medians[3..], [4.0 * gib, 2.0 * gib, gib, switches]);
        assert_eq!(median_of(&report, &SWITCHES), Some(switches));
        assert_eq!(report.over_rounds(&load, "none", &BANDWIDTH), None);
        assert_eq!(SocketReport::from_json(&report.to_json().unwrap()).unwrap(), report);
        assert!(SocketReport::from_json("{}").is_err());
    }

    #[test]
    fn rates_of_programs_are_medians() {
        let mut report = report("idle-c1", &[("tcp", &[])]);
        for (round, rate) in [(0, 30.0), (1, 10.0), (2, 20.0)] {
            let (subject, server) = ("tcp".to_owned(), Cost { cpu_ns: 500_000_000, switches: 0 });
            let (app, elapsed_ns) = (App::Redis, 1_000_000_000);
            report.extra.apps.push(AppRun { subject, app, round, rate, server, elapsed_ns });
        }
        let (rate, cores) = report.app(App::Redis, "tcp").unwrap();
        assert_eq!((rate.median, rate.spread(), cores), (20.0, Some(1.0), 0.5));
        assert_eq!(report.app(App::Redis, "none"), None);
        assert_eq!(report.app(App::Nginx, "tcp"), None);
        let text = report.to_json().unwrap();
        assert!(text.contains(r#""apps":[{"subject":"tcp","app":"redis""#), "{text}");
        assert_eq!(SocketReport::from_json(&text).unwrap(), report);
    }

    #[test]
    fn a_ping_pong_is_judged_by_its_latency_and_idle_sockets_by_their_memory() {
        let turns = report("pingpong-64b-busy", &[("tcp", &[1_000_000])]);
        let p50 = median_of(&turns, &ROUND_TRIP).unwrap();
        assert!((p50 - 1000.0).abs() < 10.0, "{p50}");
        let idle = report("idle-c1024", &[("tcp", &[1])]);
        let medians = [MEMORY, SWITCHES_AT_REST, CORES_AT_REST].map(|one| median_of(&idle, &one));
        assert_eq!(medians, [Some(1024.0), Some(4.0), Some(4e-9)]);
    }

    #[test]
    fn every_subject_is_drawn() {
        let both: [(&str, &[u64]); 2] = [("tcp", &[1_000_000_000]), ("<ours>", &[1])];
        for (load, end) in [
            ("stream-128k-c1", "8.00 Gbit/s, 5.00 cores for 10 Gbit/s, 1.25 the engines"),
            ("pingpong-64b-busy", "p99 1 ns"),
            ("idle-c1024", "4.0000 cores"),
        ] {
            let text = report(load, &both).picture("a & b").unwrap();
            fair(&text).unwrap();
            for name in ["tcp", "&lt;ours&gt;", "a &amp; b", load, end] {
                assert!(text.contains(name), "{name}: {text}");
            }
        }
        assert!(report("idle-c1", &[]).picture("x").is_err());
    }
}
