//! A report of a measurement of packets, with the context needed to judge and repeat it.

use serde::{Deserialize, Serialize};

use super::{FunctionCounts, PacketLoad};
use crate::duration::rate;
use crate::figure::Figure;
use crate::measurement::{AnySubject, Measured, Measurement, Plan};

/// The result of a turn.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PacketMeasured {
    /// Frames that the source sent, or those delivered if a peer does not report that.
    pub sent: u64,
    /// Frames that the sinks received.
    pub delivered: u64,
    /// The measured time, ns.
    pub elapsed_ns: u64,
    /// The neighbour's result, if the load has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub neighbour: Option<Neighbour>,
    /// The work of the e1000 functions that the frames passed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub work: Option<Work>,
    /// The time for which the sending thread waited for a processor that it shares with no other of
    /// the measurement, ns, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waited_ns: Option<u64>,
}

/// The work of two e1000 functions, which they have counted themselves.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Work {
    /// The function of the sender.
    pub one: FunctionCounts,
    /// The function of the receiver.
    pub two: FunctionCounts,
}

/// A neighbour's result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Neighbour {
    /// Frames that were due, including those that had no room in the neighbour's own ring.
    pub offered: u64,
    /// Frames that the neighbour's sink received.
    pub delivered: u64,
}

impl PacketMeasured {
    /// Returns a number of frames for each second of the turn.
    fn each_second(&self, frames: u64) -> f64 {
        frames as f64 * 1e9 / self.elapsed_ns.max(1) as f64
    }
}

/// A figure of packets.
type PacketFigure = Figure<PacketLoad, PacketMeasured>;

/// Frames delivered per second.
pub(super) const DELIVERED: PacketFigure = PacketFigure {
    name: "delivered",
    about: "frames delivered a second",
    more_is_better: true,
    of: |_, turn| Some(turn.each_second(turn.delivered)),
    text: |frames| rate(frames, "pps"),
    beside: &[BITS],
};
/// Bits delivered per second, counting frames only.
const BITS: PacketFigure = PacketFigure::more(
    "bits",
    "bits delivered a second",
    |load, turn| Some(turn.each_second(turn.delivered) * f64::from(load.bytes) * 8.0),
    |bits| rate(bits, "bit/s"),
);
/// Frames sent per second.
const SENT: PacketFigure = PacketFigure::more(
    "offered",
    "frames sent a second",
    |_, turn| Some(turn.each_second(turn.sent)),
    |frames| rate(frames, "pps"),
);
/// The part of a neighbour's frames that was delivered.
pub(super) const NEIGHBOUR: PacketFigure = PacketFigure::more(
    "neighbour's share",
    "the part of a neighbour's frames that was delivered",
    |_, turn| turn.neighbour.map(|one| one.delivered as f64 / one.offered.max(1) as f64),
    |share| format!("{:.2}%", share * 100.0),
);

impl Measured for PacketMeasured {
    type Load = PacketLoad;

    const KIND: &'static str = "packets";
    const SHOWS: &'static str = "Frames through switches";
    const TURN: &'static str = "round";

    fn figures(_: &PacketLoad) -> &'static [PacketFigure] {
        const COMPARED: &[PacketFigure] = &[DELIVERED];
        COMPARED
    }

    fn further(_: &PacketLoad) -> &'static [PacketFigure] {
        const FURTHER: &[PacketFigure] = &[BITS, SENT];
        FURTHER
    }

    fn waited(&self) -> Option<f64> {
        let elapsed_ns = self.elapsed_ns.max(1) as f64;
        self.waited_ns.map(|waited_ns| waited_ns as f64 / elapsed_ns)
    }
}

/// A target that can be put under load.
pub type PacketSubject = AnySubject<PacketLoad, PacketMeasured>;
/// The loads and times of a measurement.
pub type PacketPlan = Plan<PacketLoad>;
/// All results of one command, stored as JSON.
pub type PacketReport = Measurement<PacketLoad, PacketMeasured>;

impl PacketReport {
    /// Returns the work of the functions of one subject with one load, all rounds together. Returns
    /// `None` if it has none, or there was no turn.
    pub fn work(&self, load: &PacketLoad, subject: &str) -> Option<Work> {
        let all = self.turns(load, subject).filter_map(|turn| turn.work.as_ref());
        all.fold(None, |sum: Option<Work>, work| {
            let mut sum = sum.unwrap_or_default();
            sum.one.add(&work.one);
            sum.two.add(&work.two);
            Some(sum)
        })
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::time::Duration;

    use super::*;
    use crate::Times;
    use crate::json::SavedReport;

    /// Makes a report of subjects with these rates in frames per second, round by round.
    pub(crate) fn report(subjects: &[(&str, &[u64])]) -> PacketReport {
        PacketReport::sample("bench packet", &["64b-p2"], subjects, |_, (_, round), &delivered| {
            let neighbour = Neighbour { offered: 100, delivered: 100 - u64::from(round) };
            PacketMeasured {
                sent: 2 * delivered,
                delivered,
                elapsed_ns: 1_000_000_000,
                neighbour: Some(neighbour),
                ..PacketMeasured::default()
            }
        })
    }

    #[test]
    fn figures_are_medians_and_survive_json() {
        let times = Times { warm_up: Duration::ZERO, time: Duration::from_millis(1500) };
        let mut report = report(&[("switch", &[30, 10, 20]), ("link", &[])]);
        report.plan = PacketPlan::timed(report.plan.loads, 3, times);
        let of = |figure: &PacketFigure| {
            report.over_rounds(&PacketLoad::default(), "switch", figure).unwrap()
        };
        let medians = [DELIVERED, SENT, BITS].map(|figure| of(&figure).median);
        assert_eq!(medians, [20.0, 40.0, 20.0 * 512.0]);
        assert_eq!((of(&DELIVERED).spread(), of(&NEIGHBOUR).range.0), (Some(1.0), 0.98));
        assert_eq!(report.over_rounds(&PacketLoad::default(), "link", &DELIVERED), None);
        let text = report.to_json().unwrap();
        // As in reports of earlier versions, times are beside the loads.
        let time = r#""rounds":3,"warm_up":{"secs":0,"nanos":0},"time":{"secs":1,"nanos":5"#;
        assert!(text.contains(time), "{text}");
        assert_eq!(PacketReport::from_json(&text).unwrap(), report);
        assert!(PacketReport::from_json("{}").is_err());
    }
}
