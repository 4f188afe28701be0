//! The sandboxes of a node: the table of sandboxes, the resources that they share, and recovery of
//! those that an earlier daemon left.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use slipway_hypervisor::Hypervisor;
use slipway_image::{Cache, Image};
use slipway_plane_api::{NetworkClient, PlaneClient};
use slipway_telemetry::Timeline;
use tokio::sync::watch;

use crate::boot::{Boot, Known};
use crate::config::Config;
use crate::error::MOST_MESSAGE;
use crate::files::{Files, Lane};
use crate::guests::Guests;
use crate::lock::lock;
use crate::record::{self, Record, SandboxState, Store, Volume};
use crate::sandbox::Sandbox;
use crate::time::realtime_ns;
use crate::v1::RunSpec;
use crate::{Error, Result, adopt, life, name, network, process, sockets, start, volume};

/// The least memory of a sandbox: with less, no kernel boots and mounts an image.
const LEAST_MEMORY: u64 = slipway_hypervisor::VmSpec::MIN_MEMORY;

/// The most sandboxes that a node keeps, ended ones included, since a list of all must fit into one
/// message.
const MOST_SANDBOXES: usize = 8192;

/// The services and components that a node uses, beside its settings.
pub struct Parts {
    /// The client of the plane.
    pub plane: PlaneClient,
    /// The client of the networks' service.
    pub networks: NetworkClient,
    /// The hypervisor that runs microVMs.
    pub hypervisor: Arc<dyn Hypervisor>,
    /// The provider of kernels and initramfs files.
    pub boot: Arc<dyn Boot>,
    /// The image cache.
    pub images: Cache,
    /// Set if sandboxes outlive the daemon.
    pub keeps: bool,
}

/// A node: the owner of its sandboxes.
pub struct Node {
    /// The node's settings; constant.
    pub config: Config,
    pub(crate) plane: PlaneClient,
    pub(crate) networks: NetworkClient,
    pub(crate) hypervisor: Arc<dyn Hypervisor>,
    pub(crate) guests: Guests,
    files: Files,
    images: Cache,
    /// The lane of calls to the image cache. Another process may hold the lock of the cache's
    /// index, and then one thread may wait for it.
    images_lane: Lane,
    sandboxes: Mutex<BTreeMap<String, Arc<Sandbox>>>,
    uids: Mutex<BTreeSet<u32>>,
    pub(crate) boot: Known,
    changes: watch::Sender<u64>,
    closed: AtomicBool,
    /// Set if sandboxes outlive the daemon.
    pub(crate) keeps: bool,
    opened: Instant,
}

impl Node {
    /// Takes over a node's data directory. If `keeps` says that sandboxes outlive daemons, intact
    /// sandboxes that an earlier daemon left running are adopted. All others are ended and marked
    /// lost. Sandboxes that an earlier daemon left half-made are removed.
    ///
    /// # Errors
    /// [`Error::File`] if the directory cannot be read or created, or the node's threads cannot be
    /// started.
    pub async fn open(config: Config, parts: Parts) -> Result<Arc<Self>> {
        let threads = |error| Error::file("cannot start the threads of", &config.data_dir)(error);
        let (files, guests) = (Files::start().map_err(threads)?, Guests::start().map_err(threads)?);
        let node = Arc::new(Self {
            config,
            plane: parts.plane,
            networks: parts.networks,
            hypervisor: parts.hypervisor,
            guests,
            images: parts.images,
            images_lane: files.lane(),
            sandboxes: Mutex::default(),
            uids: Mutex::default(),
            boot: Known::new(parts.boot, files.lane()),
            files,
            changes: watch::Sender::new(0),
            closed: AtomicBool::new(false),
            keeps: parts.keeps,
            opened: Instant::now(),
        });
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
        let mut loading = tokio::task::JoinSet::new();
        for entry in std::fs::read_dir(&dir).map_err(Error::file("cannot read", &dir))? {
            let entry = entry.map_err(Error::file("cannot read", &dir))?;
            let store = self.store(&entry.file_name().to_string_lossy());
            match store.load() {
                Ok(Some(record)) => {
                    // The user ids in use are marked before any new one is claimed.
                    lock(&self.uids).extend(record.vmm_uid);
                    loading
                        .spawn_on(Arc::clone(self).take_over(record, store), self.guests.runtime());
                }
                Ok(None) => store.remove()?,
                // An unreadable record is not removed: the sandbox may hold volumes, and another
                // version can read it.
                Err(error) => tracing::warn!(%error, "a sandbox is passed over"),
            }
        }
        while let Some(loaded) = loading.join_next().await {
            loaded.unwrap_or_else(|error| Err(Error::Agent(error.to_string())))?;
        }
        self.sweep_run_dirs();
        let live = self.list().into_iter().filter(|sandbox| sandbox.state().is_live());
        network::reconcile(self, live.map(|sandbox| sandbox.id.clone()).collect()).await;
        Ok(())
    }

