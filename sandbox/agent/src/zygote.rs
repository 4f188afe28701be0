//! Zygotes: a container's program is set up once, stops itself, and is forked for each request
//! (the fork of containers in RunD-V).
//!
//! # The life of a zygote
//!
//! A container has at most one zygote. Its state is [`ZygoteState`], behind the container's lock.
//!
//! 1. *Asked for*: a request with `zygote` comes to [`prepare_process`], or to [`ensure_zygote`]
//!    if it wants no process yet. While the container's state is `NotStarted`,
//!    [`lock_ready_zygote`] takes the next two steps; later requests find their result.
//! 2. *Started*: [`start_zygote`] starts the program in the control group [`ZYGOTE_CGROUP`].
//! 3. *Ready*: [`await_self_stop`] returns once the program has stopped itself by SIGSTOP, with
//!    one thread. The state is `Ready`.
//! 4. *Forked from*: [`try_fork`] has [`fork_process`] make a child for each request with the same
//!    [`fork_key`]. The child continues after its SIGSTOP. A request with another key has the
//!    program started anew, and the zygote stays ready.
//! 5. *Refused*: the program did not get ready, or a fork failed, as it does once the zygote has
//!    ended. The zygote is killed, and the state is `Refused` for the rest of the container's
//!    life: [`prepare_unforked`] starts the program anew for each request, and
//!    [`continue_after_stop`] sends it SIGCONT.
//! 6. *Ended*: [`supervise`] kills everything that the process has left in its control group, as
//!    a program that became a daemon. It does so for zygotes, forks and programs that are started
//!    anew alike.
//!
//! A fork, or a program that is started anew in its place, is also killed when its Stdio stream
//! closes. Forks are made by [`crate::init`] in a process of its own, so a slow zygote delays only
//! requests to its own container.
//!
//! The system calls of a fork are in `init/fork.rs`. Unit tests are in both files, tests as root
//! in `tests/zygotes_as_root.rs`, and `tests/e2e/18-function.sh` runs programs that can be forked
//! and programs that cannot. The rules for programs are in `docs/functions.md`, "Zygotes".
//!
//! [`prepare_process`]: ContainerContext::prepare_process
//! [`ensure_zygote`]: ContainerContext::ensure_zygote
//! [`lock_ready_zygote`]: ContainerContext::lock_ready_zygote
//! [`start_zygote`]: ContainerContext::start_zygote
//! [`try_fork`]: ContainerContext::try_fork
//! [`fork_process`]: ContainerContext::fork_process
//! [`prepare_unforked`]: ContainerContext::prepare_unforked

use std::sync::Arc;
use std::time::Duration;

use slipway_agent_protocol::v1::{ExecRequest, Zygote as ZygoteRequest};
use tokio::sync::MutexGuard;
use tokio::time::Instant;

use crate::cgroup::Cgroup;
use crate::container::{AgentPaths, Container, ZygoteState};
use crate::init::InitSpec;
use crate::process::{Failure, Process};
use crate::reaper::Reaper;
use crate::stopped::Status;
use crate::{log, stdio};

/// The time between two checks of whether a process has stopped itself, while a request waits for
/// it. [`continue_after_stop`] begins with this time, too.
const POLL_INTERVAL: Duration = Duration::from_millis(2);
/// The longest time between two checks by [`continue_after_stop`], which no request waits for.
const MAX_POLL_INTERVAL: Duration = Duration::from_millis(100);
/// The name of the control group of a zygote and the processes that it started. Each fork has a
/// control group of its own beside this one.
const ZYGOTE_CGROUP: &str = "zygote";

/// A process that was prepared for a request, and waits for [`Process::start`].
pub struct PreparedProcess {
    /// The process.
    pub process: Arc<Process>,
    /// Set if the process is a fork of the container's zygote.
    pub forked: bool,
    /// The reason why the process is not a fork although the request asks for one; otherwise
    /// empty.
    pub not_forked: String,
}

