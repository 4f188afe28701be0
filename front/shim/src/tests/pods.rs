//! Tests of a pod's shim against a daemon that runs nothing: several tasks, and how they end.

#[path = "running.rs"]
mod running;

use std::path::{Path, PathBuf};

use serde_json::json;
use slipway_sandbox_api::v1::{self, run_in};

use super::calls::Calls;
use super::fake::{Fake, VMM};
use super::*;
use crate::io::Paths;
use crate::store::Store;

/// A shim of the pod "pod" with its daemon, and containerd's end of its events.
pub(super) struct Shim {
    pub(super) service: Arc<Service>,
    pub(super) daemon: Arc<Fake>,
    seen: Arc<Seen>,
    pub(super) dir: tempfile::TempDir,
}

/// The events of tasks, as "topic container".
#[derive(Default)]
struct Seen(std::sync::Mutex<Vec<String>>);

impl Handler for Seen {
    async fn call(
        self: Arc<Self>,
        _: String,
        _: String,
        payload: Vec<u8>,
    ) -> Result<Vec<u8>, Failure> {
        let request = cd::ForwardRequest::decode(payload.as_slice()).unwrap();
        let envelope = request.envelope.unwrap();
        let event = envelope.event.unwrap();
        let id = match envelope.topic.as_str() {
            "/tasks/create" => of::<cd::TaskCreate>(&event).container_id,
            "/tasks/start" => of::<cd::TaskStart>(&event).container_id,
            "/tasks/oom" => of::<cd::TaskOom>(&event).container_id,
            "/tasks/exit" => of::<cd::TaskExit>(&event).container_id,
            "/tasks/delete" => of::<cd::TaskDelete>(&event).container_id,
            other => panic!("{other}"),
        };
        self.0.lock().unwrap().push(format!("{} {id}", envelope.topic));
        Ok(Vec::new())
    }
}

fn of<M: Message + Default>(event: &cd::Any) -> M {
    M::decode(event.value.as_slice()).unwrap()
}

impl Calls for Shim {
    fn service(&self) -> &Arc<Service> {
        &self.service
    }
}

