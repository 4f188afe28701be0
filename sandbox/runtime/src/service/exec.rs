//! Further processes in a sandbox: `slipway exec`.

use slipway_agent_protocol::v1 as agent_v1;

use super::{Sender, out};
use crate::agent::{Agent, Ended, process};
use crate::log;
use crate::process;
use crate::record::{Process, Settings};
use crate::stdio::{self, Pieces};
use crate::target::Target;
use crate::v1::{self, run_out};

/// Returns the request for the agent to start the process of `spec` in a container.
///
/// # Errors
/// [`Error::Invalid`](crate::Error::Invalid) if the process may not do what it asks for.
pub(super) fn exec_request(
    target: &Target,
    spec: &v1::ExecSpec,
    exec_id: &str,
) -> crate::Result<agent_v1::ExecRequest> {
    let settings = target.look(Settings::clone);
    let asked = Process {
        args: spec.command.clone(),
        env: settings.process.env.iter().chain(&spec.env).cloned().collect(),
        cwd: crate::process::or(&spec.cwd, &settings.process.cwd),
        user: crate::process::or(&spec.user, &settings.process.user),
        terminal: spec.terminal,
        rows: spec.rows,
        columns: spec.columns,
        stdin: spec.stdin,
        limits: settings.process.limits,
        security: settings.process.security.of_exec(spec.security.as_ref(), spec.privileged)?,
    };
    Ok(agent_v1::ExecRequest {
        process: process(&target.container.name, exec_id),
        spec: Some(process::agent_spec(&asked)),
        privileged: spec.privileged || settings.privileged,
    })
}

/// Carries the output of a process to its client, then its exit, until the client leaves.
pub(super) async fn carry_exec(
    output: Pieces,
    agent: Agent,
    process: Option<agent_v1::ProcessRef>,
    sender: Sender,
) {
    tokio::select! {
        () = sender.closed() => {}
        () = tell_exec(output, agent, process, &sender) => {}
    }
}

async fn tell_exec(
    mut output: Pieces,
    agent: Agent,
    process: Option<agent_v1::ProcessRef>,
    sender: &Sender,
) {
    let started = v1::Started { stages: Vec::new() };
    let _ = sender.send(out(run_out::Kind::Started(started))).await;
    loop {
        match stdio::next_piece(&mut output).await {
            Ok(Some((log::Stream::Out, data))) => {
                let _ = sender.send(out(run_out::Kind::Stdout(data))).await;
            }
            Ok(Some((log::Stream::Err, data))) => {
                let _ = sender.send(out(run_out::Kind::Stderr(data))).await;
            }
            Ok(None) => break,
            Err(error) => {
                let _ = sender.send(Err(error.into())).await;
                return;
            }
        }
    }
    let last = match agent.wait(process).await {
        Ok(Ended { status, .. }) => {
            out(run_out::Kind::Exit(v1::Exit { status, ..Default::default() }))
        }
        Err(error) => Err(error.into()),
    };
    let _ = sender.send(last).await;
}
