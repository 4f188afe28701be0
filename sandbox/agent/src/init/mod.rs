//! Setup of a process of a container: the code between `fork` and the container's program.
//!
//! The agent starts itself again as `container-init` for every process. That program has two
//! stages, because a process cannot move itself into a new PID namespace:
//!
//! 1. *outer*: joins the container's cgroup, enters the namespaces (for an exec) and clones the
//!    inner stage (for a container: into new namespaces) as the agent's own child;
//! 2. *inner*: mounts the root (for a container), finds the user, opens the terminal, sets limits,
//!    reports [`Report::Ready`], waits for the agent's "go", drops privileges and executes.
//!
//! A fork of a container's zygote has no inner stage: the outer one makes it ([`fork`]).
//!
//! A re-executed program may allocate and use ordinary library code, which a bare fork of a process
//! that may have threads must not. Nothing here is asynchronous.
//!
//! Everything is mounted in the container's own mount namespace. So the kernel unmounts it when the
//! container's last process ends, and nothing is left to clean up in the agent's namespace.

pub mod channel;
mod credentials;
mod dev;
mod empty_dirs;
mod environment;
mod execute;
mod file_dirs;
mod files;
mod foreign;
mod fork;
mod hidden;
mod holder;
mod limits;
mod memory;
mod root;
mod seccomp;
mod shares;
pub mod sockets;
mod terminal;
mod tracee;
mod tree;
mod user;
mod variables;
mod volume;

use std::io::Read;
use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::path::Path;

use anyhow::{Context, Result, anyhow, bail};
use prost::Message;
use rustix::process::{DumpableBehavior, Pid, PidfdFlags, pidfd_open, set_dumpable_behavior};
use rustix::thread::{ThreadNameSpaceType, move_into_thread_name_spaces};
use slipway_agent_protocol::v1::{EmptyDir, File, Names, Paths, ProcessSpec, Share};

use channel::{Channel, Report};
use credentials::Rights;
pub use file_dirs::FLAGS as FILE_DIR_FLAGS;
pub use files::{MACHINE_ID, etc as files_of_etc, machine_id};
pub use terminal::size as window_size;

/// The first argument with which this program runs as `container-init`.
pub const SUBCOMMAND: &str = "container-init";

/// The exit status of a program that was not found, as in shells and docker.
pub const NOT_FOUND: u32 = 127;
/// The exit status of a program that was found and cannot be executed.
pub const NOT_EXECUTABLE: u32 = 126;

/// The description of a process for `container-init`, passed through a memfd.
#[derive(Clone, PartialEq, Message)]
pub struct InitSpec {
    /// The process to run.
    #[prost(message, optional, tag = "1")]
    pub process: Option<ProcessSpec>,
    /// Set for all capabilities and no hidden paths, unless others are given.
    #[prost(bool, tag = "2")]
    pub privileged: bool,
    /// Set to drop CAP_MKNOD. Without a device policy in the cgroup, CAP_MKNOD would open every
    /// device.
    #[prost(bool, tag = "3")]
    pub drop_mknod: bool,
    /// The directory of the container's cgroup; empty if there is no cgroup2.
    #[prost(string, tag = "4")]
    pub cgroup: String,
    /// The container to build, for a container's first process.
    #[prost(message, optional, tag = "5")]
    pub container: Option<ContainerSpec>,
    /// The id of a process of the container to join, in the agent's PID namespace, if there is no
    /// `container`.
    #[prost(int32, tag = "6")]
    pub join: i32,
    /// Set if the container's sockets are devices.
    #[prost(bool, tag = "7")]
    pub sockets: bool,
    /// The id of a zygote to fork, in the agent's PID namespace; 0: a process is started anew.
    #[prost(int32, tag = "8")]
    pub fork: i32,
    /// The text of the file that the process has at its descriptor 3; if absent, it has none.
    #[prost(string, optional, tag = "9")]
    pub variables: Option<String>,
    /// Set if the process has no streams: they are `/dev/null`.
    #[prost(bool, tag = "10")]
    pub without_streams: bool,
    /// The directory for the empty root of a process that holds a PID namespace, in place of a
    /// process that runs a program; otherwise empty.
    #[prost(string, tag = "20")]
    pub hold: String,
}

