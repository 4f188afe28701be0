//! A process beside a VMM that serves functions of its VM: in the VM's control groups and in a cage
//! like the VMM's, but with rights of its own, which it gives up itself.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::net::unix::pipe;
use tokio::task::JoinHandle;

use crate::console::{CappedLog, copy_to_log, make_fifo, open_fifo};
use crate::files::elsewhere;
use crate::process::{Launch, Process};
use crate::{Error, Result};

/// The time that a helper may take until it serves.
const READY_DEADLINE: Duration = Duration::from_secs(20);
/// The time that a killed helper may take to end.
const END_DEADLINE: Duration = Duration::from_secs(10);
/// The time that a helper which does not come to serve may take to say why.
const LAST_WORDS_DEADLINE: Duration = Duration::from_secs(2);
/// Most bytes of a helper's last words that are read.
const LAST_WORDS: u64 = 4096;
/// Most bytes of the log.
const LOG_CAP: u64 = 64 << 10;

/// A helper to be started.
#[derive(Debug)]
pub struct HelperSpec {
    /// The program, which needs no library.
    pub program: PathBuf,
    /// Its arguments. They name the descriptors in [`HelperSpec::passed`] by their numbers, which
    /// stay the same. The option `--ready N` is added.
    pub arguments: Vec<OsString>,
    /// The descriptors that it is given, beside the standard streams.
    pub passed: Vec<OwnedFd>,
    /// The files by which it joins its control groups.
    pub cgroup_procs: Vec<PathBuf>,
    /// The file for its output, which is made anew, beside a FIFO of the same name with the
    /// extension `fifo`. The helper has the FIFO, so that it cannot fill a disk. What it prints
    /// after the end of this process is lost.
    pub log: PathBuf,
}

/// A helper that serves. It outlives this object, and does not end with it.
#[derive(Debug)]
pub struct Helper {
    process: Process,
}

impl Helper {
    /// Starts a helper as root, in namespaces of its own. Returns once it has written `ready` to
    /// the descriptor that it is given for this. After an error nothing of it is left.
    ///
    /// # Errors
    /// The program cannot be started; [`Error::Helper`] with its last words if it ends early, or
    /// does not serve in time.
    pub async fn start(spec: HelperSpec) -> Result<Self> {
        let log = spec.log.clone();
        let Prepared { launch, output, errors, copied, ready } =
            elsewhere(move || prepare(spec)).await?;
        let mut process = launch.spawn(output, errors).await?;
        let copied = tokio::spawn(copy_to_log(copied.0, copied.1));
        match tokio::time::timeout(READY_DEADLINE, is_ready(&ready)).await {
            Ok(true) => Ok(Self { process }),
            answered => {
                // A process that ends by itself may print its reason after it has closed the pipe.
                if answered.is_ok() {
                    let _ = tokio::time::timeout(LAST_WORDS_DEADLINE, process.exited()).await;
                }
                process.kill()?;
                let _ = tokio::time::timeout(END_DEADLINE, process.exited()).await;
                let said = last_words(copied, log).await?;
                let late = || format!("it does not serve after {} s", READY_DEADLINE.as_secs());
                Err(Error::Helper { said: if answered.is_err() { late() } else { said } })
            }
        }
    }

    /// Returns the process id.
    pub fn pid(&self) -> i32 {
        self.process.pid()
    }

    /// Returns a descriptor of the process.
    ///
    /// # Errors
    /// No descriptors are left.
    pub fn pidfd(&self) -> Result<OwnedFd> {
        self.process.pidfd()
    }

    /// Waits until the helper has ended, and reaps it.
    pub async fn ended(mut self) {
        let _ = self.process.exited().await;
    }
}

/// The parts of a helper that is to be started.
struct Prepared {
    launch: Launch,
    output: OwnedFd,
    errors: OwnedFd,
    /// The end of the FIFO for this process, and the log.
    copied: (pipe::Receiver, CappedLog),
    /// The pipe on which the helper says that it serves.
    ready: pipe::Receiver,
}

