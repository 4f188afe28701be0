//! Containers of a pod whose memory goes to a file and comes back (`to_file`).
//!
//! The VMM ends then, and the containers do not: the task of each waits until the pod goes on in
//! another VMM, and carries the container's output from there.
//!
//! A pod is saved with a container as a whole or without it: the guest in a file has the containers
//! that run by the record. So a container begins to start, or to be released, in a turn of the pod
//! (`own.pausing`) that no save or return has ([`begin_start`], [`begin_release`]), and a pod in
//! which one starts or is released is not saved (`to_file::checks`). The turn is short: a start
//! waits for locks that a save holds. A container that was seen to end while its pod was saved is
//! released once the pod has come back.

use std::io::ErrorKind;
use std::sync::Arc;

use slipway_hypervisor::Vm;
use tokio::sync::RwLockReadGuard;

use super::{Running, bound, change, end, memory, quota, rejoin, update};
use crate::container::Container;
use crate::node::Node;
use crate::pause::check_runs;
use crate::record::SandboxState;
use crate::running::end_carry;
use crate::sandbox::Sandbox;
use crate::target::Target;
use crate::{Error, Result};

impl Node {
    /// Goes on with the containers of a pod that an earlier daemon `left` with the pod's memory in
    /// a file, once the pod comes back. Those that were not in the guest have ended.
    pub(crate) fn adopt_in_file(
        self: &Arc<Self>,
        sandbox: &Arc<Sandbox>,
        left: Vec<Arc<Container>>,
    ) {
        for container in left.into_iter().filter(|one| one.state().is_live()) {
            let target = Target { sandbox: Arc::clone(sandbox), container };
            let node = Arc::clone(self);
            let runs = target.container.state() == SandboxState::Running;
            self.guests.spawn(async move {
                let ended = match runs {
                    true => wait(&node, &target, None).await,
                    false => Err(Error::Agent("the daemon ended while it started".to_owned())),
                };
                end(node, target, ended).await;
            });
        }
    }
}

/// Waits for the end of a container, also while its pod's memory is in a file and after the pod
/// has come back. Returns the exit status. Without `running`, the pod's memory is in a file.
///
/// # Errors
/// The errors of [`super::wait`], of the VMM in which the pod ended.
pub(super) async fn wait(
    node: &Node,
    target: &Target,
    mut running: Option<Running>,
) -> Result<u32> {
    let mut vm = running.as_ref().map(|running| Arc::clone(&running.vm));
    let mut failed = Error::Stopped;
    loop {
        if let Some(running) = &mut running {
            match super::wait(target, running).await {
                Ok(status) => return Ok(status),
                Err(error) => failed = error,
            }
        }
        let Some(next) = next_vm(&target.sandbox, vm.as_ref()).await else { return Err(failed) };
        vm = Some(next);
        if let Some(last) = running.take() {
            end_carry(last.carry).await;
        }
        target.container.renew_input();
        match rejoin(node, target).await {
            Ok(again) => running = Some(again),
            Err(error) => failed = error,
        }
    }
}

/// Returns the VMM in which a pod goes on after `last` has ended, once the pod has come back from a
/// file. Returns `None` if the pod has ended, or is still in `last`.
async fn next_vm(sandbox: &Sandbox, last: Option<&Arc<dyn Vm>>) -> Option<Arc<dyn Vm>> {
    loop {
        // A save or a return that is under way is over then.
        drop(sandbox.own.pausing.read().await);
        if !sandbox.is_in_file() {
            let now = sandbox.vm().filter(|_| sandbox.agent().is_ok());
            return now.filter(|now| last.is_none_or(|last| !Arc::ptr_eq(now, last)));
        }
        sandbox.leaves_file().await;
    }
}

/// Records that a container starts.
///
/// # Errors
/// [`Error::WrongState`] if its pod is paused as a whole, in a file or not.
pub(super) async fn begin_start(target: &Target) -> Result<()> {
    let _turn = target.sandbox.own.pausing.read().await;
    check_runs(&Target::own(Arc::clone(&target.sandbox)))?;
    change(target, |added| added.state = SandboxState::Starting).await;
    Ok(())
}

/// Records that an ended container is being released. Waits while its pod's memory is in a file, if
/// the guest there may have the container.
pub(super) async fn begin_release(target: &Target) {
    let _turn = turn_to_release(target).await;
    // A session that was kept for its task, which does not go on, is another's to take.
    target.container.keep_session(None);
    change(target, |added| added.state = SandboxState::Stopping).await;
}

/// Returns the turn of a pod in which a container of it can be released, while the pod is neither
/// saved nor comes back.
async fn turn_to_release(target: &Target) -> RwLockReadGuard<'_, ()> {
    let sandbox = &target.sandbox;
    loop {
        let turn = sandbox.own.pausing.read().await;
        let has_disks = target.look_added(|added| added.is_some_and(|one| one.disks.is_some()));
        if !has_disks || !sandbox.is_in_file() {
            return turn;
        }
        drop(turn);
        sandbox.leaves_file().await;
    }
}

/// Removes the file under the volatile layer of an ended container, which it has if its pod came
/// back from a file.
///
/// # Errors
/// [`Error::File`].
pub(super) async fn remove_layer(target: &Target) -> Result<()> {
    let path = target.sandbox.store.saved_layer(&target.container.name);
    let removed = move || match std::fs::remove_file(&path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        removed => removed.map_err(Error::file("cannot remove", &path)),
    };
    target.sandbox.lane.run(removed).await
}

