//! Cuts a timeline into slices, wherever a stage begins or ends.

use slipway_telemetry::Timeline;

/// A stretch of a timeline in which the same stages run.
#[derive(Debug, PartialEq)]
pub(crate) struct Slice {
    /// Nanoseconds since the start of the run.
    pub start_ns: u64,
    /// Nanoseconds since the start of the run; after `start_ns`.
    pub end_ns: u64,
    /// Indices into the timeline's stages, in the order in which these began. Never empty.
    pub running: Vec<usize>,
}

/// Cuts `timeline` at every start and end of a stage. Leaves out stretches in which nothing runs,
/// and stages that took no time.
pub(crate) fn slices(timeline: &Timeline) -> Vec<Slice> {
    let stages = &timeline.stages;
    let mut cuts: Vec<u64> = stages.iter().flat_map(|s| [s.start_ns, s.end_ns]).collect();
    cuts.sort_unstable();
    cuts.dedup();
    let mut order: Vec<usize> = (0..stages.len()).collect();
    order.sort_by_key(|&index| stages[index].start_ns);

    let running = |from: u64, to: u64| -> Vec<usize> {
        let covers = |&index: &usize| stages[index].start_ns <= from && stages[index].end_ns >= to;
        order.iter().copied().filter(covers).collect()
    };
    cuts.windows(2)
        .map(|cut| Slice { start_ns: cut[0], end_ns: cut[1], running: running(cut[0], cut[1]) })
        .filter(|slice| !slice.running.is_empty())
        .collect()
}

/// Returns the time at which the last stage of `timeline` ended, in nanoseconds since the start of
/// the run.
pub(crate) fn end_ns(timeline: &Timeline) -> u64 {
    timeline.stages.iter().map(|stage| stage.end_ns).max().unwrap_or(0)
}

/// Returns the timelines that have stages, in the order in which they ended: the slope of their
/// ends shows at a glance what a start waits for.
pub(crate) fn by_end(timelines: &[Timeline]) -> Vec<&Timeline> {
    let mut sorted: Vec<&Timeline> =
        timelines.iter().filter(|timeline| !timeline.stages.is_empty()).collect();
    sorted.sort_by_key(|timeline| end_ns(timeline));
    sorted
}

/// Moves `timelines`, recorded on a clock that began at any time (the host's monotonic one), to a
/// time axis that begins at `origin_ns` of that clock: the start of the run. Parts before it are
/// cut off.
pub fn aligned(mut timelines: Vec<Timeline>, origin_ns: u64) -> Vec<Timeline> {
    for stage in timelines.iter_mut().flat_map(|timeline| &mut timeline.stages) {
        stage.start_ns = stage.start_ns.saturating_sub(origin_ns);
        stage.end_ns = stage.end_ns.saturating_sub(origin_ns);
    }
    timelines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_begins_at_zero() {
        let mut timeline = Timeline::new("a");
        timeline.record("image", 900, 950);
        timeline.record("vmm", 990, 1_400);
        let timelines = aligned(vec![timeline], 1_000);
        assert_eq!((timelines[0].stages[0].start_ns, timelines[0].stages[0].end_ns), (0, 0));
        assert_eq!((timelines[0].stages[1].start_ns, timelines[0].stages[1].end_ns), (0, 400));
    }

    #[test]
    fn cuts_where_stages_overlap_and_skips_gaps() {
        let mut timeline = Timeline::new("a");
        timeline.record("kernel", 20, 90);
        timeline.record("vmm", 10, 40);
        timeline.record("nothing", 50, 50);
        timeline.record("agent", 95, 99);
        let slice = |start_ns, end_ns, running: &[usize]| Slice {
            start_ns,
            end_ns,
            running: running.to_vec(),
        };
        assert_eq!(
            slices(&timeline),
            [
                slice(10, 20, &[1]),
                slice(20, 40, &[1, 0]),
                slice(40, 50, &[0]),
                slice(50, 90, &[0]),
                slice(95, 99, &[3]),
            ]
        );
        assert_eq!(slices(&Timeline::new("empty")), []);
    }
}
