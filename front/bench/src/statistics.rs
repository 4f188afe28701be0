//! Statistics of stages.

use slipway_telemetry::Timeline;

use crate::slices;

/// The statistics of one stage over the sandboxes of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct StageStatistics {
    /// The stage's name.
    pub name: String,
    /// The number of sandboxes that went through the stage. The others are in none of the times
    /// below.
    pub count: usize,
    /// Mean, in nanoseconds.
    pub mean_ns: u64,
    /// Median: the [`percentile`] 50, in nanoseconds.
    pub p50_ns: u64,
    /// The [`percentile`] 99, in nanoseconds.
    pub p99_ns: u64,
    /// The stage's part of the total time of all sandboxes, 0 to 1 (FastIOV, Table 1, *proportion
    /// in average time*).
    pub share: f64,
    /// The stage's part of the total time of the slowest sandboxes, those whose total is the 99th
    /// percentile or more, 0 to 1 (FastIOV, Table 1, *proportion in 99th percentile time*).
    pub tail_share: f64,
}

/// The statistics of a run. All zero and empty without timelines.
#[derive(Clone, Debug, PartialEq)]
pub struct Statistics {
    /// The stages, in the order in which they begin (on average).
    pub stages: Vec<StageStatistics>,
    /// Time between the first stage and the last in which no stage ran, and which the stages thus
    /// do not explain.
    pub unexplained: StageStatistics,
    /// Time from a sandbox's first stage to the end of its last.
    pub total: StageStatistics,
    /// Time from the start of the run to the end of a sandbox's last stage.
    pub ready: StageStatistics,
}

/// One sandbox's part in a row of the statistics.
#[derive(Clone, Copy)]
struct Sample {
    ns: u64,
    total_ns: u64,
}

/// Computes the statistics of `timelines`. A stage that a sandbox went through several times
/// (several functions attached) counts once, with the time in which at least one of them ran.
/// Timelines without stages do not count.
pub fn statistics(timelines: &[Timeline]) -> Statistics {
    let timelines = slices::by_end(timelines);
    let mut totals: Vec<u64> = timelines.iter().map(|timeline| timeline.total_ns()).collect();
    totals.sort_unstable();
    let tail_ns = percentile(&totals, 99);
    let row = |name: &str, time: &dyn Fn(&Timeline) -> Option<u64>| {
        let samples: Vec<Sample> = timelines
            .iter()
            .filter_map(|timeline| {
                time(timeline).map(|ns| Sample { ns, total_ns: timeline.total_ns() })
            })
            .collect();
        stage_statistics(name, &samples, &totals, tail_ns)
    };
    Statistics {
        stages: names(&timelines)
            .iter()
            .map(|name| row(name, &|timeline| time_in(timeline, name)))
            .collect(),
        unexplained: row("unexplained", &|timeline| Some(unexplained_ns(timeline))),
        total: row("total", &|timeline| Some(timeline.total_ns())),
        ready: row("ready", &|timeline| Some(slices::end_ns(timeline))),
    }
}

fn stage_statistics(
    name: &str,
    samples: &[Sample],
    totals: &[u64],
    tail_ns: u64,
) -> StageStatistics {
    let mut sorted: Vec<u64> = samples.iter().map(|sample| sample.ns).collect();
    sorted.sort_unstable();
    let tail = samples.iter().filter(|sample| sample.total_ns >= tail_ns).map(|sample| sample.ns);
    let tail_totals = totals.iter().copied().filter(|total| *total >= tail_ns);
    StageStatistics {
        name: name.to_owned(),
        count: sorted.len(),
        mean_ns: mean(&sorted),
        p50_ns: percentile(&sorted, 50),
        p99_ns: percentile(&sorted, 99),
        share: ratio(sum(sorted.iter().copied()), sum(totals.iter().copied())),
        tail_share: ratio(sum(tail), sum(tail_totals)),
    }
}

/// Returns the smallest value such that `percent` % (0 to 100) of `sorted` are not above it
/// (*nearest rank*: always a value that was measured); 0 for no values. So the 99th percentile of
/// fewer than 100 values is their largest.
pub fn percentile(sorted: &[u64], percent: usize) -> u64 {
    let rank = (sorted.len() * percent.min(100)).div_ceil(100).max(1);
    sorted.get(rank - 1).copied().unwrap_or(0)
}

/// Returns the stages' names, in the order of their mean starts.
fn names(timelines: &[&Timeline]) -> Vec<String> {
    // Name, sum of starts, occurrences.
    let mut found: Vec<(&str, u128, u128)> = Vec::new();
    for stage in timelines.iter().flat_map(|timeline| &timeline.stages) {
        match found.iter_mut().find(|entry| entry.0 == stage.name) {
            Some(entry) => {
                entry.1 += u128::from(stage.start_ns);
                entry.2 += 1;
            }
            None => found.push((&stage.name, u128::from(stage.start_ns), 1)),
        }
    }
    found.sort_by_key(|(_, starts, count)| starts / count);
    found.into_iter().map(|(name, ..)| name.to_owned()).collect()
}

/// Returns the time in which at least one stage called `name` ran, or `None` if there is no such
/// stage.
pub(crate) fn time_in(timeline: &Timeline, name: &str) -> Option<u64> {
    timeline.stage(name)?;
    let named = |index: &usize| timeline.stages[*index].name == name;
    let slices = slices::slices(timeline);
    let with = slices.iter().filter(|slice| slice.running.iter().any(named));
    Some(with.map(|slice| slice.end_ns - slice.start_ns).sum())
}

