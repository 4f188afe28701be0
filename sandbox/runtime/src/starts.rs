//! Counts of the starts of sandboxes since the daemon began, for monitoring.

use std::sync::Mutex;

use slipway_telemetry::{BOUNDS_NS, Durations, Stage, Timeline};

use crate::lock::lock;
use crate::record::Record;
use crate::templates::is_automatic;
use crate::v1;

/// The stages of a start that are counted. A guest reports stages of its own, so other names are
/// left out: they would make the list as long as the guest likes.
const STAGES: [&str; 19] = [
    "template",
    "memory",
    "reporting",
    "shared-root",
    "cgroup",
    "rootfs",
    "vf-attach",
    "dma-ram",
    "vf-driver",
    "vmm",
    "kernel",
    "agent",
    "disks",
    "shares",
    "resume",
    "network",
    "sockets",
    "hardware",
    "container",
];
/// The stages that are recorded and not counted: one that is empty by design, and those of a
/// template's making, which is no start.
const UNCOUNTED: [&str; 3] = ["dma-image", "prepare", "save"];
/// The name for the time from the first stage to the end of the last.
const TOTAL: &str = "total";

/// Returns whether the stage `name` is counted, or left out on purpose.
pub(crate) fn knows(name: &str) -> bool {
    STAGES.contains(&name) || UNCOUNTED.contains(&name)
}

/// The machine that a sandbox began with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Beginning {
    /// Its guest booted.
    Boot,
    /// A template that a user made.
    Template,
    /// A template of the node's own.
    Automatic,
    /// A snapshot.
    Snapshot,
}

impl Beginning {
    /// Returns the beginning of a sandbox that has started.
    pub fn of(record: &Record) -> Self {
        match (&record.template, &record.origin) {
            (None, _) => Self::Boot,
            (Some(name), None) if is_automatic(name) => Self::Automatic,
            (Some(_), None) => Self::Template,
            (Some(_), Some(_)) => Self::Snapshot,
        }
    }
}

/// The counts.
#[derive(Debug, Default)]
pub struct Starts(Mutex<Counts>);

#[derive(Debug, Default)]
struct Counts {
    started: u64,
    failed: u64,
    template_forks: u64,
    automatic_forks: u64,
    snapshot_forks: u64,
    stages: [Durations; STAGES.len()],
    total: Durations,
}

impl Starts {
    /// Counts a start that reached its container.
    pub fn succeeded(&self, timeline: &Timeline, beginning: Beginning) {
        let mut counts = lock(&self.0);
        counts.started += 1;
        match beginning {
            Beginning::Boot => {}
            Beginning::Template => counts.template_forks += 1,
            Beginning::Automatic => counts.automatic_forks += 1,
            Beginning::Snapshot => counts.snapshot_forks += 1,
        }
        let stages = &timeline.stages;
        let (begun, ended) =
            (stages.iter().map(|one| one.start_ns), stages.iter().map(|one| one.end_ns));
        if let Some((begun, ended)) = begun.min().zip(ended.max()) {
            counts.total.record(ended.saturating_sub(begun));
        }
        for (name, times) in STAGES.iter().zip(&mut counts.stages) {
            // A stage may have several parts, such as the plane's and the VMM's.
            let parts = stages.iter().filter(|one| one.name == *name);
            let part =
                |sum: u64, one: &Stage| sum.saturating_add(one.end_ns.saturating_sub(one.start_ns));
            if let Some(ns) = parts.fold(None, |sum, one| Some(part(sum.unwrap_or(0), one))) {
                times.record(ns);
            }
        }
    }

    /// Counts a start that failed.
    pub fn failed(&self) {
        lock(&self.0).failed += 1;
    }

    /// Fills in the counts, without stages that no start had.
    pub fn fill(&self, reply: &mut v1::FiguresReply) {
        let counts = lock(&self.0);
        (reply.started, reply.failed) = (counts.started, counts.failed);
        reply.template_forks = counts.template_forks + counts.automatic_forks;
        reply.automatic_forks = counts.automatic_forks;
        reply.snapshot_forks = counts.snapshot_forks;
        reply.bounds_ns = BOUNDS_NS.to_vec();
        let all = STAGES.iter().zip(&counts.stages).chain([(&TOTAL, &counts.total)]);
        let stages = all.filter(|(_, times)| !times.is_empty());
        let stages = stages.map(|(name, times)| v1::StageTimes {
            name: (*name).to_owned(),
            counts: times.counts().to_vec(),
            sum_ns: times.sum_ns(),
        });
        reply.stages = stages.collect();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_stage_that_a_guest_measures_is_counted() {
        for name in slipway_agent_protocol::STAGES {
            assert!(STAGES.contains(&name), "{name}");
        }
        assert!(knows("dma-image") && !knows("a guest's own"));
    }

    #[test]
    fn a_start_is_counted_stage_by_stage() {
        let starts = Starts::default();
        let mut timeline = Timeline::default();
        timeline.record("cgroup", 1_000, 41_000);
        timeline.record("cgroup", 41_000, 101_000);
        timeline.record("kernel", 200_000, 5_200_001);
        timeline.record("a guest's own", 0, 9_000_000_000);
        starts.succeeded(&timeline, Beginning::Boot);
        starts.failed();
        let mut reply = v1::FiguresReply::default();
        starts.fill(&mut reply);
        assert_eq!((reply.started, reply.failed), (1, 1));
        let bucket = |name: &str| {
            let stage = reply.stages.iter().find(|stage| stage.name == name)?;
            Some((stage.counts.iter().position(|count| *count == 1)?, stage.sum_ns))
        };
        assert_eq!(bucket("cgroup"), Some((0, 100_000)), "a bound belongs to its bucket");
        assert_eq!(bucket("kernel"), Some((4, 5_000_001)));
        assert_eq!(bucket(TOTAL), Some((13, 9_000_000_000)));
        assert_eq!(reply.stages.len(), 3);
        assert!(reply.stages.iter().all(|stage| stage.counts.len() == reply.bounds_ns.len() + 1));
        assert_eq!((reply.template_forks, reply.snapshot_forks), (0, 0));
    }

    #[test]
    fn forks_are_counted_among_the_starts() {
        let starts = Starts::default();
        let begins = |template: Option<&str>| {
            let record = crate::adopt::tests::record_of(crate::record::SandboxState::Running);
            Beginning::of(&Record { template: template.map(str::to_owned), ..record })
        };
        let booted = [begins(None), Beginning::Snapshot];
        let forks = ["web", "auto-0123456789ab", "automatic", "auto-ba9876543210", "auto-0"];
        for beginning in booted.into_iter().chain(forks.map(|name| begins(Some(name)))) {
            starts.succeeded(&Timeline::default(), beginning);
        }
        let mut reply = v1::FiguresReply::default();
        starts.fill(&mut reply);
        assert_eq!((reply.started, reply.template_forks, reply.snapshot_forks), (7, 5, 1));
        assert_eq!(reply.automatic_forks, 3);
    }
}