impl Shim {
    pub(super) fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let daemon = Fake::serve(dir.path());
        let (socket, seen) = (dir.path().join("events.sock"), Arc::new(Seen::default()));
        let (listener, handler) =
            (tokio::net::UnixListener::bind(&socket).unwrap(), Arc::clone(&seen));
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(crate::ttrpc::server::serve(stream, Arc::clone(&handler)));
            }
        });
        let store = Store::make(&dir.path().join("state")).unwrap();
        let service = Self::process(dir.path(), socket, RestartStore { store, holder: None });
        Self { service, daemon, seen, dir }
    }

    /// Makes a serving process's service.
    fn process(dir: &Path, socket: PathBuf, keep: RestartStore) -> Arc<Service> {
        Arc::new(Service {
            args: Args { namespace: "k8s.io".into(), id: "pod".into(), ..Args::default() },
            daemon: Daemon::at(dir),
            events: Arc::new(Events::kept("k8s.io", Some(socket), keep.store.clone())),
            tasks: Tasks::kept(keep.store.clone()),
            keep,
            reads: Arc::new(Semaphore::new(MOST_READS)),
            form: Form::Version1,
            end: Notify::new(),
        })
    }

    /// Returns the service of the next serving process, as if this one had been killed. Its events
    /// go nowhere.
    pub(super) fn next(&self) -> Arc<Service> {
        let store = Store::open(self.service.keep.store.share().unwrap());
        let keep = RestartStore { store, holder: None };
        let next = Self::process(self.dir.path(), self.dir.path().join("nowhere"), keep);
        next.resume();
        next
    }

    /// Returns the process of a task that the answer of a method names.
    async fn pid_of(&self, method: &str, id: &str) -> u32 {
        match method {
            "State" => self.on::<cd::StateResponse>(method, id).await.unwrap().pid,
            "Pids" => self.on::<cd::PidsResponse>(method, id).await.unwrap().processes[0].pid,
            _ => self.on::<cd::ConnectResponse>("Connect", id).await.unwrap().task_pid,
        }
    }

    async fn kill(&self, id: &str, signal: u32) {
        let kill = cd::KillRequest { id: id.into(), signal, ..Default::default() };
        self.call::<cd::Empty>("Kill", &kill).await.unwrap();
    }

    async fn create(&self, id: &str, annotations: serde_json::Value) -> Result<(), Failure> {
        let network = json!({"type": "network", "path": "/run/netns/cni-1"});
        self.create_in(id, annotations, network).await
    }

    /// Creates a pod or a container with this network namespace.
    async fn create_in(
        &self,
        id: &str,
        annotations: serde_json::Value,
        network: serde_json::Value,
    ) -> Result<(), Failure> {
        let bundle = self.dir.path().join(id);
        std::fs::create_dir_all(&bundle).unwrap();
        let namespaces = json!([{"type": "pid"}, {"type": "ipc"}, network]);
        let config = json!({
            "process": {"args": ["/pause"]}, "hostname": "web", "annotations": annotations,
            "linux": {"namespaces": namespaces, "sysctl": {"net.ipv4.ping_group_range": "0 9"}}
        });
        std::fs::write(bundle.join("config.json"), config.to_string()).unwrap();
        let bundle = bundle.to_string_lossy().into_owned();
        let request = cd::CreateTaskRequest { id: id.into(), bundle, ..Default::default() };
        self.call::<cd::CreateTaskResponse>("Create", &request).await.map(drop)
    }

    /// Creates and starts the pod.
    pub(super) async fn pod(&self) -> Arc<Task> {
        self.create("pod", annotations("sandbox")).await.unwrap();
        self.on::<cd::StartResponse>("Start", "pod").await.unwrap();
        self.service.tasks.find("pod").unwrap()
    }

    /// Puts a container into the pod, and starts it. Its root would need the program `slipway`.
    async fn member(&self, pod: &Arc<Task>, id: &str) {
        self.begin(Self::made(pod, id, Paths::default())).await;
    }

    pub(super) async fn begin(&self, task: Task) {
        let id = task.id.clone();
        let place = self.service.tasks.reserve(&id).unwrap();
        self.service.enter(place, task).await.unwrap();
        self.on::<cd::StartResponse>("Start", &id).await.unwrap();
    }

    /// Makes a container of the pod.
    pub(super) fn made(pod: &Arc<Task>, id: &str, paths: Paths) -> Task {
        let run = v1::RunSpec { pod: pod.name.clone(), name: id.into(), ..Default::default() };
        Task {
            id: id.into(),
            bundle: "/".into(),
            name: format!("{}/{id}", pod.name),
            kind: TaskKind::Member(Arc::clone(pod)),
            daemon: pod.daemon.clone(),
            events: Arc::clone(&pod.events),
            init: Arc::new(Process::new(String::new(), paths, run_in::Kind::Run(run))),
            execs: std::sync::Mutex::default(),
            vmm: Default::default(),
            paused: Default::default(),
            private: None,
            copies: std::sync::Mutex::default(),
            copied: 0,
            snapshot: Default::default(),
            message: None,
            kept: Default::default(),
            deleting: Default::default(),
        }
    }

    pub(super) async fn status(&self, id: &str) -> u32 {
        self.on::<cd::WaitResponse>("Wait", id).await.unwrap().exit_status
    }

    async fn state(&self, id: &str) -> cd::Status {
        self.on::<cd::StateResponse>("State", id).await.unwrap().status()
    }

    async fn metrics(&self, id: &str) -> cd::Metrics {
        let stats: cd::StatsResponse = self.on("Stats", id).await.unwrap();
        cd::Metrics::decode(stats.stats.unwrap().value.as_slice()).unwrap()
    }

    pub(super) async fn events(&self) -> Vec<String> {
        self.service.events.drain(Duration::from_secs(60)).await;
        self.seen.0.lock().unwrap().clone()
    }
}

fn annotations(kind: &str) -> serde_json::Value {
    json!({
        "io.kubernetes.cri.container-type": kind,
        "io.kubernetes.cri.sandbox-id": "pod",
        "io.kubernetes.cri.sandbox-name": "web-0",
        "io.kubernetes.cri.sandbox-memory": "536870912"
    })
}

