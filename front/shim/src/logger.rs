//! Loggers: programs of the host that take the output of a process, `binary://PROGRAM?WORDS`, as
//! nerdctl names itself for the log of a container that is detached.
//!
//! The protocol is that of containerd's shims for runc. A logger has the pipes of standard output
//! and standard error as its descriptors 3 and 4, and tells by closing descriptor 5, or by writing
//! to it, that it is ready: the process starts then, and not before. Its environment names the
//! process and containerd's namespace. It ends when its pipes do.
//!
//! The shim has the ends for writing, and so has the [`holder`](crate::hold). The pipes are FIFOs
//! without a name, so that the [`cursor`](crate::cursor) sees what was written to them: the times
//! of change of other pipes stay as they are (Linux 6.15). So a logger notices nothing when the
//! shim's process is killed. It is a child of that process, and then of the system's first one,
//! which reaps it; the next serving process has a descriptor of it (pidfd_open(2)). If a logger
//! ends before its process, output goes nowhere from there on.

use std::fs::File;
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::{Mode, OFlags};
use rustix::process::{Pid, PidfdFlags, Signal};
use serde::{Deserialize, Serialize};
use tokio::io::AsyncReadExt;
use tokio::net::unix::pipe;
use tokio::process::{Child, Command};

use crate::foreign::{self, ends_within};
use crate::hold::THIS;
use crate::io::{BINARY, Streams};
use crate::network;
use crate::process::Process;
use crate::task::Task;

/// The beginning of the words of a query that are the logger's environment.
const ENVIRONMENT: &str = "env.";
/// The variables that the shim sets.
const ID: &str = "CONTAINER_ID";
const NAMESPACE: &str = "CONTAINER_NAMESPACE";
/// The variable with the logger that a process becomes.
const PROGRAM: &str = "SLIPWAY_LOGGER";
/// The longest path with its query, bytes.
const LONGEST: usize = 32 << 10;
/// The longest time until a logger is ready.
const READY: Duration = Duration::from_secs(10);
/// The time after the end of its pipes after which a logger gets SIGTERM.
const LAST_LINES: Duration = Duration::from_secs(1);
/// The time after SIGTERM after which it gets SIGKILL.
const TERMINATION: Duration = Duration::from_secs(12);
/// The least number of the copies of descriptors that are on their way to the numbers 3 to 5.
const ASIDE: RawFd = 10;
/// The beginning of what is read in place of readiness if the program cannot be run, as that of
/// any failure of this program.
const FAILED: &str = "containerd-shim-slipway-v2: ";
/// The longest such message, bytes. A pipe passes it on as a whole.
const MOST_TOLD: usize = 1024;

/// A logger as a path names it.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Logger {
    program: String,
    words: Vec<String>,
    environment: Vec<(String, String)>,
}

impl Logger {
    /// Parses a path without its scheme. Of words with the same name the first one counts.
    fn parse(path: &str) -> Result<Self, String> {
        let shown = slipway_printable::line(path, MOST_TOLD);
        let wrong = |why: &str| format!("the logger {BINARY}{shown} {why}");
        if path.len() > LONGEST {
            return Err(format!("the path of a logger is longer than {LONGEST} bytes"));
        }
        let (program, query) = path.split_once('?').unwrap_or((path, ""));
        let undo = |text: &str| decode(text).ok_or_else(|| wrong("is wrongly escaped"));
        let mut logger = Self { program: undo(program)?, ..Self::default() };
        if !logger.program.starts_with('/') {
            return Err(wrong("is no absolute path"));
        }
        let mut seen = Vec::new();
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            let plus = |text: &str| undo(&text.replace('+', " "));
            let (name, value) = (plus(name)?, plus(value)?);
            if seen.contains(&name) {
                continue;
            }
            seen.push(name.clone());
            match name.strip_prefix(ENVIRONMENT) {
                Some(ID | NAMESPACE) => {}
                Some(variable) => logger.environment.push((variable.to_owned(), value)),
                None => logger.words.extend([name, value]),
            }
        }
        Ok(logger)
    }

    /// Starts it, with the ends for reading of its pipes, and `ready` for writing.
    fn spawn(
        &self,
        bundle: &Path,
        [stdout, stderr]: [OwnedFd; 2],
        ready: OwnedFd,
    ) -> Result<Child, String> {
        let named = |why: &dyn std::fmt::Display| format!("the logger {}: {why}", self.program);
        let json = serde_json::to_string(self).map_err(|error| named(&error))?;
        let mut command = Command::new(THIS);
        command.arg("log").env_clear().env(PROGRAM, json).current_dir(bundle);
        command.stdin(Stdio::from(stdout)).stdout(Stdio::from(stderr)).stderr(Stdio::from(ready));
        network::spawn_on_host(&mut command).map_err(|error| named(&error))
    }

    /// Waits until it is ready. The shim's end of `ready` for writing is closed.
    async fn ready(&self, ready: OwnedFd) -> Result<(), String> {
        let named = |why: &str| format!("the logger {} {why}", self.program);
        let mut ready = pipe::Receiver::from_owned_fd(ready)
            .map_err(|error| named(&format!("has no pipe: {error}")))?;
        let mut told = [0; MOST_TOLD];
        let read = tokio::time::timeout(READY, ready.read(&mut told)).await;
        let Ok(Ok(count)) = read else {
            let seconds = READY.as_secs();
            return Err(named(&format!("has not closed descriptor 5 within {seconds} s")));
        };
        let told = String::from_utf8_lossy(&told[..count]);
        match told.strip_prefix(FAILED) {
            Some(reason) => {
                let reason = slipway_printable::line(reason.trim(), MOST_TOLD);
                Err(named(&format!("cannot be run: {reason}")))
            }
            None => Ok(()),
        }
    }
}

