//! Zygotes: a container's process that is set up once and stops itself, and its forks, which begin
//! where it stands (RunD-V, the fork of containers).
//!
//! The first request for a fork starts the zygote. What makes a fork is [`crate::init`] in a
//! process of its own, so a zygote holds up requests for forks of its own container only. After a
//! failure the container has no zygote any more: its program is started anew for each request. In
//! both cases all that comes of a process ends with it, and it ends with its Stdio stream. What a
//! zygote started, as a program that leaves a daemon and ends, ends with the zygote.
//!
//! How a fork is made is in `init/fork.rs`. Tests are in both files, and `tests/e2e/18-function.sh`
//! has programs that can be forked and others; `docs/functions.md`, "Zygotes", has the rules for
//! programs.

use std::sync::Arc;
use std::time::Duration;

use slipway_agent_protocol::v1::{ExecRequest, Zygote as Asked};
use tokio::sync::MutexGuard;
use tokio::time::Instant;

use crate::cgroup::Cgroup;
use crate::container::{AgentPaths, Container, Zygote};
use crate::init::InitSpec;
use crate::process::{Failure, Process};
use crate::reaper::Reaper;
use crate::stopped::Status;
use crate::{log, stdio};

/// The time between two looks at a process that is to stop itself.
const LOOK: Duration = Duration::from_millis(2);
/// The longest time between two looks at one that nobody waits for.
const LONGEST_LOOK: Duration = Duration::from_millis(100);
/// The name of the control group of a zygote and of what it started; no fork's.
const GROUP: &str = "zygote";

/// A process that was set up for a request.
pub struct Begun {
    /// The process.
    pub process: Arc<Process>,
    /// Set if it is a fork.
    pub forked: bool,
    /// The reason why it is none, if one was asked for.
    pub refused: String,
}

/// The container, and what it takes to start processes in it.
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
    /// Sets up a process: a fork if `request` asks for one and the program can be forked.
    pub async fn begin(self, mut request: ExecRequest) -> Result<Begun, Failure> {
        let Some(asked) = request.zygote.take() else {
            let process = self.container.exec(self.places, self.reaper, request).await?;
            let (process, refused) = (Arc::new(process), String::new());
            return Ok(Begun { process, forked: false, refused });
        };
        match self.fork(&request, &asked).await {
            Ok(process) => Ok(Begun { process, forked: true, refused: String::new() }),
            Err(refused) => {
                let process = self.anew(request, asked).await?;
                Ok(Begun { process, forked: false, refused })
            }
        }
    }

    /// Starts the container's zygote, unless it was started before. Returns the reason if the
    /// program cannot be forked.
    pub async fn prepare(self, request: &ExecRequest, asked: &Asked) -> Option<String> {
        self.stand(request, asked).await.err()
    }

    /// Sets up a fork. Returns the reason if the program cannot be forked.
    async fn fork(self, request: &ExecRequest, asked: &Asked) -> Result<Arc<Process>, String> {
        let mut state = self.stand(request, asked).await?;
        let Zygote::Stands(zygote, _) = &*state else { return Err("it is gone".to_owned()) };
        match self.fork_of(zygote, request, asked).await {
            Ok(process) => Ok(process),
            Err(failure) => {
                // It may be half-way in a fork.
                let _ = zygote.signal(libc::SIGKILL as u32);
                *state = Zygote::Refused(failure.message.clone());
                Err(failure.message)
            }
        }
    }

    /// Returns the zygote, which stands, for as long as nobody else has it.
    ///
    /// # Errors
    /// The reason why the program cannot be forked.
    async fn stand(
        &self,
        request: &ExecRequest,
        asked: &Asked,
    ) -> Result<MutexGuard<'_, Zygote>, String> {
        let mut state = self.container.zygote.lock().await;
        if matches!(*state, Zygote::Absent) {
            *state = match self.raise(request.clone(), asked).await {
                Ok(zygote) => Zygote::Stands(zygote, Box::new(common(request))),
                Err(failure) => Zygote::Refused(failure.message),
            };
        }
        match &*state {
            Zygote::Refused(reason) => return Err(reason.clone()),
            Zygote::Stands(_, its) if **its != common(request) => {
                return Err("it has another command, environment or rights".to_owned());
            }
            Zygote::Stands(..) | Zygote::Absent => {}
        }
        Ok(state)
    }

    /// Starts a zygote, and waits until it has stopped itself.
    async fn raise(
        &self,
        mut request: ExecRequest,
        asked: &Asked,
    ) -> Result<Arc<Process>, Failure> {
        if let Some(process) = &mut request.spec {
            process.stdin = false;
        }
        let spec = InitSpec {
            variables: Some(String::new()),
            ..self.container.further(self.places, request)?
        };
        let zygote = self.prepare_apart(&spec, GROUP, 0).await?;
        // Its output is nobody's, and must not hold it up.
        let _ = stdio::abandon(&zygote).await;
        zygote.start().await?;
        let ready = Duration::from_millis(asked.ready_ms.into());
        match await_stop(&zygote, ready).await {
            Ok(()) => Ok(zygote),
            Err(error) => {
                let _ = zygote.signal(libc::SIGKILL as u32);
                Err(error.into())
            }
        }
    }

    /// Makes a fork.
    async fn fork_of(
        &self,
        zygote: &Process,
        request: &ExecRequest,
        asked: &Asked,
    ) -> Result<Arc<Process>, Failure> {
        if !zygote.is_alive() {
            return Err(anyhow::anyhow!("it has ended").into());
        }
        let spec = InitSpec {
            process: request.spec.clone(),
            fork: zygote.pid().as_raw_nonzero().get(),
            variables: Some(lines(&asked.variables)),
            ..InitSpec::default()
        };
        let process = self.prepare_apart(&spec, &group(request), asked.longest_ms).await?;
        // While it has not ended its id is not another process's, which would have been forked.
        if !zygote.is_alive() {
            let _ = process.signal(libc::SIGKILL as u32);
            return Err(anyhow::anyhow!("it has ended").into());
        }
        Ok(process)
    }

    /// Sets up a process in a control group of its own, which ends with it, and that is killed
    /// after `longest` milliseconds unless this is 0.
    async fn prepare_apart(
        &self,
        spec: &InitSpec,
        name: &str,
        longest: u32,
    ) -> Result<Arc<Process>, Failure> {
        let process = Process::prepare(&self.places.program, self.reaper, spec).await?;
        let process = Arc::new(process);
        let pid = process.pid().as_raw_nonzero().get();
        let part = self.container.cgroup.as_ref().map(|cgroup| cgroup.part(name, pid));
        match part.transpose() {
            Ok(part) => {
                tokio::spawn(end(process.clone(), part, longest));
                Ok(process)
            }
            Err(error) => {
                let _ = process.signal(libc::SIGKILL as u32);
                Err(error.into())
            }
        }
    }

    /// Sets up the program anew, and has it go on when it stops itself.
    async fn anew(self, mut request: ExecRequest, asked: Asked) -> Result<Arc<Process>, Failure> {
        let name = group(&request);
        let variables = lines(&asked.variables);
        if let Some(process) = &mut request.spec {
            process.env.extend(asked.variables);
        }
        let spec = InitSpec {
            variables: Some(variables),
            ..self.container.further(self.places, request)?
        };
        let process = self.prepare_apart(&spec, &name, asked.longest_ms).await?;
        tokio::spawn(go_on(process.clone()));
        Ok(process)
    }
}

