//! Runs the OCI hooks of a container with a sandbox of its own, in the host's namespaces.
//!
//! | hooks | run | state in the JSON that they read | a failure |
//! |---|---|---|---|
//! | `prestart`, `createRuntime` | at Create, before the container's files are read and its image is made | `creating`, the process of its [network namespace](crate::netns) | fails the Create |
//! | `poststart` | at Start, once its process runs | `running`, the same process, or the VMM | is logged |
//! | `poststop` | at Delete, once its sandbox is gone; after a Create that failed | `stopped`, without a process | is logged |
//!
//! A hook may be run a second time after the shim was killed. The [`holder`](crate::hold) has a
//! descriptor of each hook that runs (pidfd_open(2)), by which the next serving process ends it
//! before it runs others.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::process::{ExitStatus, Stdio};
use std::sync::Arc;
use std::time::Duration;

use rustix::process::{Pid, PidfdFlags, Signal};
use serde::Serialize;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::process::{Child, ChildStderr, ChildStdin, Command};
use tokio::time::{Instant, timeout, timeout_at};

use crate::foreign;
use crate::hold::{Holder, KeptDescriptor};
use crate::netns::Network;
use crate::network;
use crate::role::Role;
use crate::spec::hooks::{BEFORE_START, ENDED, STARTED, at, check};
use crate::spec::{Hook, Oci};
use crate::task::Task;

/// The longest run of a hook that names no other time.
const USUAL: Duration = Duration::from_secs(120);
/// The longest run of any hook.
const LONGEST: Duration = Duration::from_secs(600);
/// The longest time that the last words of a hook that has ended may take.
const LAST_WORDS: Duration = Duration::from_millis(100);
/// The longest time that a hook may take to end after SIGKILL.
const END: Duration = Duration::from_secs(5);
/// The beginning of the names of hooks among the holder's descriptors; their process ids follow.
const RUNS: &str = "hook-";
/// The size of the end of its error output that is told, bytes.
const MOST_TOLD: usize = 4096;
/// The name of the file in a bundle whose container's last hooks have run.
const NOTE: &str = "slipway-hooks-ended";
/// The version of the specification that a configuration without one is taken to have.
const VERSION: &str = "1.0.2";

/// The state of a container, as its hooks read it (the OCI runtime specification, *runtime.md*,
/// section State).
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct OciState<'a> {
    oci_version: &'a str,
    id: &'a str,
    status: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pid: Option<u32>,
    bundle: &'a Path,
    annotations: &'a BTreeMap<String, String>,
}

impl OciState<'_> {
    fn json(&self) -> Result<Vec<u8>, String> {
        serde_json::to_vec(self).map_err(|error| format!("the container's state: {error}"))
    }
}

/// A container, as its hooks are told of it.
#[derive(Clone, Copy)]
pub struct Subject<'a> {
    /// Its id.
    pub id: &'a str,
    /// The bundle's directory.
    pub bundle: &'a Path,
    /// Its configuration.
    pub oci: &'a Oci,
    /// The holder, which has a descriptor of a hook that runs.
    pub holder: Option<&'a Arc<Holder>>,
}

