//! `slipway daemon`: serves the node's plane and its sandboxes behind one Unix socket.
//!
//! `serve` goes through the steps in order:
//! 1. the directories, and their locks, which keep other daemons away (`claim`);
//! 2. the settings (`check_settings`), and a socket that no client finds yet (`connection`);
//! 3. the plane ([`Plane::with_keeper`] takes over endpoints), and the socket of its pool;
//! 4. all else that is served (`Served::open`): pools of virtual functions, networks, sandboxes;
//! 5. the socket's own name (`serve_clients`), from which on clients find the daemon.
//!
//! From then on `end` looks for a reason to end. `docs/walks/restart.md` has the steps of 3 and 4.

mod claim;
mod connection;
mod settings;

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use slipway_network::Networks;
use slipway_plane::{Plane, VirtualFunctions};
use slipway_plane_api::network_v1::networks_server::NetworksServer;
use slipway_plane_api::v1::plane_server::PlaneServer;
use slipway_plane_api::vf_v1::virtual_functions_server::VirtualFunctionsServer;
use slipway_runtime::boot::Installed;
use slipway_runtime::host_copies::LARGEST_REQUEST;
use slipway_runtime::traces::{self, Collector};
use slipway_runtime::v1::sandboxes_server::SandboxesServer;
use slipway_runtime::v1::snapshots_server::SnapshotsServer;
use slipway_runtime::v1::templates_server::TemplatesServer;
use slipway_runtime::{
    Config, Node, Parts, Service, SnapshotService, TemplateService, layers_of_node, old_layers,
};
use slipway_telemetry::trace::Tracer;
use tokio::net::UnixListener;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;
use tonic::transport::server::Router;

use self::connection::Counted;
use self::settings::{check_settings, poll_budget_of, reach};
use crate::args::DaemonArgs;
use crate::client::need_root;
use crate::vmm::vmms;
use crate::{image, keeper, systemd};

/// The time without clients and work after which an embedded daemon ends.
const IDLE: Duration = Duration::from_secs(5);

/// The time that clients have to receive their last replies when the daemon ends.
const FAREWELL: Duration = Duration::from_secs(5);

/// The time for last replies where sandboxes outlive the daemon: clients then look for the next
/// one.
const SHORT_FAREWELL: Duration = Duration::from_millis(300);

/// The mode of the daemon's directories: VMMs run as other users, and pass through these
/// directories to their own without reading them.
const PASS_THROUGH: u32 = 0o711;

/// The life of a daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    /// A client started the daemon, which ends when it is idle. It is not restarted, so nothing is
    /// kept for the next one.
    Embedded,
    /// The daemon ends when it is told to, with all that it serves.
    Standalone,
    /// The daemon ends when it is told to; the next one takes over what it serves.
    Kept,
}

impl Mode {
    /// Returns the mode that settings and arguments ask for.
    fn of(config: &Config, args: &DaemonArgs) -> Self {
        match (args.ends_when_idle, config.keeper) {
            (true, _) => Self::Embedded,
            (false, false) => Self::Standalone,
            (false, true) => Self::Kept,
        }
    }

    /// Returns whether the daemon ends by itself when it has no clients and no work.
    fn ends_when_idle(self) -> bool {
        self == Self::Embedded
    }

    /// Returns whether endpoints and sandboxes outlive the daemon.
    fn keeps(self) -> bool {
        self == Self::Kept
    }
}

/// Runs the daemon until a signal ends it, or, as [`Mode::Embedded`], until the daemon is idle.
/// With `--check` it looks at the settings only. Returns the exit status: 0 also where another
/// daemon serves or is to serve, and this one ends at once.
///
/// # Errors
/// The error of the first step that failed.
pub async fn serve(config: Config, args: &DaemonArgs) -> Result<i32> {
    let mode = Mode::of(&config, args);
    let poll_budget = poll_budget_of(&config, args)?;
    if args.check {
        check_settings(&config)?;
        Collector::find(&config, |_| None)?;
        return Ok(0);
    }
    need_root("running the daemon (it makes control groups and runs VMMs as other users)")?;
    make_directories(&config)?;
    if mode.ends_when_idle() && keeper::waits(&config) {
        // The keeper's state is of no use to a daemon that ends when idle. The caller waits for
        // another daemon.
        eprintln!("slipway: the node's keeper waits for its daemon; `slipway daemon` starts it");
        return Ok(0);
    }
    let locks = claim::directories(&config, mode.ends_when_idle())?;
    let Some(_locks) = locks else { return Ok(0) };
    raise_descriptor_limit();
    check_settings(&config)?;
    let collector = Collector::find(&config, |name| std::env::var(name).ok())?;
    let listener = listen_unseen(&config)?;
    if let Err(error) = old_layers::close(&config.cache_dir()) {
        tracing::warn!(%error, "other users can lock volatile layers");
    }
    let plane = plane(&config, poll_budget, mode)?;
    let _pool = serve_pool(&config, &plane)?;
    let signals = Signals::catch()?;
    let served = Served::open(&config, plane, traces::start(collector), mode).await?;
    let networks = Arc::clone(&served.networks);
    serve_clients(served, &config, listener, mode, signals).await?;
    networks.close().await;
    if mode.keeps() {
        // Exits without ending endpoints and sandboxes: the next daemon takes them over.
        std::process::exit(0);
    }
    Ok(0)
}

