//! A daemon's node and service on a control thread of their own, as in `slipway daemon`, with
//! stand-ins for the plane, the networks and the VMM. Each test decides what listens at the agent's
//! socket in the guest's place.

#![allow(dead_code)] // Each test uses a part of it.

pub mod collector;
pub mod cpus;
pub mod guest;
pub mod memory;
pub mod silent;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use slipway_hypervisor::{
    Accel, BoxFuture, Capabilities, CpuSlot, Hypervisor, LaunchTimes, LeftVm, MemoryDevice,
    PageSink, Vm, VmEvent, VmExit, VmRecord, VmSpec,
};
use slipway_image::{Cache, ImageConfig, Limits};
use slipway_plane_api::{NetworkClient, PlaneClient, VfClient};
use slipway_runtime::boot::{Boot, BootFiles, Needs};
use slipway_runtime::traces::{self, Collector};
use slipway_runtime::v1::sandboxes_server::SandboxesServer;
use slipway_runtime::v1::snapshots_server::SnapshotsServer;
use slipway_runtime::v1::{self, run_in, run_out};
use slipway_runtime::{Config, Node, Parts, SandboxClient, Service, SnapshotService};
use tokio::net::UnixListener;
use tokio::sync::{broadcast, oneshot, watch};
use tokio_stream::wrappers::UnixListenerStream;

/// A time that only a test that is stuck exceeds, even on a busy machine.
pub const LONG: Duration = Duration::from_secs(300);

/// The name of a sandbox whose VMM copies its memory ahead of a save for ever.
pub const COPIES_FOR_EVER: &str = "copies-for-ever";

const DIGEST: &str = "sha256:2222222222222222222222222222222222222222222222222222222222222222";
const LAYER_BYTES: u64 = 1 << 20;

/// The stand-in for a sandbox's guest, given the listening socket of the agent and the sandbox's
/// name. It ends with the connection.
pub type Guests = Arc<dyn Fn(std::os::unix::net::UnixListener, &str) + Send + Sync>;

/// A node with its service. Dropping this ends it.
pub struct Daemon {
    pub dir: tempfile::TempDir,
    pub client: SandboxClient,
    _stop: oneshot::Sender<()>,
}

impl Daemon {
    /// Starts a daemon whose sandboxes have `guests`. A launch and a request to join a network wait
    /// until `gate` is open.
    pub async fn start(guests: Guests, gate: watch::Receiver<bool>) -> Self {
        Self::start_in(tempfile::tempdir().unwrap(), guests, gate).await
    }

    /// Starts a daemon in `dir`, which may have the sandboxes of an earlier one
    /// ([`sandbox_dir`], [`run_dir`]).
    pub async fn start_in(
        dir: tempfile::TempDir,
        guests: Guests,
        gate: watch::Receiver<bool>,
    ) -> Self {
        Self::start_as(dir, guests, gate, false).await
    }

    /// Starts a daemon in `dir`. If it `keeps` sandboxes, it adopts them once `gate` is open.
    pub async fn start_as(
        dir: tempfile::TempDir,
        guests: Guests,
        gate: watch::Receiver<bool>,
        keeps: bool,
    ) -> Self {
        let config = config(dir.path());
        prepare(&config);
        let socket = config.socket();
        let (stop, stopped) = oneshot::channel();
        let (serves, served) = oneshot::channel();
        std::thread::Builder::new()
            .name("control".to_owned())
            .spawn(move || {
                let runtime =
                    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
                runtime.block_on(serve((config, keeps), guests, gate, serves, stopped));
                runtime.shutdown_background();
            })
            .unwrap();
        served.await.unwrap();
        let channel = slipway_plane_api::connect(&socket).await.unwrap();
        Self { dir, client: SandboxClient::new(channel), _stop: stop }
    }

    /// Starts a daemon whose launches do not wait.
    pub async fn with(guests: Guests) -> Self {
        Self::start(guests, watch::channel(true).1).await
    }

    /// Makes a client with a connection of its own.
    pub async fn another(&self) -> SandboxClient {
        SandboxClient::new(self.channel().await)
    }

    /// Makes a connection of its own to the daemon.
    pub async fn channel(&self) -> tonic::transport::Channel {
        slipway_plane_api::connect(&config(self.dir.path()).socket()).await.unwrap()
    }

    pub fn sandbox_dir(&self, id: &str) -> PathBuf {
        sandbox_dir(self.dir.path(), id)
    }

    /// Starts a sandbox. Returns its id and its further messages.
    pub async fn run(&self, name: &str) -> (String, tonic::Streaming<v1::RunOut>) {
        let replies = run_with(self.client.clone(), spec(name)).await.unwrap();
        let mut replies = replies.into_inner();
        let first = replies.message().await.unwrap().unwrap();
        let Some(run_out::Kind::Created(created)) = first.kind else { panic!("{first:?}") };
        (created.id, replies)
    }

