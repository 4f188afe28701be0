//! `slipway-agent`: PID 1 of a sandbox.
//!
//! A static program, alone in an initramfs (as `/init`, with kernel modules in `/modules`). It
//! serves the protocol of `slipway-agent-protocol` on the virtio-serial port `slipway.agent`.
//!
//! # How the pieces meet
//!
//! [`machine`] mounts the kernel's file systems and loads modules, [`port`] turns the port into a
//! sequence of connections, and [`mod@service`] answers requests with [`agent`], which holds
//! containers by id in a [`table`]; [`statuses`] has the answers to what fails. [`container`]
//! builds one container: its devices ([`nvme`], [`pmem`], [`uevent`]), its [`cgroup`] with the
//! [`device_policy`] and its counts ([`mod@group`]), its processes. A [`process`] begins as this
//! program in the role of [`init`], which sets itself up inside the container's namespaces and
//! executes the container's program. [`stdio`] carries a process's streams, [`kept`] keeps output
//! that the host may ask for again, and the [`reaper`] reports the process's end. [`trace`]
//! measures the time that the NVMe driver and the block layer take for commands, while a host asks
//! for it. [`network`] configures the sandbox's interface. [`cpus`] brings CPUs online, those that
//! the machine begins with and those that the VMM adds, and takes those offline that the VMM is to
//! remove; [`ethtool`] has the interface's queues follow. [`sockets`] starts the socket engine of a
//! sandbox whose sockets are devices. [`shares`] mounts the host's files that containers have, and
//! [`copies`] writes those of which they have copies, into a container's root or its [`file_dirs`],
//! and [`copying`] has the host copy files out of a container and into it while it runs.
//! [`rejoin`] gives a container of a saved machine the names of another sandbox. A [`message`] is
//! what a container's program says of its end. [`empty_dirs`] makes directories of the sandbox that
//! containers of a pod share by name, and [`huge_pages`] has the kernel make those that containers'
//! limits stand for. A [`zygote`] is a process of a container of which others are forks;
//! [`stopped`] says whether it stands still.
//!
//! # What keeps a container in
//!
//! The virtual machine separates a container from the host. Inside the sandbox, a container is
//! separated from the agent and its neighbours by namespaces (mount, PID, IPC, UTS, cgroup), the
//! usual default capabilities, masked and write-protected kernel paths, and a device policy in BPF.
//! The host can name other capabilities and paths, and adds filters of system calls, which it
//! compiles.
//! CAP_MKNOD stays, as in other runtimes, but a container cannot open a node of a device that is
//! not its own, such as the agent's port. On a kernel without such policies, CAP_MKNOD is dropped
//! instead. A privileged container can do everything that root in the sandbox can, including ending
//! the sandbox.
//!
//! # Not implemented
//!
//! A network namespace for each container (all share the sandbox's), user namespaces, volumes with
//! a file system other than ext4, resuming input that was in flight to a process when the host's
//! connection broke.
//!
//! # Dependencies
//!
//! `tokio` (one thread) and `tonic` serve gRPC, as on the host's end; `prost` also encodes the
//! description of a process for [`init`]. `rustix` gives system calls safe types. `libc` has those
//! that `rustix` lacks: clone into namespaces, execve, signals by number, bpf, ptrace, two ioctls.
//! These calls, the adoption of inherited descriptors and the runtime's registration of descriptors
//! are the `unsafe` blocks. `slipway-netlink` configures the interface and ends connections.
//! `serde_json` writes histograms. `anyhow` is used because every error here ends as text for the
//! host. `slipway-tar-tree` packs and unpacks what is copied.
#![allow(unsafe_code)]

mod agent;
mod cgroup;
mod connect;
mod container;
mod copies;
mod copying;
mod cpus;
mod device_policy;
mod empty_dirs;
mod ethtool;
mod file;
mod file_dirs;
mod group;
mod huge_pages;
mod init;
mod kept;
mod lock;
mod machine;
mod message;
mod name;
mod network;
mod nvme;
mod pmem;
mod port;
mod process;
mod reaper;
mod rejoin;
mod service;
mod shares;
mod signal;
mod sockets;
mod stages;
mod stats;
mod statuses;
mod stdio;
mod stopped;
mod sysctl;
mod table;
mod trace;
mod uevent;
mod zygote;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use slipway_agent_protocol::v1::agent_server::AgentServer;
use slipway_agent_protocol::{CONNECTION_WINDOW, PORT_NAME, STREAM_WINDOW};
use tonic::transport::Server;

use crate::agent::Agent;
use crate::cgroup::Hierarchy;
use crate::container::AgentPaths;
use crate::port::Port;
use crate::reaper::Reaper;
use crate::service::Service;
use crate::sockets::Files;
use crate::stages::Stages;

/// Logs a line, formatted as by `println!`.
macro_rules! log {
    ($($arguments:tt)*) => { $crate::machine::write_log(format_args!($($arguments)*)) };
}
pub(crate) use log;

