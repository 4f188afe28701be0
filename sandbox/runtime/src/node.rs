//! The sandboxes of a node: who is there, what they share, what was left of those before.

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
use crate::record::{self, Record, State, Store, Volume};
use crate::sandbox::{Sandbox, lock};
use crate::time::realtime_ns;
use crate::v1::RunSpec;
use crate::{Error, Result, adopt, name, network, process, sockets, start, volume};

/// Least memory of a sandbox: below it no kernel boots with an image mounted.
const LEAST_MEMORY: u64 = slipway_hypervisor::VmSpec::MIN_MEMORY;

/// Most sandboxes that a node keeps, ended ones included: a list of them is one message.
const MOST_SANDBOXES: usize = 8192;

/// What a node is made of beside its settings.
pub struct Parts {
    /// The plane.
    pub plane: PlaneClient,
    /// The networks.
    pub networks: NetworkClient,
    /// What runs microVMs.
    pub hypervisor: Arc<dyn Hypervisor>,
    /// What guests boot from.
    pub boot: Arc<dyn Boot>,
    /// The image cache.
    pub images: Cache,
    /// Sandboxes outlive the daemon.
    pub keeps: bool,
}

/// A node: the owner of its sandboxes.
pub struct Node {
    /// Its settings; constant.
    pub config: Config,
    pub(crate) plane: PlaneClient,
    pub(crate) networks: NetworkClient,
    pub(crate) hypervisor: Arc<dyn Hypervisor>,
    pub(crate) guests: Guests,
    files: Files,
    images: Cache,
    /// The cache's index has a lock, which somebody else may hold: one thread may wait for it.
    images_lane: Lane,
    sandboxes: Mutex<BTreeMap<String, Arc<Sandbox>>>,
    uids: Mutex<BTreeSet<u32>>,
    pub(crate) boot: Known,
    changes: watch::Sender<u64>,
    closed: AtomicBool,
    /// Sandboxes outlive the daemon.
    pub(crate) keeps: bool,
    opened: Instant,
}

impl Node {
    /// Takes over a node's data directory. Of what an earlier daemon left running, sandboxes that are
    /// whole are adopted if `keeps` says that they outlive daemons; all others are ended and marked
    /// lost. What it left half-made is removed.
    ///
    /// # Errors
    /// [`Error::File`] when the directory cannot be read or made.
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

