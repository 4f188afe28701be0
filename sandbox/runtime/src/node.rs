//! A node: the table of its sandboxes, and the resources that they share.
//!
//! The modules `create`, `life` and `recover` act on sandboxes.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use slipway_cgroup::Pool;
use slipway_hypervisor::{Hypervisor, Topology};
use slipway_image::{Cache, Image};
use slipway_plane_api::v1::RemoveEndpointRequest;
use slipway_plane_api::{NetworkClient, PlaneClient, VfClient, vf_v1};
use slipway_telemetry::trace::Tracer;
use tokio::sync::watch;

use crate::boot::{Boot, Known};
use crate::config::Config;
use crate::fetcher::Fetcher;
use crate::files::{Files, Lane};
use crate::guests::Guests;
use crate::lock::lock;
use crate::look::Looks;
use crate::record::{SandboxState, Store};
use crate::sandbox::Sandbox;
use crate::shared_root::SharedRoots;
use crate::shelf::Spares;
use crate::starts::Starts;
use crate::target::Target;
use crate::templates::{Automatic, Templates};
use crate::uids::Uids;
use crate::v1::RunSpec;
use crate::{Error, Result};

/// The most sandboxes that a node keeps, ended ones included, since a list of all must fit into one
/// message.
const MOST_SANDBOXES: usize = 8192;
/// The most looks at the host's files at once for sandboxes that are being made.
const MOST_LOOKS: usize = 64;

/// The longest wait for the end of a call that saved a sandbox which is to be removed.
const LAST_CALL: Duration = Duration::from_secs(60);

/// The services and components that a node uses, beside its settings.
pub struct Parts {
    /// The client of the plane.
    pub plane: PlaneClient,
    /// The client of the networks' service.
    pub networks: NetworkClient,
    /// The client of the pools of virtual functions.
    pub functions: VfClient,
    /// The hypervisor that runs microVMs.
    pub hypervisor: Arc<dyn Hypervisor>,
    /// The provider of kernels and initramfs files.
    pub boot: Arc<dyn Boot>,
    /// The image cache.
    pub images: Cache,
    /// The source of the spans of calls and starts.
    pub tracer: Tracer,
    /// Set if sandboxes outlive the daemon.
    pub keeps: bool,
}

/// A node: the owner of its sandboxes.
pub struct Node {
    /// The node's settings; constant.
    pub config: Config,
    pub(crate) plane: PlaneClient,
    pub(crate) networks: NetworkClient,
    pub(crate) functions: VfClient,
    pub(crate) hypervisor: Arc<dyn Hypervisor>,
    pub(crate) guests: Guests,
    files: Files,
    pub(crate) images: Cache,
    /// The lane of calls to the image cache. Another process may hold the lock of the cache's
    /// index, and then one thread may wait for it.
    images_lane: Lane,
    sandboxes: Mutex<BTreeMap<String, Arc<Sandbox>>>,
    /// The user ids of VMMs.
    pub(crate) uids: Uids,
    /// Looks at the host's files for sandboxes that are being made.
    pub(crate) looks: Looks,
    pub(crate) boot: Known,
    pub(crate) roots: SharedRoots,
    /// The process that fetches the blocks of images that were pulled lazily.
    pub(crate) fetcher: Arc<Fetcher>,
    /// The machines that sandboxes can begin with.
    pub(crate) templates: Templates,
    /// The state of those that the node makes by itself.
    pub(crate) automatic: Arc<Automatic>,
    /// The control groups that were made ahead.
    pub(crate) cgroups: Arc<Pool>,
    /// The VMMs that were started ahead.
    pub(crate) spares: Spares,
    /// Counts of starts.
    pub(crate) starts: Starts,
    /// The source of the spans of calls and starts.
    pub(crate) tracer: Tracer,
    /// The NUMA nodes of the host.
    pub(crate) topology: Arc<Topology>,
    changes: watch::Sender<u64>,
    closed: AtomicBool,
    /// Set if sandboxes outlive the daemon.
    pub(crate) keeps: bool,
    opened: Instant,
}

