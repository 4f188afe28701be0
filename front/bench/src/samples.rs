//! Timelines for the tests of this crate.

use slipway_telemetry::Timeline;

const MS: u64 = 1_000_000;

/// Returns the timelines of four sandboxes as a small machine starts them.
pub(crate) fn four() -> Vec<Timeline> {
    (0..4).map(|index| start(&format!("demo-{index}"), index * 30, index * 120)).collect()
}

/// Returns the timelines of `count` sandboxes, each of which waits for those before it.
pub(crate) fn staircase(count: u64) -> Vec<Timeline> {
    (0..count).map(|index| start(&format!("s{index}"), index % 7, index * 20)).collect()
}

/// Returns a start with all stages, some of them at the same time; `delay` and `wait` are in
/// milliseconds.
fn start(name: &str, delay: u64, wait: u64) -> Timeline {
    let mut timeline = Timeline::new(name);
    let mut at = delay * MS;
    for (stage, ms) in
        [("image", 1), ("cgroup", 2), ("rootfs", 5), ("vf-attach", 40 + wait), ("vmm", 180)]
    {
        timeline.record(stage, at, at + ms * MS);
        at += ms * MS;
    }
    // Memory is mapped for DMA while the VMM starts.
    timeline.record("dma-ram", at - 60 * MS, at - 20 * MS);
    timeline.record("kernel", at - 10 * MS, at + 1_500 * MS);
    timeline.record("vf-driver", at + 900 * MS, at + 1_100 * MS);
    timeline.record("agent", at + 1_500 * MS, at + 1_560 * MS);
    timeline.record("container", at + 1_570 * MS, at + 1_640 * MS);
    timeline
}
