//! A report of a measurement of network interfaces, with the context needed to judge and repeat it.

use serde::{Deserialize, Serialize};

use super::{Counted, NicLoad, Traffic};
use crate::duration;
use crate::figure::Figure;
use crate::measurement::{AnySubject, Measured, Measurement, Plan};
use crate::panels::CurvePoint;
use crate::statistics::{median, range};

/// The result of a turn.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NicMeasured {
    /// The sender's counts. Of requests: those of the end that asks.
    pub sent: Counted,
    /// The receiver's counts.
    pub received: Counted,
    /// CPU time of the guests' VMMs from the sender's start to the receiver's end, ns. What the
    /// daemon uses for Slipway's functions is not in it.
    pub cpu_ns: u64,
    /// Work of the guests' functions in the whole turn, if they count it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub work: Option<NicWork>,
}

/// The work of the guests' functions, all together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NicWork {
    /// Accesses to registers, each an exit of the guest.
    pub exits: u64,
    /// Writes that woke a device.
    pub kicks: u64,
    /// Interrupts that were raised.
    pub interrupts: u64,
    /// Frames that guests sent.
    pub sent: u64,
    /// Frames that guests received.
    pub received: u64,
}

/// A figure of network interfaces.
type NicFigure = Figure<NicLoad, NicMeasured>;

/// Returns the figure of datagrams, bytes or exchanges per second, which `text` formats.
const fn received(text: fn(f64) -> String) -> NicFigure {
    let of = |load: &NicLoad, turn: &NicMeasured| Some(rate(turn.measured(load)));
    NicFigure::more("rate", "received a second", of, text)
}

impl Measured for NicMeasured {
    type Load = NicLoad;

    const KIND: &'static str = "network interfaces";
    const SHOWS: &'static str = "Traffic of sockets through guests' network interfaces";
    const TURN: &'static str = "round";

    fn figures(load: &NicLoad) -> &'static [NicFigure] {
        const DATAGRAMS: &[NicFigure] = &[received(|one| duration::rate(one, "pps"))];
        const BYTES: &[NicFigure] = &[received(|one| duration::rate(one * 8.0, "bit/s"))];
        const EXCHANGES: &[NicFigure] = &[received(|one| duration::rate(one, "/s"))];
        match load.traffic {
            Traffic::Udp(_) => DATAGRAMS,
            Traffic::Tcp(_) => BYTES,
            Traffic::RequestResponse => EXCHANGES,
        }
    }
}

/// A kind of interface that can be measured.
pub type NicSubject = AnySubject<NicLoad, NicMeasured>;
/// The loads and rounds of a measurement.
pub type NicPlan = Plan<NicLoad>;
/// All results of one command, stored as JSON.
pub type NicReport = Measurement<NicLoad, NicMeasured>;

/// Medians over the rounds of one subject with one load.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NicFigures {
    /// Datagrams, bytes, or exchanges per second, as the load says.
    pub rate: f64,
    /// The least and the greatest of the rounds.
    pub range: (f64, f64),
    /// The sender's rate.
    pub sent: f64,
    /// CPU time of the guests' VMMs for each datagram, byte or exchange that arrived, ns.
    pub cpu_ns: f64,
    /// Exits, kicks and interrupts for each frame of the guests' functions, if these count them.
    pub work: Option<[f64; 3]>,
}

impl NicFigures {
    /// Returns the range of the rounds relative to their median, or `None` if the median is zero.
    pub fn spread(&self) -> Option<f64> {
        (self.rate > 0.0).then(|| (self.range.1 - self.range.0) / self.rate)
    }
}

impl NicMeasured {
    /// Returns the counts of the end that measured `load`.
    fn measured(&self, load: &NicLoad) -> &Counted {
        if load.traffic == Traffic::RequestResponse { &self.sent } else { &self.received }
    }
}

impl NicWork {
    /// Returns the work since `before`.
    pub fn since(&self, before: &Self) -> Self {
        Self {
            exits: self.exits.saturating_sub(before.exits),
            kicks: self.kicks.saturating_sub(before.kicks),
            interrupts: self.interrupts.saturating_sub(before.interrupts),
            sent: self.sent.saturating_sub(before.sent),
            received: self.received.saturating_sub(before.received),
        }
    }