    /// Runs a sandbox from its start to its end, and returns its exit.
    pub async fn run_to_end(&self, name: &str) -> v1::Exit {
        let (_, replies) = self.run(name).await;
        exit_of(replies).await
    }

    pub async fn state(&self, name: &str) -> v1::Sandbox {
        let list = self.client.clone().list(v1::Empty {}).await.unwrap().into_inner();
        list.sandboxes.into_iter().find(|one| one.name == name).unwrap()
    }

    pub async fn wait_state(&self, name: &str, state: &str) -> v1::Sandbox {
        let begun = Instant::now();
        loop {
            let sandbox = self.state(name).await;
            if sandbox.state == state {
                return sandbox;
            }
            assert!(begun.elapsed() < LONG, "{name} is {}: {}", sandbox.state, sandbox.reason);
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Returns the number of sandboxes that the daemon lists.
    pub async fn count(&self) -> usize {
        self.client.clone().list(v1::Empty {}).await.unwrap().into_inner().sandboxes.len()
    }

    pub async fn remove(&self, name: &str) {
        let request =
            v1::RemoveRequest { name: name.to_owned(), force: true, ..Default::default() };
        let removed = tokio::time::timeout(LONG, self.client.clone().remove(request)).await;
        removed.expect("it is removed in time").unwrap();
    }

    /// Asks for the list of sandboxes `count` times, and returns how long each call took.
    pub async fn list(&self, count: usize) -> Latencies {
        let mut latencies = Vec::with_capacity(count);
        for _ in 0..count {
            let begun = Instant::now();
            let listed = tokio::time::timeout(LONG, self.client.clone().list(v1::Empty {})).await;
            listed.expect("the list is answered").unwrap();
            latencies.push(begun.elapsed());
        }
        latencies.sort();
        Latencies(latencies)
    }
}

/// Removes the control groups of sandboxes that a test left running. No process is in them.
impl Drop for Daemon {
    fn drop(&mut self) {
        let sandboxes = std::fs::read_dir(config(self.dir.path()).sandboxes_dir());
        for sandbox in sandboxes.into_iter().flatten().flatten() {
            for hierarchy in ["", "memory", "cpu", "pids"] {
                let groups = Path::new("/sys/fs/cgroup").join(hierarchy).join("slipway");
                let _ = std::fs::remove_dir(groups.join(sandbox.file_name()));
            }
        }
    }
}

/// Returns the request for a sandbox of the test's image.
pub fn spec(name: &str) -> v1::RunSpec {
    v1::RunSpec {
        name: name.to_owned(),
        image_digest: DIGEST.to_owned(),
        command: vec!["/bin/true".to_owned()],
        ..Default::default()
    }
}

/// Asks for a sandbox. Returns once the sandbox is created.
pub async fn run_with(
    mut client: SandboxClient,
    spec: v1::RunSpec,
) -> Result<tonic::Response<tonic::Streaming<v1::RunOut>>, tonic::Status> {
    let first = v1::RunIn { kind: Some(run_in::Kind::Run(spec)) };
    client.run(tokio_stream::once(first)).await
}

/// Returns the exit at the end of a sandbox's stream of replies.
pub async fn exit_of(mut replies: tonic::Streaming<v1::RunOut>) -> v1::Exit {
    let end = async {
        while let Some(message) = replies.message().await.unwrap() {
            if let Some(run_out::Kind::Exit(exit)) = message.kind {
                return exit;
            }
        }
        panic!("it ended without an exit");
    };
    tokio::time::timeout(LONG, end).await.expect("it ends in time")
}

/// The latencies of calls, sorted.
pub struct Latencies(Vec<Duration>);

impl std::fmt::Display for Latencies {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let at = |share: usize| self.0[(self.0.len() * share / 100).min(self.0.len() - 1)];
        write!(f, "p50 {:?}, p99 {:?}, most {:?}", at(50), at(99), at(100))
    }
}

/// Returns the directory of sandbox `id` of a daemon in `dir`.
pub fn sandbox_dir(dir: &Path, id: &str) -> PathBuf {
    config(dir).sandboxes_dir().join(id)
}

/// Returns the run directory of sandbox `id` of a daemon in `dir`.
pub fn run_dir(dir: &Path, id: &str) -> PathBuf {
    config(dir).run_dir.join("s").join(id)
}

fn config(dir: &Path) -> Config {
    let collector = collector::socket(dir);
    let otlp_endpoint = match collector.exists() {
        true => format!("unix:{}", collector.display()),
        false => String::new(),
    };
    Config {
        otlp_endpoint,
        run_dir: dir.join("run"),
        data_dir: dir.join("data"),
        volatile_layer_bytes: LAYER_BYTES,
        network: "none".to_owned(),
        boot_timeout_s: 3600,
        accelerator: "tcg".to_owned(),
        cgroup_pool: 0,
        ..Config::default()
    }
}

/// Puts an image into the cache, and a volatile layer that needs no mkfs.
fn prepare(config: &Config) {
    let cache = config.cache_dir();
    let layers = cache.join("layers");
    for dir in [&config.run_dir, &layers, &config.images_dir()] {
        std::fs::create_dir_all(dir).unwrap();
    }
    std::fs::write(layers.join(format!("{LAYER_BYTES}.ext4")), "").unwrap();
    let hex = DIGEST.trim_start_matches("sha256:");
    std::fs::write(config.images_dir().join(format!("{hex}.erofs")), "").unwrap();
    let image = serde_json::json!({
        "config": ImageConfig::default(), "size_bytes": 0, "created": null, "added": 0,
        "last_used": 0,
    });
    let index = serde_json::json!({ "version": 1, "images": { DIGEST: image }, "references": {} });
    std::fs::write(config.images_dir().join("index.json"), index.to_string()).unwrap();
}

async fn serve(
    (config, keeps): (Config, bool),
    guests: Guests,
    gate: watch::Receiver<bool>,
    serves: oneshot::Sender<()>,
    stopped: oneshot::Receiver<()>,
) {
    let images = Cache::open(config.images_dir(), Limits::default()).unwrap();
    let silent = silent::serve(&config.run_dir.join("silent.sock"), gate.clone()).await;
    let parts = Parts {
        plane: PlaneClient::new(silent.clone()),
        networks: NetworkClient::new(silent.clone()),
        functions: VfClient::new(silent),
        hypervisor: Arc::new(StandIn { guests, gate }),
        boot: Arc::new(Nothing),
        images,
        tracer: traces::start(Collector::find(&config, |_| None).unwrap()),
        keeps,
    };
    let listener = UnixListener::bind(config.socket()).unwrap();
    let node = Node::open(config, parts).await.unwrap();
    let snapshots = SnapshotsServer::new(SnapshotService(Arc::clone(&node)));
    let service = SandboxesServer::new(Service::new(node, false));
    let _ = serves.send(());
    tonic::transport::Server::builder()
        .add_service(service)
        .add_service(snapshots)
        .serve_with_incoming_shutdown(UnixListenerStream::new(listener), async {
            let _ = stopped.await;
        })
        .await
        .unwrap();
}

struct Nothing;

impl Boot for Nothing {
    fn files(&self, _: Option<&Path>, _: Needs) -> slipway_runtime::Result<BootFiles> {
        Ok(BootFiles { kernel: "/dev/null".into(), initramfs: "/dev/null".into() })
    }
}

/// A hypervisor that runs no microVM, but puts a guest at the agent's socket.
struct StandIn {
    guests: Guests,
    gate: watch::Receiver<bool>,
}

impl Hypervisor for StandIn {
    fn name(&self) -> &'static str {
        "stand-in"
    }

