//! Adoption of sandboxes that outlived their daemon.
//!
//! If a keeper holds what the plane serves, a daemon that is killed or replaced does not end its
//! sandboxes: their VMMs are separate processes, the next plane serves their functions, and their
//! containers notice nothing. The next daemon adopts each intact sandbox. A sandbox is intact if
//! its record says that its container ran, its VMM lives and answers, the plane has its functions
//! with that VMM as the client, and its agent answers. A VMM that can be given new connections need
//! not be the client: `slipway-hypervisor` connects each function that it has lost. No disk and no
//! network interface of it may be broken, as one is whose guest has waited for a daemon for too
//! long. All other sandboxes are released, as after any daemon's death.
//!
//! A sandbox that stood still to be saved (`Saving::under_way`) first goes on: its VMM, then the
//! processes that its agent froze. Otherwise nothing of a sandbox is changed before its agent has
//! answered.
//!
//! A VMM that lives and a guest that does not answer may be those of a busy machine. The daemon
//! serves nobody before most sandboxes are adopted, so it waits for [`patience`]. Then it lists the
//! sandbox and serves, and the adoption goes on beside that ([`finish`]).

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use slipway_hypervisor::{LeftVm, Vm, VmRecord};
use slipway_plane_api::v1 as plane_v1;

use crate::carrier::OutputCarrier;
use crate::node::Node;
use crate::reach::reach;
use crate::record::{Record, SandboxState};
use crate::running::Running;
use crate::sandbox::Sandbox;
use crate::target::Target;
use crate::{
    Error, Result, cpus, function, network, oom_score, pod_functions, resize, shares, snapshot,
    sockets,
};

/// The time for adopting a sandbox, all steps together, before the daemon serves others. Clients of
/// the last daemon wait longer for the next one ([`RETURN`](crate::life::RETURN)).
const PATIENCE: Duration = Duration::from_secs(20);
/// The time beyond [`PATIENCE`] for a sandbox that stood still to be saved: as long as its VMM may
/// take to go on (`snapshot::resume_vm`). Only a VMM that refuses for long makes the daemon later
/// than its clients wait.
const RESUME: Duration = Duration::from_secs(20);
/// The longest time that an adoption takes while the daemon serves others. Then the sandbox is
/// lost.
const LONGEST: Duration = Duration::from_secs(600);
/// The pause between two attempts of a step that failed.
const AGAIN: Duration = Duration::from_millis(100);

/// Returns whether the sandbox of this record may have outlived its daemon.
pub fn may_live(record: &Record) -> bool {
    let ran = matches!(record.state, SandboxState::Running | SandboxState::Stopping);
    ran && record.run.exit_status.is_none() && record.vm.is_some() && record.vmm_uid.is_some()
}

/// Returns the time for adopting the sandbox of a record before the daemon serves others.
pub(crate) fn patience(record: &Record) -> Duration {
    if record.saving.under_way { PATIENCE + RESUME } else { PATIENCE }
}

/// Completes an adoption that has begun, of a sandbox that is listed. It ends with the VMM, when
/// the sandbox is asked to end, or after [`LONGEST`].
///
/// # Errors
/// The errors of [`adopt`]; [`Error::Stopped`] if the sandbox was asked to end.
pub(crate) async fn finish(
    sandbox: &Sandbox,
    adoption: impl Future<Output = Result<Running>>,
) -> Result<Running> {
    let adopted = tokio::select! {
        adopted = tokio::time::timeout(LONGEST, adoption) => adopted,
        () = sandbox.stopped() => return Err(Error::Stopped),
    };
    // It may have been asked to end before its VMM was known, which goes on then.
    if sandbox.is_stopping() {
        return Err(Error::Stopped);
    }
    adopted.unwrap_or_else(|_| Err(lost("its VMM or its agent does not answer")))
}