/// A container to build.
#[derive(Clone, PartialEq, Message)]
pub struct ContainerSpec {
    /// The path of an existing directory, which is covered by a tmpfs in the container's mount
    /// namespace.
    #[prost(string, tag = "1")]
    pub base: String,
    /// The device of the read-only image.
    #[prost(message, optional, tag = "2")]
    pub image: Option<Device>,
    /// The device of the overlay's upper layer, with ext4; if absent, a tmpfs is used.
    #[prost(message, optional, tag = "3")]
    pub volatile: Option<Device>,
    /// Set to mount the root read-only.
    #[prost(bool, tag = "4")]
    pub read_only: bool,
    /// The container's block devices and file systems.
    #[prost(message, repeated, tag = "5")]
    pub volumes: Vec<VolumeSpec>,
    /// The host name; empty: inherited.
    #[prost(string, tag = "6")]
    pub hostname: String,
    /// The name servers and addresses of the container.
    #[prost(message, optional, tag = "7")]
    pub names: Option<Names>,
    /// The folders that a container needs whose sockets are devices.
    #[prost(message, optional, tag = "8")]
    pub sockets: Option<SocketsSpec>,
    /// Set if the image's device is memory that the host shares.
    #[prost(bool, tag = "9")]
    pub shared_image: bool,
    /// The files to write into the root, in place of the image's.
    #[prost(message, repeated, tag = "10")]
    pub files: Vec<File>,
    /// The paths to hide; if absent, the usual ones of the container's kind.
    #[prost(message, optional, tag = "11")]
    pub masked: Option<Paths>,
    /// The paths to write-protect; if absent, the usual ones of the container's kind.
    #[prost(message, optional, tag = "12")]
    pub read_only_paths: Option<Paths>,
    /// The kernel settings of the container's own IPC namespace.
    #[prost(btree_map = "string, string", tag = "13")]
    pub sysctls: std::collections::BTreeMap<String, String>,
    /// The directory of the sandbox that is /dev/shm in all containers of a pod. Empty: the
    /// container is alone, with a /dev/shm and an IPC namespace of its own.
    #[prost(string, tag = "20")]
    pub shared_memory: String,
    /// The id, in the agent's PID namespace, of the process whose PID namespace the container
    /// shares; 0: the container has one of its own.
    #[prost(int32, tag = "21")]
    pub processes_of: i32,
    /// The file systems of the host to mount.
    #[prost(message, repeated, tag = "30")]
    pub shares: Vec<Share>,
    /// The agent's file for the container's termination message; empty: it has none.
    #[prost(string, tag = "31")]
    pub message: String,
    /// The path of that file in the container.
    #[prost(string, tag = "32")]
    pub message_path: String,
    /// The directories of the sandbox to mount, which have been made.
    #[prost(message, repeated, tag = "33")]
    pub empty_dirs: Vec<EmptyDir>,
    /// The directory on which they are mounted.
    #[prost(string, tag = "34")]
    pub empty_dirs_at: String,
    /// The container's directories for files of the host, which the agent has made and filled.
    #[prost(message, repeated, tag = "35")]
    pub file_dirs: Vec<FileDirSpec>,
}

/// A directory of a container's own, or the only file in it.
#[derive(Clone, PartialEq, Message)]
pub struct FileDirSpec {
    /// The path in the agent's mount namespace.
    #[prost(string, tag = "1")]
    pub source: String,
    /// The path in the container.
    #[prost(string, tag = "2")]
    pub path: String,
    /// Set if the container cannot write to it.
    #[prost(bool, tag = "3")]
    pub read_only: bool,
    /// Set if it is a file.
    #[prost(bool, tag = "4")]
    pub is_file: bool,
}

/// The agent's folders that are mounted into a container whose sockets are devices.
#[derive(Clone, PartialEq, Message)]
pub struct SocketsSpec {
    /// The folder with the libraries.
    #[prost(string, tag = "1")]
    pub libraries: String,
    /// The folder with the engine's socket only.
    #[prost(string, tag = "2")]
    pub engine: String,
}

/// A block device by its number.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct Device {
    /// Major number.
    #[prost(uint32, tag = "1")]
    pub major: u32,
    /// Minor number.
    #[prost(uint32, tag = "2")]
    pub minor: u32,
}

/// A volume of a container.
#[derive(Clone, PartialEq, Message)]
pub struct VolumeSpec {
    /// The volume's name; the device appears as `/dev/slipway/NAME` if it has no path of its own.
    #[prost(string, tag = "1")]
    pub name: String,
    /// The volume's device.
    #[prost(message, optional, tag = "2")]
    pub device: Option<Device>,
    /// Set if neither the device node nor the mount can be written.
    #[prost(bool, tag = "3")]
    pub read_only: bool,
    /// The path at which to mount the volume; empty: it is not mounted.
    #[prost(string, tag = "4")]
    pub mount_point: String,
    /// The path of the device, below /dev; empty: that of its name.
    #[prost(string, tag = "5")]
    pub device_path: String,
}

