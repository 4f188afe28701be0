//! Recovery: a daemon takes over the sandboxes that an earlier one left.

use std::collections::BTreeSet;
use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;

use crate::config::Config;
use crate::error::MOST_MESSAGE;
use crate::node::{Node, Parts, remove_files};
use crate::record::{Record, SandboxState, Store};
use crate::sandbox::Sandbox;
use crate::{Error, Result, adopt, cgroup, life, network, old_layers, pod_functions};

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
        let mut loading = tokio::task::JoinSet::new();
        let mut all_read = true;
        for entry in std::fs::read_dir(&dir).map_err(Error::file("cannot read", &dir))? {
            let entry = entry.map_err(Error::file("cannot read", &dir))?;
            let store = self.store(&entry.file_name().to_string_lossy());
            match store.load() {
                Ok(Some(record)) => {
                    // The user ids in use are marked before any new one is claimed.
                    self.mark_uid(record.vmm_uid);
                    loading
                        .spawn_on(Arc::clone(self).take_over(record, store), self.guests.runtime());
                }
                Ok(None) => store.remove()?,
                // An unreadable record is not removed: the sandbox may hold volumes, and another
                // version can read it.
                Err(error) => {
                    tracing::warn!(%error, "a sandbox is passed over");
                    all_read = false;
                }
            }
        }
        while let Some(loaded) = loading.join_next().await {
            loaded.unwrap_or_else(|error| Err(Error::Agent(error.to_string())))?;
        }
        self.sweep_run_dirs();
        old_layers::remove_unused(&self.config.cache_dir());
        let live = self.list().into_iter().filter(|sandbox| sandbox.state().is_live());
        cgroup::open(self, all_read).await;
        let live = live.map(|sandbox| sandbox.id.clone()).collect();
        network::reconcile(self, live, all_read).await;
        if all_read {
            pod_functions::reconcile(self).await;
        }
        Ok(())
    }

    /// Adopts a sandbox of an earlier daemon, or releases what is left of it.
    async fn take_over(self: Arc<Self>, record: Record, store: Store) -> Result<()> {
        let sandbox = Sandbox::new(record, store, self.lane());
        let record = sandbox.record();
        let started = !matches!(record.state, SandboxState::Created | SandboxState::Starting);
        let mut reason =
            format!("the daemon ended while it {}", if started { "ran" } else { "started" });
        if self.keeps && adopt::may_live(&record) {
            match adopt::adopt(&self, &sandbox).await {
                Ok(running) => {
                    sandbox.update(|record| record.state = SandboxState::Running).await?;
                    tracing::info!(sandbox = sandbox.name, "adopted");
                    self.put_back(Arc::clone(&sandbox));
                    self.adopt_added(&sandbox);
                    tokio::spawn(life::live_on(self, sandbox, running));
                    return Ok(());
                }
                Err(error) => reason = error.to_string(),
            }
        }
        // A created sandbox that was not started is lost, too: the client that would have started
        // it is gone. An ended sandbox with a user id had a process left that did not end.
        if record.state.is_live() || record.vmm_uid.is_some() {
            self.release_lost(&sandbox, reason).await?;
        }
        if !sandbox.record().remove {
            self.put_back(sandbox);
        } else if self.keeps {
            self.put_back(Arc::clone(&sandbox));
            tokio::spawn(life::remove_later(self, sandbox));
        } else {
            remove_files(&sandbox).await?;
        }
        Ok(())
    }

    /// Releases the resources of a dead daemon's sandbox. Marks it exited if it was live and its
    /// exit status was recorded, and lost if it was live without one.
    async fn release_lost(&self, sandbox: &Sandbox, reason: String) -> Result<()> {
        let released = life::release(self, sandbox).await;
        if let Err(error) = released.outcome {
            tracing::warn!(sandbox = sandbox.name, %error, "left by an earlier daemon");
        }
        life::record_end(self, sandbox, released.processes_gone, |record| lose(record, &reason))
            .await?;
        sandbox.close_outputs();
        Ok(())
    }

    /// Removes run directories without a record, which a daemon that was killed at the wrong moment
    /// leaves.
    fn sweep_run_dirs(&self) {
        let Ok(entries) = std::fs::read_dir(self.config.run_dir.join("s")) else { return };
        let known: BTreeSet<_> = self.list().iter().map(|sandbox| sandbox.id.clone()).collect();
        for entry in entries.flatten() {
            let id = entry.file_name().to_string_lossy().into_owned();
            if !known.contains(&id) {
                let _ = std::fs::remove_dir_all(entry.path());
            }
        }
    }
}

/// Marks the sandbox of a record as ended if it was live.
fn lose(record: &mut Record, reason: &str) {
    if !record.state.is_live() {
        return;
    }
    life::finish_added(record, reason);
    if record.exit_status.is_some() {
        record.state = SandboxState::Exited;
        return;
    }
    record.state = SandboxState::Lost;
    record.exit_status = Some(128 + libc::SIGKILL as u32);
    record.reason = slipway_printable::line(reason, MOST_MESSAGE);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::adopt::tests::record_of;

    #[test]
    fn only_a_live_sandbox_is_lost() {
        let lost = |state, exit_status| {
            let mut record = Record { exit_status, ..record_of(state) };
            lose(&mut record, "why");
            (record.state, record.exit_status, record.reason)
        };
        let why = || "why".to_owned();
        assert_eq!(lost(SandboxState::Running, None), (SandboxState::Lost, Some(137), why()));
        let exited = (SandboxState::Exited, Some(3), String::new());
        assert_eq!(lost(SandboxState::Running, Some(3)), exited);
        let failed = (SandboxState::Failed, Some(125), String::new());
        assert_eq!(lost(SandboxState::Failed, Some(125)), failed);
    }
}
