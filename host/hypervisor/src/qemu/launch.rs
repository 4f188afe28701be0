//! From a spec to a QEMU that answers.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::{Mode, OFlags};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use super::args::{self, Passed};
use super::console::{CappedLog, copy_to_log, read_tail};
use super::qmp::Qmp;
use super::vm::{QemuVm, Supervised};
use crate::process::{Launch, Process};
use crate::{
    Accel, EmulatedDisk, Error, LaunchTimes, Result, VmExit, VmRecord, VmSpec, accel, process,
};

/// How long QEMU may take to answer. A hundred at once on two cores need some of it.
const ANSWER_DEADLINE: Duration = Duration::from_secs(60);

/// Connections to the agent's port that may wait for QEMU.
const AGENT_BACKLOG: i32 = 4;

pub(super) async fn launch(program: &Path, spec: &VmSpec, accel: Accel) -> Result<QemuVm> {
    args::check(spec)?;
    let log = CappedLog::create(&spec.console_log, VmSpec::CONSOLE_CAP)?;
    let (qmp_ours, qmp_theirs) =
        UnixStream::pair().map_err(|source| Error::system("making a socket pair", source))?;
    let mut launch = Launch::new(program, &spec.run_dir);
    launch.run_as(spec.credentials);
    launch.join(&spec.cgroup_procs)?;
    let kvm = match accel {
        Accel::Kvm => {
            Some(accel::open_kvm().map_err(|error| Error::file("open", accel::KVM_DEVICE, error))?)
        }
        Accel::Tcg => None,
    };
    let functions = spec.vfio_user_sockets.iter().map(|path| open_socket(path));
    let functions = functions.collect::<Result<Vec<_>>>()?;
    let disks = spec.disks.iter().map(open_disk).collect::<Result<Vec<_>>>()?;
    let agent = AgentSocket::listen(&spec.agent_socket)?;
    let passed = Passed {
        qmp: launch.pass(qmp_theirs.into()),
        agent: launch.pass(agent.listener),
        functions: functions.into_iter().map(|fd| launch.pass(fd)).collect(),
        disks: disks.into_iter().map(|(fd, device)| (launch.pass(fd), device)).collect(),
        kvm: kvm.map(|fd| launch.pass(fd)),
    };
    launch.arguments(args::build(spec, accel, &passed));

    let spawned = Instant::now();
    let mut process = Unfinished(Some(launch.spawn()?));
    let started = start_up(process.get(), log, qmp_ours).await?;
    let times = LaunchTimes { spawned, ready: Instant::now() };
    let Started { record, qmp, stderr } = started;
    let supervised = Supervised { process: process.finish(), stderr, agent_socket: agent.path };
    QemuVm::new(record, times, accel, qmp, supervised)
}

type StderrTail = tokio::task::JoinHandle<io::Result<String>>;

/// A QEMU that answered.
struct Started {
    record: VmRecord,
    qmp: Qmp,
    stderr: StderrTail,
}

async fn start_up(process: &mut Process, log: CappedLog, control: UnixStream) -> Result<Started> {
    let record = VmRecord::of("qemu", process.pid())?;
    let (Some(console), Some(stderr)) = process.output() else {
        return Err(Error::Control("its output was taken by somebody else".into()));
    };
    tokio::spawn(copy_to_log(console.into(), log));
    let mut stderr = tokio::spawn(read_tail(stderr.into()));
    tokio::select! {
        answer = tokio::time::timeout(ANSWER_DEADLINE, connect(control)) => {
            let command = || "qmp_capabilities".to_owned();
            match answer {
                Ok(Ok(qmp)) => return Ok(Started { record, qmp, stderr }),
                // A dying QEMU closes the channel a moment before it is gone: its standard error
                // says more than the closed channel does.
                Ok(Err(error @ Error::Control(_))) => {
                    let limit = Duration::from_secs(2);
                    if tokio::time::timeout(limit, process.exited()).await.is_err() {
                        return Err(error);
                    }
                }
                Ok(Err(error)) => return Err(error),
                Err(_) => {
                    return Err(Error::Timeout { command: command(), timeout: ANSWER_DEADLINE });
                }
            }
        }
        _ = process.exited() => {}
    }
    Err(Error::Died { exit: Box::new(exit_of(process, &mut stderr, None).await) })
}