#[tokio::test]
async fn a_pod_is_a_sandbox_of_the_daemons_and_stops_on_sigterm() {
    let shim = Shim::new();
    let pod = shim.pod().await;
    let run = &shim.daemon.runs()[0];
    assert!(run.makes_pod && !run.detach && run.image.is_empty(), "{run:?}");
    assert_eq!((run.name.as_str(), run.hostname.as_str()), (pod.name.as_str(), "web"));
    assert_eq!(run.memory_bytes, (512 + 128) << 20);
    assert_eq!(run.network_namespace, "/run/netns/cni-1");
    assert_eq!(run.labels["io.kubernetes.pod.name"], "web-0");
    assert_eq!(shim.state("pod").await, cd::Status::Running);
    let metrics = shim.metrics("pod").await;
    assert_eq!(metrics.memory.unwrap().usage.unwrap().limit, 1 << 28);
    assert_eq!(metrics.cpu.unwrap().usage.unwrap().total, 2000);
    // A signal that stops no pod, and one that does.
    shim.kill("pod", 1).await;
    shim.kill("pod", 15).await;
    assert_eq!(shim.status("pod").await, 0);
    shim.on::<cd::DeleteResponse>("Delete", "pod").await.unwrap();
    let name = &pod.name;
    let calls = [format!("stats {name}"), format!("stop {name} 10"), format!("remove {name}")];
    assert_eq!(shim.daemon.calls(), calls);
    let topics = ["create", "start", "exit", "delete"];
    assert_eq!(shim.events().await, topics.map(|topic| format!("/tasks/{topic} pod")));
}

#[tokio::test]
async fn calls_reach_the_container_that_they_name() {
    let shim = Shim::new();
    let pod = shim.pod().await;
    shim.member(&pod, "one").await;
    shim.member(&pod, "two").await;
    assert_eq!(shim.daemon.runs()[2].pod, pod.name);
    // The pod's VMM stands for each.
    for id in ["pod", "one", "two"] {
        let pids: cd::PidsResponse = shim.on("Pids", id).await.unwrap();
        let pids: Vec<u32> = pids.processes.iter().map(|process| process.pid).collect();
        let state: cd::StateResponse = shim.on("State", id).await.unwrap();
        assert_eq!((pids, state.pid), (vec![VMM], VMM), "{id}");
    }
    shim.kill("one", 15).await;
    assert_eq!(shim.status("one").await, 128 + 15);
    assert_eq!(shim.state("two").await, cd::Status::Running);
    assert_eq!(shim.state("pod").await, cd::Status::Running);
    shim.on::<cd::DeleteResponse>("Delete", "one").await.unwrap();
    for method in ["State", "Pids", "Stats", "Wait", "Delete"] {
        let failed = shim.on::<cd::Empty>(method, "one").await.unwrap_err();
        assert_eq!(failed.code, Code::NotFound, "{method}");
    }
    let name = &pod.name;
    let calls = [format!("signal {name}/one 15"), format!("remove {name}/one")];
    assert_eq!(shim.daemon.calls(), calls);
    let events = shim.events().await;
    assert_eq!(events[4..], ["/tasks/exit one", "/tasks/delete one"], "{events:?}");
}

#[tokio::test]
async fn a_container_has_figures_and_limits_of_its_own() {
    let shim = Shim::new();
    let pod = shim.pod().await;
    shim.member(&pod, "one").await;
    let metrics = shim.metrics("one").await;
    assert_eq!(metrics.memory.unwrap().usage.unwrap().usage, 1 << 27);
    assert_eq!(metrics.cpu.unwrap().usage.unwrap().total, 1000);
    for json in [&br#"{"memory": {"limit": 4096}}"#[..], br#"{"cpu": {"cpus": "0"}}"#] {
        let resources = Some(cd::Any { type_url: String::new(), value: json.into() });
        let update = cd::UpdateTaskRequest { id: "one".into(), resources };
        shim.call::<cd::Empty>("Update", &update).await.unwrap();
    }
    let name = format!("{}/one", pod.name);
    let updates = [format!("update {name} 0 4096"), format!("update {name} 0 0 on 0")];
    assert_eq!(shim.daemon.calls(), [&[format!("stats {name}")][..], &updates].concat());
    // Of a container that has ended there are no figures: they are 0, and present.
    shim.kill("one", 9).await;
    shim.status("one").await;
    let metrics = shim.metrics("one").await;
    assert_eq!(metrics.memory.unwrap().usage.unwrap().limit, 0);
}

#[tokio::test]
async fn a_killed_pod_takes_its_containers_with_it_and_the_shim_ends_with_the_last() {
    let shim = Shim::new();
    let pod = shim.pod().await;
    shim.member(&pod, "one").await;
    shim.kill("pod", 9).await;
    assert_eq!((shim.status("one").await, shim.status("pod").await), (143, 0));
    assert_eq!(shim.daemon.calls(), [format!("stop {} 0", pod.name)]);
    let shutdown = cd::Empty {};
    shim.on::<cd::DeleteResponse>("Delete", "pod").await.unwrap();
    shim.call::<cd::Empty>("Shutdown", &shutdown).await.unwrap();
    shim.on::<cd::DeleteResponse>("Delete", "one").await.unwrap();
    shim.service.end.notified().await;
}

