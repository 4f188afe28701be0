//! The plugin between a real plane's pools and a kubelet of the test's: a server of kubelet's
//! registration at its socket, which calls the plugin back as kubelet does.
#![allow(clippy::unwrap_used)] // helpers of tests state facts as tests do

use std::path::{Path, PathBuf};
use std::time::Duration;

use slipway_device_plugin::v1beta1::device_plugin_client::DevicePluginClient;
use slipway_device_plugin::v1beta1::registration_server::{Registration, RegistrationServer};
use slipway_device_plugin::v1beta1::{
    AllocateRequest, ContainerAllocateRequest, ContainerPreferredAllocationRequest, Device, Empty,
    ListAndWatchResponse, PreStartContainerRequest, PreferredAllocationRequest, RegisterRequest,
};
use slipway_device_plugin::{Error, Settings, list, serve};
use slipway_plane::{Plane, VirtualFunctions};
use slipway_plane_api::v1::{Disk, RamDisk, disk};
use slipway_plane_api::vf_v1::virtual_functions_server::VirtualFunctionsServer;
use slipway_plane_api::vf_v1::{Template, template};
use tokio::net::UnixListener;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::{Channel, Server};
use tonic::{Code, Request, Response, Status, Streaming};

/// Longer than any step takes on any machine.
const PATIENCE: Duration = Duration::from_secs(100);

/// Kubelet's side: registrations as they come.
struct Kubelet {
    registered: mpsc::UnboundedSender<RegisterRequest>,
    /// The resource whose registrations have no answer.
    unanswered: &'static str,
}

#[tonic::async_trait]
impl Registration for Kubelet {
    async fn register(&self, request: Request<RegisterRequest>) -> Result<Response<Empty>, Status> {
        let request = request.into_inner();
        let is_answered = request.resource_name != self.unanswered;
        let _ = self.registered.send(request);
        if !is_answered {
            std::future::pending::<()>().await;
        }
        Ok(Response::new(Empty {}))
    }
}

/// A node: the plane's pools at the daemon's socket, and directories.
struct Node {
    dir: tempfile::TempDir,
    functions: VirtualFunctions,
    /// Ends the daemon, with its clients' connections.
    daemon: Option<oneshot::Sender<()>>,
}

impl Node {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        for name in ["vf", "kubelet"] {
            std::fs::create_dir(dir.path().join(name)).unwrap();
        }
        let plane = Plane::new(slipway_plane::Settings::default()).unwrap();
        let ledger = dir.path().join("ledger");
        let functions = VirtualFunctions::open(plane, &dir.path().join("vf"), &ledger);
        Self { dir, functions, daemon: None }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Makes a pool of disks in memory.
    fn make(&self, pool: &str, count: u32) {
        let ram = disk::Kind::Ram(RamDisk { size_bytes: 1 << 20 });
        let disk = Some(Disk { block_size: 0, kind: Some(ram) });
        let kind = Some(template::Kind::Nvme(template::Nvme { disk, layers_bytes: 0 }));
        let template = Template { kind, count, ..Default::default() };
        self.functions.create(pool, template).unwrap();
    }

    /// Serves the pools where the daemon does.
    fn start_daemon(&mut self) {
        let service = VirtualFunctionsServer::new(self.functions.clone());
        let (end, ended) = oneshot::channel();
        serve_at(&self.path("daemon.sock"), |incoming| async move {
            let router = Server::builder().add_service(service);
            let ended = async { _ = ended.await };
            let _ = router.serve_with_incoming_shutdown(incoming, ended).await;
        });
        self.daemon = Some(end);
    }