/// Connects, and waits for the main loop: the greeting comes from a thread of its own before the
/// machine is complete, `query-status` is answered after.
async fn connect(control: UnixStream) -> Result<Qmp> {
    let stream = control
        .set_nonblocking(true)
        .and_then(|()| tokio::net::UnixStream::from_std(control))
        .map_err(|source| Error::system("using a socket pair", source))?;
    let (reader, writer) = stream.into_split();
    let qmp = Qmp::connect(reader, writer).await?;
    qmp.execute("query-status", ANSWER_DEADLINE).await?;
    Ok(qmp)
}

/// How a process ended that has ended.
pub(super) async fn exit_of(
    process: &mut Process,
    stderr: &mut StderrTail,
    qmp: Option<&Qmp>,
) -> VmExit {
    // Both pipes close with the process; the limit is for a descriptor that somebody else holds.
    let limit = Duration::from_secs(2);
    let stderr = match tokio::time::timeout(limit, stderr).await {
        Ok(Ok(Ok(text))) => text,
        _ => String::new(),
    };
    let reason = match qmp {
        Some(qmp) => {
            let _ = tokio::time::timeout(limit, qmp.drained()).await;
            qmp.last_shutdown()
        }
        None => None,
    };
    let (code, signal) = match process.exited().await {
        Ok(status) => process::code_and_signal(status),
        Err(_) => (None, None),
    };
    VmExit { code, signal, reason, stderr }
}

/// Ends and reaps a process whose launch did not finish, for whatever reason.
struct Unfinished(Option<Process>);

impl Unfinished {
    fn get(&mut self) -> &mut Process {
        self.0.as_mut().expect("present until finish, which consumes self")
    }

    fn finish(mut self) -> Process {
        self.0.take().expect("present until finish, which consumes self")
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        if let Some(process) = &mut self.0 {
            process.end_now();
        }
    }
}

/// A path that is removed when its owner goes.
#[derive(Debug)]
pub(super) struct RemoveOnDrop(std::path::PathBuf);

impl Drop for RemoveOnDrop {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

struct AgentSocket {
    listener: OwnedFd,
    path: RemoveOnDrop,
}

impl AgentSocket {
    /// Listens at `path`, mode 0600 before anybody can connect.
    fn listen(path: &Path) -> Result<Self> {
        let failed = |source: io::Error| Error::file("listen on", path, source);
        remove_stale(path).map_err(failed)?;
        let address = SocketAddrUnix::new(path).map_err(|errno| failed(errno.into()))?;
        let bind = || -> rustix::io::Result<OwnedFd> {
            let socket = rustix::net::socket_with(
                AddressFamily::UNIX,
                SocketType::STREAM,
                SocketFlags::CLOEXEC,
                None,
            )?;
            rustix::net::bind(&socket, &address)?;
            Ok(socket)
        };
        let listener = bind().map_err(|errno| failed(errno.into()))?;
        let path = RemoveOnDrop(path.to_owned());
        let private = fs::Permissions::from_mode(0o600);
        fs::set_permissions(&path.0, private)
            .and_then(|()| Ok(rustix::net::listen(&listener, AGENT_BACKLOG)?))
            .map_err(failed)?;
        Ok(Self { listener, path })
    }
}

/// Removes a socket that an earlier run left; anything else stays and is an error later.
fn remove_stale(path: &Path) -> io::Result<()> {
    match fs::symlink_metadata(path) {
        Ok(meta) if meta.file_type().is_socket() => fs::remove_file(path),
        Ok(_) => Err(io::Error::new(io::ErrorKind::AlreadyExists, "a file is in the way")),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    }
}

/// A disk's file with the rights that the guest is to have, and whether it is a block device.
fn open_disk(disk: &EmulatedDisk) -> Result<(OwnedFd, bool)> {
    use rustix::fs::FileType;
    let failed = |source: io::Error| Error::file("use the disk", &disk.path, source);
    let access = if disk.read_only { OFlags::RDONLY } else { OFlags::RDWR };
    // QEMU takes a descriptor only if it has the very flags that it would have opened it with.
    let flags = access | OFlags::DIRECT | OFlags::CLOEXEC;
    let fd =
        rustix::fs::open(&disk.path, flags, Mode::empty()).map_err(|errno| failed(errno.into()))?;
    let stat = rustix::fs::fstat(&fd).map_err(|errno| failed(errno.into()))?;
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => Ok((fd, false)),
        FileType::BlockDevice => Ok((fd, true)),
        _ => Err(failed(io::Error::other("it is neither a file nor a block device"))),
    }
}