/// A container, with the paths and the reaper that starting a process in it takes.
#[derive(Clone, Copy)]
pub struct ContainerContext<'a> {
    /// The container.
    pub container: &'a Arc<Container>,
    /// The agent's paths.
    pub places: &'a AgentPaths,
    /// The dispatcher of exit statuses.
    pub reaper: &'a Arc<Reaper>,
}

impl ContainerContext<'_> {
    /// Prepares the process of `request`: a fork of the zygote if the request asks for one and the
    /// program can be forked, otherwise the program started anew.
    pub async fn prepare_process(
        self,
        mut request: ExecRequest,
    ) -> Result<PreparedProcess, Failure> {
        let Some(asked) = request.zygote.take() else {
            let process = self.container.exec(self.places, self.reaper, request).await?;
            let (process, not_forked) = (Arc::new(process), String::new());
            return Ok(PreparedProcess { process, forked: false, not_forked });
        };
        match self.try_fork(&request, &asked).await {
            Ok(process) => Ok(PreparedProcess { process, forked: true, not_forked: String::new() }),
            Err(not_forked) => {
                let process = self.prepare_unforked(request, asked).await?;
                Ok(PreparedProcess { process, forked: false, not_forked })
            }
        }
    }

    /// Starts the container's zygote if no request did so before, and waits until it is ready.
    /// Returns `None` if it is ready for forks of `request`, otherwise the reason why it is not.
    pub async fn ensure_zygote(
        self,
        request: &ExecRequest,
        asked: &ZygoteRequest,
    ) -> Option<String> {
        self.lock_ready_zygote(request, asked).await.err()
    }

    /// Forks the container's zygote, which is started first if it was not before. If the fork
    /// fails, kills the zygote and refuses all later forks in this container.
    ///
    /// # Errors
    /// The reason why the program cannot be forked.
    async fn try_fork(
        self,
        request: &ExecRequest,
        asked: &ZygoteRequest,
    ) -> Result<Arc<Process>, String> {
        let mut state = self.lock_ready_zygote(request, asked).await?;
        let ZygoteState::Ready { zygote, .. } = &*state else {
            return Err("it is gone".to_owned());
        };
        match self.fork_process(zygote, request, asked).await {
            Ok(process) => Ok(process),
            Err(failure) => {
                // The zygote may have been left half-way in a fork.
                let _ = zygote.signal(libc::SIGKILL as u32);
                *state = ZygoteState::Refused(failure.message.clone());
                Err(failure.message)
            }
        }
    }

    /// Locks the state of the container's zygote, which is started first if it was not before. The
    /// state that is returned is `Ready`, with the [`fork_key`] of `request`. Other requests for
    /// forks in this container wait while the lock is held.
    ///
    /// # Errors
    /// The reason why the program cannot be forked.
    async fn lock_ready_zygote(
        &self,
        request: &ExecRequest,
        asked: &ZygoteRequest,
    ) -> Result<MutexGuard<'_, ZygoteState>, String> {
        let mut state = self.container.zygote.lock().await;
        if matches!(*state, ZygoteState::NotStarted) {
            *state = match self.start_zygote(request.clone(), asked).await {
                Ok(zygote) => ZygoteState::Ready { zygote, key: Box::new(fork_key(request)) },
                Err(failure) => ZygoteState::Refused(failure.message),
            };
        }
        match &*state {
            ZygoteState::Refused(reason) => return Err(reason.clone()),
            ZygoteState::Ready { key, .. } if **key != fork_key(request) => {
                return Err("it has another command, environment or rights".to_owned());
            }
            ZygoteState::Ready { .. } | ZygoteState::NotStarted => {}
        }
        Ok(state)
    }

    /// Starts a zygote without input, and waits until it has stopped itself.
    ///
    /// # Errors
    /// The errors of starting a process and of [`await_self_stop`]. The zygote is killed.
    async fn start_zygote(
        &self,
        mut request: ExecRequest,
        asked: &ZygoteRequest,
    ) -> Result<Arc<Process>, Failure> {
        if let Some(process) = &mut request.spec {
            process.stdin = false;
        }
        let spec = InitSpec {
            variables: Some(String::new()),
            ..self.container.further(self.places, request)?
        };
        let zygote = self.prepare_in_own_cgroup(&spec, ZYGOTE_CGROUP, 0).await?;
        // A zygote's output goes to no stream. Unread output must not block the zygote.
        let _ = stdio::abandon(&zygote).await;
        zygote.start().await?;
        let ready = Duration::from_millis(asked.ready_ms.into());
        match await_self_stop(&zygote, ready).await {
            Ok(()) => Ok(zygote),
            Err(error) => {
                let _ = zygote.signal(libc::SIGKILL as u32);
                Err(error.into())
            }
        }
    }

    /// Makes one fork of `zygote`, with the streams and variables of `request`. The fork waits for
    /// [`Process::start`].
    ///
    /// # Errors
    /// The zygote has ended, or the fork failed. The zygote may be left half-way in the fork.
    async fn fork_process(
        &self,
        zygote: &Process,
        request: &ExecRequest,
        asked: &ZygoteRequest,
    ) -> Result<Arc<Process>, Failure> {
        if !zygote.is_alive() {
            return Err(anyhow::anyhow!("it has ended").into());
        }
        let spec = InitSpec {
            process: request.spec.clone(),
            fork: zygote.pid().as_raw_nonzero().get(),
            variables: Some(variables_file(&asked.variables)),
            ..InitSpec::default()
        };
        let name = request_cgroup(request);
        let process = self.prepare_in_own_cgroup(&spec, &name, asked.longest_ms).await?;
        // If the zygote has ended, another process may have got its id and been forked instead.
        if !zygote.is_alive() {
            let _ = process.signal(libc::SIGKILL as u32);
            return Err(anyhow::anyhow!("it has ended").into());
        }
        Ok(process)
    }

    /// Prepares a process in the control group `cgroup`, which is made for it in the container's,
    /// and hands both to [`supervise`]. The process is killed after `longest_ms` milliseconds
    /// unless this is 0.
    async fn prepare_in_own_cgroup(
        &self,
        spec: &InitSpec,
        cgroup: &str,
        longest_ms: u32,
    ) -> Result<Arc<Process>, Failure> {
        let process = Process::prepare(&self.places.program, self.reaper, spec).await?;
        let process = Arc::new(process);
        let pid = process.pid().as_raw_nonzero().get();
        let own = self.container.cgroup.as_ref().map(|parent| parent.part(cgroup, pid));
        match own.transpose() {
            Ok(own) => {
                tokio::spawn(supervise(process.clone(), own, longest_ms));
                Ok(process)
            }
            Err(error) => {
                let _ = process.signal(libc::SIGKILL as u32);
                Err(error.into())
            }
        }
    }

    /// Prepares a new process of the program for a request that cannot have a fork. The process has
    /// the request's variables in its environment as well as in their file. It is sent SIGCONT once
    /// it stops itself, which it does as a zygote would.
    async fn prepare_unforked(
        self,
        mut request: ExecRequest,
        asked: ZygoteRequest,
    ) -> Result<Arc<Process>, Failure> {
        let name = request_cgroup(&request);
        let variables = variables_file(&asked.variables);
        if let Some(process) = &mut request.spec {
            process.env.extend(asked.variables);
        }
        let spec = InitSpec {
            variables: Some(variables),
            ..self.container.further(self.places, request)?
        };
        let process = self.prepare_in_own_cgroup(&spec, &name, asked.longest_ms).await?;
        tokio::spawn(continue_after_stop(process.clone()));
        Ok(process)
    }
}

