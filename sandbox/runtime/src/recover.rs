//! Recovery: a daemon takes over the sandboxes that an earlier one left.
//!
//! A sandbox whose record cannot be read is passed over. Another version of Slipway may have made
//! it and may take it over later, so all that it may hold stays: its files, run directory, control
//! group, addresses and functions, and the user id of its VMM. A failure that concerns one sandbox
//! is logged, and does not keep the others from being taken over.

use std::collections::BTreeSet;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;

use tokio::task::JoinSet;

use crate::config::Config;
use crate::container::Container;
use crate::node::{Node, Parts, remove_files};
use crate::record::{Record, SandboxState, Store};
use crate::running::Running;
use crate::sandbox::Sandbox;
use crate::target::Target;
use crate::{
    Error, Result, adopt, cgroup, life, network, old_layers, pause, pod_functions, release, spares,
    to_file, volume,
};

impl Node {
    /// Takes over a node's data directory. If `keeps` says that sandboxes outlive daemons, intact
    /// sandboxes that an earlier daemon left running are adopted. All others are ended and marked
    /// lost. Sandboxes that an earlier daemon left half-made are removed.
    ///
    /// # Errors
    /// [`Error::File`] if the directory cannot be read or created, or the node's threads cannot be
    /// started.
    pub async fn open(config: Config, parts: Parts) -> Result<Arc<Self>> {
        let cgroups = cgroup::pool(&config)
            .map_err(Error::file("cannot start the threads of", &config.data_dir))?;
        let node = Arc::new(Self::new(config, parts, cgroups)?);
        node.load().await?;
        Ok(node)
    }

    /// Loads the sandboxes' directory. Reads it on the calling thread, since the daemon serves
    /// nobody yet.
    async fn load(self: &Arc<Self>) -> Result<()> {
        let dir = self.config.sandboxes_dir();
        std::fs::create_dir_all(&dir).map_err(Error::file("cannot create", &dir))?;
        // Environments, output and volumes are for root's eyes only.
        let private = std::fs::Permissions::from_mode(0o700);
        std::fs::set_permissions(&dir, private).map_err(Error::file("cannot close", &dir))?;
        self.templates.clean();
        volume::remove_unfinished(&self.config.cache_dir());
        // Before any id is claimed. The record of a VMM's sandbox may be gone, or not be readable.
        self.uids.mark_running();
        let passed_over = self.take_over_all(&dir).await?;
        let all_read = passed_over.is_empty();
        self.sweep_run_dirs(&passed_over);
        old_layers::remove_unused(&self.config.cache_dir());
        cgroup::open(self, all_read).await;
        let live = self.list().into_iter().filter(|sandbox| sandbox.state().is_live());
        let live = live.map(|sandbox| sandbox.id.clone()).chain(passed_over).collect();
        network::reconcile(self, live, all_read).await;
        if all_read {
            pod_functions::reconcile(self).await;
        }
        spares::keep(self);
        Ok(())
    }

    /// Takes over the sandboxes in `dir`. Returns the ids of those that are passed over.
    ///
    /// # Errors
    /// [`Error::File`] if the directory cannot be read.
    async fn take_over_all(self: &Arc<Self>, dir: &Path) -> Result<BTreeSet<String>> {
        let (mut passed_over, mut loading) = (BTreeSet::new(), JoinSet::new());
        let mut unfinished = BTreeSet::new();
        for entry in std::fs::read_dir(dir).map_err(Error::file("cannot read", dir))? {
            let entry = entry.map_err(Error::file("cannot read", dir))?;
            let id = entry.file_name().to_string_lossy().into_owned();
            let store = self.store(&id);
            match store.load() {
                Ok(Some(record)) => {
                    // The id of a VMM that has ended is given back when its sandbox is released.
                    self.uids.mark(record.vmm_uid);
                    unfinished.insert(id.clone());
                    let taken_over = Arc::clone(self).take_over(record, store);
                    let taken_over = async move {
                        taken_over.await;
                        id
                    };
                    loading.spawn_on(taken_over, self.guests.runtime());
                }
                Ok(None) => {
                    if let Err(error) = store.remove() {
                        tracing::warn!(sandbox = id, %error, "a half-made sandbox stays");
                    }
                }
                Err(error) => {
                    tracing::warn!(sandbox = id, %error, "a sandbox is passed over");
                    passed_over.insert(id);
                }
            }
        }
        while let Some(loaded) = loading.join_next().await {
            match loaded {
                Ok(id) => {
                    unfinished.remove(&id);
                }
                Err(panic) => tracing::error!(%panic, "a sandbox was not taken over"),
            }
        }
        for id in unfinished {
            tracing::error!(sandbox = id, "a sandbox is passed over: its task panicked");
            passed_over.insert(id);
        }
        Ok(passed_over)
    }