    /// Waits until all functions of a pool are ready.
    async fn settle(&self, pool: &str) {
        while !list(&self.settings(&[])).await.unwrap()[pool].values().all(|one| one.is_ready) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    fn take(&self, owner: &str, number: u32) {
        self.functions.take("fast", &owner.parse().unwrap(), Some(number), None).unwrap();
    }

    /// Starts a kubelet as kubelet starts: what is in its directory is removed.
    fn start_kubelet(&self) -> (JoinHandle<()>, mpsc::UnboundedReceiver<RegisterRequest>) {
        self.start_kubelet_without("")
    }

    /// Starts a kubelet that does not answer registrations of this resource.
    fn start_kubelet_without(
        &self,
        unanswered: &'static str,
    ) -> (JoinHandle<()>, mpsc::UnboundedReceiver<RegisterRequest>) {
        for entry in std::fs::read_dir(self.path("kubelet")).unwrap() {
            std::fs::remove_file(entry.unwrap().path()).unwrap();
        }
        let (sender, receiver) = mpsc::unbounded_channel();
        let kubelet = Kubelet { registered: sender, unanswered };
        let service = RegistrationServer::new(kubelet);
        let server = serve_at(&self.path("kubelet/kubelet.sock"), |incoming| async move {
            let _ = Server::builder().add_service(service).serve_with_incoming(incoming).await;
        });
        (server, receiver)
    }

    /// Returns settings with which no kubelet has dropped the plugin, however slow the test is.
    fn settings(&self, pools: &[&str]) -> Settings {
        Settings {
            kubelet: self.path("kubelet"),
            daemon: self.path("daemon.sock"),
            run_dir: self.dir.path().to_owned(),
            pools: pools.iter().map(|&one| one.to_owned()).collect(),
            sockets: None,
            quiet: Duration::MAX,
        }
    }

    /// Starts the plugin.
    fn advertise(&self, pools: &[&str]) -> JoinHandle<Error> {
        Self::advertise_with(self.settings(pools))
    }

    fn advertise_with(settings: Settings) -> JoinHandle<Error> {
        tokio::spawn(async move {
            match serve(settings).await {
                Err(error) => error,
                Ok(never) => match never {},
            }
        })
    }

    /// Connects to a plugin, as kubelet does when one has registered.
    async fn connect(&self, registered: &RegisterRequest) -> DevicePluginClient<Channel> {
        let socket = self.path("kubelet").join(&registered.endpoint);
        DevicePluginClient::new(slipway_plane_api::connect(&socket).await.unwrap())
    }
}

fn serve_at<F: Future<Output = ()> + Send + 'static>(
    path: &Path,
    server: impl FnOnce(UnixListenerStream) -> F,
) -> JoinHandle<()> {
    let _ = std::fs::remove_file(path);
    tokio::spawn(server(UnixListenerStream::new(UnixListener::bind(path).unwrap())))
}

async fn next<T>(from: &mut mpsc::UnboundedReceiver<T>) -> T {
    tokio::time::timeout(PATIENCE, from.recv()).await.unwrap().unwrap()
}

/// Waits until a plugin tells of devices of which this is true.
async fn told(
    lists: &mut Streaming<ListAndWatchResponse>,
    is: impl Fn(&[Device]) -> bool,
) -> Vec<Device> {
    tokio::time::timeout(PATIENCE, async {
        loop {
            let devices = lists.message().await.unwrap().unwrap().devices;
            if is(&devices) {
                return devices;
            }
        }
    })
    .await
    .unwrap()
}

fn healthy(devices: &[Device]) -> Vec<&str> {
    let healthy = devices.iter().filter(|one| one.health == "Healthy");
    healthy.map(|one| one.id.as_str()).collect()
}

fn ids(ids: &[&str]) -> Vec<String> {
    ids.iter().map(|&id| id.to_owned()).collect()
}

fn allocation(containers: &[&[&str]]) -> AllocateRequest {
    let containers = containers.iter().map(|one| ContainerAllocateRequest { ids: ids(one) });
    AllocateRequest { container_requests: containers.collect() }
}

/// Runs a test in a runtime of its own: a plane is made and dropped outside of one.
fn run<T>(mut node: Node, test: impl AsyncFnOnce(&mut Node) -> T) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let done = runtime.block_on(test(&mut node));
    drop(runtime);
    done
}

