//! A process of a container, seen from the agent.
//!
//! [`Process::prepare`] starts this program in the role of `init` with the process's streams
//! ([`launch`]) and waits for its reports ([`receive_pid`], [`receive_ready`]); [`Process::start`]
//! has it go on to the container's program. From then on a [`Process`] has its streams, signals and
//! end, for which `stdio` and `service` ask.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::{Duration, Instant};

use prost::Message;
use rustix::fs::MemfdFlags;
use rustix::io::{FdFlags, fcntl_setfd};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::process::Pid;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::file::{AsyncFile, register};
use crate::init::channel::{self, Report};
use crate::init::{InitSpec, SUBCOMMAND};
use crate::kept::OutputTail;
use crate::lock::lock;
use crate::log;
use crate::reaper::{Exit, Reaper};

/// The deadline for setting a process up. Mounts and look-ups take milliseconds, or minutes in a
/// guest under emulation on a busy host, but a device that does not answer must not block the
/// caller for ever. The NVMe driver gives up a command after 30 s.
const SETUP_DEADLINE: Duration = Duration::from_secs(600);

/// The reason why a process could not be set up or started.
#[derive(Debug, Clone)]
pub struct Failure {
    /// 126 or 127 if the program itself is the reason, as in docker; otherwise 0.
    pub exit_status: u32,
    /// The message for the user.
    pub message: String,
}

impl<E: Into<anyhow::Error>> From<E> for Failure {
    fn from(error: E) -> Self {
        Failure { exit_status: 0, message: format!("{:#}", error.into()) }
    }
}

/// Standard output and standard error. With a terminal, its master side is standard output.
#[derive(Default)]
pub struct Outputs {
    pub stdout: Option<Arc<AsyncFile>>,
    pub stderr: Option<Arc<AsyncFile>>,
}

/// How a process that was set up begins to run.
enum Begin {
    /// `container-init` executes the program, once it is told so.
    Execute(AsyncFd<OwnedFd>),
    /// A fork, which is stopped, goes on.
    GoOn,
}

/// A process that was set up. It runs after [`Process::start`].
pub struct Process {
    pid: Pid,
    exit: Exit,
    /// `None` once it was started.
    begin: Mutex<Option<Begin>>,
    /// The time at which it was set up.
    made: Instant,
    /// Set if the process is killed when its Stdio stream is closed.
    ends_with_stream: bool,
    stdin: Mutex<Option<Arc<AsyncFile>>>,
    terminal: Option<Arc<AsyncFile>>,
    /// The streams, locked by the attached Stdio stream.
    pub outputs: Arc<tokio::sync::Mutex<Outputs>>,
    /// Output that was read and that the host has not recorded yet.
    kept: Mutex<OutputTail>,
    /// Set once its exit status was told, or nobody is left to ask for it.
    told: AtomicBool,
}

impl Process {
    /// Sets up a process, with the program `agent` (this one) as its first stage. `terminal` and
    /// `stdin` are those of `spec.process`.
    pub async fn prepare(
        agent: &Path,
        reaper: &Arc<Reaper>,
        spec: &InitSpec,
    ) -> Result<Process, Failure> {
        let starting = reaper.starting();
        let (channel, mut pipes) = launch(agent, spec)?;
        let channel = register(channel, Interest::READABLE)?;
        let (pid, early) = receive_pid(&channel).await?;
        let exit = starting.watch(pid);
        let terminal = receive_ready(&channel, pid, early).await?;
        let terminal = terminal.map(AsyncFile::new).transpose()?.map(Arc::new);
        if let Some(terminal) = &terminal {
            pipes.stdout = Some(terminal.clone());
            pipes.stdin = pipes.stdin.is_some().then(|| terminal.clone());
        }
        let begin = if spec.fork != 0 { Begin::GoOn } else { Begin::Execute(channel) };
        Ok(Process {
            pid,
            exit,
            begin: Mutex::new(Some(begin)),
            made: Instant::now(),
            // A request with `zygote` shares its container with other requests: its process must
            // not outlive the request's stream.
            ends_with_stream: spec.variables.is_some(),
            stdin: Mutex::new(pipes.stdin),
            terminal,
            outputs: Arc::new(tokio::sync::Mutex::new(Outputs {
                stdout: pipes.stdout,
                stderr: pipes.stderr,
            })),
            kept: Mutex::default(),
            told: AtomicBool::new(false),
        })
    }

    /// Runs the program, and returns once it executes. Returns `false` if it was started before.
    pub async fn start(&self) -> Result<bool, Failure> {
        let begin = lock(&self.begin).take();
        let channel = match begin {
            None => return Ok(false),
            Some(Begin::GoOn) => {
                self.signal(libc::SIGCONT as u32)?;
                return Ok(true);
            }
            Some(Begin::Execute(channel)) => channel,
        };
        channel::go(channel.get_ref())
            .map_err(|_| anyhow::anyhow!("the process was ended before"))?;
        match receive(&channel).await? {
            None => Ok(true),
            Some(Report::Failed { exit_status, message }) => Err(Failure { exit_status, message }),
            Some(report) => Err(anyhow::anyhow!("unexpected report {report:?}").into()),
        }
    }