/// Runs `container-init CHANNEL SPEC` (two inherited descriptors). Does not return on success.
pub fn run(mut args: impl Iterator<Item = String>) -> Result<()> {
    let channel = Channel::new(inherited(args.next())?);
    let spec = inherited(args.next())?;
    // A container that an exec joins must not get at the agent's memory and descriptors.
    set_dumpable_behavior(DumpableBehavior::NotDumpable).context("prctl(PR_SET_DUMPABLE)")?;
    if let Err(error) = outer(&channel, spec) {
        channel.report(&Report::Failed { exit_status: 0, message: format!("{error:#}") })?;
    }
    Ok(())
}

fn inherited(number: Option<String>) -> Result<OwnedFd> {
    let number: i32 = number.context("missing descriptor")?.parse()?;
    if number < 3 {
        bail!("descriptor {number} is not one of the agent's");
    }
    // SAFETY: the agent passes descriptors that it opened for this process alone; nothing else
    // in this freshly executed program owns a descriptor above 2.
    let fd = unsafe { OwnedFd::from_raw_fd(number) };
    // Above the one that the program may get.
    Ok(rustix::io::fcntl_dupfd_cloexec(&fd, variables::DESCRIPTOR + 1)?)
}

fn outer(channel: &Channel, spec: OwnedFd) -> Result<()> {
    let mut bytes = Vec::new();
    std::fs::File::from(spec).read_to_end(&mut bytes).context("reading the specification")?;
    let spec = InitSpec::decode(bytes.as_slice()).context("decoding the specification")?;
    if spec.fork != 0 {
        return fork::run(channel, &spec);
    }
    if !spec.cgroup.is_empty() {
        // "0" stands for the writing process.
        std::fs::write(Path::new(&spec.cgroup).join("cgroup.procs"), "0")
            .with_context(|| format!("joining cgroup {}", spec.cgroup))?;
        memory::prefer_own_node(Path::new(&spec.cgroup))?;
    }
    // Written here, since the container's /proc may be its own. Forked processes inherit it.
    if let Some(process) = spec.process.as_ref().filter(|process| process.oom_score_adj != 0) {
        std::fs::write("/proc/self/oom_score_adj", process.oom_score_adj.to_string())
            .with_context(|| format!("OOM score adjustment {}", process.oom_score_adj))?;
    }
    let flags = match &spec.container {
        _ if !spec.hold.is_empty() => libc::CLONE_NEWNS | libc::CLONE_NEWPID,
        Some(container) => {
            if container.processes_of != 0 {
                join(container.processes_of, ThreadNameSpaceType::PROCESS_ID)?;
            }
            namespaces(container)
        }
        None => {
            join(spec.join, ALL_NAMESPACES)?;
            0
        }
    };
    match clone_sibling(flags)? {
        Some(pid) => channel.report(&Report::Pid(pid.as_raw_nonzero().get())),
        None => inner(channel, &spec),
    }
}

/// Returns the kinds of the namespaces that a container has for its own. Containers of a pod share
/// the sandbox's IPC namespace, and its host name unless they have one of their own.
fn namespaces(container: &ContainerSpec) -> i32 {
    let own = libc::CLONE_NEWNS | libc::CLONE_NEWCGROUP;
    let pid = if container.processes_of == 0 { libc::CLONE_NEWPID } else { 0 };
    let in_pod = !container.shared_memory.is_empty();
    let ipc = if in_pod { 0 } else { libc::CLONE_NEWIPC };
    let uts = if in_pod && container.hostname.is_empty() { 0 } else { libc::CLONE_NEWUTS };
    own | pid | ipc | uts
}

/// The kinds of the namespaces of a container.
const ALL_NAMESPACES: ThreadNameSpaceType = ThreadNameSpaceType::MOUNT
    .union(ThreadNameSpaceType::PROCESS_ID)
    .union(ThreadNameSpaceType::INTER_PROCESS_COMMUNICATION)
    .union(ThreadNameSpaceType::HOST_NAME_AND_NIS_DOMAIN_NAME)
    .union(ThreadNameSpaceType::CONTROL_GROUP);

/// Enters namespaces of process `pid`. A PID namespace takes effect for children.
fn join(pid: i32, kinds: ThreadNameSpaceType) -> Result<()> {
    let pid = Pid::from_raw(pid).context("no process to join")?;
    let fd = pidfd_open(pid, PidfdFlags::empty()).context("the container is not running")?;
    move_into_thread_name_spaces(fd.as_fd(), kinds).context("joining the container's namespaces")
}

