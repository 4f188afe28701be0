//! Adoption of sandboxes that outlived their daemon.
//!
//! If a keeper holds what the plane serves, a daemon that is killed or replaced does not end its
//! sandboxes: their VMMs are separate processes, the next plane serves their functions, and their
//! containers notice nothing. The next daemon adopts each intact sandbox. A sandbox is intact if
//! its record says that its container ran, its VMM lives and answers, the plane has its functions
//! with that VMM as the client, and its agent answers. A VMM that can be given new connections need
//! not be the client: `slipway-hypervisor` connects each function that it has lost. All other
//! sandboxes are released, as after any daemon's death. There is no state in between: until the
//! last step has succeeded, no part of a sandbox is changed.

use std::sync::Arc;
use std::time::Duration;

use slipway_hypervisor::{LeftVm, Vm, VmRecord};
use slipway_plane_api::v1 as plane_v1;

use crate::agent::Agent;
use crate::carrier::Carrier;
use crate::node::Node;
use crate::record::{Record, SandboxState};
use crate::running::Running;
use crate::sandbox::Sandbox;
use crate::target::Target;
use crate::{Error, Result, cpus, function, network, pod_functions, resize, shares, sockets};

/// The deadline for adopting a sandbox, all steps together, since the daemon serves nobody before.
/// Clients of the last daemon wait longer for the next one ([`RETURN`](crate::life::RETURN)).
const PATIENCE: Duration = Duration::from_secs(20);
/// The time for one answer of the agent before the connection is made anew. Messages to the last
/// daemon that are still in flight may arrive first, and are not an answer.
const ANSWER: Duration = Duration::from_secs(5);
/// The pause between two connections.
const AGAIN: Duration = Duration::from_millis(100);

/// Returns whether the sandbox of this record may have outlived its daemon.
pub fn may_live(record: &Record) -> bool {
    let ran = matches!(record.state, SandboxState::Running | SandboxState::Stopping);
    ran && record.exit_status.is_none() && record.vm.is_some() && record.vmm_uid.is_some()
}

/// Adopts a sandbox that an earlier daemon started.
///
/// # Errors
/// An error that names the missing part. The parts of the sandbox are unchanged then.
pub async fn adopt(node: &Node, sandbox: &Arc<Sandbox>) -> Result<Running> {
    let adopted = tokio::time::timeout(PATIENCE, take(node, sandbox)).await;
    adopted.map_err(|_| Error::Agent("the sandbox's agent does not answer".to_owned()))?
}

async fn take(node: &Node, sandbox: &Arc<Sandbox>) -> Result<Running> {
    let record = sandbox.record();
    let lost = |what: &str| Error::Agent(what.to_owned());
    let left = left(node, &record).ok_or_else(|| lost("its VMM is not known"))?;
    let vmm = left.record.clone();
    if !sandbox.lane.run(move || vmm.is_running()).await? {
        return Err(lost("its VMM ended while no daemon ran"));
    }
    if let Some(identity) = record.shared_root {
        let (digest, pid) = (&record.settings.image_digest, left.record.pid);
        let root = node.roots.adopt(digest, identity, pid, &sandbox.lane).await?;
        sandbox.hold_root(Some(root));
    }
    hold_fetcher(node, sandbox, &record);
    for id in function::ids(&record) {
        if !serves(node, &id, &left.record).await? {
            return Err(lost("its disks ended with the daemon"));
        }
    }
    let net = network::function_of(&record);
    let holds = network::holds(node, &record).await?;
    if record.network.is_some() && !(holds && serves(node, &net, &left.record).await?) {
        return Err(lost("its network ended with the daemon"));
    }
    let mut holds = pod_functions::holds(node, &record).await?;
    for id in pod_functions::endpoints(&record) {
        holds = holds && serves(node, id, &left.record).await?;
    }
    if !holds {
        return Err(lost("a function of a pool of disks ended with the daemon"));
    }
    let vm: Arc<dyn Vm> = Arc::from(node.hypervisor.adopt(&left).await?);
    vm.detach();
    let agent = tokio::select! {
        agent = reach(node, sandbox, &left.agent_socket) => agent?,
        ended = vm.wait() => return Err(Error::vm_ended(&ended)),
    };
    let own = Target::own(Arc::clone(sandbox));
    let carrier = match record.pod {
        true => None,
        false => Some(Carrier::attach(&own, &agent, node.config.log_bytes, None).await?),
    };
    own.end_lost_input();
    cpus::recount(sandbox, &*vm).await?;
    resize::recount(sandbox, &*vm).await?;
    sandbox.set_vm(Some(Arc::clone(&vm)));
    sandbox.set_agent(Some(agent.clone()));
    network::restart(sandbox, &agent);
    let carry = carrier.map(|carrier| carrier.carry(&own, &agent));
    Ok(Running::new(vm, agent, carry))
}

