//! An agent as an ordinary root process, with loop devices in place of NVMe namespaces. The agent
//! finds them in a directory that is laid out like sysfs; everything else is real.

#![allow(clippy::unwrap_used)] // a failed unwrap is the failure report
#![allow(missing_docs)]

use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use hyper_util::rt::TokioIo;
use slipway_agent_protocol::v1::agent_client::AgentClient;
use slipway_agent_protocol::v1::*;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::{Channel, Endpoint};
use tonic::{Status, Streaming};

const BUSYBOX: &str = "/bin/busybox";

/// Returns the reason why the tests cannot run here. Returns `None` if they can.
fn missing() -> Option<&'static str> {
    let works = |program: &str, argument: &str| {
        Command::new(program).arg(argument).output().is_ok_and(|output| output.status.success())
    };
    let file_systems = std::fs::read_to_string("/proc/filesystems").unwrap_or_default();
    let checks: [(bool, &str); 9] = [
        (rustix::process::geteuid().is_root(), "root"),
        (Path::new(BUSYBOX).exists(), "/bin/busybox (busybox-static)"),
        (works("mkfs.erofs", "--help"), "mkfs.erofs (erofs-utils)"),
        (works("mkfs.ext4", "-V"), "mkfs.ext4 (e2fsprogs)"),
        (file_systems.contains("\terofs\n"), "EROFS in the kernel"),
        (file_systems.contains("\toverlay\n"), "overlayfs in the kernel"),
        (Path::new("/dev/loop-control").exists(), "loop devices"),
        (cgroup2().is_some(), "a cgroup2 mount"),
        (is_root_of_namespace(), "the mount namespace's own root; this is a chroot"),
    ];
    checks.iter().find(|(there, _)| !there).map(|(_, what)| *what)
}

/// Returns whether `/` is the root that a process gets that enters this mount namespace, as an exec
/// does.
fn is_root_of_namespace() -> bool {
    let root = |command: &mut Command| {
        let output = command.args(["stat", "-c", "%d:%i", "/"]).output().ok()?;
        output.status.success().then_some(output.stdout)
    };
    let own = root(&mut Command::new("env"));
    own.is_some() && own == root(Command::new("nsenter").arg("--mount=/proc/self/ns/mnt"))
}

fn cgroup2() -> Option<PathBuf> {
    let mounts = std::fs::read_to_string("/proc/mounts").ok()?;
    mounts.lines().find_map(|line| {
        let mut fields = line.split(' ').skip(1);
        let path = fields.next()?;
        (fields.next()? == "cgroup2").then(|| PathBuf::from(path))
    })
}

fn run(command: &mut Command) {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
}

/// Returns the path of a busybox system as an EROFS image, made once for all tests of this process.
fn image() -> &'static Path {
    static IMAGE: OnceLock<PathBuf> = OnceLock::new();
    IMAGE.get_or_init(|| {
        let own = format!("image-{}", std::process::id());
        let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join(own);
        let root = directory.join("root");
        for path in ["bin", "etc", "home/ada"] {
            std::fs::create_dir_all(root.join(path)).unwrap();
        }
        std::fs::copy(BUSYBOX, root.join("bin/busybox")).unwrap();
        let applets = Command::new(BUSYBOX).arg("--list").output().unwrap().stdout;
        for applet in String::from_utf8(applets).unwrap().lines().filter(|name| *name != "busybox")
        {
            std::os::unix::fs::symlink("busybox", root.join("bin").join(applet)).unwrap();
        }
        let files = [
            ("etc/passwd", "root:x:0:0:root:/root:/bin/sh\nada:x:1000:1000::/home/ada:/bin/sh\n"),
            ("etc/group", "root:x:0:\nada:x:1000:\naudio:x:29:ada\n"),
            ("bin/data", "no program\n"),
            // An ELF header of s390x. Its type is none, so that no emulator of this host takes it.
            ("bin/foreign", "\x7fELF\x02\x02\x01\0\0\0\0\0\0\0\0\0\0\0\0\x16"),
            ("bin/foreign-script", "#!/bin/foreign -e\n"),
            ("bin/unknown", "no program\n"),
            ("etc/resolv.conf", "nameserver 192.0.2.1\n"),
        ];
        for (path, content) in files {
            std::fs::write(root.join(path), content).unwrap();
        }
        for program in ["bin/foreign", "bin/foreign-script", "bin/unknown"] {
            let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
            std::fs::set_permissions(root.join(program), mode).unwrap();
        }
        let image = directory.join("image.erofs");
        run(Command::new("mkfs.erofs").arg("--all-root").arg(&image).arg(&root));
        std::fs::remove_dir_all(&root).unwrap();
        image
    })
}

/// A loop device, released on drop.
struct Loop(String);

impl Loop {
    fn new(file: &Path) -> Loop {
        let output = Command::new("losetup").args(["--find", "--show"]).arg(file).output().unwrap();
        assert!(output.status.success(), "losetup: {}", String::from_utf8_lossy(&output.stderr));
        Loop(String::from_utf8(output.stdout).unwrap().trim().to_owned())
    }

