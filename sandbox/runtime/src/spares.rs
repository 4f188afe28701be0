//! VMMs that are started before sandboxes need them.
//!
//! A task of the daemon keeps so many ready as the setting `spare_vmms` says. Each has a control
//! group of the pool and a user id of its own. A sandbox that gets the VMM gets these with it, and
//! records them before the VMM learns anything of the sandbox: from there on it is as if they had
//! been chosen at its start. No sandbox waits for a spare. A start for which none is ready starts a
//! VMM, and so does one for which a spare turns out to be unfit.
//!
//! A spare ends with its daemon, also with one that is killed. No record names it: the next daemon
//! finds its group among those of the pool that no sandbox has.

use std::sync::Arc;
use std::time::{Duration, Instant};

use slipway_hypervisor::{
    Accel, AccelChoice, Credentials, Error as HypervisorError, Spare, SpareSpec, Vm, VmSpec,
};

use crate::lock::lock;
use crate::node::Node;
use crate::record::{Placement, Record};
use crate::sandbox::Sandbox;
use crate::shelf::{Ahead, Due, Waiting};
use crate::templates::Choice;
use crate::{Error, Result, emulated, reporting};

/// The time between two attempts to start a spare while the pool has no control group ready.
const AGAIN: Duration = Duration::from_secs(1);

/// The longest wait for the control groups of spares that have ended. A group empties a moment
/// after its last process was reaped, and a pool that closes removes those that are empty.
const EMPTIES: Duration = Duration::from_secs(2);
/// The time between two looks at them.
const LOOK: Duration = Duration::from_millis(10);

/// Begins to keep spares, if the node's settings want any and its sandboxes can have them.
pub(crate) fn keep(node: &Arc<Node>) {
    if node.config.spare_vmms == 0 {
        return;
    }
    let accel = node.config.accelerator();
    let on_kvm = matches!(accel, Ok(AccelChoice::Auto | AccelChoice::Only(Accel::Kvm)));
    if !on_kvm || node.cgroups.hierarchies().is_empty() {
        tracing::info!("no spare VMMs: they need KVM and writable control groups");
        return;
    }
    let task = tokio::spawn(refill(Arc::clone(node)));
    *lock(&node.spares.task) = Some(task);
}

/// Starts spares until they are to end, and ends them then.
async fn refill(node: Arc<Node>) {
    let spares = &node.spares;
    let most = node.config.spare_vmms as usize;
    loop {
        let due = lock(&spares.shelf).due(most, Instant::now());
        match due {
            Due::Never => break,
            Due::WhenMissing => spares.changed.notified().await,
            Due::In(wait) => tokio::select! {
                () = tokio::time::sleep(wait) => {}
                () = spares.closing.notified() => {}
            },
            Due::Now => {
                if !start_one(&node).await {
                    break;
                }
            }
        }
    }
    let rest = {
        let mut shelf = lock(&spares.shelf);
        shelf.closed = true;
        std::mem::take(&mut shelf.ready)
    };
    let until = (!rest.is_empty()).then(|| Instant::now() + EMPTIES);
    for (_, Waiting { ahead, watch }) in rest {
        watch.abort();
        end(&node, ahead).await;
    }
    let in_time = || until.is_some_and(|until| Instant::now() < until);
    while node.cgroups.counts().returning > 0 && in_time() {
        tokio::time::sleep(LOOK).await;
    }
}

/// Starts a spare, or notes when to try again. Returns `false` if the node's VMM is not started
/// ahead.
async fn start_one(node: &Arc<Node>) -> bool {
    let later = |wait: Duration| lock(&node.spares.shelf).start_at = Some(Instant::now() + wait);
    match start(node).await {
        Ok(Some(ahead)) => {
            if let Some(ahead) = add(node, ahead) {
                end(node, ahead).await;
                lock(&node.spares.shelf).fail(Instant::now());
            }
        }
        Ok(None) => later(AGAIN),
        Err(Error::Hypervisor(error @ HypervisorError::Unsupported { .. })) => {
            tracing::info!(%error, "no spare VMMs");
            return false;
        }
        Err(error) => {
            tracing::warn!(%error, "a spare VMM does not start");
            lock(&node.spares.shelf).fail(Instant::now());
        }
    }
    true
}

/// Starts a spare in a control group of the pool. Returns `None` if none is ready, or all user ids
/// are taken.
async fn start(node: &Node) -> Result<Option<Ahead>> {
    if node.cgroups.counts().ready == 0 {
        return Ok(None);
    }
    let Ok(uid) = node.uids.claim() else { return Ok(None) };
    let Some(group) = node.cgroups.take() else {
        node.uids.give_back(uid);
        return Ok(None);
    };
    let its = group.clone();
    let spec = SpareSpec {
        credentials: Some(Credentials { uid, gid: uid }),
        cgroup_procs: node.lane().run(move || its.procs_files()).await,
        gives_back: node.config.free_page_reporting,
    };
    match node.hypervisor.launch_spare(&spec).await {
        Ok(spare) => Ok(Some(Ahead { spare, uid, group })),
        Err(error) => {
            node.uids.give_back(uid);
            node.cgroups.give_back(group);
            Err(error.into())
        }
    }
}