    /// Runs the program of a process that nobody attaches to, if the host's `call` still waits for
    /// it. Otherwise ends the process, which the host takes for one that has not begun.
    pub async fn start_detached(&self, call: &Weak<()>) -> Result<(), Failure> {
        // Nobody asks for its exit status.
        self.note_told();
        if call.strong_count() == 0 {
            self.end_if_left(Duration::ZERO);
            return Err(anyhow::anyhow!("the host does not wait for it any more").into());
        }
        self.start().await?;
        Ok(())
    }

    /// Ends the process if it was set up longer ago than `longest` and was not started.
    pub fn end_if_left(&self, longest: Duration) {
        if self.made.elapsed() < longest || lock(&self.begin).take().is_none() {
            return;
        }
        self.note_told();
        if let Err(error) = self.signal(libc::SIGKILL as u32) {
            log!("a process that was not started: {error}");
        }
    }

    /// Returns the process id in the agent's PID namespace.
    pub fn pid(&self) -> Pid {
        self.pid
    }

    /// Returns whether the process has not ended. Its id is not reused before it has.
    pub fn is_alive(&self) -> bool {
        self.exit.borrow().is_none()
    }

    /// Returns whether the process is killed when its Stdio stream is closed.
    pub fn ends_with_stream(&self) -> bool {
        self.ends_with_stream
    }

    /// Waits for the process's end. Returns its exit status: 0 to 255, or 128 + n for signal n.
    pub async fn ended(&self) -> u32 {
        let mut exit = self.exit.clone();
        // The reaper outlives every process; 255 means that the reaper is gone.
        exit.wait_for(Option::is_some).await.ok().and_then(|status| *status).unwrap_or(255)
    }

    /// Notes that the exit status was told, or that nobody is left to ask for it.
    pub fn note_told(&self) {
        self.told.store(true, Ordering::Relaxed);
    }

    /// Returns whether nobody is expected to ask for the exit status.
    pub fn is_told(&self) -> bool {
        self.told.load(Ordering::Relaxed)
    }

    /// Sends `signal` (1 to 64). A process that has ended is no error.
    pub fn signal(&self, signal: u32) -> io::Result<()> {
        if !self.is_alive() {
            return Ok(());
        }
        crate::signal::send(self.pid.as_raw_nonzero().get(), signal)
    }

    /// Returns the output that the host has not recorded yet.
    pub fn kept(&self) -> MutexGuard<'_, OutputTail> {
        lock(&self.kept)
    }

    /// Returns the write side of standard input. Returns `None` if it is closed.
    pub fn stdin(&self) -> Option<Arc<AsyncFile>> {
        lock(&self.stdin).clone()
    }

    /// Closes standard input. A terminal has no end of input: a program sees the end when the user
    /// types it.
    pub fn close_stdin(&self) {
        if self.terminal.is_some() {
            return;
        }
        lock(&self.stdin).take();
    }

    /// Returns the terminal's master side. Returns `None` if the process has no terminal.
    pub fn terminal(&self) -> Option<&AsyncFile> {
        self.terminal.as_deref()
    }
}

#[derive(Default)]
struct Pipes {
    stdin: Option<Arc<AsyncFile>>,
    stdout: Option<Arc<AsyncFile>>,
    stderr: Option<Arc<AsyncFile>>,
}

/// Starts the first stage. There is no await in here, since the descriptors that are opened without
/// close-on-exec must not leak into another process that starts meanwhile.
fn launch(agent: &Path, spec: &InitSpec) -> io::Result<(OwnedFd, Pipes)> {
    let (ours, theirs) =
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    let memfd = specification(spec)?;
    let process = spec.process.as_ref();
    let wants =
        |wanted: fn(&slipway_agent_protocol::v1::ProcessSpec) -> bool| process.is_some_and(wanted);
    let mut command = Command::new(agent);
    command.env_clear().arg(SUBCOMMAND);
    command.arg(theirs.as_raw_fd().to_string()).arg(memfd.as_raw_fd().to_string());
    let mut pipes = Pipes::default();
    let (terminal, stdin) = (wants(|process| process.terminal), wants(|process| process.stdin));
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    if !terminal && !spec.without_streams {
        let (read, write) = io::pipe()?;
        command.stdout(write);
        pipes.stdout = Some(Arc::new(AsyncFile::new(read.into())?));
        let (read, write) = io::pipe()?;
        command.stderr(write);
        pipes.stderr = Some(Arc::new(AsyncFile::new(read.into())?));
    }
    if stdin {
        let (read, write) = io::pipe()?;
        if !terminal {
            command.stdin(read);
        }
        // With a terminal, this pipe only marks that input is wanted; the terminal replaces it.
        pipes.stdin = Some(Arc::new(AsyncFile::new(write.into())?));
    }
    fcntl_setfd(&theirs, FdFlags::empty())?;
    fcntl_setfd(&memfd, FdFlags::empty())?;
    // The reaper collects the child: dropping std's handle neither waits nor kills.
    drop(command.spawn()?);
    Ok((ours, pipes))
}

