//! A report of density, with the context needed to judge and repeat it.

use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};
use slipway_telemetry::Timeline;

use super::{Cpu, DensityLoad, Quantity, Taken, Unit};
use crate::figure::{Figure, mib, time};
use crate::measurement::{AnySubject, Measured, Measurement, Plan};
use crate::slices;
use crate::statistics::percentile;

/// Sandboxes that were left alone, or containers of a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Idle {
    /// The memory before the first of them.
    pub before: Taken,
    /// The memory when they idled.
    pub taken: Taken,
    /// Memory that a guest counts as used, mean of some, bytes; `None` if no guest tells.
    pub guest_used: Option<u64>,
    /// `false` if they were still busy when they were measured.
    pub settled: bool,
    /// The length of the period in which they were left alone, ns.
    pub idle_ns: u64,
    /// The processor time that was used in that period.
    pub cpu: Cpu,
}

impl Idle {
    /// Returns by how much a figure is above that before the first of them, all together, bytes. It
    /// may be below.
    pub(super) fn value(&self, quantity: Quantity) -> f64 {
        quantity.of(&self.taken) - quantity.of(&self.before)
    }

    /// Returns the same for each of `count`.
    pub fn each(&self, quantity: Quantity, count: u32) -> f64 {
        self.value(quantity) / f64::from(count.max(1))
    }

    /// Returns the processor time in a second, ns, of a time in the period.
    pub(super) fn in_a_second(&self, ns: u64) -> f64 {
        ns as f64 * 1e9 / self.idle_ns.max(1) as f64
    }
}

/// Starts: for each request the times from it until each one ran, ns, in ascending order.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Starts(pub Vec<Vec<u64>>);

impl Starts {
    /// Returns the times of one request, ns, in ascending order, from which the timelines count.
    pub fn times_of(timelines: &[Timeline]) -> Vec<u64> {
        sorted(timelines.iter().map(slices::end_ns))
    }

    /// Returns whether nothing was started.
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the times of all requests, ns, in ascending order.
    pub(super) fn times(&self) -> Vec<u64> {
        sorted(self.0.iter().flatten().copied())
    }

    /// Returns the time until the last one ran of each request, ns, in ascending order.
    pub(super) fn lasts(&self) -> Vec<u64> {
        sorted(self.0.iter().filter_map(|times| times.last().copied()))
    }
}

fn sorted(times: impl Iterator<Item = u64>) -> Vec<u64> {
    let mut times: Vec<u64> = times.collect();
    times.sort_unstable();
    times
}

/// Returns the median of sorted times, ns, or `None` without any.
fn median(times: &[u64]) -> Option<f64> {
    (!times.is_empty()).then(|| percentile(times, 50) as f64)
}

/// The result of a turn.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DensityMeasured {
    /// The sandboxes while they idle. `None` in a turn in which further ones started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idle: Option<Idle>,
    /// Starts at once beside those that were there, or of containers one after the other.
    #[serde(default, skip_serializing_if = "Starts::is_empty")]
    pub starts: Starts,
}

/// A figure of density.
type DensityFigure = Figure<DensityLoad, DensityMeasured>;

/// Returns a part of the memory of each, bytes.
fn each(quantity: Quantity, load: &DensityLoad, turn: &DensityMeasured) -> Option<f64> {
    Some(turn.idle.as_ref()?.each(quantity, load.count))
}

impl Measured for DensityMeasured {
    type Load = DensityLoad;

    const KIND: &'static str = "density";
    const FORMAT: u32 = 2;

    fn check(&self) -> Result<()> {
        let has_length = self.idle.is_none_or(|idle| idle.idle_ns > 0);
        ensure!(has_length, "a period of idleness has no length");
        Ok(())
    }

    fn figures(load: &DensityLoad) -> &'static [DensityFigure] {
        const PSS: DensityFigure = DensityFigure::less(
            "PSS",
            "memory of each (PSS)",
            |load, turn| each(Quantity::Pss, load, turn),
            mib,
        );
        const PRIVATE: DensityFigure = DensityFigure::less(
            "private",
            "memory of each that no other process maps",
            |load, turn| each(Quantity::Private, load, turn),
            mib,
        );
        const HOST: DensityFigure = DensityFigure::less(
            "host",
            "memory of the host for each",
            |load, turn| each(Quantity::Host, load, turn),
            mib,
        );
        const CPU: DensityFigure = DensityFigure::less(
            "CPU",
            "processor time in a second, all together",
            |_, turn| turn.idle.map(|idle| idle.in_a_second(idle.cpu.own())),
            time,
        );
        const START: DensityFigure =
            DensityFigure::less("start", "a start", |_, turn| median(&turn.starts.times()), time);
        const ALL_RUN: DensityFigure = DensityFigure::less(
            "all run",
            "until all run",
            |_, turn| median(&turn.starts.lasts()),
            time,
        );
        const IDLE: &[DensityFigure] = &[PSS, PRIVATE, HOST, CPU];
        const REPLICAS: &[DensityFigure] = &[PSS, PRIVATE, HOST, CPU, START];
        const STARTS: &[DensityFigure] = &[START, ALL_RUN];
        match load.unit {
            Unit::Sandbox if load.more > 0 => STARTS,
            Unit::Sandbox => IDLE,
            Unit::Replica => REPLICAS,
        }
    }

    /// Memory is read once, and starts are made round after round.
    fn is_gate(load: &DensityLoad) -> bool {
        load.more == 0
    }
}

