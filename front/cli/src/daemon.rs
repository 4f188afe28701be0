//! `slipway daemon`: serves the node's plane and its sandboxes behind one Unix socket.

use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context as TaskContext, Poll};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use slipway_network::Networks;
use slipway_plane::{Plane, VirtualFunctions};
use slipway_plane_api::network_v1::networks_server::NetworksServer;
use slipway_plane_api::v1::plane_server::PlaneServer;
use slipway_plane_api::vf_v1::virtual_functions_server::VirtualFunctionsServer;
use slipway_runtime::boot::Installed;
use slipway_runtime::v1::sandboxes_server::SandboxesServer;
use slipway_runtime::v1::templates_server::TemplatesServer;
use slipway_runtime::{Config, Node, Parts, Service, TemplateService};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{UnixListener, UnixStream};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tonic::transport::server::{Connected, UdsConnectInfo};

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

/// The longest time that a thread which serves devices may poll before it sleeps.
const LONGEST_POLLING: Duration = Duration::from_secs(1);

/// Serves until it is told to end, or, with `ends_when_idle`, until it is idle.
pub async fn serve(config: Config, args: &DaemonArgs) -> Result<i32> {
    let ends_when_idle = args.ends_when_idle;
    let poll_budget = poll_budget_of(&config, args)?;
    need_root("running the daemon (it makes control groups and runs VMMs as other users)")?;
    make_private_dir(&config.data_dir, 0o711)?;
    make_private_dir(&config.run_dir, 0o711)?;
    make_private_dir(&config.ports_dir(), 0o711)?;
    let functions_dir = config.run_dir.join("vf");
    make_private_dir(&functions_dir, 0o711)?;
    if ends_when_idle && keeper::waits(&config) {
        // The keeper's state is of no use to a daemon that ends when idle. The caller waits for
        // another daemon.
        eprintln!("slipway: the node's keeper waits for its daemon; `slipway daemon` starts it");
        return Ok(0);
    }
    let _lock = match lock(&config.lock(), &config)? {
        Lock::Ours(file) => file,
        // Another command was quicker, and its daemon serves this one's caller, too.
        Lock::Theirs(socket) if ends_when_idle && socket == config.socket() => return Ok(0),
        Lock::Theirs(socket) => {
            let (data, socket) = (config.data_dir.display(), socket.display());
            bail!("another daemon has {data}; it serves {socket}");
        }
    };
    // Another daemon's socket and its sandboxes' would be taken for leftovers, too.
    let _run_lock = match lock(&config.run_dir.join("daemon.lock"), &config)? {
        Lock::Ours(file) => file,
        Lock::Theirs(_) => {
            let run = config.run_dir.display();
            bail!("a daemon with another data directory uses {run}; --run-dir names another place")
        }
    };
    raise_descriptor_limit();
    let socket = config.socket();
    // Bound under a temporary name, so that no client connects before the daemon serves.
    let unborn = config.run_dir.join(".slipway.sock.new");
    let _ = std::fs::remove_file(&unborn);
    let _ = std::fs::remove_file(&socket);
    let listener = UnixListener::bind(&unborn)
        .with_context(|| format!("cannot listen on {}", unborn.display()))?;
    std::fs::set_permissions(&unborn, std::fs::Permissions::from_mode(0o600))?;
    let connections = watch::Sender::new(0_usize);
    let (stop, stopped) = watch::channel(false);
    // A daemon that ends when idle is not restarted, so nothing is kept for the next one.
    let keeps = config.keeper && !ends_when_idle;
    let plane = plane(&config, poll_budget, keeps)?;
    // Served as long as this process runs.
    let pool = plane.pool().map(|pool| pool.listen(&config.pool_socket())).transpose();
    let _pool = pool.context("cannot serve the pool of memory")?;
    let router = tonic::transport::Server::builder()
        .initial_stream_window_size(slipway_plane_api::STREAM_WINDOW)
        .initial_connection_window_size(slipway_plane_api::CONNECTION_WINDOW)
        .add_service(PlaneServer::new(plane.service()));
    // Beside the sockets: a reboot ends all owners, and empties this directory.
    let ledger = config.run_dir.join("vf.ledger");
    let functions = VirtualFunctions::open(plane.clone(), &functions_dir, &ledger);
    let networks = Arc::new(open_networks(&config, &plane).await?);
    let node = open_node(&config, (&plane, &functions), &networks, keeps).await?;
    let router = router
        .add_service(NetworksServer::new(slipway_network::Service::new(Arc::clone(&networks))));
    let router =
        router.add_service(SandboxesServer::new(Service::new(Arc::clone(&node), ends_when_idle)));
    let router = router.add_service(TemplatesServer::new(TemplateService(Arc::clone(&node))));
    let router = router.add_service(VirtualFunctionsServer::new(functions.clone()));
    std::fs::rename(&unborn, &socket)?;
    // From here on this daemon removes containers; those that were removed before left notes.
    networks.catch_up().await;
    tracing::info!(socket = %socket.display(), "serving");
    systemd::ready();
    let incoming = Counted::incoming(listener, connections.clone());
    let used = Used { node, plane, functions, networks: Arc::clone(&networks), connections };
    let watcher = tokio::spawn(end(used, ends_when_idle, socket, stop));
    let farewell = if keeps { SHORT_FAREWELL } else { FAREWELL };
    let serving = router.serve_with_incoming_shutdown(incoming, told(stopped.clone()));
    tokio::select! {
        served = serving => served?,
        // A suspended client would delay the end for ever.
        () = async { told(stopped).await; tokio::time::sleep(farewell).await } => {}
    }
    watcher.await?;
    networks.close().await;
    if keeps {
        // Exits without ending endpoints and sandboxes: the next daemon takes them over.
        std::process::exit(0);
    }
    Ok(0)
}