    /// Adopts a sandbox of an earlier daemon, or releases what is left of it.
    async fn take_over(self: Arc<Self>, record: Record, store: Store) -> Result<()> {
        let id = record.id.clone();
        let sandbox = Sandbox::new(record, store, self.files.lane());
        let record = sandbox.record();
        let started = !matches!(record.state, SandboxState::Created | SandboxState::Starting);
        let mut reason =
            format!("the daemon ended while it {}", if started { "ran" } else { "started" });
        if self.keeps && adopt::may_live(&record) {
            match adopt::adopt(&self, &sandbox).await {
                Ok(running) => {
                    sandbox.update(|record| record.state = SandboxState::Running).await?;
                    tracing::info!(sandbox = sandbox.name, "adopted");
                    lock(&self.sandboxes).insert(id, Arc::clone(&sandbox));
                    tokio::spawn(life::live_on(self, sandbox, running));
                    return Ok(());
                }
                Err(error) => reason = error.to_string(),
            }
        }
        // A created sandbox that was not started is lost, too: the client that would have started
        // it is gone.
        if record.state.is_live() {
            self.release_lost(&sandbox, reason).await?;
        }
        if !sandbox.record().remove {
            lock(&self.sandboxes).insert(id, sandbox);
        } else if self.keeps {
            lock(&self.sandboxes).insert(id, Arc::clone(&sandbox));
            tokio::spawn(life::remove_later(self, sandbox));
        } else {
            remove_files(&sandbox).await?;
        }
        Ok(())
    }

    /// Releases the resources of a dead daemon's sandbox and marks it exited if its exit status was
    /// recorded, and lost otherwise.
    async fn release_lost(&self, sandbox: &Sandbox, reason: String) -> Result<()> {
        if let Err(error) = life::release(self, sandbox).await {
            tracing::warn!(sandbox = sandbox.name, %error, "left by an earlier daemon");
        }
        let recorded = sandbox.update(|record| {
            (record.vm, record.vmm_uid) = (None, None);
            if record.exit_status.is_some() {
                record.state = SandboxState::Exited;
                return;
            }
            record.state = SandboxState::Lost;
            record.exit_status = Some(128 + libc::SIGKILL as u32);
            record.reason = slipway_printable::line(&reason, MOST_MESSAGE);
        });
        recorded.await?;
        sandbox.fanout.close();
        Ok(())
    }

    /// Returns how long ago the daemon took over the node.
    pub(crate) fn age(&self) -> Duration {
        self.opened.elapsed()
    }

    /// Removes run directories without a record, which a daemon that was killed at the wrong moment
    /// leaves.
    fn sweep_run_dirs(&self) {
        let Ok(entries) = std::fs::read_dir(self.config.run_dir.join("s")) else { return };
        for entry in entries.flatten() {
            let id = entry.file_name().to_string_lossy().into_owned();
            if !lock(&self.sandboxes).contains_key(&id) {
                let _ = std::fs::remove_dir_all(entry.path());
            }
        }
    }

