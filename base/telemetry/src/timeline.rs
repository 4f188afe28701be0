//! The stages of a start.

use serde::{Deserialize, Serialize};

/// One stage: where it began and ended on the time axis that all timelines of a run share.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stage {
    /// Stage name as FastIOV's Figure 5 has it where it has one: `cgroup`, `dma-ram`, `rootfs`,
    /// `dma-image`, `vf-attach`, `vf-driver`; ours beside them: `vmm`, `kernel`, `agent`,
    /// `container`.
    pub name: String,
    /// Nanoseconds since the start of the run.
    pub start_ns: u64,
    /// Nanoseconds since the start of the run; not before `start_ns`.
    pub end_ns: u64,
}

/// The start of one sandbox, stage by stage. Stages may overlap.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Timeline {
    /// Name of the sandbox.
    pub sandbox: String,
    /// In the order they were recorded.
    pub stages: Vec<Stage>,
}

impl Timeline {
    /// An empty timeline of the sandbox `sandbox`.
    pub fn new(sandbox: impl Into<String>) -> Self {
        Self { sandbox: sandbox.into(), stages: Vec::new() }
    }

    /// Adds a stage; an end before its start is set to the start.
    pub fn record(&mut self, name: impl Into<String>, start_ns: u64, end_ns: u64) {
        self.stages.push(Stage { name: name.into(), start_ns, end_ns: end_ns.max(start_ns) });
    }

    /// The first stage with this name.
    pub fn stage(&self, name: &str) -> Option<&Stage> {
        self.stages.iter().find(|stage| stage.name == name)
    }

    /// From the first stage's start to the last one's end, in nanoseconds.
    pub fn total_ns(&self) -> u64 {
        let start = self.stages.iter().map(|stage| stage.start_ns).min().unwrap_or(0);
        let end = self.stages.iter().map(|stage| stage.end_ns).max().unwrap_or(0);
        end - start
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn total_spans_overlapping_stages() {
        let mut timeline = Timeline::new("a");
        timeline.record("vmm", 10, 40);
        timeline.record("kernel", 30, 90);
        timeline.record("agent", 50, 20);
        assert_eq!(timeline.total_ns(), 80);
        assert_eq!(timeline.stage("agent").map(|stage| stage.end_ns - stage.start_ns), Some(0));
    }

    #[test]
    fn an_empty_timeline_took_no_time() {
        let timeline = Timeline::new("a");
        assert_eq!((timeline.total_ns(), timeline.stage("vmm")), (0, None));
    }

    #[test]
    fn the_first_stage_of_a_name_counts() {
        let mut timeline = Timeline::new("a");
        timeline.record("vf-attach", 5, 6);
        timeline.record("vf-attach", 1, 9);
        assert_eq!(timeline.stage("vf-attach").map(|stage| stage.start_ns), Some(5));
        assert_eq!(timeline.total_ns(), 8);
    }
}