#[test]
fn a_pool_is_registered_listed_and_given() {
    let node = Node::new();
    node.make("fast", 3);
    run(node, async |node: &mut Node| {
        node.start_daemon();
        node.settle("fast").await;
        let (_kubelet, mut registered) = node.start_kubelet();
        let _plugin = node.advertise(&[]);
        let request = next(&mut registered).await;
        assert_eq!(
            (request.version.as_str(), request.resource_name.as_str()),
            ("v1beta1", "slipway.dev/fast")
        );
        assert!(request.options.unwrap().get_preferred_allocation_available);
        let mut plugin = node.connect(&request).await;
        let options = plugin.get_device_plugin_options(Empty {}).await.unwrap();
        assert!(!options.get_ref().pre_start_required);
        let unasked = plugin.pre_start_container(PreStartContainerRequest { ids: vec![] }).await;
        assert_eq!(unasked.unwrap_err().code(), Code::Unimplemented);
        let mut lists = plugin.list_and_watch(Empty {}).await.unwrap().into_inner();
        let all = told(&mut lists, |devices| healthy(devices).len() == 3).await;
        assert_eq!(healthy(&all), ["fast.0", "fast.1", "fast.2"]);

        let reply = plugin.allocate(allocation(&[&["fast.2", "fast.0"], &[], &["fast.1"]])).await;
        let replies = reply.unwrap().into_inner().container_responses;
        let mounts: Vec<Vec<_>> = replies
            .iter()
            .map(|one| one.mounts.iter().map(|mount| mount.container_path.as_str()).collect())
            .collect();
        let at = |number| format!("/proc/slipway/functions/fast.{number}");
        assert_eq!(mounts, [vec![at(0), at(2)], vec![], vec![at(1)]]);
        let mount = &replies[2].mounts[0];
        let run_dir = node.dir.path().canonicalize().unwrap();
        assert_eq!(mount.host_path, run_dir.join("functions/fast.1").to_string_lossy());
        assert!(mount.read_only && Path::new(&mount.host_path).is_file());

        // Somebody else has one: kubelet is not to count on it. A pod's is as kubelet gave it.
        node.take("slipway-pod:0123456789ab.1", 1);
        node.take("sandbox:4f1c", 0);
        let rest = told(&mut lists, |devices| healthy(devices).len() == 2).await;
        assert_eq!(healthy(&rest), ["fast.1", "fast.2"]);
        let shown = list(&node.settings(&[])).await.unwrap();
        assert!(!shown["fast"][&0].is_healthy && !shown["fast"][&1].is_ready);

        // Without a daemon none is healthy, and kubelet is told that they are there.
        std::fs::remove_file(node.path("daemon.sock")).unwrap();
        node.daemon.take().unwrap().send(()).unwrap();
        let lost = told(&mut lists, |devices| healthy(devices).is_empty()).await;
        assert_eq!(lost.len(), 3);
        let why = list(&node.settings(&[])).await.unwrap_err().to_string();
        assert!(why.contains("`slipway daemon`"), "{why}");
        node.start_daemon();
        told(&mut lists, |devices| healthy(devices).len() == 2).await;
    });
}

#[test]
fn a_function_that_is_ready_is_preferred() {
    let node = Node::new();
    node.make("fast", 4);
    run(node, async |node: &mut Node| {
        node.start_daemon();
        node.settle("fast").await;
        node.take("sandbox:4f1c", 0);
        let (_kubelet, mut registered) = node.start_kubelet();
        let _plugin = node.advertise(&["fast", "none"]);
        let mut plugin = node.connect(&next(&mut registered).await).await;
        let container =
            |available: &[&str], must: &[&str], size| ContainerPreferredAllocationRequest {
                available_ids: ids(available),
                must_include_ids: ids(must),
                size,
            };
        let all = ["fast.0", "fast.1", "fast.2", "fast.3"];
        let container_requests = vec![
            container(&all, &[], 1),
            container(&all, &["fast.3"], 2),
            container(&all, &[], 4),
            container(&all, &[], -1),
            container(&all, &[], i32::MAX),
        ];
        let request = PreferredAllocationRequest { container_requests };
        let reply = plugin.get_preferred_allocation(request).await.unwrap().into_inner();
        let chosen: Vec<_> = reply.container_responses.into_iter().map(|one| one.ids).collect();
        let last = ids(&["fast.1", "fast.2", "fast.3", "fast.0"]);
        let expected = [ids(&["fast.1"]), ids(&["fast.3", "fast.1"]), last.clone(), vec![], last];
        assert_eq!(chosen, expected);
    });
}