    /// Returns the store of sandbox `id`: its persistent files.
    pub fn store(&self, id: &str) -> Store {
        Store::new(&self.config.sandboxes_dir(), id)
    }

    /// Returns the directory of the sockets of sandbox `id`, which exists while the sandbox is
    /// live.
    pub fn run_dir(&self, id: &str) -> PathBuf {
        self.config.run_dir.join("s").join(id)
    }

    /// Records a new sandbox.
    ///
    /// # Errors
    /// An error that says in one line what is wrong with `spec`. Nothing of the sandbox is left
    /// then.
    pub async fn create(&self, spec: &RunSpec) -> Result<Arc<Sandbox>> {
        let lane = self.files.lane();
        let image = self.image(spec).await?;
        let id = name::new_id();
        let store = self.store(&id);
        let (volumes, its) = (spec.volumes.clone(), store.clone());
        let volumes = lane.run(move || volume::check(&volumes, &its)).await?;
        let record = self.record(spec, &image, id.clone(), volumes)?;
        record::check_size(&record)?;
        // An invalid kernel is refused here, since a start with it would fail.
        self.boot.files(record.kernel.as_deref(), record.sockets.is_some()).await?;
        if let Some(engine) = &record.sockets {
            sockets::check(engine).await?;
        }
        let sandbox = Sandbox::new(record, store, lane);
        self.enter(&sandbox)?;
        if let Err(error) = self.keep(&sandbox, spec).await {
            self.abandon(&sandbox).await;
            return Err(error);
        }
        self.settled();
        Ok(sandbox)
    }

    /// Removes a sandbox that was created and is not to be started.
    pub(crate) async fn abandon(&self, sandbox: &Sandbox) {
        for undone in [network::release(self, &sandbox.record()).await, remove_files(sandbox).await]
        {
            if let Err(error) = undone {
                tracing::warn!(sandbox = sandbox.name, %error, "left by a sandbox not started");
            }
        }
        lock(&self.sandboxes).remove(&sandbox.id);
        sandbox.give_up();
        self.settled();
    }

    async fn image(&self, spec: &RunSpec) -> Result<Image> {
        let named = if spec.image_digest.is_empty() { &spec.image } else { &spec.image_digest };
        let (images, asked) = (self.images.clone(), named.clone());
        let found = self.images_lane.run(move || images.get(&asked)).await?;
        found.ok_or_else(|| Error::NoImage(named.clone()))
    }