/// Returns the poll budget of the command line, or else of the settings. Fails if it is too long.
fn poll_budget_of(config: &Config, args: &DaemonArgs) -> Result<Duration> {
    let set = Duration::from_micros(config.poll_budget_us.into());
    let budget = args.poll_budget.unwrap_or(set);
    if budget > LONGEST_POLLING {
        bail!("a poll budget of {budget:?} is more than {LONGEST_POLLING:?}");
    }
    Ok(budget)
}

/// Starts the plane. With `keeps` it takes over what the last daemon left.
fn plane(config: &Config, poll_budget: Duration, keeps: bool) -> Result<Plane> {
    let pool = config.uses_pool()?.then_some(config.pool_bytes);
    config.pool_page()?;
    config.shares_roots()?;
    config.cpu_template()?;
    config.check_cgroups()?;
    let reactors = config.reactors;
    let settings = slipway_plane::Settings { reactors, poll_budget, pool, templates: true };
    if !keeps {
        return Ok(Plane::new(settings)?);
    }
    let keeper = keeper::connect(config)?;
    let witness = config.run_dir.join("io.lock");
    let plane = Plane::with_keeper(settings, keeper, &witness);
    plane.context("cannot go on with what the last daemon left with the keeper")
}

async fn told(mut stopped: watch::Receiver<bool>) {
    // The end of the sender means stop, too.
    let _ = stopped.wait_for(|stop| *stop).await;
}

fn make_private_dir(dir: &Path, mode: u32) -> Result<()> {
    std::fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
    // VMMs run as other users and pass through this directory to their own, without reading it.
    std::fs::set_permissions(dir, std::fs::Permissions::from_mode(mode))
        .with_context(|| format!("cannot set the permissions of {}", dir.display()))
}

#[derive(Debug)]
enum Lock {
    /// This daemon's lock. It is released when its file is closed, at the latest by the kernel.
    Ours(slipway_lock::Lock),
    /// Another daemon's lock, and the socket that it serves.
    Theirs(PathBuf),
}

/// Takes the lock of a data or run directory, which allows one daemon for each: a second daemon
/// would take the first one's sandboxes for leftovers.
fn lock(path: &Path, config: &Config) -> Result<Lock> {
    match slipway_lock::Lock::try_take(path) {
        Ok(lock) => {
            let mut file = lock.file();
            file.set_len(0)?;
            file.write_all(config.socket().as_os_str().as_encoded_bytes())?;
            Ok(Lock::Ours(lock))
        }
        // The holder took the lock while the file was readable to everybody, as older versions
        // created it.
        Err(slipway_lock::Error::Held { holders, .. }) if holders.are_strangers() => {
            bail!("{} is locked by {holders}, which is no daemon: end it", path.display())
        }
        Err(slipway_lock::Error::Held { .. }) => {
            let socket = std::fs::read_to_string(path).unwrap_or_default();
            // The other daemon has not written its socket yet: it is starting, most likely for the
            // same command.
            let socket = if socket.is_empty() { config.socket() } else { socket.into() };
            Ok(Lock::Theirs(socket))
        }
        Err(error) => Err(error.into()),
    }
}