#[tokio::test]
async fn a_pod_whose_vmm_dies_reports_all_ends() {
    let shim = Shim::new();
    let pod = shim.pod().await;
    shim.member(&pod, "one").await;
    shim.member(&pod, "two").await;
    shim.daemon.end(&pod.name, 137, 137);
    for id in ["one", "two", "pod"] {
        assert_eq!(shim.status(id).await, 137, "{id}");
    }
    let mut exits = shim.events().await.split_off(4);
    exits.sort();
    assert_eq!(exits, ["one", "pod", "two"].map(|id| format!("/tasks/exit {id}")));
}

#[tokio::test]
async fn what_a_pod_cannot_do_is_refused_in_one_line() {
    let shim = Shim::new();
    let refused = shim.create("one", annotations("container")).await.unwrap_err();
    assert_eq!(refused.code, Code::NotFound);
    assert!(refused.message.contains("there is no pod pod"), "{refused}");
    let other = json!({"io.kubernetes.cri.sandbox-id": "other"});
    let refused = shim.create("one", other).await.unwrap_err();
    assert!(refused.message.contains("this shim serves pod"), "{refused}");
    shim.pod().await;
    let exec =
        cd::ExecProcessRequest { id: "pod".into(), exec_id: "x".into(), ..Default::default() };
    let refused = shim.call::<cd::Empty>("Exec", &exec).await.unwrap_err();
    assert_eq!(refused.code, Code::FailedPrecondition);
    shim.kill("pod", 9).await;
    assert_eq!(shim.status("pod").await, 0);
    let refused = shim.create("three", annotations("container")).await.unwrap_err();
    assert!(refused.message.contains("the pod pod has ended"), "{refused}");
}

#[tokio::test]
async fn a_daemon_that_knows_no_functions_of_pools_is_not_asked_for_them() {
    let shim = Shim::new();
    let refused = shim.service.daemon.check_functions().await.unwrap_err();
    assert_eq!(refused.code, Code::FailedPrecondition);
    assert!(refused.message.ends_with("start the daemon again"), "{refused}");
    let refused = shim.service.daemon.check_huge_pages().await.unwrap_err();
    assert!(refused.message.contains("knows no limits of huge pages"), "{refused}");
    shim.daemon.gives_functions.store(true, Ordering::Relaxed);
    shim.service.daemon.check_functions().await.unwrap();
    shim.service.daemon.check_huge_pages().await.unwrap();
}

#[tokio::test]
async fn a_daemon_says_whether_it_gives_containers_directories_of_the_guest() {
    let shim = Shim::new();
    for makes in [false, true] {
        shim.daemon.makes_empty_dirs.store(makes, Ordering::Relaxed);
        assert_eq!(shim.service.daemon.makes_empty_dirs().await, Ok(makes));
        assert_eq!(shim.service.daemon.makes_file_dirs().await, Ok(makes));
    }
}