/// Adopts a sandbox that an earlier daemon started. The caller limits the time.
///
/// # Errors
/// An error that names the missing part. A sandbox that stood still to be saved may go on then;
/// unless its agent has answered, nothing else of the sandbox is changed.
pub(crate) async fn adopt(node: Arc<Node>, sandbox: Arc<Sandbox>) -> Result<Running> {
    let (node, sandbox) = (&*node, &sandbox);
    let record = sandbox.record();
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
    check_served(node, &record, &left.record).await?;
    let vm: Arc<dyn Vm> = Arc::from(node.hypervisor.adopt(&left).await?);
    vm.detach();
    check_functions(needed(node, &record), &vm.broken_functions())?;
    if record.saving.under_way {
        again(is_answer_open, || snapshot::resume_vm(&*vm)).await?;
    }
    let agent = tokio::select! {
        agent = reach(node, sandbox, &left.agent_socket) => agent?.0,
        ended = vm.wait() => return Err(Error::vm_ended(&ended)),
    };
    if record.saving.under_way {
        again(is_answer_open, || snapshot::resume(sandbox, &*vm, &agent)).await?;
    }
    let own = Target::own(Arc::clone(sandbox));
    let carrier = match record.pod {
        true => None,
        false => Some(OutputCarrier::reattach(&own, &agent, node.config.log_bytes, None).await?),
    };
    again(is_late, || cpus::recount(sandbox, &*vm)).await?;
    cpus::settle(sandbox, &vm, &agent).await;
    again(is_late, || resize::recount(sandbox, &*vm)).await?;
    sandbox.set_vm(Some(Arc::clone(&vm)));
    sandbox.set_agent(Some(agent.clone()));
    // The daemon before this one may have ended between a container's end and this.
    oom_score::apply(node, sandbox).await;
    network::restart(sandbox, &agent);
    let carry = carrier.map(|carrier| carrier.carry(&own, &agent));
    Ok(Running::new(vm, agent, carry))
}

fn lost(what: &str) -> Error {
    Error::Agent(what.to_owned())
}

/// Carries out a step until it succeeds, or fails with an error for which `may_pass` does not hold.
async fn again<F: Future<Output = Result<()>>>(
    may_pass: impl Fn(&Error) -> bool,
    step: impl Fn() -> F,
) -> Result<()> {
    loop {
        match step().await {
            Err(error) if may_pass(&error) => tokio::time::sleep(AGAIN).await,
            done => return done,
        }
    }
}

/// Returns whether a VMM has not answered in time, so that it may answer later. One that has ended
/// breaks its channel, which is another error.
fn is_late(error: &Error) -> bool {
    matches!(error, Error::Hypervisor(slipway_hypervisor::Error::Timeout { .. }))
}

/// Returns whether a sandbox that stands still may go on later: a VMM that still saves refuses, and
/// its guest answers late.
fn is_answer_open(error: &Error) -> bool {
    !matches!(error, Error::VmEnded(_))
}

/// Checks that the plane has all functions of the sandbox's record for its VMM.
///
/// # Errors
/// [`Error::Agent`] with the kind of a function that is missing; errors of the plane.
async fn check_served(node: &Node, record: &Record, vmm: &VmRecord) -> Result<()> {
    for id in function::ids(record) {
        if !serves(node, &id, vmm).await? {
            return Err(lost("its disks ended with the daemon"));
        }
    }
    let mut holds = network::holds(node, record).await?;
    for id in network::functions_of(record) {
        holds = holds && serves(node, &id, vmm).await?;
    }
    if !holds {
        return Err(lost("its network ended with the daemon"));
    }
    let mut holds = pod_functions::holds(node, record).await?;
    for id in pod_functions::endpoints(record) {
        holds = holds && serves(node, id, vmm).await?;
    }
    if !holds {
        return Err(lost("a function of a pool ended with the daemon"));
    }
    Ok(())
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
    let sockets = function::sockets(node, record).chain(network::sockets(node, record));
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
        Err(status) => Err(Error::plane(status)),
    }
}

/// Returns the sockets of the functions without which a sandbox is not intact. It goes on without
/// its sockets' function, whose programs use the kernel's sockets, and without its shares.
fn needed(node: &Node, record: &Record) -> impl Iterator<Item = PathBuf> {
    let disks = function::sockets(node, record).chain(pod_functions::sockets(record));
    disks.chain(network::sockets(node, record))
}