/// Makes a spare ready. Returns it again if its end cannot be waited for.
fn add(node: &Arc<Node>, ahead: Ahead) -> Option<Ahead> {
    let ended = match ahead.spare.ended() {
        Ok(ended) => ended,
        Err(error) => {
            tracing::warn!(%error, "a spare VMM cannot be watched");
            return Some(ahead);
        }
    };
    lock(&node.spares.shelf).add(|number| {
        let watch = tokio::spawn(watch(Arc::clone(node), number, ended)).abort_handle();
        Waiting { ahead, watch }
    });
    None
}

/// Waits for the end of spare `number`, and has another one started.
async fn watch(node: Arc<Node>, number: u64, ended: impl Future<Output = ()> + Send) {
    ended.await;
    let lost = lock(&node.spares.shelf).lose(number, Instant::now());
    if let Some(Waiting { ahead, .. }) = lost {
        tracing::warn!(pid = ahead.spare.pid(), "a spare VMM has ended");
        end(&node, ahead).await;
        node.spares.changed.notify_one();
    }
}

/// Ends a spare that no sandbox has, and gives back what a sandbox would have got with it.
async fn end(node: &Node, ahead: Ahead) {
    let Ahead { spare, uid, group } = ahead;
    // No sandbox may have the user id of a process that is left.
    if spare.end().await {
        node.uids.give_back(uid);
    }
    node.cgroups.give_back(group);
}

/// Takes a spare for a sandbox that is about to start. Returns `None` if none is ready, or the
/// sandbox's VMM is to be as no spare is.
pub(crate) fn take(node: &Node, sandbox: &Sandbox) -> Option<Ahead> {
    let may_fork = sandbox.choice() != Choice::Request;
    let gives_back = node.config.free_page_reporting;
    let wanted = node.config.spare_vmms > 0;
    if !wanted || !sandbox.look(|record| likely_fits(record, may_fork, gives_back)) {
        return None;
    }
    let taken = lock(&node.spares.shelf).take(Instant::now());
    node.spares.changed.notify_one();
    let Waiting { ahead, watch } = taken?;
    watch.abort();
    Some(ahead)
}

/// Launches a VM, in the spare that its sandbox took if it took one and that fits.
///
/// # Errors
/// Those of the hypervisor.
pub(crate) async fn launch(
    node: &Node,
    spare: Option<Spare>,
    spec: &VmSpec,
) -> Result<Arc<dyn Vm>> {
    let vm = match spare {
        None => node.hypervisor.launch(spec).await?,
        Some(spare) => {
            if !spare.fits(spec) {
                lock(&node.spares.shelf).counts.unfit += 1;
            }
            node.hypervisor.launch_in(spare, spec).await?
        }
    };
    Ok(Arc::from(vm))
}

/// Returns whether the VM of a sandbox will be one for a spare, as far as that is known before the
/// sandbox's template is. `may_fork` says that the node may choose one; `gives_back` is how spares
/// are started.
fn likely_fits(record: &Record, may_fork: bool, gives_back: bool) -> bool {
    let accel = record.accelerator.parse();
    let on_kvm = matches!(accel, Ok(AccelChoice::Auto | AccelChoice::Only(Accel::Kvm)));
    let emulates = !emulated::disks(record).is_empty()
        || emulated::interface(record).is_some()
        || emulated::assigned(record).is_some();
    // A pod that boots is given room for more memory.
    let boots = record.template.is_none() && !may_fork;
    let room = record.hot_bytes() > 0 || (record.pod && boots);
    let reports = reporting::not_wanted(record, None, gives_back).is_none();
    on_kvm
        && !emulates
        && (room || reports) == gives_back
        && !record.saving.is_for_template()
        && !record.confinement.asks_for_group()
        && record.settings.placement == Placement::default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::adopt::tests::record_of;
    use crate::record::SandboxState;

    #[test]
    fn a_sandbox_has_a_spare_if_its_vmm_is_as_others_are() {
        let usual = || Record { accelerator: "auto".into(), ..record_of(SandboxState::Created) };
        let fits = |record: &Record| likely_fits(record, false, false);
        assert!(fits(&usual()));
        assert!(fits(&Record { template: Some("web".into()), ..usual() }));
        assert!(!fits(&record_of(SandboxState::Created)), "software emulation");
        let mut asks = usual();
        asks.confinement.control_group = "/kubepods/one".to_owned();
        assert!(!fits(&asks));
        let mut placed = usual();
        placed.settings.placement.cpus = "0-1".into();
        assert!(!fits(&placed));
        let mut saved = usual();
        saved.saving.as_template = Some("web".into());
        assert!(!fits(&saved));
        // Pods that boot have room for more memory, which their VMM gives back.
        let pod = || Record { pod: true, ..usual() };
        assert!(!fits(&pod()) && likely_fits(&pod(), true, false));
        assert!(likely_fits(&pod(), false, true) && likely_fits(&usual(), false, true));
        let mut reports = usual();
        reports.reporting.asked = Some(true);
        assert!(!fits(&reports) && likely_fits(&reports, false, true));
        reports.reporting.asked = Some(false);
        assert!(fits(&reports) && !likely_fits(&reports, false, true));
    }
}