#[tokio::test]
async fn a_pod_begins_with_the_template_that_its_annotation_names() {
    let shim = Shim::new();
    let with = |more: &[(&str, &str)]| {
        let mut all = annotations("sandbox");
        for (name, value) in more {
            all[name] = json!(value);
        }
        all
    };
    let refused = shim.create("pod", with(&[("dev.slipway.template", "cold")])).await.unwrap_err();
    assert_eq!(refused.code, Code::NotFound);
    assert!(
        refused.message.contains(r#"no template "cold": `slipway template create`"#),
        "{refused}"
    );
    let large = [("dev.slipway.template", "warm"), ("dev.slipway.memory", "2G")];
    let refused = shim.create("pod", with(&large)).await.unwrap_err();
    assert!(refused.message.contains("640 MiB of memory, and 2048 are needed"), "{refused}");
    shim.create("own", with(&[("dev.slipway.template", "auto"), ("dev.slipway.memory", "2G")]))
        .await
        .unwrap();
    shim.on::<cd::StartResponse>("Start", "own").await.unwrap();
    let run = &shim.daemon.runs()[0];
    assert_eq!((run.template.as_str(), run.memory_bytes), ("auto", 2 << 30));
    shim.create("pod", with(&[("dev.slipway.template", "warm")])).await.unwrap();
    shim.on::<cd::StartResponse>("Start", "pod").await.unwrap();
    let run = &shim.daemon.runs()[1];
    assert_eq!((run.template.as_str(), run.memory_bytes), ("warm", 640 << 20));
    assert!(run.makes_pod && run.network_namespace == "/run/netns/cni-1");
}

#[tokio::test]
async fn a_container_is_paused_and_goes_on() {
    let shim = Shim::new();
    let pod = shim.pod().await;
    shim.begin(Shim::made(&pod, "one", Paths::default())).await;
    for (method, expected) in [("Pause", cd::Status::Paused), ("Resume", cd::Status::Running)] {
        shim.on::<cd::Empty>(method, "one").await.unwrap();
        let state = shim.on::<cd::StateResponse>("State", "one").await.unwrap();
        assert_eq!(state.status, i32::from(expected));
    }
    let calls = shim.daemon.calls();
    let name = format!("{}/one", pod.name);
    assert_eq!(calls[calls.len() - 2..], [format!("pause {name}"), format!("resume {name}")]);
    assert!(shim.on::<cd::Empty>("Pause", "two").await.is_err());
}

#[tokio::test]
async fn output_waits_for_a_reader_that_was_away_at_the_end() {
    use tokio::io::AsyncReadExt;
    let shim = Shim::new();
    let pod = shim.pod().await;
    let path = shim.dir.path().join("stdout");
    let mode = rustix::fs::Mode::from_raw_mode(0o600);
    rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, mode, 0).unwrap();
    let paths = Paths { stdout: path.to_string_lossy().into_owned(), ..Paths::default() };
    shim.daemon.prints(b"the last line\n");
    shim.begin(Shim::made(&pod, "one", paths)).await;
    shim.daemon.end(&format!("{}/one", pod.name), 3, 0);
    // Nobody reads, and the exit is told even so.
    assert_eq!(shim.status("one").await, 3);
    let mut reader = tokio::net::unix::pipe::OpenOptions::new().open_receiver(&path).unwrap();
    let mut read = String::new();
    reader.read_to_string(&mut read).await.unwrap();
    assert_eq!(read, "the last line\n");
}

#[tokio::test]
async fn a_client_that_joins_a_container_has_time_to_enter_it_before_its_exit() {
    let shim = Shim::new();
    let pod = shim.pod().await;
    shim.member(&pod, "one").await;
    let asked = std::time::Instant::now();
    let end = async { shim.daemon.end(&format!("{}/one", pod.name), 3, 0) };
    let (status, ()) = tokio::join!(shim.status("one"), end);
    assert_eq!(status, 3);
    assert!(asked.elapsed() >= ENTERED);
}

#[tokio::test]
async fn files_that_change_are_put_into_a_container_and_its_message_is_written() {
    let shim = Shim::new();
    let pod = shim.pod().await;
    let (hosts, message) = (shim.dir.path().join("hosts"), shim.dir.path().join("message"));
    for file in [&hosts, &message] {
        std::fs::write(file, "before").unwrap();
    }
    let mount = crate::spec::Mount {
        source: hosts.display().to_string(),
        destination: "/etc/hosts".into(),
        kind: "bind".into(),
        ..Default::default()
    };
    let room = crate::copies::Room { bytes: 4096, files: 1, dirs: 0 };
    let copies = crate::copies::read(vec![mount], Vec::new(), room).unwrap().copies;
    let task = Shim::made(&pod, "one", Paths::default());
    let (copies, file) = (
        std::sync::Mutex::new(copies),
        Some(std::fs::File::options().write(true).open(&message).unwrap()),
    );
    shim.begin(Task { copies, message: file, ..task }).await;
    std::fs::write(&hosts, "after it began").unwrap();
    let put = format!("put {}/one 1 0", pod.name);
    while !shim.daemon.calls().contains(&put) {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    shim.kill("one", 9).await;
    assert_eq!(shim.status("one").await, 137);
    assert_eq!(std::fs::read_to_string(&message).unwrap(), "said");
}

#[tokio::test]
async fn a_process_that_is_not_known_is_asked_for_again() {
    let shim = Shim::new();
    let pod = shim.pod().await;
    shim.member(&pod, "web").await;
    for method in ["State", "Pids", "Connect"] {
        // The daemon did not answer when the pod started.
        pod.vmm.store(0, Ordering::Relaxed);
        shim.daemon.is_silent.store(true, Ordering::Relaxed);
        pod.learn_pid(Duration::from_millis(1)).await;
        assert_eq!(pod.pid(), std::process::id());
        shim.daemon.is_silent.store(false, Ordering::Relaxed);
        // A daemon on a busy machine may take longer than a single call waits.
        let asked = async { while shim.pid_of(method, "web").await != VMM {} };
        tokio::time::timeout(Duration::from_secs(60), asked).await.expect(method);
    }
}