/// Returns what requests for forks of one zygote have in common: all that a process is, but its
/// input and its variables.
fn common(request: &ExecRequest) -> ExecRequest {
    let mut common = ExecRequest { process: None, zygote: None, ..request.clone() };
    if let Some(spec) = &mut common.spec {
        spec.stdin = false;
    }
    common
}

/// Returns the name of the control group of the process that is begun for a request.
fn group(request: &ExecRequest) -> String {
    let id = request.process.as_ref().map_or("", |process| process.exec_id.as_str());
    format!("fork-{id}")
}

/// Returns the text of a file of variables.
fn lines(variables: &[String]) -> String {
    variables.iter().flat_map(|variable| [variable.as_str(), "\n"]).collect()
}

/// Waits until a process has stopped itself.
///
/// # Errors
/// It cannot be forked: it ended, has several threads, or did not stop in time.
async fn await_stop(process: &Process, ready: Duration) -> anyhow::Result<()> {
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
            _ => tokio::time::sleep(LOOK).await,
        }
    }
}

/// Has a process go on once if it stops itself.
async fn go_on(process: Arc<Process>) {
    let pid = process.pid().as_raw_nonzero().get();
    let mut pause = LOOK;
    while process.is_alive() {
        if Status::read(pid).is_some_and(Status::is_stopped) {
            let _ = process.signal(libc::SIGCONT as u32);
            return;
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(LONGEST_LOOK);
    }
}

/// Kills all that is left of a process when it has ended. Kills the process after `longest`
/// milliseconds unless this is 0.
async fn end(process: Arc<Process>, part: Option<Cgroup>, longest: u32) {
    let limit = Duration::from_millis(longest.into());
    if longest > 0 && tokio::time::timeout(limit, process.ended()).await.is_err() {
        let _ = process.signal(libc::SIGKILL as u32);
    }
    process.ended().await;
    let Some(part) = part else { return };
    // Fails if the container was removed, with all that is in it.
    let _ = part.kill();
    if let Err(error) = part.remove().await {
        log!("ending what a process left: {error}");
    }
}

#[cfg(test)]
mod tests {
    use slipway_agent_protocol::v1::{ProcessRef, ProcessSpec};

    use super::*;

    #[test]
    fn variables_are_lines() {
        assert_eq!(lines(&["A=1".into(), "B=".into()]), "A=1\nB=\n");
        assert_eq!(lines(&[]), "");
    }

    #[test]
    fn forks_differ_in_input_and_variables_only() {
        let request = |id: &str, spec: ProcessSpec| ExecRequest {
            process: Some(ProcessRef { exec_id: id.to_owned(), ..ProcessRef::default() }),
            spec: Some(spec),
            zygote: Some(Asked { variables: vec![format!("N={id}")], ..Asked::default() }),
            ..ExecRequest::default()
        };
        let one = request("1", ProcessSpec::default());
        let two = request("2", ProcessSpec { stdin: true, ..ProcessSpec::default() });
        assert_eq!(common(&one), common(&two));
        let user = request("1", ProcessSpec { user: "1".to_owned(), ..ProcessSpec::default() });
        let privileged = ExecRequest { privileged: true, ..one.clone() };
        assert!(common(&user) != common(&one) && common(&privileged) != common(&one));
    }
}