impl Node {
    /// Returns a node without sandboxes.
    pub(crate) fn new(config: Config, parts: Parts, cgroups: Pool) -> Result<Self> {
        let threads = |error| Error::file("cannot start the threads of", &config.data_dir)(error);
        let (files, guests) = (Files::start().map_err(threads)?, Guests::start().map_err(threads)?);
        let roots = SharedRoots::new(config.shared_root_bytes);
        let (dir, plane) = (config.templates_dir(), parts.plane.clone());
        let templates = Templates::new(dir, plane, config.spare_forks);
        let fetcher = Arc::new(Fetcher::new(&config));
        let uids = Uids::new(config.vmm_uid_base, config.vmm_uid_count);
        Ok(Self {
            config,
            roots,
            fetcher,
            templates,
            automatic: Arc::default(),
            cgroups: Arc::new(cgroups),
            spares: Spares::default(),
            starts: Starts::default(),
            tracer: parts.tracer,
            plane: parts.plane,
            networks: parts.networks,
            functions: parts.functions,
            hypervisor: parts.hypervisor,
            guests,
            images: parts.images,
            images_lane: files.lane(),
            sandboxes: Mutex::default(),
            uids,
            looks: Looks::new(MOST_LOOKS),
            boot: Known::new(parts.boot, files.lane()),
            files,
            topology: Arc::new(Topology::of_host()),
            changes: watch::Sender::new(0),
            closed: AtomicBool::new(false),
            keeps: parts.keeps,
            opened: Instant::now(),
        })
    }

    /// Returns how long ago the daemon took over the node.
    pub(crate) fn age(&self) -> Duration {
        self.opened.elapsed()
    }

    /// Returns the store of sandbox `id`: its persistent files.
    pub fn store(&self, id: &str) -> Store {
        Store::new(&self.config.sandboxes_dir(), id)
    }

    /// Returns the path of the socket that leads to the port of the agent of sandbox `id`.
    pub(crate) fn agent_socket(&self, id: &str) -> PathBuf {
        self.run_dir(id).join("agent.sock")
    }

    /// Returns the directory of the sockets of sandbox `id`, which exists while the sandbox is
    /// live.
    pub fn run_dir(&self, id: &str) -> PathBuf {
        self.config.run_dir.join("s").join(id)
    }

    /// Has the plane remove functions. Missing ones are no error.
    ///
    /// # Errors
    /// [`Error::Plane`]: the first failure. The others are removed even so.
    pub(crate) async fn remove_functions(&self, ids: impl Iterator<Item = String>) -> Result<()> {
        let mut removed = Ok(());
        for id in ids {
            let request = RemoveEndpointRequest { id };
            let gone = Error::unless_gone(self.plane.clone().remove_endpoint(request).await);
            removed = removed.and(gone);
        }
        removed
    }

    /// Returns the image that `spec` names.
    pub(crate) async fn image(&self, spec: &RunSpec) -> Result<Image> {
        let named = if spec.image_digest.is_empty() { &spec.image } else { &spec.image_digest };
        let (images, asked) = (self.images.clone(), named.clone());
        let found = self.images_lane.run(move || images.get(&asked)).await?;
        found.ok_or_else(|| Error::NoImage(named.clone()))
    }

    /// Adds the sandbox to the table, so that its name is taken.
    ///
    /// # Errors
    /// The name is taken, the table is full, or the daemon is about to end.
    pub(crate) fn enter(&self, sandbox: &Arc<Sandbox>) -> Result<()> {
        let mut sandboxes = lock(&self.sandboxes);
        if self.closed.load(Ordering::Relaxed) {
            return Err(Error::Closed);
        }
        if let Some(other) = sandboxes.values().find(|other| other.name == sandbox.name) {
            let (name, id) = (other.name.clone(), other.id.clone());
            return Err(Error::NameTaken { name, id, runs: other.state().is_live() });
        }
        if sandboxes.len() >= MOST_SANDBOXES {
            return Err(Error::TooMany(MOST_SANDBOXES));
        }
        sandboxes.insert(sandbox.id.clone(), Arc::clone(sandbox));
        Ok(())
    }

    /// Adds a sandbox of an earlier daemon to the table.
    pub(crate) fn put_back(&self, sandbox: Arc<Sandbox>) {
        lock(&self.sandboxes).insert(sandbox.id.clone(), sandbox);
    }

    /// Removes the sandbox from the table, and notifies watchers.
    pub(crate) fn forget(&self, sandbox: &Sandbox) {
        lock(&self.sandboxes).remove(&sandbox.id);
        self.settled();
    }

    /// Returns a new lane of file operations.
    pub(crate) fn lane(&self) -> Lane {
        self.files.lane()
    }

    /// Refuses new sandboxes from now on: the daemon is about to end, and they would lose their
    /// disks.
    pub fn close(&self) {
        self.closed.store(true, Ordering::Relaxed);
    }

    /// Ends the VMMs that no sandbox has. Called before their control groups are removed.
    pub async fn close_spares(&self) {
        self.spares.close().await;
    }

    /// Removes the control groups that no sandbox has. Waits for the kernel; called last.
    pub fn close_cgroups(&self) {
        self.cgroups.close();
    }