/// Returns the part of a request that decides which zygote it can be a fork of: everything except
/// its exec id, its input and its variables. Requests with equal keys can share a zygote.
fn fork_key(request: &ExecRequest) -> ExecRequest {
    let mut key = ExecRequest { process: None, zygote: None, ..request.clone() };
    if let Some(spec) = &mut key.spec {
        spec.stdin = false;
    }
    key
}

/// Returns the name of the control group for the process of `request`, whether it is a fork or is
/// started anew.
fn request_cgroup(request: &ExecRequest) -> String {
    let id = request.process.as_ref().map_or("", |process| process.exec_id.as_str());
    format!("fork-{id}")
}

/// Returns the text of the file with a request's variables, one `NAME=value` in each line.
fn variables_file(variables: &[String]) -> String {
    variables.iter().flat_map(|variable| [variable.as_str(), "\n"]).collect()
}

/// Waits for at most `ready` until a process has stopped itself by a signal.
///
/// # Errors
/// The process cannot be forked: it ended, has several threads, or did not stop in time.
async fn await_self_stop(process: &Process, ready: Duration) -> anyhow::Result<()> {
    let deadline = Instant::now() + ready;
    let pid = process.pid().as_raw_nonzero().get();
    loop {
        if !process.is_alive() {
            let status = process.ended().await;
            anyhow::bail!("it ended with status {status} before it stopped itself");
        }
        match Status::read(pid) {
            Some(status) if status.is_stopped() && status.threads > 1 => {
                anyhow::bail!("it has {} threads", status.threads)
            }
            Some(status) if status.is_stopped() => return Ok(()),
            _ if Instant::now() >= deadline => {
                anyhow::bail!("it did not stop itself within {} s", ready.as_secs_f64())
            }
            _ => tokio::time::sleep(POLL_INTERVAL).await,
        }
    }
}