fn specification(spec: &InitSpec) -> io::Result<OwnedFd> {
    let mut file: File = rustix::fs::memfd_create(c"container-init", MemfdFlags::CLOEXEC)?.into();
    file.write_all(&spec.encode_to_vec())?;
    io::Seek::rewind(&mut file)?;
    Ok(file.into())
}

/// Waits for the process id. Both stages report on one channel, so the inner stage may be ready
/// before the outer stage has reported the id: that report is returned, too.
async fn receive_pid(channel: &AsyncFd<OwnedFd>) -> Result<(Pid, Option<Report>), Failure> {
    let mut early = None;
    loop {
        match receive(channel).await? {
            Some(Report::Pid(pid)) => {
                let pid = Pid::from_raw(pid).ok_or_else(|| anyhow::anyhow!("no process id"))?;
                return Ok((pid, early));
            }
            Some(ready @ Report::Ready(_)) => early = Some(ready),
            Some(Report::Failed { exit_status, message }) => {
                return Err(Failure { exit_status, message });
            }
            None => return Err(anyhow::anyhow!("the process's first stage ended early").into()),
        }
    }
}

/// Waits until the process is set up, unless an `early` report says so, and returns its terminal.
/// A process that is not ready in time is killed.
async fn receive_ready(
    channel: &AsyncFd<OwnedFd>,
    pid: Pid,
    early: Option<Report>,
) -> Result<Option<OwnedFd>, Failure> {
    let ready = match early {
        Some(ready) => Ok(Ok(Some(ready))),
        None => tokio::time::timeout(SETUP_DEADLINE, receive(channel)).await,
    };
    match ready {
        Ok(Ok(Some(Report::Ready(terminal)))) => Ok(terminal),
        Ok(Ok(Some(Report::Failed { exit_status, message }))) => {
            Err(Failure { exit_status, message })
        }
        other => {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
            let reason = if other.is_err() { "timed out" } else { "ended early" };
            Err(anyhow::anyhow!("setting the process up {reason}").into())
        }
    }
}

async fn receive(channel: &AsyncFd<OwnedFd>) -> io::Result<Option<Report>> {
    loop {
        let mut guard = channel.readable().await?;
        match channel::receive(channel.get_ref()) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => guard.clear_ready(),
            result => return result,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;

    use super::*;

    /// Returns a process that was set up, its child, and the channel's end of the child.
    fn prepared() -> (Process, std::process::Child, OwnedFd) {
        let child = Command::new("sleep").arg("100000").spawn().unwrap();
        let (_exits, exit) = tokio::sync::watch::channel(None);
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
                .unwrap();
        let begin = Begin::Execute(register(ours, Interest::READABLE).unwrap());
        let process = Process {
            pid: Pid::from_child(&child),
            exit,
            begin: Mutex::new(Some(begin)),
            made: Instant::now(),
            ends_with_stream: false,
            stdin: Mutex::default(),
            terminal: None,
            outputs: Arc::default(),
            kept: Mutex::default(),
            told: AtomicBool::new(false),
        };
        (process, child, theirs)
    }

    #[tokio::test]
    async fn a_detached_process_does_not_begin_once_the_host_has_given_up() {
        let (process, mut child, theirs) = prepared();
        let call = Arc::new(());
        let waits = Arc::downgrade(&call);
        drop(call);
        let refused = process.start_detached(&waits).await.err().unwrap().message;
        assert!(refused.contains("does not wait"), "{refused}");
        assert!(process.is_told() && !process.start().await.unwrap());
        assert!(!channel::Channel::new(theirs).wait_for_go().unwrap());
        assert_eq!(child.wait().unwrap().signal(), Some(libc::SIGKILL));
    }

    #[tokio::test]
    async fn a_process_that_nobody_starts_is_ended() {
        let (process, mut child, theirs) = prepared();
        process.end_if_left(Duration::MAX);
        assert!(lock(&process.begin).is_some() && !process.is_told());
        process.end_if_left(Duration::ZERO);
        assert!(process.is_told(), "nobody asks for its exit status");
        assert!(!process.start().await.unwrap(), "it does not begin any more");
        assert!(!channel::Channel::new(theirs).wait_for_go().unwrap());
        assert_eq!(child.wait().unwrap().signal(), Some(libc::SIGKILL));
    }
}
