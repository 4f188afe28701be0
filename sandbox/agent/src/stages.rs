//! Times at which the guest reached its stages, in CLOCK_BOOTTIME, which starts with the guest's
//! kernel.

use std::sync::{Mutex, OnceLock};

use rustix::time::{ClockId, clock_gettime};
use slipway_agent_protocol::v1::GuestStage;
use tokio::sync::watch;

use crate::lock::lock;

/// Returns the time since the kernel started, in ns.
pub fn now() -> u64 {
    let time = clock_gettime(ClockId::Boottime);
    time.tv_sec.unsigned_abs() * 1_000_000_000 + time.tv_nsec.unsigned_abs()
}

/// The times of the stages, each set once.
pub struct Stages {
    first_instruction: u64,
    modules_from: OnceLock<u64>,
    modules: watch::Sender<bool>,
    namespaces_at: Mutex<Option<u64>>,
    prepared: watch::Sender<bool>,
    serving_at: OnceLock<u64>,
    /// The last times at which the host requested the network interface, and at which it was
    /// usable. A fork of a machine has times of its own.
    network: Mutex<(Option<u64>, Option<u64>)>,
}

impl Stages {
    /// Makes the stages. `first_instruction` is the time at which the agent began.
    pub fn new(first_instruction: u64) -> Stages {
        Stages {
            first_instruction,
            modules_from: OnceLock::new(),
            modules: watch::Sender::new(false),
            namespaces_at: Mutex::new(None),
            prepared: watch::Sender::new(false),
            serving_at: OnceLock::new(),
            network: Mutex::default(),
        }
    }

    /// Records that loading modules begins.
    pub fn modules_begin(&self) {
        let _ = self.modules_from.set(now());
    }

    /// Records that all modules are loaded, or that there are none.
    pub fn modules_end(&self) {
        self.modules.send_replace(true);
    }

    /// Waits for [`Stages::modules_end`].
    pub async fn modules_loaded(&self) {
        let mut modules = self.modules.subscribe();
        // The sender lives in `self`.
        let _ = modules.wait_for(|loaded| *loaded).await;
    }

    /// Records that the machine is about to be saved.
    pub fn prepare(&self) {
        self.prepared.send_replace(true);
    }

    /// Waits for [`Stages::prepare`].
    pub async fn prepared(&self) {
        let mut prepared = self.prepared.subscribe();
        // The sender lives in `self`.
        let _ = prepared.wait_for(|prepared| *prepared).await;
    }

    /// Records that requests can be answered. Later calls change nothing.
    pub fn serving(&self) {
        let _ = self.serving_at.set(now());
    }

    /// Records that the host has requested the network interface.
    pub fn network_begins(&self) {
        *lock(&self.network) = (Some(now()), None);
    }

    /// Records that the interface is usable.
    pub fn network_ends(&self) {
        lock(&self.network).1 = Some(now());
    }

    /// Returns the stage of the network interface, or `None` if the interface is not usable yet.
    pub fn network(&self) -> Option<GuestStage> {
        self.list().into_iter().find(|stage| stage.name == "network")
    }

    /// Records the time of the first NVMe namespace, or that there was none in time.
    pub fn driver_ends(&self, at: Option<u64>) {
        *lock(&self.namespaces_at) = at;
    }

    /// Returns the stages that have ended.
    pub fn list(&self) -> Vec<GuestStage> {
        let first = self.first_instruction;
        let stage =
            |name: &str, start_ns, end_ns| GuestStage { name: name.into(), start_ns, end_ns };
        let namespaces_at = *lock(&self.namespaces_at);
        let driver_from = self.modules_from.get().copied().unwrap_or(first);
        let driver = namespaces_at.map(|at| stage("vf-driver", driver_from.min(at), at));
        let agent = self.serving_at.get().map(|at| stage("agent", first, *at));
        let (from, at) = *lock(&self.network);
        let network = from.zip(at);
        let network = network.map(|(from, at)| stage("network", from, at));
        [Some(stage("kernel", 0, first)), driver, agent, network].into_iter().flatten().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stages_appear_as_they_end() {
        let stages = Stages::new(7);
        let names = |stages: &Stages| -> Vec<String> {
            stages.list().into_iter().map(|stage| stage.name).collect()
        };
        assert_eq!(names(&stages), ["kernel"]);
        stages.serving();
        stages.driver_ends(Some(9));
        assert_eq!(names(&stages), ["kernel", "vf-driver", "agent"]);
        stages.network_begins();
        assert_eq!(stages.list().len(), 3);
        stages.network_ends();
        assert_eq!(names(&stages), ["kernel", "vf-driver", "agent", "network"]);
        assert_eq!(stages.network(), stages.list().pop());
        stages.network_begins();
        assert_eq!(stages.list().len(), 3, "it is configured anew, in a fork");
        assert_eq!(stages.network(), None);
        let list = stages.list();
        assert_eq!((list[0].start_ns, list[0].end_ns), (0, 7));
        assert_eq!((list[1].start_ns, list[1].end_ns), (7, 9));
    }
}