    /// Reads the directory in place: the daemon serves nobody yet.
    async fn load(self: &Arc<Self>) -> Result<()> {
        let dir = self.config.sandboxes_dir();
        std::fs::create_dir_all(&dir).map_err(Error::file("cannot create", &dir))?;
        // Environments, output and volumes are nobody's but root's.
        let private = std::fs::Permissions::from_mode(0o700);
        std::fs::set_permissions(&dir, private).map_err(Error::file("cannot close", &dir))?;
        let mut loading = tokio::task::JoinSet::new();
        for entry in std::fs::read_dir(&dir).map_err(Error::file("cannot read", &dir))? {
            let entry = entry.map_err(Error::file("cannot read", &dir))?;
            let store = self.store(&entry.file_name().to_string_lossy());
            match store.load() {
                Ok(Some(record)) => {
                    // Before anything takes a new one.
                    lock(&self.uids).extend(record.vmm_uid);
                    loading
                        .spawn_on(Arc::clone(self).take_over(record, store), self.guests.runtime());
                }
                Ok(None) => store.remove()?,
                // Not ours to remove: it may hold volumes, and another version knows it.
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

    /// A sandbox of an earlier daemon lives on, or what is left of it is released.
    async fn take_over(self: Arc<Self>, record: Record, store: Store) -> Result<()> {
        let id = record.id.clone();
        let sandbox = Sandbox::new(record, store, self.files.lane());
        let record = sandbox.record();
        let started = record.state.is_live() && record.state != State::Starting;
        let mut reason =
            format!("the daemon ended while it {}", if started { "ran" } else { "started" });
        if self.keeps && adopt::may_live(&record) {
            match adopt::adopt(&self, &sandbox).await {
                Ok(running) => {
                    sandbox.update(|record| record.state = State::Running).await?;
                    tracing::info!(sandbox = sandbox.name, "adopted");
                    lock(&self.sandboxes).insert(id, Arc::clone(&sandbox));
                    tokio::spawn(start::live_on(self, sandbox, running));
                    return Ok(());
                }
                Err(error) => reason = error.to_string(),
            }
        }
        // One that was only recorded has lost whoever would have started it.
        if record.state.is_live() || record.state == State::Created {
            self.release_lost(&sandbox, reason).await?;
        }
        if !sandbox.record().remove {
            lock(&self.sandboxes).insert(id, sandbox);
        } else if self.keeps {
            lock(&self.sandboxes).insert(id, Arc::clone(&sandbox));
            tokio::spawn(start::remove_later(self, sandbox));
        } else {
            remove_files(&sandbox).await?;
        }
        Ok(())
    }

    /// Gives back what a dead daemon's sandbox holds. Its container had ended, or is lost with it.
    async fn release_lost(&self, sandbox: &Sandbox, reason: String) -> Result<()> {
        if let Err(error) = start::release(self, sandbox).await {
            tracing::warn!(sandbox = sandbox.name, %error, "left by an earlier daemon");
        }
        let recorded = sandbox.update(|record| {
            (record.vm, record.vmm_uid) = (None, None);
            if record.exit_status.is_some() {
                record.state = State::Exited;
                return;
            }
            record.state = State::Lost;
            record.exit_status = Some(128 + libc::SIGKILL as u32);
            record.reason = slipway_printable::line(&reason, MOST_MESSAGE);
        });
        recorded.await?;
        sandbox.fanout.close();
        Ok(())
    }

    /// How long ago the daemon took the node over.
    pub(crate) fn age(&self) -> Duration {
        self.opened.elapsed()
    }

    /// Run directories without a record: a daemon was killed between the two.
    fn sweep_run_dirs(&self) {
        let Ok(entries) = std::fs::read_dir(self.config.run_dir.join("s")) else { return };
        for entry in entries.flatten() {
            let id = entry.file_name().to_string_lossy().into_owned();
            if !lock(&self.sandboxes).contains_key(&id) {
                let _ = std::fs::remove_dir_all(entry.path());
            }
        }
    }

    /// The files of sandbox `id` that last.
    pub fn store(&self, id: &str) -> Store {
        Store::new(&self.config.sandboxes_dir(), id)
    }

    /// The sockets of sandbox `id` while it lives.
    pub fn run_dir(&self, id: &str) -> PathBuf {
        self.config.run_dir.join("s").join(id)
    }

    /// Records a new sandbox.
    ///
    /// # Errors
    /// What is wrong with `spec`, in one line; nothing is left then.
    pub async fn create(&self, spec: &RunSpec) -> Result<Arc<Sandbox>> {
        let lane = self.files.lane();
        let image = self.image(spec).await?;
        let id = name::new_id();
        let store = self.store(&id);
        let (volumes, its) = (spec.volumes.clone(), store.clone());
        let volumes = lane.run(move || volume::check(&volumes, &its)).await?;
        let record = self.record(spec, &image, id.clone(), volumes)?;
        record::check_size(&record)?;
        // A kernel that is none is refused here, not after a start that was bound to fail.
        self.boot.files(record.kernel.as_deref(), record.sockets.is_some()).await?;
        if let Some(engine) = &record.sockets {
            sockets::check(engine).await?;
        }
        let sandbox = Sandbox::new(record, store, lane);
        self.enter(&sandbox)?;
        if let Err(error) = self.keep(&sandbox, spec).await {
            lock(&self.sandboxes).remove(&id);
            let _ = remove_files(&sandbox).await;
            return Err(error);
        }
        self.settled();
        Ok(sandbox)
    }

    async fn image(&self, spec: &RunSpec) -> Result<Image> {
        let named = if spec.image_digest.is_empty() { &spec.image } else { &spec.image_digest };
        let (images, asked) = (self.images.clone(), named.clone());
        let found = self.images_lane.run(move || images.get(&asked)).await?;
        found.ok_or_else(|| Error::NoImage(named.clone()))
    }

    /// Takes the sandbox's name.
    fn enter(&self, sandbox: &Arc<Sandbox>) -> Result<()> {
        let mut sandboxes = lock(&self.sandboxes);
        if self.closed.load(Ordering::Relaxed) {
            return Err(Error::Closed);
        }
        if let Some(other) = sandboxes.values().find(|other| other.name == sandbox.name) {
            let (name, id) = (other.name.clone(), other.id.clone());
            return Err(Error::NameTaken { name, id });
        }
        if sandboxes.len() >= MOST_SANDBOXES {
            return Err(Error::TooMany(MOST_SANDBOXES));
        }
        sandboxes.insert(sandbox.id.clone(), Arc::clone(sandbox));
        Ok(())
    }

    /// Records a sandbox, then its place in a network.
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
            state: State::Created,
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

    /// Takes no new sandboxes from now on: the daemon ends, and they would lose their disks.
    pub fn close(&self) {
        self.closed.store(true, Ordering::Relaxed);
    }

    /// Starts a created sandbox; its life goes on by itself.
    pub fn start(self: &Arc<Self>, sandbox: &Arc<Sandbox>) {
        self.guests.spawn(start::live(Arc::clone(self), Arc::clone(sandbox)));
    }

    /// The sandbox with this name, this id, or the only one whose id begins so.
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

    /// All sandboxes, the oldest first.
    pub fn list(&self) -> Vec<Arc<Sandbox>> {
        let mut all: Vec<_> = lock(&self.sandboxes).values().cloned().collect();
        all.sort_by_cached_key(|sandbox| sandbox.look(|record| record.created_ns));
        all
    }

    /// How many sandboxes hold a VMM.
    pub fn live(&self) -> usize {
        let all = lock(&self.sandboxes);
        all.values().filter(|sandbox| sandbox.state().is_live()).count()
    }

    /// Whether a sandbox is lost with the daemon: it holds a VMM, and none that the next one adopts.
    pub fn ends_with_daemon(&self, sandbox: &Sandbox) -> bool {
        let state = sandbox.state();
        state.is_live() && !(self.keeps && matches!(state, State::Running | State::Stopping))
    }

    /// Tells whoever watches that sandboxes came, ended or went.
    pub(crate) fn settled(&self) {
        self.changes.send_modify(|count| *count += 1);
    }

    /// Changes whenever a sandbox comes, ends or goes.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// Removes a sandbox with all that is left of it.
    ///
    /// # Errors
    /// [`Error::WrongState`] when it is alive and `force` is not set.
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