/// Opens what the helper is given. The helper has the writing ends of both pipes alone, so the
/// pipes end with it.
fn prepare(spec: HelperSpec) -> Result<Prepared> {
    let log = CappedLog::create(&spec.log, LOG_CAP)?;
    let fifo = spec.log.with_extension("fifo");
    let (output, text) = (make_fifo(&fifo)?, open_fifo(&fifo)?);
    let errors = output.try_clone().map_err(|e| Error::system("duplicating a descriptor", e))?;
    let (from, to) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)
        .map_err(|errno| Error::system("making a pipe", errno))?;
    let ready = pipe::Receiver::from_owned_fd(from)
        .map_err(|source| Error::system("watching a pipe", source))?;
    let mut launch = Launch::new(&spec.program, Path::new("/"));
    launch.filters_itself();
    launch.join(&spec.cgroup_procs)?;
    let mut arguments = spec.arguments;
    arguments.extend(["--ready".into(), to.as_raw_fd().to_string().into()]);
    launch.arguments(arguments);
    for fd in spec.passed.into_iter().chain([to]) {
        launch.pass(fd);
    }
    Ok(Prepared { launch, output, errors, copied: (text, log), ready })
}

/// Returns whether the helper says that it serves, before it closes the pipe.
async fn is_ready(pipe: &pipe::Receiver) -> bool {
    const READY: &[u8] = b"ready\n";
    let mut said = Vec::new();
    let mut bytes = [0; READY.len()];
    while said.len() < READY.len() {
        if pipe.readable().await.is_err() {
            return false;
        }
        match pipe.try_read(&mut bytes) {
            Ok(0) => return false,
            Ok(count) => said.extend_from_slice(&bytes[..count]),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(_) => return false,
        }
    }
    said.starts_with(READY)
}

/// Returns the last line of the log of a helper that has ended.
async fn last_words(copied: JoinHandle<io::Result<()>>, log: PathBuf) -> Result<String> {
    let _ = tokio::time::timeout(LAST_WORDS_DEADLINE, copied).await;
    elsewhere(move || Ok(last_line(&log))).await
}

/// Returns the last line of a log, or that there is none.
fn last_line(log: &Path) -> String {
    use std::io::Read;
    let mut text = Vec::new();
    let read = std::fs::File::open(log).map(|file| file.take(LAST_WORDS).read_to_end(&mut text));
    let text = String::from_utf8_lossy(&text);
    let last = text.trim().lines().last().filter(|_| read.is_ok());
    last.unwrap_or("it ended without a word").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(directory: &Path, script: &str) -> HelperSpec {
        HelperSpec {
            program: "/bin/bash".into(),
            // The script's own options are in $@: --ready N.
            arguments: ["-c", script, "bash"].map(OsString::from).into(),
            passed: Vec::new(),
            cgroup_procs: Vec::new(),
            log: directory.join("log"),
        }
    }

    #[tokio::test]
    async fn a_helper_says_when_it_serves() {
        let directory = tempfile::tempdir().unwrap();
        let script = "echo hello; eval \"echo ready >&$2\"; exec sleep 0.1";
        let helper = Helper::start(spec(directory.path(), script)).await.unwrap();
        assert!(helper.pid() > 0);
        helper.ended().await;
        let log = || std::fs::read_to_string(directory.path().join("log")).unwrap();
        while log() != "hello\n" {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn the_log_of_a_helper_has_an_end() {
        let directory = tempfile::tempdir().unwrap();
        let much = format!("head -c {} /dev/zero", 4 * LOG_CAP);
        let script = format!(
            "{much}; eval \"echo ready >&$2\"; {much}; until readlink /proc/self/fd/1; do :; done"
        );
        let helper = Helper::start(spec(directory.path(), &script)).await.unwrap();
        helper.ended().await;
        let log = directory.path().join("log");
        while !std::fs::read(&log).unwrap().ends_with(b"/log.fifo\n") {
            tokio::task::yield_now().await;
        }
        assert!(std::fs::metadata(&log).unwrap().len() <= LOG_CAP);
    }

    #[tokio::test]
    async fn a_helper_that_ends_is_quoted() {
        let directory = tempfile::tempdir().unwrap();
        for (script, said) in [
            ("echo first; echo no such share >&2; exit 1", "no such share"),
            ("eval \"exec $2>&-\"; sleep 0.2; echo it said late", "it said late"),
            ("exit 0", "ended without a word"),
            ("eval \"echo re >&$2\"", "ended without a word"),
        ] {
            let error = Helper::start(spec(directory.path(), script)).await.unwrap_err();
            assert!(error.to_string().contains(said), "{error}");
        }
    }
}