    /// Adopts a sandbox of an earlier daemon, or releases what is left of it.
    async fn take_over(self: Arc<Self>, record: Record, store: Store) {
        let sandbox = Sandbox::new(record, store, self.lane());
        // Once the agent has answered, this daemon starts others in the pod.
        let left = sandbox.added();
        let record = sandbox.record();
        if record.saving.in_file {
            return self.take_over_in_file(sandbox, left).await;
        }
        note(&sandbox, to_file::clear(&sandbox).await);
        let started = !matches!(record.state, SandboxState::Created | SandboxState::Starting);
        let mut reason =
            format!("the daemon ended while it {}", if started { "ran" } else { "started" });
        if self.keeps && adopt::may_live(&record) {
            end_lost_input(&sandbox, &left);
            let adoption = adopt::adopt(Arc::clone(&self), Arc::clone(&sandbox));
            let mut adoption = Box::pin(adoption);
            match tokio::time::timeout(adopt::patience(&record), &mut adoption).await {
                Ok(Ok(running)) => return self.enter_adopted(sandbox, running, left).await,
                Ok(Err(error)) => reason = error.to_string(),
                Err(_) => return self.enter_later(sandbox, adoption, left),
            }
        }
        // A sandbox in the state `Created` is live, and lost as well: the client that would have
        // started it is gone. An ended sandbox that still has a user id has left a process, which
        // the release ends.
        if record.state.is_live() || record.vmm_uid.is_some() {
            self.release_lost(&sandbox, &reason).await;
        }
        self.enter_ended(sandbox).await;
    }

    /// Takes over a sandbox whose memory is in a file by its record, with the containers that an
    /// earlier daemon `left` in it. If that daemon was ending the sandbox, it ends. If it has no
    /// file, it is lost.
    async fn take_over_in_file(self: Arc<Self>, sandbox: Arc<Sandbox>, left: Vec<Arc<Container>>) {
        if sandbox.state() == SandboxState::Stopping {
            let known = sandbox.look(|record| record.run.exit_status);
            // Without an exit status it counts as killed.
            sandbox.kill();
            life::end_life(&self, &sandbox, known.ok_or(Error::Stopped)).await;
            sandbox.close_outputs();
        } else if to_file::has_file(&sandbox).await {
            return self.enter_in_file(sandbox, left).await;
        } else {
            self.release_lost(&sandbox, "the file of its memory is gone").await;
        }
        note(&sandbox, to_file::clear(&sandbox).await);
        self.enter_ended(sandbox).await;
    }

    /// Lists a sandbox that has ended, if it is not to be removed.
    async fn enter_ended(self: Arc<Self>, sandbox: Arc<Sandbox>) {
        let (remove, ended) = sandbox.look(|record| (record.remove, record.vmm_uid.is_none()));
        // Without a keeper, the sandbox of a `run --rm` goes now. If a process of its is left, or
        // its files cannot be removed, it is listed, so that a user can remove it later.
        if remove && !self.keeps && ended && note(&sandbox, remove_files(&sandbox).await) {
            return;
        }
        self.put_back(Arc::clone(&sandbox));
        if remove && self.keeps {
            tokio::spawn(life::remove_later(self, sandbox));
        }
    }