/// A path-only descriptor of a socket.
fn open_socket(path: &Path) -> Result<OwnedFd> {
    let failed = |source: io::Error| Error::file("use the vfio-user socket", path, source);
    let fd = rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())
        .map_err(|errno| failed(errno.into()))?;
    let stat = rustix::fs::fstat(&fd).map_err(|errno| failed(errno.into()))?;
    if rustix::fs::FileType::from_raw_mode(stat.st_mode) != rustix::fs::FileType::Socket {
        return Err(failed(io::Error::other("it is no socket")));
    }
    Ok(fd)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::qemu::args::tests::spec;

    /// A spec whose paths are all in `directory`.
    fn spec_in(directory: &Path) -> VmSpec {
        VmSpec {
            agent_socket: directory.join("agent"),
            vfio_user_sockets: Vec::new(),
            console_log: directory.join("console"),
            run_dir: directory.to_owned(),
            ..spec()
        }
    }

    async fn failure(program: &str, spec: &VmSpec) -> Error {
        launch(Path::new(program), spec, Accel::Tcg).await.err().expect("no launch")
    }

    #[tokio::test]
    async fn a_program_that_ends_is_reported_and_leaves_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let spec = spec_in(directory.path());
        // ls rejects the first of QEMU's options and says so on standard error.
        let error = failure("ls", &spec).await;
        let Error::Died { exit } = &error else { panic!("{error}") };
        assert_eq!(exit.code, Some(2));
        assert!(exit.stderr.contains("ls"), "{}", exit.stderr);
        assert!(!spec.agent_socket.exists());
    }

    #[tokio::test]
    async fn what_is_missing_is_named() {
        let directory = tempfile::tempdir().unwrap();
        let mut spec = spec_in(directory.path());
        let error = failure("/nonexistent/qemu", &spec).await.to_string();
        assert!(error.starts_with("cannot start /nonexistent/qemu"), "{error}");
        assert!(!spec.agent_socket.exists());
        spec.vfio_user_sockets = vec![directory.path().join("absent")];
        let error = failure("true", &spec).await.to_string();
        assert!(error.contains("cannot use the vfio-user socket") && error.contains("absent"));
        spec.vfio_user_sockets = vec![directory.path().join("console")];
        assert!(failure("true", &spec).await.to_string().contains("it is no socket"));
    }

    #[tokio::test]
    async fn a_stale_socket_is_replaced_and_a_file_is_not() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("agent");
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        let socket = AgentSocket::listen(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        UnixStream::connect(&path).unwrap();
        drop(socket);
        assert!(!path.exists());
        fs::write(&path, "precious").unwrap();
        assert!(AgentSocket::listen(&path).is_err());
        assert_eq!(fs::read(&path).unwrap(), b"precious");
    }
}