    /// Adds the sandbox to the table, so that its name is taken.
    fn enter(&self, sandbox: &Arc<Sandbox>) -> Result<()> {
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

    /// Saves a new sandbox's record, then joins its network.
    async fn keep(&self, sandbox: &Sandbox, spec: &RunSpec) -> Result<()> {
        let store = sandbox.store.clone();
        sandbox.lane.run(move || store.create()).await?;
        sandbox.update(|_| {}).await?;
        network::join(self, sandbox, spec).await
    }

    fn record(
        &self,
        spec: &RunSpec,
        image: &Image,
        id: String,
        volumes: Vec<Volume>,
    ) -> Result<Record> {
        let name = if spec.name.is_empty() { name::new_name() } else { spec.name.clone() };
        name::check(&name)?;
        start::accelerator(&spec.accelerator)?;
        let signal = &image.config.stop_signal;
        Ok(Record {
            image: process::or(&spec.image, &image.digest.to_string()),
            image_digest: image.digest.to_string(),
            image_path: image.erofs_path.clone(),
            state: SandboxState::Created,
            created_ns: realtime_ns(),
            exit_status: None,
            reason: String::new(),
            memory_bytes: memory(spec.memory_bytes, self.config.memory_bytes)?,
            cpus: cpus(spec.cpus, self.config.cpus)?,
            hostname: process::or(&spec.hostname, &name),
            process: process::process(&image.config, spec)?,
            stop_signal: process::signal_number(signal).unwrap_or(libc::SIGTERM as u32),
            privileged: spec.privileged,
            read_only: spec.read_only,
            volumes,
            kernel: (!spec.kernel.is_empty()).then(|| PathBuf::from(&spec.kernel)),
            accelerator: process::or(&spec.accelerator, &self.config.accelerator),
            labels: spec.labels.clone().into_iter().collect(),
            remove: spec.remove,
            network: None,
            sockets: (!spec.socket_engine.is_empty()).then(|| PathBuf::from(&spec.socket_engine)),
            vmm_uid: None,
            vm: None,
            timeline: Timeline::new(name.clone()),
            id,
            name,
        })
    }

    /// Refuses new sandboxes from now on: the daemon is about to end, and they would lose their
    /// disks.
    pub fn close(&self) {
        self.closed.store(true, Ordering::Relaxed);
    }

    /// Starts a created sandbox. Returns at once; a task on the guests' thread runs the sandbox to
    /// its end.
    pub fn start(self: &Arc<Self>, sandbox: &Arc<Sandbox>) {
        self.guests.spawn(life::live(Arc::clone(self), Arc::clone(sandbox)));
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
            && !(self.keeps && matches!(state, SandboxState::Running | SandboxState::Stopping))
    }

    /// Notifies watchers that a sandbox was created, ended or was removed.
    pub(crate) fn settled(&self) {
        self.changes.send_modify(|count| *count += 1);
    }

    /// Returns a counter that changes whenever a sandbox is created, ends or is removed.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// Removes a sandbox and all of its files. With `force`, kills it first if it is live.
    ///
    /// # Errors
    /// [`Error::WrongState`] if the sandbox is live and `force` is not set.
    pub async fn remove(&self, id: &str, force: bool) -> Result<()> {
        let sandbox = self.find(id)?;
        if sandbox.state().is_live() {
            if !force {
                return Err(
                    sandbox.wrong_state("`slipway stop` ends it, `slipway rm -f` removes it")
                );
            }
            sandbox.kill();
            sandbox.wait_state(|state| !state.is_live()).await;
        }
        remove_files(&sandbox).await?;
        lock(&self.sandboxes).remove(&sandbox.id);
        self.settled();
        Ok(())
    }

    pub(crate) fn claim_uid(&self) -> Result<u32> {
        let (base, count) = (self.config.vmm_uid_base, self.config.vmm_uid_count);
        let mut taken = lock(&self.uids);
        let free = (base..base.saturating_add(count)).find(|uid| !taken.contains(uid));
        let uid = free.ok_or(Error::Full(count))?;
        taken.insert(uid);
        Ok(uid)
    }

    pub(crate) fn return_uid(&self, uid: u32) {
        lock(&self.uids).remove(&uid);
    }
}

async fn remove_files(sandbox: &Sandbox) -> Result<()> {
    let store = sandbox.store.clone();
    sandbox.lane.run(move || store.remove()).await
}

fn memory(asked: u64, otherwise: u64) -> Result<u64> {
    let bytes = if asked == 0 { otherwise } else { asked };
    if bytes < LEAST_MEMORY {
        return Err(Error::Invalid(format!(
            "{} of memory is too little for a sandbox: at least {} MiB",
            if bytes < 1 << 20 { format!("{bytes} bytes") } else { format!("{} MiB", bytes >> 20) },
            LEAST_MEMORY >> 20
        )));
    }
    let host = rustix::system::sysinfo();
    let total = (host.totalram as u64).saturating_mul(u64::from(host.mem_unit));
    if bytes > total {
        return Err(Error::Invalid(format!(
            "{} MiB of memory is more than this host has, {} MiB",
            bytes >> 20,
            total >> 20
        )));
    }
    Ok(bytes.next_multiple_of(1 << 20))
}

fn cpus(asked: u32, otherwise: u32) -> Result<u32> {
    let cpus = if asked == 0 { otherwise } else { asked };
    if cpus > 64 {
        return Err(Error::Invalid(format!("{cpus} CPUs are too many for a sandbox: at most 64")));
    }
    Ok(cpus)
}