    /// Lists a sandbox whose memory is in a file, and starts the tasks that wait for it to come
    /// back: its own, and those of the containers that an earlier daemon `left` in it.
    async fn enter_in_file(self: Arc<Self>, sandbox: Arc<Sandbox>, left: Vec<Arc<Container>>) {
        to_file::put_down(&self, &sandbox).await;
        self.put_back(Arc::clone(&sandbox));
        self.adopt_in_file(&sandbox, left);
        tokio::spawn(life::live_in_file(self, sandbox));
    }

    /// Lists an adopted sandbox, and starts the task that runs it to its end. `left` are the
    /// containers that an earlier daemon added to it.
    async fn enter_adopted(
        self: Arc<Self>,
        sandbox: Arc<Sandbox>,
        running: Running,
        left: Vec<Arc<Container>>,
    ) {
        // One whose record is not saved runs even so: the old record suffices to adopt it again.
        note(&sandbox, sandbox.update(|record| record.state = SandboxState::Running).await);
        tracing::info!(sandbox = sandbox.name, "adopted");
        self.put_back(Arc::clone(&sandbox));
        self.adopt_added(&sandbox, left);
        pause::settle(&self, Target::own(Arc::clone(&sandbox)));
        tokio::spawn(life::live_on(self, sandbox, running));
    }

    /// Lists a sandbox whose VMM or guest does not answer yet, and starts the task that completes
    /// its adoption or releases it. Others are served meanwhile. `left` are the containers that an
    /// earlier daemon added to it.
    fn enter_later(
        self: Arc<Self>,
        sandbox: Arc<Sandbox>,
        adoption: impl Future<Output = Result<Running>> + Send + 'static,
        left: Vec<Arc<Container>>,
    ) {
        tracing::warn!(sandbox = sandbox.name, "does not answer yet; it is waited for");
        self.put_back(Arc::clone(&sandbox));
        tokio::spawn(async move {
            let error = match adopt::finish(&sandbox, adoption).await {
                Ok(running) => return self.enter_adopted(sandbox, running, left).await,
                Err(error) => error,
            };
            // A sandbox that was asked to end counts as killed, not as lost.
            if matches!(error, Error::Stopped) {
                life::end_life(&self, &sandbox, Err(error)).await;
                sandbox.close_outputs();
                return life::remove_later(self, sandbox).await;
            }
            let stopping = sandbox.update(|record| record.state = SandboxState::Stopping);
            note(&sandbox, stopping.await);
            sandbox.set_agent(None);
            self.release_lost(&sandbox, &error.to_string()).await;
            self.settled();
            life::remove_later(self, sandbox).await;
        });
    }

    /// Releases the resources of a dead daemon's sandbox. Marks it exited if it was live and its
    /// exit status was recorded, and lost if it was live without one.
    async fn release_lost(&self, sandbox: &Sandbox, reason: &str) {
        let released = release::release(self, sandbox).await;
        note(sandbox, released.outcome);
        let describe = |record: &mut Record| lose(record, reason);
        note(sandbox, release::record_end(self, sandbox, released.processes_gone, describe).await);
        sandbox.close_outputs();
    }

    /// Removes the run directories of sandboxes that are neither listed nor passed over. A daemon
    /// that was killed at the wrong moment leaves such directories.
    fn sweep_run_dirs(&self, passed_over: &BTreeSet<String>) {
        let Ok(entries) = std::fs::read_dir(self.config.run_dir.join("s")) else { return };
        let known: BTreeSet<_> = self.list().iter().map(|sandbox| sandbox.id.clone()).collect();
        for entry in entries.flatten() {
            let id = entry.file_name().to_string_lossy().into_owned();
            if !known.contains(&id) && !passed_over.contains(&id) {
                let _ = std::fs::remove_dir_all(entry.path());
            }
        }
    }
}

/// Ends the input of a sandbox's container, and of the containers that an earlier daemon `left` in
/// it, where some of it may be lost. No client has come back yet, so what clients send follows it.
fn end_lost_input(sandbox: &Arc<Sandbox>, left: &[Arc<Container>]) {
    Target::own(Arc::clone(sandbox)).end_lost_input();
    for container in left {
        let (sandbox, container) = (Arc::clone(sandbox), Arc::clone(container));
        Target { sandbox, container }.end_lost_input();
    }
}

