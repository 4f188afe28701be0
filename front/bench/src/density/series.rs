//! Measurements with more and more sandboxes, or containers in one: figures for each, and the line
//! through them.

use serde::{Deserialize, Serialize};
use slipway_telemetry::Timeline;

use super::{Cpu, Taken};
use crate::line::Line;
use crate::slices;

/// The number of sandboxes for which the model is asked: the greatest of RunD-V's figure 14.
pub const MODEL: u32 = 2000;
/// The numbers of sandboxes for which the model is asked, as far as they were not measured.
pub const MODELS: [u32; 4] = [100, 500, 1000, MODEL];
/// The fewest points that support a model.
const LEAST_POINTS: usize = 3;
/// The greatest distance of a point from the line that supports a model, as a part of the line's
/// value at the last point.
const MOST_OFF: f64 = 0.1;

/// The measurements with a number of sandboxes, or of containers in one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DensityPoint {
    /// How many there were.
    pub count: u32,
    /// The memory when they idled.
    pub taken: Taken,
    /// Memory that a guest counts as used, mean of some, bytes; `None` if no guest tells.
    pub guest_used: Option<u64>,
    /// `false` if they were still busy when they were measured.
    pub settled: bool,
    /// The length of the period in which they were left alone, ns.
    pub idle_ns: u64,
    /// The processor time that was used in that period.
    pub idle: Cpu,
    /// Starts while they were there.
    pub bursts: Vec<Burst>,
    /// Reasons why figures of this point are void: the machine was busy with something else, or its
    /// processors were taken away.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub void: Vec<String>,
}

impl DensityPoint {
    /// Returns the marks behind the point's name, each after a space: "BUSY" if it was still at
    /// work, "VOID" if it does not count.
    pub(super) fn marks(&self) -> String {
        let busy = if self.settled { "" } else { " BUSY" };
        let void = if self.void.is_empty() { "" } else { " VOID" };
        format!("{busy}{void}")
    }
}

/// Starts of some more at once, round after round.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Burst {
    /// How many were started at once.
    pub at_once: u32,
    /// For each round the times from the common request until each one ran, ns, in ascending order.
    pub rounds: Vec<Vec<u64>>,
}

impl Burst {
    /// Returns the times of a round, ns, in ascending order, whose timelines count from the common
    /// request.
    pub fn round(timelines: &[Timeline]) -> Vec<u64> {
        let mut times: Vec<u64> = timelines.iter().map(slices::end_ns).collect();
        times.sort_unstable();
        times
    }

    /// Returns the times of all rounds, ns, in ascending order.
    pub fn times(&self) -> Vec<u64> {
        let mut times: Vec<u64> = self.rounds.iter().flatten().copied().collect();
        times.sort_unstable();
        times
    }

    /// Returns the time until the last one ran in each round, ns, in ascending order.
    pub fn lasts(&self) -> Vec<u64> {
        let lasts = self.rounds.iter().filter_map(|times| times.last().copied());
        let mut lasts: Vec<u64> = lasts.collect();
        lasts.sort_unstable();
        lasts
    }
}

/// Points, and the memory before the first.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Series {
    /// The memory before the first point.
    pub before: Taken,
    /// The points, by their counts.
    pub points: Vec<DensityPoint>,
}

/// A figure of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quantity {
    /// The PSS of Slipway's processes, with the huge pages of guests.
    Pss,
    /// Pages that are mapped by one process only.
    Private,
    /// The guest's memory, as far as it counts for the VMM.
    Guest,
    /// The VMM's own: heap, stacks, its part of programs.
    Vmm,
    /// The daemon's own, in which the plane is.
    Plane,
    /// The daemon's part of files in memory: volatile layers, and what it maps of guests' memory.
    Mapped,
    /// Other processes: the keeper, `slipway-fs`.
    Others,
    /// Decrease of the host's available memory, with what the kernel needs for the others.
    Host,
}

impl Quantity {
    /// All of them, in the order of tables.
    pub const ALL: [Self; 8] = [
        Self::Pss,
        Self::Private,
        Self::Guest,
        Self::Vmm,
        Self::Plane,
        Self::Mapped,
        Self::Others,
        Self::Host,
    ];

    /// Returns the heading in tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Pss => "PSS",
            Self::Private => "private",
            Self::Guest => "guest",
            Self::Vmm => "VMM",
            Self::Plane => "plane",
            Self::Mapped => "mapped",
            Self::Others => "others",
            Self::Host => "host",
        }
    }

    /// Returns the figure of all processes together, bytes.
    fn of(self, taken: &Taken) -> f64 {
        let Taken { vmms, daemon, others, available, .. } = taken;
        match self {
            // Huge pages of guests, which the daemon maps too, count for their VMMs.
            Self::Pss => (vmms.all() + daemon.pss + others.pss) as f64,
            Self::Private => (vmms.private + daemon.private + others.private) as f64,
            Self::Guest => (vmms.pss_shmem + vmms.hugetlb) as f64,
            Self::Vmm => vmms.pss as f64 - vmms.pss_shmem as f64,
            Self::Plane => daemon.pss as f64 - daemon.pss_shmem as f64,
            Self::Mapped => daemon.pss_shmem as f64,
            Self::Others => others.pss as f64,
            Self::Host => -(*available as f64),
        }
    }
}

impl Series {
    /// Returns by how much a figure of a point is above that before the first point, all sandboxes
    /// together, bytes. It may be below.
    pub fn value(&self, point: &DensityPoint, quantity: Quantity) -> f64 {
        quantity.of(&point.taken) - quantity.of(&self.before)
    }