/// Raises the descriptor limit: a sandbox takes about thirty descriptors, so the usual soft limit
/// of 1024 would allow about thirty sandboxes.
fn raise_descriptor_limit() {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    if let Err(error) = setrlimit(Resource::Nofile, limit) {
        tracing::warn!(%error, "the descriptor limit stays");
    }
}

/// Opens the networks, which use the plane only by its interface, over a socket pair within this
/// process.
async fn open_networks(config: &Config, plane: &Plane) -> Result<Networks> {
    let plane = slipway_plane_api::PlaneClient::new(plane.connect().await?);
    let Config { network_reach, network_allow, network_deny, .. } = config;
    let settings = slipway_network::Settings {
        dir: config.networks_dir(),
        ports_dir: config.ports_dir(),
        table: table(config),
        resolv_conf: "/etc/resolv.conf".into(),
        reach: slipway_network::reach::Policy::parse(network_reach, network_allow, network_deny)?,
        forwarding: slipway_network::FORWARDING_FILE.into(),
    };
    Ok(Networks::open(settings, plane)?)
}

/// Returns the name of the packet filter's table. Each data directory, and so each daemon, has its
/// own.
fn table(config: &Config) -> String {
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
    keeps: bool,
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
        keeps,
    };
    Ok(Node::open(config.clone(), parts).await?)
}

/// The parts of a daemon whose use keeps an embedded one from ending.
struct Used {
    node: Arc<Node>,
    plane: Plane,
    functions: VirtualFunctions,
    networks: Arc<Networks>,
    connections: watch::Sender<usize>,
}

/// Waits for a reason to end, then ends the sandboxes that do not outlive this daemon, then sets
/// `stop`.
async fn end(used: Used, ends_when_idle: bool, socket: PathBuf, stop: watch::Sender<bool>) {
    let mut terminate = signal(SignalKind::terminate()).ok();
    let mut interrupt = signal(SignalKind::interrupt()).ok();
    let asked = async {
        tokio::select! {
            _ = async { terminate.as_mut()?.recv().await } , if terminate.is_some() => {}
            _ = async { interrupt.as_mut()?.recv().await } , if interrupt.is_some() => {}
            else => std::future::pending().await,
        }
    };
    tokio::select! {
        () = asked => tracing::info!("asked to end"),
        () = idle(&used), if ends_when_idle => tracing::info!("idle, ending"),
    }
    // From here on no new client finds this daemon; clients that are connected are served to the
    // end.
    let _ = std::fs::remove_file(&socket);
    let node = used.node;
    node.close();
    // A sandbox that is just being created is live, too.
    let live: Vec<_> = node.list().into_iter().filter(|s| node.ends_with_daemon(s)).collect();
    live.iter().for_each(|sandbox| sandbox.kill());
    for sandbox in live {
        sandbox.wait_state(|state| !state.is_live()).await;
    }
    let _ = tokio::task::spawn_blocking(move || node.close_cgroups()).await;
    let _ = stop.send(true);
}

/// Returns after [`IDLE`] without work and without connections.
async fn idle(used: &Used) {
    let Used { node, plane, functions, networks, connections } = used;
    let mut connected = connections.subscribe();
    let mut changes = node.changes();
    loop {
        let connected_now = *connected.borrow_and_update();
        // Endpoints, disks, memory ports and attachments change only by requests over connections,
        // so `connected` covers them.
        let disks = !plane.list_disks().is_empty();
        let served = !plane.list().is_empty() || disks || plane.fabric().count_ports() > 0;
        let served = served || functions.is_in_use() || networks.is_attached().await;
        let busy = node.live() > 0 || connected_now > 0 || served;
        changes.borrow_and_update();
        tokio::select! {
            () = tokio::time::sleep(IDLE), if !busy => return,
            // Neither sender goes away while the node is borrowed here.
            _ = connected.changed() => {}
            _ = changes.changed() => {}
        }
    }
}

/// A connection that is counted while it is open.
struct Counted {
    stream: UnixStream,
    count: watch::Sender<usize>,
}

