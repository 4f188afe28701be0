//! The order in which the host's kernel ends VMMs when its memory is short: the adjustments of
//! their scores (proc_pid_oom_score_adj(5)).
//!
//! Clients may give a container an adjustment, as kubelet does by the class of a pod: -1000
//! protects most, 1000 least. A VMM has the lowest of those of the containers that run in it, but
//! none below the daemon's own. The process of its shares has 500 more, so that it ends first,
//! as it does by itself. Where no container has an adjustment, both keep what they began with. A
//! pod in which no container runs keeps what it has: its guest says when a container has ended, and
//! must not be protected better for it.

use std::sync::Arc;

use slipway_hypervisor::VmRecord;

use crate::cgroup;
use crate::node::Node;
use crate::proc::{self, Owned};
use crate::record::{Added, Record, SandboxState, Settings, ShareServer};
use crate::sandbox::Sandbox;

/// The file with the daemon's own adjustment.
const OWN: &str = "/proc/self/oom_score_adj";
/// The part of its adjustment that a server of shares has beyond its VMM's.
const ENDS_FIRST: i32 = 500;
/// The largest adjustment.
const MOST: i32 = 1000;

/// Adjusts the scores of a sandbox's VMM and of the process of its shares as its containers ask
/// for. A refusal of the kernel is told in the log.
pub(crate) async fn apply(node: &Node, sandbox: &Arc<Sandbox>) {
    if sandbox.look(wanted).is_none() {
        return;
    }
    // Containers come and go at once: the last look at them decides.
    let _turn = sandbox.placement.lock().await;
    let Some(adjustment) = sandbox.look(wanted) else { return };
    let Some(vm) = sandbox.vm() else { return };
    let (vmm, run_dir) = (vm.record(), node.run_dir(&sandbox.id));
    let server = sandbox.look(|record| {
        let serves = record.share_server == ShareServer::Serving;
        record.vmm_uid.filter(|_| serves).map(|uid| (uid, cgroup::path(record)))
    });
    let adjusted = sandbox.lane.run(move || {
        let adjustment = adjustment.max(own());
        adjust_vmm(&vmm, adjustment)?;
        let Some((uid, cgroup)) = server else { return Ok(()) };
        let owned = Owned { uid, shares: true, run_dir: &run_dir, cgroup: &cgroup };
        proc::adjust_helper(&owned, (adjustment + ENDS_FIRST).min(MOST))
    });
    if let Err(error) = adjusted.await {
        let sandbox = &sandbox.name;
        tracing::warn!(sandbox, %error, "its processes keep their OOM score adjustments");
    }
}

fn adjust_vmm(vmm: &VmRecord, adjustment: i32) -> std::io::Result<()> {
    proc::adjust_oom_score(vmm.pid, adjustment, || vmm.is_running().unwrap_or(false))
}

/// Returns the daemon's own adjustment.
fn own() -> i32 {
    let text = std::fs::read_to_string(OWN).unwrap_or_default();
    text.trim().parse().unwrap_or(0)
}

/// Returns the lowest adjustment of the containers that run, if one has any.
fn wanted(record: &Record) -> Option<i32> {
    let of = |settings: &Settings| settings.process.oom_score_adj;
    if !record.pod {
        return of(&record.settings);
    }
    let runs = |added: &&Added| added.state.is_live() && added.state != SandboxState::Created;
    record.added.iter().filter(runs).filter_map(|added| of(&added.settings)).min()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::adopt::tests::{added_of, record_of};

    #[test]
    fn the_best_protected_container_that_runs_decides() {
        use SandboxState::{Created, Exited, Running, Starting};
        let of = |containers: &[(SandboxState, Option<i32>)]| {
            let added = |(at, (state, adjustment)): (usize, &(SandboxState, Option<i32>))| {
                let mut added = added_of(&format!("c{at}"), *state);
                added.settings.process.oom_score_adj = *adjustment;
                added
            };
            let added = containers.iter().enumerate().map(added).collect();
            wanted(&Record { pod: true, added, ..record_of(Running) })
        };
        assert_eq!(of(&[]), None);
        assert_eq!(of(&[(Running, None)]), None);
        assert_eq!(of(&[(Running, Some(1000)), (Starting, Some(-997))]), Some(-997));
        assert_eq!(of(&[(Running, Some(900)), (Running, None)]), Some(900));
        assert_eq!(of(&[(Running, Some(900)), (Exited, Some(3)), (Created, Some(2))]), Some(900));
        assert_eq!(of(&[(Exited, Some(3))]), None, "it keeps what it has");
    }

    #[test]
    fn a_container_alone_has_its_own() {
        let mut record = record_of(SandboxState::Running);
        assert_eq!(wanted(&record), None);
        record.settings.process.oom_score_adj = Some(7);
        assert_eq!(wanted(&record), Some(7));
    }
}