fn main() {
    let first_instruction = stages::now();
    let mut args = std::env::args().skip(1);
    let result = match args.next().as_deref() {
        // The kernel passes options that it does not know to PID 1, so PID 1 ignores its arguments.
        _ if std::process::id() == 1 => run_as_init(first_instruction),
        Some(init::SUBCOMMAND) => init::run(args),
        Some("serve") => serve_socket(first_instruction, args.collect()),
        // Requested modules are mostly absent, which is not worth a log line.
        Some(machine::MODPROBE_OPTION) => {
            let there = args.nth(1).is_some_and(|name| machine::load_asked(&name));
            std::process::exit(i32::from(!there))
        }
        _ => Err(anyhow::anyhow!("this program is PID 1 of a Slipway sandbox")),
    };
    if let Err(error) = result {
        log!("{error:#}");
        if std::process::id() == 1 {
            machine::power_off();
        }
        std::process::exit(1);
    }
}

fn runtime() -> Result<tokio::runtime::Runtime> {
    // One thread: requests are few, and the data path is bounded by the port.
    Ok(tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build()?)
}

fn run_as_init(first_instruction: u64) -> Result<()> {
    machine::end_on_panic();
    machine::mount_all()?;
    if let Err(error) = cpus::start_all(Path::new(machine::SYSFS)) {
        log!("{error:#}");
    }
    let stages = Arc::new(Stages::new(first_instruction));
    let loader = stages.clone();
    // Modules are loaded in parallel to opening the port, which needs only its own driver and not
    // the last module.
    std::thread::Builder::new()
        .name("modules".into())
        .spawn(move || machine::load_modules(&loader))
        .context("starting the module loader")?;
    runtime()?.block_on(async {
        watch_driver(&stages, Path::new(machine::SYSFS));
        let port = Port::open(Path::new(machine::SYSFS), PORT_NAME).await?;
        let hierarchy = Hierarchy::new(Path::new(machine::CGROUPS))
            .inspect_err(|error| log!("no cgroups for containers: {error}"))
            .ok();
        let places = AgentPaths {
            program: machine::read_only_program()?,
            base: machine::BASE.into(),
            sysfs: machine::SYSFS.into(),
            sockets: Files { fixed: machine::SOCKETS.into(), run: machine::SOCKETS_RUN.into() },
            empty_dirs: machine::EMPTY_DIRS.into(),
            file_dirs: machine::FILE_DIRS.into(),
            hierarchy,
        };
        if let Err(error) = machine::loopback_up() {
            log!("loopback: {error}");
        }
        let service = service(places, stages, Box::new(machine::power_off));
        server().serve_with_incoming(service, port.connections()).await?;
        bail!("the port failed")
    })
}

/// Runs `serve SOCKET BASE SYSFS CGROUP`: the agent as an ordinary root process on a Unix socket,
/// for tests and development. It changes nothing of the machine that it runs on.
fn serve_socket(first_instruction: u64, args: Vec<String>) -> Result<()> {
    let [socket, base, sysfs, cgroup] = args.as_slice() else {
        bail!("serve SOCKET BASE SYSFS CGROUP");
    };
    rustix::process::set_child_subreaper(Some(rustix::process::getpid()))?;
    let stages = Arc::new(Stages::new(first_instruction));
    stages.modules_end();
    runtime()?.block_on(async {
        watch_driver(&stages, Path::new(sysfs));
        let places = AgentPaths {
            program: "/proc/self/exe".into(),
            base: PathBuf::from(base),
            sysfs: PathBuf::from(sysfs),
            sockets: Files {
                fixed: Path::new(base).with_file_name("sockets"),
                run: Path::new(base).with_file_name("run"),
            },
            empty_dirs: Path::new(base).with_file_name("empty-dirs"),
            file_dirs: Path::new(base).with_file_name("file-dirs"),
            hierarchy: Hierarchy::new(Path::new(cgroup)).ok(),
        };
        let listener = tokio::net::UnixListener::bind(socket)?;
        let incoming = tokio_stream::wrappers::UnixListenerStream::new(listener);
        let service = service(places, stages, Box::new(|| std::process::exit(0)));
        server().serve_with_incoming(service, incoming).await.context("serving")
    })
}

/// Makes a server whose connections have room for calls beside stalled streams.
fn server() -> Server {
    Server::builder()
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
}

fn service(
    places: AgentPaths,
    stages: Arc<Stages>,
    power_off: agent::PowerOff,
) -> AgentServer<Service> {
    let reaper = Arc::new(Reaper::default());
    let reaping = reaper.clone();
    tokio::spawn(async move {
        if let Err(error) = reaping.run().await {
            log!("reaping: {error}");
        }
    });
    AgentServer::new(Service(Arc::new(Agent::new(places, stages, reaper, power_off))))
}

/// Starts a task that records the driver's stage.
fn watch_driver(stages: &Arc<Stages>, sysfs: &Path) {
    let (stages, sysfs) = (stages.clone(), sysfs.to_owned());
    tokio::spawn(async move { nvme::record_first(&stages, sysfs).await });
}