impl Counted {
    fn incoming(
        listener: UnixListener,
        count: watch::Sender<usize>,
    ) -> impl tokio_stream::Stream<Item = std::io::Result<Self>> {
        use tokio_stream::StreamExt;
        tokio_stream::wrappers::UnixListenerStream::new(listener).map(move |stream| {
            let stream = stream?;
            count.send_modify(|count| *count += 1);
            Ok(Self { stream, count: count.clone() })
        })
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.count.send_modify(|count| *count -= 1);
    }
}

impl Connected for Counted {
    type ConnectInfo = UdsConnectInfo;

    fn connect_info(&self) -> Self::ConnectInfo {
        self.stream.connect_info()
    }
}

impl AsyncRead for Counted {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut TaskContext<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for Counted {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut TaskContext<'_>,
        data: &[u8],
    ) -> Poll<std::io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, data)
    }

    fn poll_flush(
        mut self: Pin<&mut Self>,
        context: &mut TaskContext<'_>,
    ) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(
        mut self: Pin<&mut Self>,
        context: &mut TaskContext<'_>,
    ) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::CommandExt;

    use super::*;

    fn config_in(dir: &Path) -> Config {
        Config { data_dir: dir.to_owned(), run_dir: dir.join("run"), ..Config::default() }
    }

    #[test]
    fn a_second_daemon_learns_where_the_first_one_serves() {
        let dir = tempfile::tempdir().unwrap();
        let config = config_in(dir.path());
        let first = lock(&config.lock(), &config).unwrap();
        assert!(matches!(first, Lock::Ours(_)));
        let second = lock(&config.lock(), &config).unwrap();
        assert!(
            matches!(&second, Lock::Theirs(socket) if *socket == config.socket()),
            "{second:?}"
        );
        let mode = std::fs::metadata(config.lock()).unwrap().permissions().mode();
        assert_eq!(mode & 0o7777, 0o600);
    }

    /// Checks that another user cannot lock the daemon's file, which would keep the node from its
    /// next daemon.
    #[test]
    fn another_user_holds_no_lock_of_the_daemons_as_root() {
        if !rustix::process::geteuid().is_root() {
            return eprintln!(
                "SKIPPED: another_user_holds_no_lock_of_the_daemons_as_root: needs root to act as \
                 another user"
            );
        }
        let dir = tempfile::tempdir().unwrap();
        // The same mode as the daemon's data directory: other users can pass through.
        make_private_dir(dir.path(), 0o711).unwrap();
        let config = config_in(dir.path());
        drop(lock(&config.lock(), &config).unwrap());
        let attack = || {
            let mut command = std::process::Command::new("flock");
            command.args(["--shared", "--nonblock", "--no-fork"]).arg(config.lock());
            command.args(["sh", "-c", "echo held; exec sleep 600"]).uid(65534).gid(65534);
            command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::null());
            let mut child = command.spawn().unwrap();
            let mut said = String::new();
            let out = child.stdout.take().unwrap();
            std::io::BufRead::read_line(&mut std::io::BufReader::new(out), &mut said).unwrap();
            (child, said)
        };
        let (mut child, said) = attack();
        assert_eq!(said, "", "the attacker has the lock");
        child.wait().unwrap();
        assert!(matches!(lock(&config.lock(), &config).unwrap(), Lock::Ours(_)));
        // A lock that was taken before the file was closed to others is reported with its holder,
        // which is no daemon.
        std::fs::set_permissions(config.lock(), PermissionsExt::from_mode(0o644)).unwrap();
        let (mut child, said) = attack();
        assert_eq!(said, "held\n");
        let error = lock(&config.lock(), &config).unwrap_err().to_string();
        assert!(error.contains("daemon.lock is locked by process"), "{error}");
        assert!(error.contains("of user 65534, which is no daemon"), "{error}");
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(matches!(lock(&config.lock(), &config).unwrap(), Lock::Ours(_)));
    }

    #[test]
    fn the_command_line_is_stronger_than_the_settings() {
        let config = Config { poll_budget_us: 70, ..Config::default() };
        let budget = |config: &Config, poll_budget| {
            poll_budget_of(config, &DaemonArgs { ends_when_idle: false, poll_budget })
        };
        assert_eq!(budget(&config, None).unwrap(), Duration::from_micros(70));
        assert_eq!(budget(&config, Some(Duration::ZERO)).unwrap(), Duration::ZERO);
        assert!(budget(&config, Some(Duration::from_secs(2))).is_err());
        let config = Config { poll_budget_us: 1_000_001, ..config };
        assert!(budget(&config, None).is_err());
    }
}