    /// Returns the sandbox with this name or id, or the only one whose id begins with `named`.
    ///
    /// # Errors
    /// [`Error::NoSandbox`], [`Error::Ambiguous`].
    pub fn find(&self, named: &str) -> Result<Arc<Sandbox>> {
        let sandboxes = lock(&self.sandboxes);
        if let Some(exact) = sandboxes.values().find(|one| one.name == named || one.id == named) {
            return Ok(Arc::clone(exact));
        }
        let mut begin = sandboxes.values().filter(|s| !named.is_empty() && s.id.starts_with(named));
        match (begin.next(), begin.next()) {
            (Some(only), None) => Ok(Arc::clone(only)),
            (Some(_), Some(_)) => Err(Error::Ambiguous(named.to_owned())),
            (None, _) => Err(Error::NoSandbox(named.to_owned())),
        }
    }

    /// Returns the container that `named` names: the own one of a sandbox, or with a slash one of a
    /// pod.
    ///
    /// # Errors
    /// [`Error::NoSandbox`], [`Error::Ambiguous`].
    pub fn target(&self, named: &str) -> Result<Target> {
        let Some((pod, container)) = named.split_once('/') else {
            return Ok(Target::own(self.find(named)?));
        };
        let sandbox = self.find(pod)?;
        match sandbox.find_added(container) {
            Some(container) => Ok(Target { sandbox, container }),
            None => Err(Error::NoSandbox(named.to_owned())),
        }
    }

    /// Returns all sandboxes, the oldest first.
    pub fn list(&self) -> Vec<Arc<Sandbox>> {
        let mut all: Vec<_> = lock(&self.sandboxes).values().cloned().collect();
        all.sort_by_cached_key(|sandbox| sandbox.look(|record| record.created_ns));
        all
    }

    /// Returns the number of live sandboxes.
    pub fn live(&self) -> usize {
        let all = lock(&self.sandboxes);
        all.values().filter(|sandbox| sandbox.state().is_live()).count()
    }

    /// Returns whether a sandbox is lost when the daemon ends: it is live, and the next daemon will
    /// not adopt it.
    pub fn ends_with_daemon(&self, sandbox: &Sandbox) -> bool {
        let state = sandbox.state();
        state.is_live()
            && !sandbox.is_in_file()
            && !(self.keeps && matches!(state, SandboxState::Running | SandboxState::Stopping))
    }

    /// Takes the functions of owners of this kind back from all but `ids`. `owners` names them in
    /// the log, in the plural.
    pub(crate) async fn reconcile_functions(&self, owners: &str, kind: &str, ids: Vec<String>) {
        let request = vf_v1::ReconcileRequest { kind: kind.to_owned(), ids };
        match self.functions.clone().reconcile(request).await {
            Ok(reply) => {
                let returned = reply.into_inner().returned;
                if !returned.is_empty() {
                    tracing::info!(?returned, "functions of {owners} that are gone");
                }
            }
            Err(status) => {
                let error = status.message();
                tracing::warn!(error, "functions of {owners} that are gone stay");
            }
        }
    }

    /// Notifies watchers that a sandbox was created, ended or was removed.
    pub(crate) fn settled(&self) {
        self.changes.send_modify(|count| *count += 1);
    }

    /// Returns a counter that changes whenever a sandbox is created, ends or is removed.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }
}

/// Removes all files of a sandbox that has ended. Waits, for at most [`LAST_CALL`], for a call that
/// saved the sandbox or had it come back from a file: that call makes, renames and removes files in
/// the same directory, and ends with the sandbox's VMM.
///
/// # Errors
/// [`Error::File`].
pub(crate) async fn remove_files(sandbox: &Sandbox) -> Result<()> {
    let _turn = tokio::time::timeout(LAST_CALL, sandbox.wait_to_change_size()).await;
    let store = sandbox.store.clone();
    sandbox.lane.run(move || store.remove()).await
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::adopt::tests::{record_of, sandbox_of};

    #[tokio::test]
    async fn the_files_of_a_sandbox_stay_until_a_call_that_saved_it_is_over() {
        let dir = tempfile::tempdir().unwrap();
        let sandbox = sandbox_of(record_of(SandboxState::Exited), dir.path());
        let saves = sandbox.change_size().unwrap();
        let mut removal = Box::pin(remove_files(&sandbox));
        assert!(tokio::time::timeout(Duration::ZERO, &mut removal).await.is_err());
        // Behind whatever the removal has begun.
        sandbox.lane.run(|| ()).await;
        assert!(sandbox.store.dir().exists());
        drop(saves);
        removal.await.unwrap();
        assert!(!sandbox.store.dir().exists());
    }
}