/// Has the fetcher run if an image of the sandbox was pulled lazily. Does not wait for it: the
/// guest runs, and its reads that need the fetcher wait.
fn hold_fetcher(node: &Node, sandbox: &Sandbox, record: &Record) {
    if !record.has_lazy_image() {
        return;
    }
    match node.fetcher.hold_later() {
        Ok(held) => sandbox.hold_fetcher(Some(held)),
        Err(error) => tracing::warn!(sandbox = sandbox.name, %error, "its reads may fail"),
    }
}

fn left(node: &Node, record: &Record) -> Option<LeftVm> {
    // In the order of the start.
    let sockets = function::sockets(node, record).chain(network::socket(node, record));
    Some(LeftVm {
        record: record.vm.clone()?,
        agent_socket: node.agent_socket(&record.id),
        vfio_user_sockets: sockets
            .chain(sockets::socket(node, record))
            .chain(shares::first_socket(node, record))
            .collect(),
        run_dir: node.run_dir(&record.id),
        console_log: node.store(&record.id).console(),
    })
}

/// Returns whether the plane has function `id` for this VMM: with the VMM as its client, or with
/// any or none if the VMM can be given a new connection.
async fn serves(node: &Node, id: &str, vmm: &VmRecord) -> Result<bool> {
    let request = plane_v1::GetEndpointRequest { id: id.to_owned() };
    match node.plane.clone().get_endpoint(request).await {
        Ok(endpoint) => {
            let is_client = u32::try_from(vmm.pid) == Ok(endpoint.get_ref().client_pid);
            Ok(is_client || vmm.reconnects())
        }
        Err(status) if status.code() == tonic::Code::NotFound => Ok(false),
        Err(status) => Err(Error::Plane(status.message().to_owned())),
    }
}

/// Connects to an agent until it answers. The caller limits the time.
async fn reach(node: &Node, sandbox: &Sandbox, socket: &std::path::Path) -> Result<Agent> {
    loop {
        let tried =
            tokio::time::timeout(ANSWER, Agent::connect(&node.guests, socket, &sandbox.bin)).await;
        if let Ok(Ok((agent, _))) = tried {
            return Ok(agent);
        }
        tokio::time::sleep(AGAIN).await;
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::record::Added;

    /// Makes a record of a sandbox without volumes.
    pub(crate) fn record_of(state: SandboxState) -> Record {
        let text = serde_json::json!({
            "id": "0123456789ab", "name": "one", "image": "i", "image_digest": "d",
            "image_path": "/i", "state": state, "created_ns": 1, "exit_status": null, "reason": "",
            "memory_bytes": 1, "cpus": 1, "hostname": "h",
            "process": crate::record::Process::default(), "stop_signal": 15,
            "privileged": false, "read_only": false, "volumes": [],
            "kernel": null, "accelerator": "tcg", "labels": {}, "remove": false, "vmm_uid": 7,
            "vm": VmRecord {
                hypervisor: "qemu".into(), pid: 1, start_time_ticks: 1, boot_id: "b".into(),
                plugged: Default::default(),
            },
            "timeline": slipway_telemetry::Timeline::new("one"),
        });
        serde_json::from_value(text).unwrap()
    }

    /// Makes the record of a container of a pod, without disks and shares.
    pub(crate) fn added_of(name: &str, state: SandboxState) -> Added {
        let text = serde_json::json!({
            "name": name, "image": "i", "image_digest": "d", "image_path": "/i",
            "process": crate::record::Process::default(), "stop_signal": 15, "privileged": false,
            "read_only": false, "state": state, "created_ns": 1, "started_ns": null,
            "exit_status": null, "reason": "", "limits": crate::record::Limits::default(),
            "disks": null, "remove": false,
        });
        serde_json::from_value(text).unwrap()
    }

    #[test]
    fn only_what_ran_and_was_not_seen_to_end_may_live() {
        use SandboxState::{Created, Exited, Failed, Lost, Running, Starting, Stopping};
        for state in [Created, Starting, Running, Stopping, Exited, Failed, Lost] {
            let ran = matches!(state, Running | Stopping);
            assert_eq!(may_live(&record_of(state)), ran, "{state:?}");
            assert!(!may_live(&Record { vm: None, ..record_of(state) }));
            assert!(!may_live(&Record { vmm_uid: None, ..record_of(state) }));
            assert!(!may_live(&Record { exit_status: Some(0), ..record_of(state) }), "{state:?}");
        }
    }
}