    /// Returns the same for each of the sandboxes.
    pub fn each(&self, point: &DensityPoint, quantity: Quantity) -> f64 {
        self.value(point, quantity) / f64::from(point.count.max(1))
    }

    /// Returns the least and the greatest PSS of a sandbox, bytes: its VMM's, and what the others
    /// of Slipway's processes have for each.
    pub fn range(&self, point: &DensityPoint) -> (f64, f64) {
        let vmms = point.taken.vmms.all() as f64;
        let rest = (self.value(point, Quantity::Pss) - vmms) / f64::from(point.count.max(1));
        let (least, most) = point.taken.vmm_range;
        (least as f64 + rest, most as f64 + rest)
    }

    /// Returns the line through a figure of all points, bytes over counts, or `None` if there are
    /// no two counts.
    pub fn line(&self, quantity: Quantity) -> Option<Line> {
        let point = |one: &DensityPoint| (f64::from(one.count), self.value(one, quantity));
        Line::through(&self.points.iter().map(point).collect::<Vec<_>>())
    }

    /// Returns the mark of what is computed from all points: " VOID" if one of them has a mark.
    pub(super) fn mark(&self) -> &'static str {
        let is_marked = |point: &DensityPoint| !point.marks().is_empty();
        if self.points.iter().any(is_marked) { " VOID" } else { "" }
    }

    /// Returns the line's value for each of `count` sandboxes, bytes. Returns `None` if so many
    /// were measured, or the points support no line.
    pub fn model(&self, quantity: Quantity, count: u32) -> Option<f64> {
        let last = self.points.iter().map(|point| point.count).max()?;
        let line = self.line(quantity)?;
        let off = line.farthest <= MOST_OFF * line.at(last.into());
        let supported = self.points.len() >= LEAST_POINTS && off && line.slope > 0.0;
        (supported && last < count).then(|| line.at(count.into()) / f64::from(count))
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::density::Rollup;

    const MIB: u64 = 1 << 20;

    /// Returns what sandboxes of 10 MiB take, 7 of which are a guest's, beside 20 MiB of a daemon
    /// that grows by 1 MiB for each.
    pub fn taken(count: u64) -> Taken {
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

    pub fn point(count: u32) -> DensityPoint {
        let times = |at_once: u64| (1..=at_once).map(|one| one * 1_000_000).collect::<Vec<_>>();
        let burst = |at_once: u32| Burst { at_once, rounds: vec![times(at_once.into()); 2] };
        DensityPoint {
            count,
            taken: taken(count.into()),
            guest_used: None,
            settled: true,
            idle_ns: 10_000_000_000,
            idle: Cpu { vmms: u64::from(count) * 50_000_000, ..Cpu::default() },
            bursts: vec![burst(1), burst(10)],
            void: Vec::new(),
        }
    }

    pub fn series(counts: &[u32]) -> Series {
        Series { before: taken(0), points: counts.iter().map(|count| point(*count)).collect() }
    }

    #[test]
    fn parts_add_up_to_what_is_beyond_the_start() {
        let all = series(&[1, 4]);
        let each = |quantity| all.each(&all.points[1], quantity) / MIB as f64;
        let found = Quantity::ALL.map(each);
        assert_eq!(found, [11.0, 10.0, 7.0, 3.0, 1.0, 0.0, 0.0, 13.0]);
        let (least, most) = all.range(&all.points[1]);
        assert_eq!((least, most), ((10 * MIB) as f64, (13 * MIB) as f64));
    }

    #[test]
    fn huge_pages_of_a_guest_count_once() {
        let mut all = series(&[2]);
        let huge = Rollup { hugetlb: 4 * MIB, ..all.points[0].taken.vmms };
        all.points[0].taken.vmms = huge;
        assert_eq!(all.each(&all.points[0], Quantity::Guest), (9 * MIB) as f64);
        assert_eq!(all.each(&all.points[0], Quantity::Pss), (13 * MIB) as f64);
    }

    #[test]
    fn a_model_is_for_more_than_was_measured_on_a_line() {
        let all = series(&[1, 2, 4]);
        let line = all.line(Quantity::Pss).unwrap();
        assert!((line.slope - (11 * MIB) as f64).abs() < 1.0 && line.residual < 1.0, "{line:?}");
        let model = all.model(Quantity::Pss, MODEL).unwrap();
        assert!((model - (11 * MIB) as f64).abs() < 1.0, "{model}");
        assert_eq!(all.model(Quantity::Pss, 4), None, "that was measured");
        assert_eq!(series(&[1, 2]).model(Quantity::Pss, MODEL), None, "two points are a line");
        let mut bent = series(&[1, 2, 4]);
        bent.points[2].taken.vmms.pss *= 3;
        assert_eq!(bent.model(Quantity::Pss, MODEL), None);
        assert!(bent.line(Quantity::Pss).is_some());
        assert_eq!(series(&[]).model(Quantity::Pss, MODEL), None);
    }

    #[test]
    fn a_burst_has_the_times_of_all_and_of_the_last() {
        let burst = Burst { at_once: 2, rounds: vec![vec![5, 9], vec![1, 7]] };
        assert_eq!((burst.times(), burst.lasts()), (vec![1, 5, 7, 9], vec![7, 9]));
        let mut late = Timeline::new("late");
        late.record("vmm", 2, 8);
        assert_eq!(Burst::round(&[late, Timeline::new("none")]), [0, 8]);
    }
}