/// Replaces the escapes of a URI (RFC 3986, section 2.1). Returns `None` if one is wrong, or if the
/// text is not UTF-8 then.
fn decode(text: &str) -> Option<String> {
    let mut parts = text.split('%');
    let mut bytes = parts.next()?.as_bytes().to_vec();
    for part in parts {
        let (digits, rest) = part.as_bytes().split_at_checked(2)?;
        let mut byte = [0; 1];
        hex::decode_to_slice(digits, &mut byte).ok()?;
        bytes.push(byte[0]);
        bytes.extend_from_slice(rest);
    }
    String::from_utf8(bytes).ok()
}

/// Opens the streams of a process of a task. A logger is started for its output, if its path names
/// one, and is ready then.
///
/// # Errors
/// One line: a path cannot be opened, or the logger cannot be run or is not ready in time.
pub async fn open(task: &Task, process: &Arc<Process>) -> Result<Streams, String> {
    let Some(path) = process.paths.logger() else {
        return crate::io::open(&process.paths, &process.held);
    };
    let mut logger = Logger::parse(path)?;
    let id = if process.is_init() { &task.id } else { &process.exec_id };
    let own = [(ID, id.as_str()), (NAMESPACE, task.events.namespace())];
    logger.environment.extend(own.map(|(name, value)| (name.to_owned(), value.to_owned())));
    let pipes = start(&logger, &task.bundle, process).await?;
    crate::io::open_piped(&process.paths, &process.held, pipes).inspect_err(|_| {
        // The logger runs, for nothing.
        process.held.release_outputs();
        let process = Arc::clone(process);
        tokio::spawn(async move { end(&process).await });
    })
}

/// Starts a logger. Returns the ends for writing of its pipes.
async fn start(logger: &Logger, bundle: &Path, process: &Process) -> Result<[OwnedFd; 2], String> {
    let failed = |error: io::Error| format!("no pipes for a logger: {error}");
    let (stdout, to_stdout) = fifo(process, "stdout").map_err(failed)?;
    let (stderr, to_stderr) = fifo(process, "stderr").map_err(failed)?;
    let (ready, to_ready) = io::pipe().map_err(failed)?;
    let mut child = logger.spawn(bundle, [stdout, stderr], to_ready.into())?;
    if let Err(reason) = logger.ready(ready.into()).await {
        let _ = child.start_kill();
        return Err(reason);
    }
    let pid = child.id().and_then(|pid| Pid::from_raw(pid.cast_signed()));
    let opened = pid.map(|pid| rustix::process::pidfd_open(pid, PidfdFlags::empty()));
    // Without it, nobody waits for the logger. tokio reaps it as long as this process lives.
    if let Some(Ok(descriptor)) = opened {
        process.held.keep_logger(descriptor);
    }
    Ok([to_stdout, to_stderr])
}