#[test]
fn what_is_no_function_is_refused() {
    let node = Node::new();
    node.make("fast", 2);
    run(node, async |node: &mut Node| {
        node.start_daemon();
        node.settle("fast").await;
        let (_kubelet, mut registered) = node.start_kubelet();
        let _plugin = node.advertise(&[]);
        let mut plugin = node.connect(&next(&mut registered).await).await;
        let long = "x".repeat(10_000);
        for bad in
            ["", "fast", "fast.2", "fast.01", "fast.-1", "slow.0", "../fast.0", long.as_str()]
        {
            let status = plugin.allocate(allocation(&[&[bad]])).await.unwrap_err();
            assert_eq!(status.code(), Code::InvalidArgument, "{bad}: {status}");
            assert!(status.message().len() < 200, "{status}");
        }
        let twice: [&[&[&str]]; 2] = [&[&["fast.0", "fast.0"]], &[&["fast.0"], &["fast.0"]]];
        for twice in twice {
            let status = plugin.allocate(allocation(twice)).await.unwrap_err();
            assert!(status.message().contains("twice"), "{status}");
        }
        // A list that no node has devices for is not even read.
        let giant = vec!["fast.0"; 1 << 18];
        assert!(plugin.allocate(allocation(&[&giant])).await.is_err());
        assert_eq!(std::fs::read_dir(node.path("functions")).unwrap().count(), 0);
        let reply = plugin.allocate(allocation(&[&["fast.1"]])).await.unwrap();
        assert_eq!(reply.get_ref().container_responses.len(), 1);
    });
}

#[test]
fn a_kubelet_that_starts_again_is_registered_with_again() {
    let node = Node::new();
    node.make("fast", 1);
    run(node, async |node: &mut Node| {
        // The plugin is there first: neither a daemon nor a kubelet is.
        let plugin = node.advertise(&[]);
        let (kubelet, mut registered) = node.start_kubelet();
        node.start_daemon();
        let first = next(&mut registered).await;
        let socket = node.path("kubelet").join(&first.endpoint);
        assert!(socket.exists());
        for _ in 0..2 {
            kubelet.abort();
            let (_next, mut again) = node.start_kubelet();
            let request = next(&mut again).await;
            assert_eq!(request, first);
            let mut client = node.connect(&request).await;
            let mut lists = client.list_and_watch(Empty {}).await.unwrap().into_inner();
            told(&mut lists, |devices| devices.len() == 1).await;
        }
        // A pool that comes later is one more resource.
        let (_last, mut both) = node.start_kubelet();
        assert_eq!(next(&mut both).await.resource_name, "slipway.dev/fast");
        node.make("more", 1);
        assert_eq!(next(&mut both).await.resource_name, "slipway.dev/more");
        // A socket that somebody else has removed is made again.
        std::fs::remove_file(&socket).unwrap();
        assert_eq!(next(&mut both).await, first);
        assert!(socket.exists() && !plugin.is_finished());
    });
}

#[test]
fn a_registration_without_an_answer_holds_up_no_other_pool() {
    let node = Node::new();
    node.make("a", 1);
    node.make("b", 1);
    run(node, async |node: &mut Node| {
        node.start_daemon();
        node.settle("b").await;
        let (_kubelet, mut registered) = node.start_kubelet_without("slipway.dev/a");
        let _plugin = node.advertise(&[]);
        let both = async { [next(&mut registered).await, next(&mut registered).await] };
        // Less than the time that a registration has.
        let both = tokio::time::timeout(Duration::from_secs(14), both).await.unwrap();
        let mut names = both.map(|request| request.resource_name);
        names.sort_unstable();
        assert_eq!(names, ["slipway.dev/a", "slipway.dev/b"]);
    });
}

#[test]
fn a_kubelet_that_has_dropped_the_plugin_is_registered_with_again() {
    let node = Node::new();
    node.make("fast", 1);
    run(node, async |node: &mut Node| {
        node.start_daemon();
        let (_kubelet, mut registered) = node.start_kubelet();
        let _plugin =
            Node::advertise_with(Settings { quiet: Duration::ZERO, ..node.settings(&[]) });
        let first = next(&mut registered).await;
        let mut client = node.connect(&first).await;
        let mut lists = client.list_and_watch(Empty {}).await.unwrap().into_inner();
        told(&mut lists, |devices| devices.len() == 1).await;
        // Both sockets stay, and kubelet asks for nothing any more.
        drop(lists);
        while registered.try_recv().is_ok() {}
        assert_eq!(next(&mut registered).await, first);
        let mut lists = client.list_and_watch(Empty {}).await.unwrap().into_inner();
        told(&mut lists, |devices| devices.len() == 1).await;
    });
}