/// Forks into new namespaces. The child's parent is this process's parent, the agent, so that the
/// agent gets its exit status. Returns `None` in the child.
fn clone_sibling(namespaces: i32) -> Result<Option<Pid>> {
    let flags = (namespaces | libc::CLONE_PARENT | libc::SIGCHLD) as libc::c_ulong;
    // SAFETY: without CLONE_VM this is a fork: the child gets a copy of the address space, with a
    // null stack it goes on with a copy of this one. This program has a single thread, so no lock
    // of the C library or the allocator can be left held in the child.
    let pid = unsafe { libc::syscall(libc::SYS_clone, flags, 0usize, 0usize, 0usize, 0usize) };
    if pid < 0 {
        return Err(anyhow!(std::io::Error::last_os_error()).context("clone"));
    }
    Ok(Pid::from_raw(i32::try_from(pid)?))
}

/// Runs the inner stage, which ends in the container's program or in exit.
fn inner(channel: &Channel, spec: &InitSpec) -> ! {
    let failure = match prepare_and_execute(channel, spec) {
        Ok(never) => match never {},
        Err(Failure::Setup(error)) => {
            Report::Failed { exit_status: 0, message: format!("{error:#}") }
        }
        Err(Failure::Execute { exit_status, message }) => Report::Failed { exit_status, message },
    };
    let status = match &failure {
        Report::Failed { exit_status, .. } if *exit_status != 0 => *exit_status as i32,
        _ => 1,
    };
    // If the agent is gone, nobody can receive the report.
    let _ = channel.report(&failure);
    std::process::exit(status)
}

/// The reason why the program does not run.
pub enum Failure {
    /// The container could not be set up as requested.
    Setup(anyhow::Error),
    /// The program is missing or cannot be executed.
    Execute {
        /// The exit status, [`NOT_FOUND`] or [`NOT_EXECUTABLE`].
        exit_status: u32,
        /// The message for the user.
        message: String,
    },
}

impl From<anyhow::Error> for Failure {
    fn from(error: anyhow::Error) -> Self {
        Failure::Setup(error)
    }
}

/// Sets the process up, reports that, waits for the agent's "go", and executes the program.
fn prepare_and_execute(
    channel: &Channel,
    spec: &InitSpec,
) -> Result<std::convert::Infallible, Failure> {
    if !spec.hold.is_empty() {
        holder::hold(channel, Path::new(&spec.hold))?;
    }
    let process = spec.process.as_ref().context("no process given")?;
    if let Some(container) = &spec.container {
        root::enter(container, spec.privileged)?;
    }
    let security = process.security.as_ref();
    let rights = Rights::new(security, spec.privileged, spec.drop_mknod)?;
    let groups = security.map_or(&[][..], |security| &security.groups);
    let user = user::resolve(Path::new("/"), &process.user)?.with_groups(groups);
    enter_directory(process, spec.container.as_ref())?;
    limits::apply(&process.limits)?;
    rustix::process::setsid().context("setsid")?;
    let master = open_streams(process, &user, spec.container.is_some())?;
    let mut environment = environment::complete(process, &user.home);
    if spec.sockets {
        sockets::add_environment(&mut environment);
    }
    let program = execute::Program::new(&process.args, &environment)?;
    // If the program of an exec is missing, that is reported before the process counts as created.
    if spec.container.is_none() {
        program.find(&user)?;
    }
    channel.ready(master)?;
    if !channel.wait_for_go()? {
        // The agent is gone or gave up this process.
        std::process::exit(1);
    }
    if let Some(text) = &spec.variables {
        variables::leave(text)?;
    }
    let path = program.find(&user)?;
    credentials::drop_to(&user, &rights)?;
    Err(program.execute(&path, rights.filter.as_ref()))
}

/// Enters the working directory, which is made if it is missing. The root of a container that is
/// read-only becomes so in between.
fn enter_directory(process: &ProcessSpec, container: Option<&ContainerSpec>) -> Result<()> {
    let cwd = if process.cwd.is_empty() { "/" } else { &process.cwd };
    files::create_directory(cwd).with_context(|| format!("working directory {cwd:?}"))?;
    if container.is_some_and(|container| container.read_only) {
        root::make_read_only()?;
    }
    rustix::process::chdir(cwd).with_context(|| format!("working directory {cwd:?}"))
}

/// Opens the terminal of a process that has one, which is the container's console if the process
/// `is_first`; otherwise the user gets the streams. Returns the terminal's master side.
fn open_streams(
    process: &ProcessSpec,
    user: &user::User,
    is_first: bool,
) -> Result<Option<OwnedFd>> {
    if process.terminal {
        let size = terminal::size(process.rows, process.columns);
        return terminal::open_terminal(size, user.uid, is_first).map(Some);
    }
    terminal::give_streams(user)?;
    Ok(None)
}
