//! The release of what a sandbox held: its VMM, functions, addresses, directories and groups.

use std::path::PathBuf;
use std::time::Duration;

use crate::node::Node;
use crate::record::{Record, ShareServer};
use crate::running::end;
use crate::sandbox::Sandbox;
use crate::{Error, Result, cgroup, function, network, pod_functions};

/// The outcome of a sandbox's release.
pub struct Released {
    /// Set if no process of the sandbox is left on the host.
    pub processes_gone: bool,
    /// The first failure. The remaining resources are released even so.
    pub outcome: Result<()>,
}

/// Releases everything that a live sandbox holds on the host but the user id of its VMM, which
/// [`record_end`] gives back. Missing resources are no error, so this also cleans up after a daemon
/// that was killed.
pub async fn release(node: &Node, sandbox: &Sandbox) -> Released {
    release_parts(node, sandbox, false).await
}

/// Releases what [`release`] does but the addresses, for a sandbox that is to have a VMM again.
pub(crate) async fn release_machine(node: &Node, sandbox: &Sandbox) -> Released {
    release_parts(node, sandbox, true).await
}

async fn release_parts(node: &Node, sandbox: &Sandbox, keeps_addresses: bool) -> Released {
    let record = sandbox.record();
    let processes_gone = if let Some(vm) = sandbox.vm() {
        sandbox.set_vm(None);
        let ended = end(&*vm).await;
        // The server of its shares ends with the VMM's connections, unless it hangs.
        let alone = record.share_server == ShareServer::None;
        ended && (alone || end_leftover(&record, node.run_dir(&record.id)).await)
    } else {
        end_leftover(&record, node.run_dir(&record.id)).await
    };
    sandbox.hold_memory(None);
    let endpoint = function::remove(node, &record).await;
    sandbox.hold_fetcher(None);
    let network = match keeps_addresses {
        true => network::remove_first(node, &record).await,
        false => network::release(node, &record).await,
    };
    pod_functions::give_back(node, sandbox).await;
    let run_dir = node.run_dir(&record.id);
    let dir = sandbox.lane.run(move || match std::fs::remove_dir_all(&run_dir) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(Error::file("cannot remove", &run_dir)(error))
        }
        _ => Ok(()),
    });
    let dir = dir.await;
    // A process that is left keeps its group.
    let cgroup = if processes_gone { cgroup::release(node, sandbox).await } else { Ok(()) };
    // A VMM that is left has the root mapped, which counts as long as that is so.
    if processes_gone {
        sandbox.hold_root(None);
    }
    Released { processes_gone, outcome: endpoint.and(network).and(dir).and(cgroup) }
}

/// Saves the end of a released sandbox, which `describe` puts into its record. Then gives the user
/// id of its VMM back if its processes are gone. Two sandboxes must never share a user id: it is
/// free only if no process has it, and once no record on disk names it.
///
/// # Errors
/// The errors of saving the record. The user id stays taken then.
pub async fn record_end(
    node: &Node,
    sandbox: &Sandbox,
    processes_gone: bool,
    describe: impl FnOnce(&mut Record),
) -> Result<()> {
    let mut free = None;
    let recorded = sandbox.update(|record| {
        free = forget_vmm(record, processes_gone);
        describe(record);
    });
    recorded.await?;
    if let Some(uid) = free {
        node.uids.give_back(uid);
    }
    Ok(())
}

/// Takes the VMM out of the record of a released sandbox. If a process is left, the VMM stays in
/// the record, so that the next daemon ends that process and does not give its user id away.
/// Returns the user id that is free once the record is saved.
pub(crate) fn forget_vmm(record: &mut Record, processes_gone: bool) -> Option<u32> {
    if !processes_gone {
        return None;
    }
    record.vm = None;
    record.vmm_uid.take()
}

/// Ends the VMM of a sandbox that another daemon started. The daemon may not have recorded the
/// VMM's process, but it recorded the user id before the start, and only this sandbox uses that id.
/// Returns whether no process is left.
pub(crate) async fn end_leftover(record: &Record, run_dir: PathBuf) -> bool {
    const PATIENCE: Duration = Duration::from_secs(5);
    let (vm, uid, name) = (record.vm.clone(), record.vmm_uid, record.name.clone());
    let cgroup = cgroup::path(record);
    let shares = record.share_server != ShareServer::None;
    let ended = tokio::task::spawn_blocking(move || {
        if let Some(Err(error)) = vm.map(|vm| slipway_hypervisor::reap_leftover(&vm, PATIENCE)) {
            tracing::warn!(sandbox = name, %error, "its VMM may still run");
        }
        uid.is_none_or(|uid| {
            let owned = crate::proc::Owned { uid, shares, run_dir: &run_dir, cgroup: &cgroup };
            crate::proc::kill_all(&owned, PATIENCE)
        })
    });
    let ended = ended.await.unwrap_or(false);
    if !ended {
        tracing::warn!(sandbox = record.name, "a process of its is left");
    }
    ended
}