/// Sends SIGCONT to a process the first time that it stops itself. Returns then, or when the
/// process has ended.
async fn continue_after_stop(process: Arc<Process>) {
    let pid = process.pid().as_raw_nonzero().get();
    let mut pause = POLL_INTERVAL;
    while process.is_alive() {
        if Status::read(pid).is_some_and(Status::is_stopped) {
            let _ = process.signal(libc::SIGCONT as u32);
            return;
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(MAX_POLL_INTERVAL);
    }
}

/// Waits until a process has ended, then kills all other processes in its control group `own` and
/// removes that. Kills the process itself after `longest_ms` milliseconds unless this is 0.
async fn supervise(process: Arc<Process>, own: Option<Cgroup>, longest_ms: u32) {
    let limit = Duration::from_millis(longest_ms.into());
    if longest_ms > 0 && tokio::time::timeout(limit, process.ended()).await.is_err() {
        let _ = process.signal(libc::SIGKILL as u32);
    }
    process.ended().await;
    let Some(own) = own else { return };
    // Fails if the container was removed, and this control group with it.
    let _ = own.kill();
    if let Err(error) = own.remove().await {
        log!("ending what a process left: {error}");
    }
}

#[cfg(test)]
mod tests {
    use slipway_agent_protocol::v1::{ProcessRef, ProcessSpec};

    use super::*;

    #[test]
    fn variables_are_lines() {
        assert_eq!(variables_file(&["A=1".into(), "B=".into()]), "A=1\nB=\n");
        assert_eq!(variables_file(&[]), "");
    }

    #[test]
    fn forks_differ_in_input_and_variables_only() {
        let request = |id: &str, spec: ProcessSpec| ExecRequest {
            process: Some(ProcessRef { exec_id: id.to_owned(), ..ProcessRef::default() }),
            spec: Some(spec),
            zygote: Some(ZygoteRequest {
                variables: vec![format!("N={id}")],
                ..ZygoteRequest::default()
            }),
            ..ExecRequest::default()
        };
        let one = request("1", ProcessSpec::default());
        let two = request("2", ProcessSpec { stdin: true, ..ProcessSpec::default() });
        assert_eq!(fork_key(&one), fork_key(&two));
        let user = request("1", ProcessSpec { user: "1".to_owned(), ..ProcessSpec::default() });
        let privileged = ExecRequest { privileged: true, ..one.clone() };
        assert!(fork_key(&user) != fork_key(&one) && fork_key(&privileged) != fork_key(&one));
    }
}