    fn overhead<'a>(&'a self, _: &'a VmSpec) -> BoxFuture<'a, slipway_hypervisor::Result<u64>> {
        Box::pin(std::future::ready(Ok(0)))
    }

    fn capabilities<'a>(
        &'a self,
        _: &'a VmSpec,
    ) -> BoxFuture<'a, slipway_hypervisor::Result<Capabilities>> {
        let all = Capabilities { plugs_memory: true, ..Capabilities::default() };
        Box::pin(std::future::ready(Ok(all)))
    }

    fn launch<'a>(
        &'a self,
        spec: &'a VmSpec,
    ) -> BoxFuture<'a, slipway_hypervisor::Result<Box<dyn Vm>>> {
        Box::pin(async move {
            self.begin(&spec.agent_socket, &spec.name).await;
            let record = VmRecord {
                hypervisor: "stand-in".into(),
                // No process has this id, so that the code that ends leftover VMMs finds none.
                pid: 0,
                start_time_ticks: 0,
                boot_id: String::new(),
                plugged: Default::default(),
            };
            let (killed, liar) = (watch::Sender::new(false), cpus::Liar::of(&spec.name));
            let memory = memory::HotMemory::of(spec);
            let copies_for_ever = spec.name == COPIES_FOR_EVER;
            Ok(Box::new(NoVm { record, killed, liar, memory, copies_for_ever }) as Box<dyn Vm>)
        })
    }

    fn adopt<'a>(
        &'a self,
        left: &'a LeftVm,
    ) -> BoxFuture<'a, slipway_hypervisor::Result<Box<dyn Vm>>> {
        Box::pin(async move {
            self.begin(&left.agent_socket, "adopted").await;
            let (record, killed) = (left.record.clone(), watch::Sender::new(false));
            let vm = NoVm { record, killed, liar: None, memory: None, copies_for_ever: false };
            Ok(Box::new(vm) as Box<dyn Vm>)
        })
    }
}