impl<'a> Subject<'a> {
    fn state(self, status: &'a str, pid: Option<u32>) -> OciState<'a> {
        let Self { id, bundle, oci, .. } = self;
        let oci_version = if oci.version.is_empty() { VERSION } else { &oci.version };
        OciState { oci_version, id, status, pid, bundle, annotations: &oci.annotations }
    }

    /// Returns whether it has hooks before its start.
    pub fn begins(self) -> bool {
        BEFORE_START.iter().any(|point| !at(self.oci, point).is_empty())
    }

    /// Runs the hooks before the container's start. Returns the network namespace that is made for
    /// them.
    ///
    /// # Errors
    /// One line: a hook failed. The others are not run, and the hooks after the container's end
    /// were.
    pub async fn begin(self) -> Result<Network, String> {
        let network = Network::make().await?;
        let state = self.state("creating", Some(network.pid())).json()?;
        for point in BEFORE_START {
            for hook in at(self.oci, point) {
                if let Err(reason) = run(hook, self.bundle, self.holder, &state).await {
                    self.end().await;
                    return Err(format!("the {point} hook {reason}"));
                }
            }
        }
        Ok(network)
    }

    /// Runs the hooks after the container's end, unless they ran before: containerd has a shim
    /// delete a task, or fail to make it, and then the program once more. Hooks during which the
    /// shim was killed run again.
    pub async fn end(self) {
        let note = self.bundle.join(NOTE);
        if at(self.oci, ENDED).is_empty() || note.exists() {
            return;
        }
        self.run_all(ENDED, "stopped", None).await;
        if let Err(error) = std::fs::write(&note, "") {
            crate::log::warn(&format!("hooks may run twice: {}: {error}", note.display()));
        }
    }

    /// Runs all hooks of a point. Failures are logged.
    async fn run_all(self, point: &str, status: &str, pid: Option<u32>) {
        let hooks = at(self.oci, point);
        if hooks.is_empty() {
            return;
        }
        let state = match self.state(status, pid).json() {
            Ok(state) => state,
            Err(reason) => return crate::log::warn(&reason),
        };
        for hook in hooks {
            if let Err(reason) = run(hook, self.bundle, self.holder, &state).await {
                crate::log::warn(&format!("{}: the {point} hook {reason}", self.id));
            }
        }
    }
}

/// Runs the hooks of a container that runs.
pub async fn started(task: &Task, holder: Option<&Arc<Holder>>) {
    let Some(oci) = of(&task.bundle) else { return };
    let subject = Subject { id: &task.id, bundle: &task.bundle, oci: &oci, holder };
    let pid = task.kept.network.pid().unwrap_or_else(|| task.pid());
    subject.run_all(STARTED, "running", Some(pid)).await;
}

/// Runs the hooks of a container whose sandbox is gone, unless they ran before.
pub async fn ended(id: &str, bundle: &Path, holder: Option<&Arc<Holder>>) {
    let Some(oci) = of(bundle) else { return };
    Subject { id, bundle, oci: &oci, holder }.end().await;
}

/// Ends the hooks that an earlier serving process was running, with what they have started.
pub async fn end_left(holder: &Arc<Holder>) {
    let mut left = Vec::new();
    for name in holder.names(RUNS) {
        let Some(hook) = holder.take(&name) else { continue };
        let pid = name[RUNS.len()..].parse().ok().and_then(Pid::from_raw);
        // As long as it has not ended, it is the leader of its group.
        if let Some(group) = pid.filter(|_| !foreign::has_ended(&hook)) {
            let _ = rustix::process::kill_process_group(group, Signal::KILL);
        }
        let _ = rustix::process::pidfd_send_signal(&hook, Signal::KILL);
        left.push(hook);
    }
    let until = Instant::now() + END;
    for hook in &left {
        let patience = until.saturating_duration_since(Instant::now());
        if !foreign::ends_within(hook, patience).await {
            crate::log::warn("a hook that ran when the shim was killed does not end at SIGKILL");
        }
    }
}

/// Returns the configuration of a container that may have hooks. The bundle may be a pod's, or may
/// be gone.
fn of(bundle: &Path) -> Option<Oci> {
    let oci = Oci::load(bundle).ok()?;
    let may = Role::of(&oci.annotations) == Ok(Role::Alone) && check(&oci).is_ok();
    may.then_some(oci)
}

/// Runs a hook, which reads `state`.
///
/// # Errors
/// Its path and the reason, with the end of its error output.
async fn run(
    hook: &Hook,
    bundle: &Path,
    holder: Option<&Arc<Holder>>,
    state: &[u8],
) -> Result<(), String> {
    let (path, limit) = (&hook.path, limit(hook));
    let until = Instant::now() + limit;
    let Ok(spawned) = timeout_at(until, spawn(command(hook, bundle))).await else {
        return Err(format!("{path} did not begin within {} s", limit.as_secs()));
    };
    let mut child = spawned.map_err(|error| format!("{path} cannot be run: {error}"))?;
    let group = child.id().and_then(|pid| Pid::from_raw(pid.cast_signed()));
    let kept = holder.zip(group).and_then(|(holder, pid)| keep(holder, pid));
    let mut told = Tail { output: child.stderr.take(), text: Vec::new() };
    let ended = timeout_at(until, wait_for(&mut child, state, &mut told)).await;
    drop(kept);
    let why = match ended {
        Ok(Ok(status)) if status.success() => return Ok(()),
        Ok(Ok(status)) => {
            // What it wrote is in the pipe, which a process that it has left may have open.
            let _ = timeout(LAST_WORDS, told.fill()).await;
            format!("failed: {status}")
        }
        Ok(Err(error)) => format!("cannot be waited for: {error}"),
        Err(_) => {
            // With what it has started itself.
            if let Some(group) = group {
                let _ = rustix::process::kill_process_group(group, Signal::KILL);
            }
            format!("was killed after {} s", limit.as_secs())
        }
    };
    Err(format!("{path} {why}{told}"))
}

/// Starts a hook on a thread of its own, which may wait for the program's file system. If the hook
/// starts when nobody waits for it any more, it is killed.
async fn spawn(mut command: Command) -> io::Result<Child> {
    let spawned = tokio::task::spawn_blocking(move || network::spawn_on_host(&mut command)).await;
    spawned.map_err(io::Error::other)?
}

/// Has the holder keep a descriptor of a hook. Without one, the next serving process lets it run.
fn keep(holder: &Arc<Holder>, pid: Pid) -> Option<KeptDescriptor> {
    let hook = rustix::process::pidfd_open(pid, PidfdFlags::empty()).ok()?;
    Some(holder.put(format!("{RUNS}{pid}"), hook))
}

/// Returns the longest run of a hook.
fn limit(hook: &Hook) -> Duration {
    let named = hook.timeout.and_then(|seconds| u64::try_from(seconds).ok());
    match named {
        None | Some(0) => USUAL,
        Some(seconds) => Duration::from_secs(seconds).min(LONGEST),
    }
}

#[allow(unsafe_code)]
fn command(hook: &Hook, bundle: &Path) -> Command {
    let mut command = Command::new(&hook.path);
    if let Some((name, words)) = hook.args.split_first() {
        command.arg0(name).args(words);
    }
    let env = hook.env.iter().filter_map(|one| one.split_once('='));
    command.env_clear().envs(env).current_dir(bundle).process_group(0).kill_on_drop(true);
    command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
    // SAFETY: it only calls the kernel, as a child of a process with threads may before execve(2).
    unsafe { command.pre_exec(foreign::begin) };
    command
}

/// Gives a hook its input, and waits for its end.
async fn wait_for(child: &mut Child, state: &[u8], told: &mut Tail) -> io::Result<ExitStatus> {
    let stdin = child.stdin.take();
    let talk = async { tokio::join!(feed(stdin, state), told.fill()) };
    tokio::select! {
        status = child.wait() => status,
        _ = talk => child.wait().await,
    }
}

async fn feed(stdin: Option<ChildStdin>, state: &[u8]) {
    if let Some(mut stdin) = stdin {
        // A hook need not read.
        let _ = stdin.write_all(state).await;
    }
}

/// The end of a hook's error output.
struct Tail {
    output: Option<ChildStderr>,
    text: Vec<u8>,
}

impl Tail {
    /// Reads until the output ends.
    async fn fill(&mut self) {
        let Some(output) = &mut self.output else { return };
        let mut piece = [0; 1024];
        while let Ok(count @ 1..) = output.read(&mut piece).await {
            self.text.extend_from_slice(&piece[..count]);
            let excess = self.text.len().saturating_sub(MOST_TOLD);
            self.text.drain(..excess);
        }
    }
}

impl std::fmt::Display for Tail {
    /// As the end of a line.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let text = String::from_utf8_lossy(&self.text);
        match text.trim() {
            "" => Ok(()),
            // Longer by the parts between lines, and by escapes.
            text => {
                let line = text.replace('\n', "; ");
                write!(f, ": {}", slipway_printable::line(&line, 2 * MOST_TOLD))
            }
        }
    }
}

#[cfg(test)]
#[path = "tests/hooks.rs"]
mod tests;