    fn number(&self) -> String {
        let name = self.0.trim_start_matches("/dev/");
        std::fs::read_to_string(format!("/sys/class/block/{name}/dev")).unwrap()
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("-d").arg(&self.0).status();
    }
}

/// The namespace identifiers of a sandbox's fake controller.
pub const IMAGE: u32 = 1;
pub const VOLATILE: u32 = 2;
pub const FORMATTED: u32 = 3;
pub const BLANK: u32 = 4;

/// A running agent.
pub struct Sandbox {
    pub client: AgentClient<Channel>,
    pub agent: Child,
    pub cgroup: PathBuf,
    socket: PathBuf,
    _loops: Vec<Loop>,
    /// The directory of the agent's files.
    #[allow(dead_code)] // not every test looks there
    pub directory: tempfile::TempDir,
}

/// The output and the exit status of a finished process.
#[derive(Debug, Default, PartialEq)]
pub struct Output {
    pub status: u32,
    pub stdout: String,
    pub stderr: String,
}

impl Sandbox {
    /// Starts an agent. Returns `None` after printing why the test is skipped.
    pub async fn start(test: &str) -> Option<Sandbox> {
        if let Some(what) = missing() {
            eprintln!("SKIPPED: {test}: needs {what}");
            return None;
        }
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        let mut loops = vec![Loop::new(image())];
        for (name, formatted) in [("volatile", true), ("formatted", true), ("blank", false)] {
            let file = std::fs::File::create(path(name)).unwrap();
            file.set_len(32 << 20).unwrap();
            if formatted {
                run(Command::new("mkfs.ext4").arg("-q").arg(path(name)));
            }
            loops.push(Loop::new(&path(name)));
        }
        for (index, device) in loops.iter().enumerate() {
            let name = format!("nvme0n{}", index + 1);
            let namespace = path("sys/class/nvme/nvme0").join(&name);
            std::fs::create_dir_all(&namespace).unwrap();
            std::fs::write(namespace.join("nsid"), format!("{}\n", index + 1)).unwrap();
            let block = path("sys/class/block").join(&name);
            std::fs::create_dir_all(&block).unwrap();
            std::fs::write(block.join("dev"), device.number()).unwrap();
        }
        std::fs::create_dir(path("base")).unwrap();
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let own = format!("slipway-test-{}-{count}", std::process::id());
        let cgroup = cgroup2().unwrap().join(own);
        std::fs::create_dir(&cgroup).unwrap();
        let socket = path("agent.sock");
        let agent = Command::new(env!("CARGO_BIN_EXE_slipway-agent"))
            .arg("serve")
            .args([&socket, &path("base"), &path("sys"), &cgroup.join("containers")])
            .spawn()
            .unwrap();
        let client = connect(&socket).await;
        Some(Sandbox { client, agent, cgroup, socket, _loops: loops, directory })
    }

    /// Opens another connection.
    pub async fn reconnect(&self) -> AgentClient<Channel> {
        connect(&self.socket).await
    }

    /// Creates a container, runs it to its end and removes it.
    pub async fn run(&mut self, request: CreateContainerRequest) -> Result<Output, Status> {
        let id = request.id.clone();
        self.client.create_container(request).await?;
        let mut stream = self.attach(&main(&id), vec![]).await?;
        let started = self.client.start_container(StartContainerRequest { id: id.clone() }).await;
        let mut output = drain(&mut stream).await;
        output.status = self.wait(&main(&id)).await.exit_status;
        self.remove(&id).await;
        started.map(|_| output)
    }

    /// Opens a Stdio stream and sends `input`, and the end of input if `input` is not empty.
    pub async fn attach(
        &mut self,
        process: &ProcessRef,
        input: Vec<Vec<u8>>,
    ) -> Result<Streaming<StdioOut>, Status> {
        let (sender, receiver) = tokio::sync::mpsc::channel(4);
        let attach = stdio_in::Kind::Attach(process.clone());
        sender.send(StdioIn { kind: Some(attach) }).await.unwrap();
        let end = !input.is_empty();
        tokio::spawn(async move {
            for bytes in input {
                let _ = sender.send(StdioIn { kind: Some(stdio_in::Kind::Stdin(bytes)) }).await;
            }
            if end {
                let kind = Some(stdio_in::Kind::StdinClosed(true));
                let _ = sender.send(StdioIn { kind }).await;
            }
            sender.closed().await;
        });
        Ok(self.client.stdio(ReceiverStream::new(receiver)).await?.into_inner())
    }

    /// Opens a Stdio stream like [`Sandbox::attach`], and returns it with a sender for further
    /// messages.
    pub async fn attach_interactively(
        &mut self,
        process: &ProcessRef,
    ) -> (tokio::sync::mpsc::Sender<StdioIn>, Streaming<StdioOut>) {
        let (sender, receiver) = tokio::sync::mpsc::channel(4);
        let attach = stdio_in::Kind::Attach(process.clone());
        sender.send(StdioIn { kind: Some(attach) }).await.unwrap();
        let stream = self.client.stdio(ReceiverStream::new(receiver)).await.unwrap();
        (sender, stream.into_inner())
    }