impl StandIn {
    /// Waits until the gate is open, and puts the guest of sandbox `name` at the agent's socket.
    async fn begin(&self, agent_socket: &Path, name: &str) {
        let _ = self.gate.clone().wait_for(|open| *open).await;
        let listener = std::os::unix::net::UnixListener::bind(agent_socket).unwrap();
        (self.guests)(listener, name);
    }
}

struct NoVm {
    record: VmRecord,
    killed: watch::Sender<bool>,
    /// Its CPUs, if it lies about them.
    liar: Option<cpus::Liar>,
    /// Its hot-plug memory, if it has some.
    memory: Option<memory::HotMemory>,
    copies_for_ever: bool,
}

impl NoVm {
    /// Returns the answer of the hot-plug memory.
    fn hot<'a, T: Send + 'a>(
        &self,
        answer: impl FnOnce(&memory::HotMemory) -> slipway_hypervisor::Result<T>,
    ) -> BoxFuture<'a, slipway_hypervisor::Result<T>> {
        let none = || Err(slipway_hypervisor::Error::Control("no such call".into()));
        Box::pin(std::future::ready(self.memory.as_ref().map_or_else(none, answer)))
    }

    /// Returns the answer of a VMM with room for CPUs. Others cannot change theirs.
    fn lie<'a, T: Send + 'a>(
        &self,
        answer: impl FnOnce(&cpus::Liar) -> slipway_hypervisor::Result<T>,
    ) -> BoxFuture<'a, slipway_hypervisor::Result<T>> {
        let none = || Err(slipway_hypervisor::Error::Control("no such call".into()));
        Box::pin(std::future::ready(self.liar.as_ref().map_or_else(none, answer)))
    }
}

fn done<'a>() -> BoxFuture<'a, slipway_hypervisor::Result<()>> {
    Box::pin(std::future::ready(Ok(())))
}

impl Vm for NoVm {
    fn record(&self) -> VmRecord {
        self.record.clone()
    }

    fn times(&self) -> Option<LaunchTimes> {
        None
    }

    fn accel(&self) -> Accel {
        // Under emulation no CPU is taken away.
        if self.liar.is_some() { Accel::Kvm } else { Accel::Tcg }
    }

    fn cpus(&self) -> BoxFuture<'_, slipway_hypervisor::Result<Vec<CpuSlot>>> {
        self.lie(cpus::Liar::list)
    }

    fn plug_cpu<'a>(
        &'a self,
        _: &'a str,
        cpu: u32,
    ) -> BoxFuture<'a, slipway_hypervisor::Result<()>> {
        self.lie(|liar| liar.plug(cpu))
    }

    fn unplug<'a>(&'a self, name: &'a str) -> BoxFuture<'a, slipway_hypervisor::Result<()>> {
        self.lie(|liar| liar.unplug(name))
    }

    fn memory_devices(&self) -> BoxFuture<'_, slipway_hypervisor::Result<Vec<MemoryDevice>>> {
        self.hot(memory::HotMemory::list)
    }

    fn set_memory(
        &self,
        device: usize,
        bytes: u64,
    ) -> BoxFuture<'_, slipway_hypervisor::Result<()>> {
        self.hot(|memory| memory.ask(device, bytes))
    }

    fn copy_ahead(&self, _: u64, _: PageSink) -> BoxFuture<'_, slipway_hypervisor::Result<()>> {
        if self.copies_for_ever {
            return Box::pin(std::future::pending());
        }
        let none = slipway_hypervisor::Error::Control("no such call".into());
        Box::pin(std::future::ready(Err(none)))
    }

    fn events(&self) -> broadcast::Receiver<VmEvent> {
        broadcast::Sender::new(1).subscribe()
    }

    fn wait(&self) -> BoxFuture<'_, VmExit> {
        Box::pin(async move {
            let _ = self.killed.subscribe().wait_for(|killed| *killed).await;
            VmExit { code: None, signal: Some(9), reason: None, stderr: String::new() }
        })
    }

    fn power_down(&self) -> BoxFuture<'_, slipway_hypervisor::Result<()>> {
        done()
    }

    fn quit(&self) -> BoxFuture<'_, slipway_hypervisor::Result<()>> {
        done()
    }

    fn pause(&self) -> BoxFuture<'_, slipway_hypervisor::Result<()>> {
        done()
    }

    fn resume(&self) -> BoxFuture<'_, slipway_hypervisor::Result<()>> {
        done()
    }

    fn kill(&self) -> slipway_hypervisor::Result<()> {
        self.killed.send_replace(true);
        Ok(())
    }

    fn detach(&self) {}
}