/// Checks that none of the functions `needed` is among the `broken` ones.
///
/// # Errors
/// [`Error::Agent`] with the socket of the first one that is.
fn check_functions(mut needed: impl Iterator<Item = PathBuf>, broken: &[PathBuf]) -> Result<()> {
    let Some(socket) = needed.find(|socket| broken.contains(socket)) else { return Ok(()) };
    Err(Error::Agent(format!(
        "its function at {} is broken for good, since its guest waited for a daemon for too long, \
         or for the reason in the daemon's log",
        socket.display()
    )))
}

#[cfg(test)]
pub(crate) mod tests {
    use std::path::Path;

    use super::*;
    use crate::files::Files;
    use crate::record::{Added, Store};

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

    /// Makes the sandbox of a record, with its files in the directory `dir`.
    pub(crate) fn sandbox_of(record: Record, dir: &Path) -> Arc<Sandbox> {
        let store = Store::new(dir, &record.id);
        store.create().unwrap();
        Sandbox::new(record, store, Files::start().unwrap().lane())
    }

    #[test]
    fn a_sandbox_with_a_broken_disk_is_not_intact() {
        let paths = |names: &[&str]| names.iter().map(PathBuf::from).collect::<Vec<_>>();
        let check = |needed: &[&str], broken: &[&str]| {
            check_functions(paths(needed).into_iter(), &paths(broken))
        };
        check(&["/nvme-0", "/net"], &[]).unwrap();
        check(&["/nvme-0", "/net"], &["/sockets"]).unwrap();
        let error = check(&["/nvme-0", "/net"], &["/sockets", "/net"]).unwrap_err().to_string();
        assert!(error.contains("/net is broken"), "{error}");
    }

    #[test]
    fn a_sandbox_that_stood_still_has_time_to_go_on() {
        let mut record = record_of(SandboxState::Running);
        assert_eq!(patience(&record), PATIENCE);
        record.saving.under_way = true;
        assert_eq!(patience(&record), PATIENCE + RESUME);
    }

    #[tokio::test(start_paused = true)]
    async fn a_sandbox_whose_guest_does_not_answer_is_waited_for_until_it_is_asked_to_end() {
        let dir = tempfile::tempdir().unwrap();
        let sandbox = sandbox_of(record_of(SandboxState::Running), dir.path());
        let begun = tokio::time::Instant::now();
        let silent = finish(&sandbox, std::future::pending()).await.err().unwrap();
        assert!(silent.to_string().contains("does not answer"), "{silent}");
        assert!(begun.elapsed() >= LONGEST);
        let ended = || std::future::ready(Err(lost("its disks ended")));
        let error = finish(&sandbox, ended()).await.err().unwrap();
        assert!(error.to_string().contains("disks"), "{error}");
        sandbox.kill();
        for _ in 0..8 {
            let stopped = finish(&sandbox, ended()).await.err().unwrap();
            assert!(matches!(stopped, Error::Stopped), "{stopped}");
        }
        assert!(begun.elapsed() < LONGEST * 2);
    }

    #[tokio::test(start_paused = true)]
    async fn a_vmm_that_answers_late_is_asked_again() {
        let tries = std::cell::Cell::new(0);
        let step = || {
            tries.set(tries.get() + 1);
            let (command, timeout) = ("query-cpus".to_owned(), PATIENCE);
            let late = slipway_hypervisor::Error::Timeout { command, timeout };
            std::future::ready(if tries.get() < 3 { Err(late.into()) } else { Ok(()) })
        };
        again(is_late, step).await.unwrap();
        assert_eq!(tries.get(), 3);
        let gone = || std::future::ready(Err(lost("gone")));
        assert!(again(is_late, gone).await.is_err());
    }

    #[test]
    fn only_what_ran_and_was_not_seen_to_end_may_live() {
        use SandboxState::{Created, Exited, Failed, Lost, Running, Starting, Stopping};
        for state in [Created, Starting, Running, Stopping, Exited, Failed, Lost] {
            let ran = matches!(state, Running | Stopping);
            assert_eq!(may_live(&record_of(state)), ran, "{state:?}");
            assert!(!may_live(&Record { vm: None, ..record_of(state) }));
            assert!(!may_live(&Record { vmm_uid: None, ..record_of(state) }));
            let mut exited = record_of(state);
            exited.run.exit_status = Some(0);
            assert!(!may_live(&exited), "{state:?}");
        }
    }
}