/// Logs what failed while a sandbox was taken over. Returns whether nothing did.
fn note(sandbox: &Sandbox, outcome: Result<()>) -> bool {
    if let Err(error) = &outcome {
        tracing::warn!(sandbox = sandbox.name, %error, "left by an earlier daemon");
    }
    outcome.is_ok()
}

/// Marks the sandbox of a record as ended if it was live. The record forgets its function of a
/// pool, which the release gave back.
fn lose(record: &mut Record, reason: &str) {
    // Also where an earlier version marked it as lost: it kept the function's name.
    if let Some(network) = &mut record.network {
        network.forget_taken();
    }
    if !record.state.is_live() {
        return;
    }
    life::finish_added(record, reason);
    record.saving.in_file = false;
    if record.run.exit_status.is_some() {
        record.state = SandboxState::Exited;
        return;
    }
    record.state = SandboxState::Lost;
    record.run.lose(reason);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::adopt::tests::{added_of, record_of, sandbox_of};
    use crate::record::{FunctionPool, Network, TakenFunction};
    use crate::stdio::Input;

    #[tokio::test]
    async fn input_of_the_last_daemons_clients_ends_before_that_of_the_next_ones() {
        let dir = tempfile::tempdir().unwrap();
        let mut record = record_of(SandboxState::Running);
        record.settings.process.stdin = true;
        let mut added = added_of("one", SandboxState::Running);
        added.settings.process.stdin = true;
        record.added.push(added);
        record.added.push(added_of("without-input", SandboxState::Running));
        let sandbox = sandbox_of(record, dir.path());
        let left = sandbox.added();
        end_lost_input(&sandbox, &left);
        for container in [&sandbox.own, &left[0]] {
            container.input.send(Input::Data(vec![7])).await.unwrap();
            let mut input = container.take_input().unwrap();
            assert!(matches!(input.recv().await, Some(Input::Close)), "{}", container.name);
        }
        assert!(left[1].take_input().unwrap().try_recv().is_err());
    }

    #[test]
    fn a_lost_sandbox_names_no_function_of_a_pool() {
        use SandboxState::{Lost, Running, Starting};
        for (state, exit_status) in
            [(Running, None), (Starting, None), (Running, Some(3)), (Lost, None)]
        {
            let mut record = record_of(state);
            record.run.exit_status = exit_status;
            let (id, socket, mac) = ("nics.0".to_owned(), "/vf/nics.0".into(), "m".to_owned());
            let taken = Some(TakenFunction { id, socket, mac });
            let (name, owner) = ("nics".to_owned(), String::new());
            let pool = Some(FunctionPool { name, needed: true, owner, taken });
            record.network = Some(Network { pool, ..Network::default() });
            lose(&mut record, "why");
            let network = record.network.unwrap();
            assert_eq!(network.taken(), None, "{state:?}");
            assert_eq!(network.pool.unwrap().name, "nics", "by which a later daemon finds it");
        }
    }

    #[test]
    fn only_a_live_sandbox_is_lost() {
        let lost = |state, exit_status| {
            let mut record = record_of(state);
            record.run.exit_status = exit_status;
            lose(&mut record, "why");
            (record.state, record.run.exit_status, record.run.reason)
        };
        let why = || "why".to_owned();
        assert_eq!(lost(SandboxState::Running, None), (SandboxState::Lost, Some(137), why()));
        let exited = (SandboxState::Exited, Some(3), String::new());
        assert_eq!(lost(SandboxState::Running, Some(3)), exited);
        let failed = (SandboxState::Failed, Some(125), String::new());
        assert_eq!(lost(SandboxState::Failed, Some(125)), failed);
    }

    #[test]
    fn a_lost_sandbox_is_in_no_file() {
        let mut record = record_of(SandboxState::Running);
        (record.run.paused, record.saving.in_file) = (true, true);
        lose(&mut record, "why");
        assert_eq!((record.state, record.saving.in_file), (SandboxState::Lost, false));
    }
}
