//! The stages of a start on the sandbox's timeline. Each is a span of the trace of the call that
//! starts the sandbox as well.
//!
//! A new stage has its name in `starts::STAGES`, so that the metrics count it (an assertion fails
//! in debug builds otherwise), in the drawing and the steps of `docs/walks/sandbox.md`, and in
//! `palette.rs` of `front/bench` if it is to have a fixed colour. What it makes on the host is in
//! the sandbox's record on disk before it is made, and `release::release` gives it back. A stage of
//! the guest is in `STAGES` of `sandbox/agent-protocol` as well. Tests: those of `starts.rs`, and
//! `tests/e2e/41-start-kills.sh`, which kills the daemon at steps of a start and looks for what is
//! left.

use slipway_plane_api::v1 as plane_v1;
use slipway_telemetry::monotonic_ns;

use crate::agent::{GuestStage, Hello};
use crate::node::Node;
use crate::sandbox::Sandbox;
use crate::{Error, Result, network, starts};

/// The recorder of stages on the sandbox's timeline.
pub(crate) struct Stages<'a> {
    sandbox: &'a Sandbox,
}

impl<'a> Stages<'a> {
    /// Makes the recorder of a sandbox.
    pub(crate) fn of(sandbox: &'a Sandbox) -> Self {
        Self { sandbox }
    }

    /// Runs the stage `name`, one of those that `starts` knows. Returns [`Error::Stopped`] instead
    /// if the sandbox is being stopped.
    pub(crate) async fn run<T>(
        &self,
        name: &'static str,
        stage: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        if self.sandbox.is_stopping() {
            return Err(Error::Stopped);
        }
        self.sandbox.enter(name);
        let start = monotonic_ns();
        let outcome = stage.await;
        self.record(name, (start, monotonic_ns()), outcome.as_ref().err());
        outcome
    }

    /// Records a stage, with its beginning and its end.
    fn record(&self, name: &'static str, times: (u64, u64), failure: Option<&Error>) {
        debug_assert!(starts::knows(name), "stage {name:?} is not in starts::STAGES");
        self.sandbox.record_stage(name, times, failure);
    }
}

/// Records the stages that the guest measured, on the host's clock. The network's stage is left
/// out: the code that waits for the network records it.
pub(crate) fn guest_stages(sandbox: &Sandbox, hello: &Hello, booted: u64) {
    for stage in hello.stages.iter().filter(|stage| stage.name != network::STAGE) {
        if sandbox.look(|record| record.timeline.stage(stage.name).is_none()) {
            sandbox.record_stage(stage.name, boot_times(stage, booted, hello.at_ns), None);
        }
    }
}

/// Returns the start and the end of a stage of a guest that boots since `booted` and has answered
/// at `answered`. The kernel's stage begins when the VMM runs, since the kernel's own clock begins
/// only after the loader. The agent's stage ends when the host has its answer.
fn boot_times(stage: &GuestStage, booted: u64, answered: u64) -> (u64, u64) {
    let (start, end) = stage.since(booted);
    match stage.name {
        "kernel" => (booted, end),
        "agent" => (start, answered),
        _ => (start, end),
    }
}

/// Records how long the plane took to map the guest's memory, by the plane's own clock. The image
/// is a backend of the function and is never mapped for DMA: its stage is empty by design, and is
/// recorded so that a comparison with FastIOV's figure shows it.
pub(crate) async fn dma_stages(node: &Node, stages: &Stages<'_>, id: &str) -> Result<()> {
    let request = plane_v1::GetEndpointRequest { id: id.to_owned() };
    let reply = node.plane.clone().get_endpoint(request).await;
    let endpoint = reply.map_err(Error::plane)?.into_inner();
    let Some(times) = endpoint.times else { return Ok(()) };
    if times.client_attached_ns > 0 {
        let attached = (times.client_connected_ns, times.client_attached_ns);
        stages.record("vf-attach", attached, None);
    }
    let start = times.first_dma_map_ns;
    stages.record("dma-ram", (start, start.saturating_add(times.dma_map_total_ns)), None);
    stages.record("dma-image", (start, start), None);
    Ok(())
}

#[cfg(test)]
mod tests {
    use slipway_agent_protocol::{STAGES, v1};

    use super::*;
    use crate::agent;

    #[test]
    fn no_stage_of_a_guest_is_longer_than_the_host_has_waited() {
        let (booted, answered) = (1_000, 1_500);
        for (start_ns, end_ns) in [(0, u64::MAX), (u64::MAX, 0), (u64::MAX, u64::MAX), (0, 0)] {
            for boottime_ns in [0, 100, u64::MAX] {
                let stage =
                    |name: &&str| v1::GuestStage { name: (*name).to_owned(), start_ns, end_ns };
                let told: Vec<_> = STAGES.iter().map(stage).collect();
                let found = agent::stages(&told, boottime_ns, answered);
                assert_eq!(found.len(), STAGES.len());
                for stage in &found {
                    let within = booted..=answered;
                    let (start, end) = boot_times(stage, booted, answered);
                    assert!(within.contains(&start) && within.contains(&end), "{stage:?}");
                    let (start, end) = stage.since(booted);
                    assert!(within.contains(&start) && within.contains(&end), "{stage:?}");
                }
            }
        }
    }

    #[test]
    fn stages_of_a_boot_are_as_the_guest_measured_them() {
        let stage = |name| GuestStage { name, start_ns: 120, end_ns: 150 };
        assert_eq!(boot_times(&stage("kernel"), 100, 200), (100, 150));
        assert_eq!(boot_times(&stage("vf-driver"), 100, 200), (120, 150));
        assert_eq!(boot_times(&stage("agent"), 100, 200), (120, 200));
    }
}