fn unexplained_ns(timeline: &Timeline) -> u64 {
    let explained: u64 =
        slices::slices(timeline).iter().map(|slice| slice.end_ns - slice.start_ns).sum();
    timeline.total_ns() - explained
}

fn sum(values: impl Iterator<Item = u64>) -> u128 {
    values.map(u128::from).sum()
}

fn mean(values: &[u64]) -> u64 {
    let count = values.len().max(1) as u128;
    u64::try_from(sum(values.iter().copied()) / count).unwrap_or(u64::MAX)
}

fn ratio(part: u128, whole: u128) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

/// Returns the least and the greatest of `values`; infinities for no values.
pub(crate) fn range(values: &[f64]) -> (f64, f64) {
    let none = (f64::INFINITY, f64::NEG_INFINITY);
    values.iter().fold(none, |(least, most), value| (least.min(*value), most.max(*value)))
}

/// Returns the middle of `values`, or the mean of the two in the middle; 0 for no values.
pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => 0.0,
        odd if odd % 2 == 1 => values[middle],
        _ => f64::midpoint(values[middle - 1], values[middle]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::samples;

    #[test]
    fn percentiles_are_measured_values() {
        assert_eq!(percentile(&[], 50), 0);
        for percent in [0, 50, 99, 100, 1000] {
            assert_eq!(percentile(&[7], percent), 7);
        }
        assert_eq!(percentile(&[1, 2], 50), 1);
        assert_eq!(percentile(&[1, 2], 51), 2);
        assert_eq!(percentile(&[1, 2, 3], 50), 2);
        assert_eq!(percentile(&[1, 2, 3], 99), 3);
        let hundred: Vec<u64> = (1..=100).collect();
        assert_eq!(percentile(&hundred, 50), 50);
        assert_eq!(percentile(&hundred, 99), 99);
        let more: Vec<u64> = (1..=101).collect();
        assert_eq!(percentile(&more, 99), 100);
    }

    #[test]
    fn nothing_gives_zeros() {
        for timelines in [vec![], vec![Timeline::new("a")]] {
            let statistics = statistics(&timelines);
            assert!(statistics.stages.is_empty());
            assert_eq!(statistics.total.count, 0);
            assert_eq!(statistics.total.p99_ns, 0);
            assert_eq!(statistics.total.share, 0.0);
        }
    }

    #[test]
    fn stages_gaps_and_the_whole_agree() {
        let mut timeline = Timeline::new("a");
        timeline.record("vmm", 10, 40);
        timeline.record("kernel", 30, 90);
        timeline.record("agent", 100, 110);
        let statistics = statistics(&[timeline]);
        let names: Vec<_> = statistics.stages.iter().map(|stage| stage.name.as_str()).collect();
        assert_eq!(names, ["vmm", "kernel", "agent"]);
        assert_eq!(statistics.stages[1].mean_ns, 60);
        assert_eq!(statistics.stages[1].share, 0.6);
        assert_eq!(statistics.unexplained.mean_ns, 10);
        assert_eq!(statistics.total.mean_ns, 100);
        assert_eq!(statistics.total.share, 1.0);
        assert_eq!(statistics.ready.mean_ns, 110);
    }

    #[test]
    fn a_stage_gone_through_twice_counts_once() {
        let mut timeline = Timeline::new("a");
        timeline.record("vf-attach", 0, 40);
        timeline.record("vf-attach", 20, 60);
        timeline.record("vf-attach", 80, 100);
        let statistics = statistics(&[timeline]);
        assert_eq!(statistics.stages.len(), 1);
        assert_eq!(statistics.stages[0].count, 1);
        assert_eq!(statistics.stages[0].mean_ns, 80);
    }

    #[test]
    fn a_stage_that_some_skip_keeps_its_own_mean() {
        let mut with = Timeline::new("a");
        with.record("image", 0, 100);
        let mut without = Timeline::new("b");
        without.record("kernel", 0, 100);
        let statistics = statistics(&[with, without]);
        assert_eq!(statistics.stages[0].count, 1);
        assert_eq!(statistics.stages[0].mean_ns, 100);
        assert_eq!(statistics.stages[0].share, 0.5);
    }

    #[test]
    fn the_tail_has_shares_of_its_own() {
        // 200 sandboxes; two of them spend nearly all of their time in one stage.
        let mut timelines = Vec::new();
        for index in 0..200 {
            let mut timeline = Timeline::new(format!("s{index}"));
            let attach = if index < 3 { 900 } else { 50 };
            timeline.record("vf-attach", 0, attach);
            timeline.record("kernel", attach, attach + 100);
            timelines.push(timeline);
        }
        let statistics = statistics(&timelines);
        let attach = &statistics.stages[0];
        assert_eq!(attach.p50_ns, 50);
        assert_eq!(attach.p99_ns, 900);
        assert!((attach.tail_share - 0.9).abs() < 1e-9);
        assert!(attach.share < 0.45);
    }

    #[test]
    fn hundreds_of_sandboxes() {
        let statistics = statistics(&samples::staircase(500));
        assert_eq!(statistics.total.count, 500);
        assert_eq!(statistics.stages.len(), 10);
        assert!(statistics.stages.iter().all(|stage| stage.p50_ns <= stage.p99_ns));
    }
}