/// Lets clients find the socket, and serves them until the daemon ends.
async fn serve_clients(
    served: Served,
    config: &Config,
    listener: UnixListener,
    mode: Mode,
    signals: Signals,
) -> Result<()> {
    let router = served.router(mode);
    let socket = config.socket();
    std::fs::rename(unseen(config), &socket)?;
    // A DEL of the CNI plugin finds this daemon from here on. Earlier ones may have left notes,
    // which are carried out now.
    served.networks.catch_up().await;
    tracing::info!(socket = %socket.display(), "serving");
    systemd::ready();
    tokio::spawn(Arc::clone(&served.node).remove_unused_images());
    let connections = watch::Sender::new(0_usize);
    let incoming = Counted::incoming(listener, connections.clone());
    let (stop, stopped) = watch::channel(false);
    let reasons = EndReasons { connections, mode, signals };
    let watcher = tokio::spawn(end(served, reasons, socket, stop));
    let farewell = if mode.keeps() { SHORT_FAREWELL } else { FAREWELL };
    let serving = router.serve_with_incoming_shutdown(incoming, told(stopped.clone()));
    tokio::select! {
        outcome = serving => outcome?,
        // A suspended client would delay the end for ever.
        () = async { told(stopped).await; tokio::time::sleep(farewell).await } => {}
    }
    watcher.await?;
    Ok(())
}

/// Returns the directory of the sockets of virtual functions.
fn functions_dir(config: &Config) -> PathBuf {
    config.run_dir.join("vf")
}

fn make_directories(config: &Config) -> Result<()> {
    make_directory(&config.data_dir)?;
    make_directory(&config.run_dir)?;
    make_directory(&config.ports_dir())?;
    make_directory(&functions_dir(config))
}

fn make_directory(dir: &Path) -> Result<()> {
    std::fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
    std::fs::set_permissions(dir, std::fs::Permissions::from_mode(PASS_THROUGH))
        .with_context(|| format!("cannot set the permissions of {}", dir.display()))
}

/// Returns the temporary path of the daemon's socket.
fn unseen(config: &Config) -> PathBuf {
    config.run_dir.join(".slipway.sock.new")
}

/// Listens under a temporary name, so that no client connects before the daemon serves. Removes the
/// socket that an earlier daemon left.
fn listen_unseen(config: &Config) -> Result<UnixListener> {
    let unseen = unseen(config);
    let _ = std::fs::remove_file(&unseen);
    let _ = std::fs::remove_file(config.socket());
    connection::listen(&unseen).with_context(|| format!("cannot listen on {}", unseen.display()))
}

/// Starts the plane. If daemons keep what they serve, it takes over what the last one left.
fn plane(config: &Config, poll_budget: Duration, mode: Mode) -> Result<Plane> {
    let pool = config.uses_pool()?.then_some(config.pool_bytes);
    let reactors = config.reactors;
    let overlays = layers_of_node(config);
    let late_zeroing = config.late_zeroing;
    let spare_bytes = if config.spare_forks > 0 { config.pool_bytes } else { 0 };
    let settings = slipway_plane::Settings {
        reactors,
        poll_budget,
        pool,
        late_zeroing,
        templates: true,
        spare_bytes,
        overlays,
    };
    tracing::info!(limit_bytes = overlays, "memory for root layers");
    if !mode.keeps() {
        return Ok(Plane::new(settings)?);
    }
    let keeper = keeper::connect(config)?;
    let witness = config.run_dir.join("io.lock");
    let plane = Plane::with_keeper(settings, keeper, &witness);
    plane.context("cannot go on with what the last daemon left with the keeper")
}