/// Has tasks see to what a pod that came back from a file has beyond its containers' limits, and to
/// updates of limits that were cut off, as after an adoption.
pub(crate) fn settle_returned(node: &Node, sandbox: &Arc<Sandbox>) {
    if sandbox.look(|record| record.pod) {
        quota::leave(node, sandbox);
        memory::leave(node, sandbox);
        bound::leave(node, sandbox);
        update::settle(node, sandbox);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::sync::Semaphore;
    use tokio::time::timeout;

    use super::*;
    use crate::adopt::tests::{added_of, record_of, sandbox_of};
    use crate::record::{Disks, Record};

    /// Makes a pod with a container "a" that runs and one "b" that was not started.
    fn pod(in_file: bool, dir: &std::path::Path) -> Arc<Sandbox> {
        let mut record = Record { pod: true, ..record_of(SandboxState::Running) };
        (record.saving.in_file, record.run.paused) = (in_file, in_file);
        record.added =
            vec![added_of("a", SandboxState::Running), added_of("b", SandboxState::Created)];
        record.added[0].disks = Some(Disks { image: 1, volatile: 2, volumes: Vec::new() });
        sandbox_of(record, dir)
    }

    fn target(sandbox: &Arc<Sandbox>, name: &str) -> Target {
        let container = sandbox.find_added(name).unwrap();
        Target { sandbox: Arc::clone(sandbox), container }
    }

    #[tokio::test(start_paused = true)]
    async fn a_container_is_released_when_its_pod_is_in_no_file() {
        let dir = tempfile::tempdir().unwrap();
        let sandbox = pod(true, dir.path());
        let (running, created) = (target(&sandbox, "a"), target(&sandbox, "b"));
        drop(turn_to_release(&created).await);
        let waits = async |target: &Target| {
            timeout(Duration::from_secs(1), turn_to_release(target)).await.is_err()
        };
        assert!(waits(&running).await, "the guest in the file has it");
        sandbox.note(|record| record.saving.in_file = false);
        assert!(!waits(&running).await);
        let _saves = sandbox.own.pausing.write().await;
        assert!(waits(&running).await && waits(&created).await, "amid a save");
    }

    #[tokio::test]
    async fn no_container_starts_while_its_pod_is_paused() {
        let dir = tempfile::tempdir().unwrap();
        let sandbox = pod(true, dir.path());
        let created = target(&sandbox, "b");
        let refused = begin_start(&created).await.unwrap_err().to_string();
        assert!(refused.contains("is paused") && refused.contains("slipway resume"), "{refused}");
        assert_eq!(created.container.state(), SandboxState::Created);
        // The daemon was killed when the pod had come back and had not gone on.
        sandbox.note(|record| record.saving.in_file = false);
        let refused = begin_start(&created).await.unwrap_err().to_string();
        assert!(refused.contains("is paused") && refused.contains("slipway resume"), "{refused}");
        sandbox.note(|record| record.run.paused = false);
        begin_start(&created).await.unwrap();
        assert_eq!(created.container.state(), SandboxState::Starting);
        begin_release(&created).await;
        assert_eq!(created.container.state(), SandboxState::Stopping);
    }

    #[tokio::test(start_paused = true)]
    async fn a_container_ends_with_its_pod_and_not_when_that_is_in_a_file() {
        let dir = tempfile::tempdir().unwrap();
        let ended = pod(false, dir.path());
        assert!(next_vm(&ended, None).await.is_none(), "it has no VMM");
        let dir = tempfile::tempdir().unwrap();
        let sandbox = pod(true, dir.path());
        let mut next = Box::pin(next_vm(&sandbox, None));
        assert!(timeout(Duration::from_secs(60), &mut next).await.is_err());
        let ended = sandbox.update(|record| {
            (record.state, record.saving.in_file) = (SandboxState::Exited, false);
        });
        ended.await.unwrap();
        assert!(next.await.is_none());
    }

    #[tokio::test]
    async fn a_container_that_goes_on_has_a_session_before_clients_commands() {
        let dir = tempfile::tempdir().unwrap();
        let sandbox = pod(false, dir.path());
        let (running, created) = (target(&sandbox, "a"), target(&sandbox, "b"));
        let sessions = Arc::new(Semaphore::new(2));
        let session = || Arc::clone(&sessions).try_acquire_owned().map_err(|_| Error::Closed);
        sandbox.keep_sessions(session);
        assert_eq!(sessions.available_permits(), 1);
        assert!(created.container.take_session().is_none(), "it does not run");
        drop(running.container.take_session().unwrap());
        sandbox.keep_sessions(session);
        sandbox.keep_sessions(session);
        assert_eq!(sessions.available_permits(), 1, "one for each return at a time");
        begin_release(&running).await;
        assert_eq!(sessions.available_permits(), 2, "its task does not go on");
    }

    #[tokio::test]
    async fn the_layer_of_an_ended_container_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let sandbox = pod(false, dir.path());
        let [a, b] = ["a", "b"].map(|name| sandbox.store.saved_layer(name));
        for path in [&a, &b] {
            std::fs::write(path, "x").unwrap();
        }
        for _ in 0..2 {
            remove_layer(&target(&sandbox, "a")).await.unwrap();
            assert!(!a.exists() && b.exists());
        }
    }
}