/// The properties of all sandboxes of a report.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DensityExtra {
    /// The image.
    pub image: String,
    /// Set if each sandbox began with a template in place of booting.
    pub forks: bool,
    /// The memory that a guest begins with, bytes.
    pub memory_bytes: u64,
}

/// A node that can be measured; its name is the VMM's.
pub type DensitySubject = AnySubject<DensityLoad, DensityMeasured>;
/// The loads and rounds of a measurement.
pub type DensityPlan = Plan<DensityLoad>;
/// All results of one command, stored as JSON.
pub type DensityReport = Measurement<DensityLoad, DensityMeasured, DensityExtra>;

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::density::Rollup;
    use crate::json::SavedReport;

    pub const MIB: u64 = 1 << 20;

    /// Returns what sandboxes of 10 MiB take, 7 of which are a guest's, beside 20 MiB of a daemon
    /// that grows by 1 MiB for each.
    fn taken(count: u64) -> Taken {
        let vmms = Rollup {
            pss: 10 * MIB * count,
            pss_anon: 2 * MIB * count,
            pss_file: MIB * count,
            pss_shmem: 7 * MIB * count,
            private: 9 * MIB * count,
            ..Rollup::default()
        };
        let pss = (20 + count) * MIB;
        let daemon = Rollup { pss, pss_anon: pss, private: pss, ..Rollup::default() };
        let range = if count == 0 { (0, 0) } else { (9 * MIB, 12 * MIB) };
        let available = (4000 - 13 * count) * MIB;
        Taken { vmms, vmm_range: range, daemon, available, ..Taken::default() }
    }

    fn measured(load: &DensityLoad) -> DensityMeasured {
        let count = u64::from(load.count);
        let idle = Idle {
            before: taken(0),
            taken: taken(count),
            guest_used: None,
            settled: true,
            idle_ns: 10_000_000_000,
            cpu: Cpu { vmms: count * 50_000_000, ..Cpu::default() },
        };
        let times =
            |at_once: u32| (1..=u64::from(at_once)).map(|one| one * 1_000_000).collect::<Vec<_>>();
        let starts = match (load.unit, load.more) {
            (Unit::Sandbox, 0) => Vec::new(),
            (Unit::Sandbox, more) => vec![times(more)],
            (Unit::Replica, _) => vec![times(1); load.count as usize],
        };
        DensityMeasured { idle: (load.more == 0).then_some(idle), starts: Starts(starts) }
    }

    /// Returns a report of these numbers of sandboxes, with starts of 1 and of 10 beside them, and
    /// of these numbers of replicas.
    pub fn report(deployed: &[u32], replicas: &[u32]) -> DensityReport {
        let load = |unit, count, more| DensityLoad { unit, count, more };
        let of = |count: &u32| [0, 1, 10].map(|more| load(Unit::Sandbox, *count, more));
        let replicas = replicas.iter().map(|count| load(Unit::Replica, *count, 0));
        let loads = deployed.iter().flat_map(of).chain(replicas).collect();
        let subjects = [("slipway-vmm", &[0, 0][..])];
        let measured = |load: &DensityLoad, _: (&str, u32), _: &u8| measured(load);
        let mut report = DensityReport::sample_of("bench density", loads, &subjects, measured);
        report.runs.retain(|run| run.round == 0 || run.load.more > 0);
        report
    }

    #[test]
    fn a_report_survives_json() {
        let report = report(&[0, 1, 2], &[0, 1]);
        assert_eq!(DensityReport::from_json(&report.to_json().unwrap()).unwrap(), report);
        assert!(DensityReport::from_json("{}").is_err());
    }

    #[test]
    fn a_report_that_contradicts_itself_is_refused() {
        let mut forged = report(&[1], &[]);
        forged.runs[0].measured.idle.as_mut().unwrap().idle_ns = 0;
        assert!(DensityReport::from_json(&forged.to_json().unwrap()).is_err());
    }

    #[test]
    fn figures_are_those_of_the_load() {
        let report = report(&[4], &[2]);
        let medians = |place: usize| -> Vec<f64> {
            let load = report.plan.loads[place];
            let figures = DensityMeasured::figures(&load).iter();
            let of = |one| report.over_rounds(&load, "slipway-vmm", one).unwrap().median;
            figures.map(of).collect()
        };
        let mib = MIB as f64;
        assert_eq!(medians(0), [11.0 * mib, 10.0 * mib, 13.0 * mib, 2e7]);
        assert_eq!(medians(2), [5e6, 1e7]);
        assert_eq!(medians(3)[4], 1e6);
    }

    #[test]
    fn starts_have_the_times_of_all_and_of_the_last() {
        let starts = Starts(vec![vec![5, 9], vec![1, 7]]);
        assert_eq!((starts.times(), starts.lasts()), (vec![1, 5, 7, 9], vec![7, 9]));
        let mut late = Timeline::new("late");
        late.record("vmm", 2, 8);
        assert_eq!(Starts::times_of(&[late, Timeline::new("none")]), [0, 8]);
    }
}