/// Makes a FIFO, whose name is gone when this returns: its ends for reading and for writing. A
/// process that nobody keeps for a next serving process has another pipe.
fn fifo(process: &Process, stream: &str) -> io::Result<(OwnedFd, OwnedFd)> {
    let Some(path) = process.place(stream) else {
        let (reader, writer) = io::pipe()?;
        return Ok((reader.into(), writer.into()));
    };
    // Left by a process that was killed.
    let _ = std::fs::remove_file(&path);
    rustix::fs::mkfifoat(rustix::fs::CWD, &path, Mode::RUSR | Mode::WUSR)?;
    let opened = ends(&path);
    let _ = std::fs::remove_file(&path);
    opened
}

/// Opens both ends of a FIFO, without waiting. Reads from it wait, as a logger expects.
fn ends(path: &Path) -> io::Result<(OwnedFd, OwnedFd)> {
    let open = |flags: OFlags| rustix::fs::open(path, flags | OFlags::CLOEXEC, Mode::empty());
    let reader = open(OFlags::RDONLY | OFlags::NONBLOCK)?;
    let writer = open(OFlags::WRONLY)?;
    rustix::fs::fcntl_setfl(&reader, OFlags::empty())?;
    Ok((reader, writer))
}

/// Waits for the end of the logger of a process whose output has ended, and has it end. Returns at
/// once if there is none.
pub async fn end(process: &Process) {
    let Some(logger) = process.held.take_logger() else { return };
    if ends_within(&logger, LAST_LINES).await {
        return;
    }
    // Fails if it has ended.
    let _ = rustix::process::pidfd_send_signal(&logger, Signal::TERM);
    if !ends_within(&logger, TERMINATION).await {
        let _ = rustix::process::pidfd_send_signal(&logger, Signal::KILL);
        crate::log::warn("a logger did not end with its pipes, nor at SIGTERM: it was killed");
    }
}

/// Becomes a logger: has its pipes, which are standard input and output, and the end of `ready`
/// for writing, which is standard error, as the descriptors 3 to 5, and runs its program. A failure
/// is told by the last one.
///
/// # Errors
/// One line: the environment names no logger, or the kernel refuses.
pub fn exec() -> Result<(), String> {
    let failed = |error: io::Error| error.to_string();
    let json = std::env::var(PROGRAM).map_err(|error| format!("{PROGRAM}: {error}"))?;
    let logger: Logger = serde_json::from_str(&json).map_err(|error| error.to_string())?;
    let ready = inherit().and_then(|moved| foreign::begin().map(|()| moved)).map_err(failed)?;
    let mut command = std::process::Command::new(&logger.program);
    command.args(&logger.words).env_clear().envs(logger.environment);
    let reason = command.exec();
    let told = format!("{FAILED}{reason}");
    rustix::io::write(&ready[2], told.as_bytes()).map(drop).map_err(|error| error.to_string())
}

/// Moves the standard descriptors to 3 and those behind it, which the next program has too, and
/// puts `/dev/null` in their place.
fn inherit() -> io::Result<[OwnedFd; 3]> {
    // The numbers from 3 on may be taken.
    let copies = [
        rustix::io::fcntl_dupfd_cloexec(io::stdin(), ASIDE)?,
        rustix::io::fcntl_dupfd_cloexec(io::stdout(), ASIDE)?,
        rustix::io::fcntl_dupfd_cloexec(io::stderr(), ASIDE)?,
    ];
    let [stdout, stderr, ready] = &copies;
    let moved = [place(stdout, 3)?, place(stderr, 4)?, place(ready, 5)?];
    let null = File::options().read(true).write(true).open("/dev/null")?;
    rustix::stdio::dup2_stdin(&null)?;
    rustix::stdio::dup2_stdout(&null)?;
    rustix::stdio::dup2_stderr(&null)?;
    Ok(moved)
}

/// Makes a copy of a descriptor by this number, which the next program has too, in place of what
/// the number may stand for. No value of this process owns that.
#[allow(unsafe_code)]
fn place(descriptor: &OwnedFd, number: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: nothing else owns the number, and the value is dropped only once it is open.
    let mut placed = ManuallyDrop::new(unsafe { OwnedFd::from_raw_fd(number) });
    rustix::io::dup2(descriptor, &mut placed)?;
    Ok(ManuallyDrop::into_inner(placed))
}

#[cfg(test)]
#[path = "tests/logger.rs"]
mod tests;