    pub async fn create(&mut self, request: CreateContainerRequest) {
        self.client.create_container(request).await.unwrap();
    }

    pub async fn start_container(&mut self, id: &str) -> u32 {
        let request = StartContainerRequest { id: id.into() };
        self.client.start_container(request).await.unwrap().into_inner().pid
    }

    pub async fn wait(&mut self, process: &ProcessRef) -> WaitReply {
        let request = WaitRequest { process: Some(process.clone()) };
        self.client.wait(request).await.unwrap().into_inner()
    }

    pub async fn signal(&mut self, process: &ProcessRef, signal: i32, all: bool) {
        let signal = signal as u32;
        let request = SignalRequest { process: Some(process.clone()), signal, all };
        self.client.signal(request).await.unwrap();
    }

    pub async fn remove(&mut self, id: &str) {
        let request = RemoveContainerRequest { id: id.into() };
        self.client.remove_container(request).await.unwrap();
    }

    /// Runs another process to its end.
    pub async fn exec(&mut self, id: &str, spec: ProcessSpec) -> Result<Output, Status> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let exec_id = format!("exec{}", COUNT.fetch_add(1, Ordering::Relaxed));
        let process = ProcessRef { container_id: id.into(), exec_id };
        let (named, spec) = (Some(process.clone()), Some(spec));
        let request = ExecRequest { process: named, spec, ..Default::default() };
        self.client.exec(request).await?;
        let mut stream = self.attach(&process, vec![]).await?;
        let mut output = drain(&mut stream).await;
        output.status = self.wait(&process).await.exit_status;
        Ok(output)
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        let _ = self.agent.kill();
        let _ = self.agent.wait();
        // The agent is gone, so processes that a failed test left alive are killed here.
        let containers = self.cgroup.join("containers");
        for entry in std::fs::read_dir(&containers).into_iter().flatten().flatten() {
            let _ = std::fs::write(entry.path().join("cgroup.kill"), "1");
            let deadline = Instant::now() + Duration::from_secs(2);
            while entry.path().is_dir()
                && std::fs::remove_dir(entry.path()).is_err()
                && Instant::now() < deadline
            {
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        let _ = std::fs::remove_dir(&containers);
        let _ = std::fs::remove_dir(&self.cgroup);
        for name in ["empty-dirs", "file-dirs"] {
            let mounted = self.directory.path().join(name);
            if mounted.exists() {
                let _ = rustix::mount::unmount(&mounted, rustix::mount::UnmountFlags::DETACH);
            }
        }
    }
}

async fn connect(socket: &Path) -> AgentClient<Channel> {
    let deadline = Instant::now() + Duration::from_secs(100);
    loop {
        let socket = socket.to_owned();
        let connector = tower::service_fn(move |_| {
            let socket = socket.clone();
            async move { tokio::net::UnixStream::connect(socket).await.map(TokioIo::new) }
        });
        match Endpoint::from_static("http://agent").connect_with_connector(connector).await {
            Ok(channel) => return AgentClient::new(channel),
            Err(error) => assert!(Instant::now() < deadline, "no agent: {error}"),
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Reads a stream to its end.
pub async fn drain(stream: &mut Streaming<StdioOut>) -> Output {
    let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
    while let Some(message) = stream.message().await.unwrap() {
        match message.kind.unwrap() {
            stdio_out::Kind::Attached(_) => {}
            stdio_out::Kind::Stdout(bytes) => stdout.extend(bytes),
            stdio_out::Kind::Stderr(bytes) => stderr.extend(bytes),
        }
    }
    let text = |bytes| String::from_utf8(bytes).unwrap();
    Output { status: 0, stdout: text(stdout), stderr: text(stderr) }
}

/// Returns a reference to the first process of a container.
pub fn main(id: &str) -> ProcessRef {
    ProcessRef { container_id: id.into(), exec_id: String::new() }
}

/// Makes a process that runs `args`.
pub fn process(args: &[&str]) -> ProcessSpec {
    ProcessSpec { args: args.iter().map(|arg| (*arg).into()).collect(), ..Default::default() }
}

/// Makes a process that runs a script.
pub fn script(text: &str) -> ProcessSpec {
    process(&["sh", "-c", text])
}

pub fn device(nsid: u32) -> Option<BlockDevice> {
    Some(BlockDevice { pci_address: String::new(), nsid })
}

/// Makes a request for a container of the test image.
pub fn container(id: &str, process: ProcessSpec) -> CreateContainerRequest {
    CreateContainerRequest {
        id: id.into(),
        root: Some(RootFilesystem { image: device(IMAGE), ..Default::default() }),
        process: Some(process),
        ..Default::default()
    }
}