/// Serves the pool of memory, if there is one, as long as the returned value lives.
fn serve_pool(config: &Config, plane: &Plane) -> Result<impl Sized + use<>> {
    let server = plane.pool().map(|pool| pool.listen(&config.pool_socket())).transpose();
    server.context("cannot serve the pool of memory")
}

/// Returns once the daemon is told to stop.
async fn told(mut stopped: watch::Receiver<bool>) {
    // The end of the sender means stop, too.
    let _ = stopped.wait_for(|stop| *stop).await;
}

/// Raises the descriptor limit of this process to the hard limit: a sandbox takes about thirty
/// descriptors, so the usual soft limit of 1024 would allow about thirty sandboxes.
pub(crate) fn raise_descriptor_limit() {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    if let Err(error) = setrlimit(Resource::Nofile, limit) {
        tracing::warn!(%error, "the descriptor limit stays");
    }
}

/// Opens the networks, which use the plane and the pools only by their interfaces, over socket
/// pairs within this process.
async fn open_networks(
    config: &Config,
    (plane, functions): (&Plane, &VirtualFunctions),
) -> Result<Networks> {
    let plane = slipway_plane_api::PlaneClient::new(plane.connect().await?);
    let functions = slipway_plane_api::VfClient::new(functions.connect().await?);
    let settings = slipway_network::Settings {
        dir: config.networks_dir(),
        ports_dir: config.ports_dir(),
        table: filter_table(config),
        resolv_conf: "/etc/resolv.conf".into(),
        reach: reach(config)?,
        forwarding: slipway_network::FORWARDING_FILE.into(),
    };
    Ok(Networks::open(settings, plane)?.with_functions(functions))
}

/// Returns the name of the packet filter's table. Each data directory, and so each daemon, has its
/// own.
fn filter_table(config: &Config) -> String {
    if config.data_dir == Config::default().data_dir {
        return "slipway".to_owned();
    }
    // FNV-1a: short, and stable across builds.
    let bytes = config.data_dir.as_os_str().as_encoded_bytes();
    let mix = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
    format!("slipway_{:016x}", bytes.iter().fold(0xcbf2_9ce4_8422_2325, mix))
}

/// Opens the node, which uses the plane and the networks only by their interfaces.
async fn open_node(
    config: &Config,
    (plane, functions): (&Plane, &VirtualFunctions),
    networks: &Arc<Networks>,
    tracer: &Tracer,
    mode: Mode,
) -> Result<Arc<Node>> {
    let vmms = vmms(config)?;
    // A VMM that is missing is reported here, where its user looks first.
    vmms.check().await?;
    let parts = Parts {
        plane: slipway_plane_api::PlaneClient::new(plane.connect().await?),
        networks: slipway_plane_api::NetworkClient::new(networks.connect().await?),
        functions: slipway_plane_api::VfClient::new(functions.connect().await?),
        hypervisor: Arc::new(vmms),
        boot: Arc::new(Installed(config.clone())),
        images: image::cache(config)?,
        tracer: tracer.clone(),
        keeps: mode.keeps(),
    };
    Ok(Node::open(config.clone(), parts).await?)
}

/// All that a daemon serves.
struct Served {
    plane: Plane,
    functions: VirtualFunctions,
    networks: Arc<Networks>,
    node: Arc<Node>,
    tracer: Tracer,
}

impl Served {
    /// Opens what is served beside the plane. `tracer` records calls.
    async fn open(config: &Config, plane: Plane, tracer: Tracer, mode: Mode) -> Result<Self> {
        // Beside the sockets: a reboot ends all owners, and empties this directory.
        let ledger = config.run_dir.join("vf.ledger");
        let functions = VirtualFunctions::open(plane.clone(), &functions_dir(config), &ledger);
        let networks = Arc::new(open_networks(config, (&plane, &functions)).await?);
        let node = open_node(config, (&plane, &functions), &networks, &tracer, mode).await?;
        Ok(Self { plane, functions, networks, node, tracer })
    }

    /// Returns the gRPC services.
    fn router(&self, mode: Mode) -> Router {
        let tracer = self.tracer.clone();
        let networks = slipway_network::Service::new(Arc::clone(&self.networks), tracer);
        let sandboxes = Service::new(Arc::clone(&self.node), mode.ends_when_idle());
        tonic::transport::Server::builder()
            .initial_stream_window_size(slipway_plane_api::STREAM_WINDOW)
            .initial_connection_window_size(slipway_plane_api::CONNECTION_WINDOW)
            .add_service(PlaneServer::new(self.plane.service()))
            .add_service(NetworksServer::new(networks))
            .add_service(SandboxesServer::new(sandboxes).max_decoding_message_size(LARGEST_REQUEST))
            .add_service(TemplatesServer::new(TemplateService(Arc::clone(&self.node))))
            .add_service(SnapshotsServer::new(SnapshotService(Arc::clone(&self.node))))
            .add_service(VirtualFunctionsServer::new(self.functions.clone()))
    }
}