    /// Returns exits, kicks and interrupts for each frame.
    fn for_each_frame(&self) -> [f64; 3] {
        let frames = (self.sent + self.received).max(1) as f64;
        [self.exits, self.kicks, self.interrupts].map(|count| count as f64 / frames)
    }
}

fn rate(counted: &Counted) -> f64 {
    counted.count as f64 * 1e9 / counted.elapsed_ns.max(1) as f64
}

impl NicReport {
    /// Returns medians over the rounds, or `None` if there was no turn.
    pub fn figures(&self, load: &NicLoad, subject: &str) -> Option<NicFigures> {
        let turns = self.turns(load, subject);
        turns.clone().next()?;
        let all = |value: &dyn Fn(&NicMeasured) -> f64| -> Vec<f64> {
            turns.clone().map(value).collect()
        };
        let rates = all(&|one| rate(one.measured(load)));
        let range = range(&rates);
        let works: Vec<[f64; 3]> =
            turns.clone().filter_map(|one| Some(one.work?.for_each_frame())).collect();
        let work = (!works.is_empty())
            .then(|| [0, 1, 2].map(|at| median(works.iter().map(|work| work[at]).collect())));
        Some(NicFigures {
            rate: median(rates),
            range,
            sent: median(all(&|one| rate(&one.sent))),
            cpu_ns: median(all(&|one| one.cpu_ns as f64 / one.measured(load).all.max(1) as f64)),
            work,
        })
    }

    /// Returns, for a subject, the points of the curve that `load` without its rate stands for:
    /// datagrams received over datagrams sent per second, from the least offered rate to the
    /// greatest. A source may send fewer than it is asked for.
    pub(super) fn curve(&self, load: &NicLoad, subject: &str) -> Vec<CurvePoint> {
        let same = |one: &&NicLoad| one.offered > 0 && one.without_rate() == load.without_rate();
        let mut loads: Vec<&NicLoad> = self.plan.loads.iter().filter(same).collect();
        loads.sort_unstable();
        loads.dedup();
        let point = |load: &NicLoad| {
            let figures = self.figures(load, subject)?;
            Some(CurvePoint { at: figures.sent, value: figures.rate, range: figures.range })
        };
        loads.into_iter().filter_map(point).collect()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::json::SavedReport;

    /// Makes a report with these loads, of subjects with these rates, round by round, the same with
    /// each load.
    pub(crate) fn report(loads: &[&str], subjects: &[(&str, &[u64])]) -> NicReport {
        NicReport::sample("bench packet --guests", loads, subjects, |_, (name, _), rate| {
            let one = |count| Counted { count, all: 2 * count, elapsed_ns: 1_000_000_000 };
            let (kicks, interrupts) = (1, 2);
            let work = NicWork { exits: 5, kicks, interrupts, sent: 10, received: 0 };
            NicMeasured {
                sent: one(2 * rate),
                received: one(*rate),
                cpu_ns: 1_000_000,
                work: name.starts_with("csb").then_some(work),
            }
        })
    }

    #[test]
    fn figures_are_medians_and_survive_json() {
        let report = report(&["udp8-gh", "rr-gh"], &[("csb", &[30, 10, 20]), ("virtio", &[])]);
        let figures = report.figures(&report.plan.loads[0], "csb").unwrap();
        assert_eq!((figures.rate, figures.range, figures.sent), (20.0, (10.0, 30.0), 40.0));
        assert_eq!((figures.cpu_ns, figures.work), (25_000.0, Some([0.5, 0.1, 0.2])));
        let asked = report.figures(&report.plan.loads[1], "csb").unwrap();
        assert_eq!(asked.rate, 40.0, "the end that asks measures");
        assert_eq!(report.figures(&report.plan.loads[0], "virtio"), None);
        assert_eq!(NicReport::from_json(&report.to_json().unwrap()).unwrap(), report);
        assert!(NicReport::from_json("{}").is_err());
    }

    #[test]
    fn loads_of_different_rates_are_a_curve() {
        let loads = ["udp18-sg-o20k", "udp18-gh-o1k", "udp18-sg-o5k", "udp18-sg"];
        let report = report(&loads, &[("csb", &[7])]);
        let curve = report.curve(&loads[0].parse().unwrap(), "csb");
        let point = CurvePoint { at: 14.0, value: 7.0, range: (7.0, 7.0) };
        assert_eq!(curve, [point, point]);
        assert!(report.curve(&loads[0].parse().unwrap(), "base").is_empty());
    }
}