/// The things that show whether a daemon is to end: signals, and in some modes that it is idle.
struct EndReasons {
    /// The number of clients' connections.
    connections: watch::Sender<usize>,
    mode: Mode,
    signals: Signals,
}

/// The signals that ask a daemon to end. From [`Signals::catch`] on they do not end the process by
/// themselves.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    fn catch() -> Result<Self> {
        let catch = |kind| signal(kind).context("cannot handle signals");
        let (terminate, interrupt) = (SignalKind::terminate(), SignalKind::interrupt());
        Ok(Self { terminate: catch(terminate)?, interrupt: catch(interrupt)? })
    }

    /// Returns once one of them has come since [`Signals::catch`].
    async fn come(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

/// Waits for a reason to end, then ends the sandboxes that do not outlive this daemon, then sets
/// `stop`.
async fn end(served: Served, reasons: EndReasons, socket: PathBuf, stop: watch::Sender<bool>) {
    let EndReasons { connections, mode, mut signals } = reasons;
    tokio::select! {
        () = signals.come() => tracing::info!("asked to end"),
        () = idle(&served, &connections), if mode.ends_when_idle() => {
            tracing::info!("idle, ending");
        }
    }
    // From here on no new client finds this daemon; clients that are connected are served to the
    // end.
    let _ = std::fs::remove_file(&socket);
    let node = served.node;
    node.close();
    // A sandbox that is just being created is live, too.
    let live: Vec<_> = node.list().into_iter().filter(|one| node.ends_with_daemon(one)).collect();
    live.iter().for_each(|sandbox| sandbox.kill());
    for sandbox in live {
        sandbox.wait_state(|state| !state.is_live()).await;
    }
    node.close_spares().await;
    let _ = tokio::task::spawn_blocking(move || node.close_cgroups()).await;
    let _ = stop.send(true);
}

/// Returns after [`IDLE`] without work and without connections.
async fn idle(served: &Served, connections: &watch::Sender<usize>) {
    let Served { plane, functions, networks, node, .. } = served;
    let mut connected = connections.subscribe();
    let mut changes = node.changes();
    loop {
        // Both are marked as seen before the state is read: a change while it is read begins
        // another turn. Endpoints, disks, memory ports and attachments change by requests over
        // connections, which `connected` covers, and with sandboxes, which `changes` covers.
        let connected_now = *connected.borrow_and_update();
        changes.borrow_and_update();
        let plane_used = !plane.list().is_empty()
            || !plane.list_disks().is_empty()
            || plane.fabric().count_ports() > 0;
        let used = plane_used || functions.is_in_use() || networks.is_attached().await;
        let busy = node.live() > 0 || connected_now > 0 || used;
        tokio::select! {
            () = tokio::time::sleep(IDLE), if !busy => return,
            // Neither sender goes away while the node is borrowed here.
            _ = connected.changed() => {}
            _ = changes.changed() => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_daemon_that_ends_when_idle_keeps_nothing() {
        let mode = |ends_when_idle, keeper| {
            let config = Config { keeper, ..Config::default() };
            Mode::of(&config, &DaemonArgs { ends_when_idle, poll_budget: None, check: false })
        };
        assert_eq!((mode(true, true), mode(true, false)), (Mode::Embedded, Mode::Embedded));
        assert!(mode(true, true).ends_when_idle() && !mode(true, true).keeps());
        assert_eq!((mode(false, true), mode(false, false)), (Mode::Kept, Mode::Standalone));
        assert!(mode(false, true).keeps() && !mode(false, true).ends_when_idle());
    }

    /// Makes `in_a_child_process` do what it is for.
    const CHILD: &str = "SLIPWAY_TEST_SIGNALS";

    /// A process of its own, since other tests of this program handle signals too.
    #[test]
    fn a_signal_that_came_early_is_not_lost() {
        let mut child = std::process::Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", "daemon::tests::in_a_child_process"]).env(CHILD, "1");
        assert!(child.status().unwrap().success());
    }

    #[tokio::test]
    async fn in_a_child_process() {
        if std::env::var_os(CHILD).is_none() {
            return;
        }
        let mut signals = Signals::catch().unwrap();
        rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::TERM)
            .unwrap();
        signals.come().await;
    }
}
