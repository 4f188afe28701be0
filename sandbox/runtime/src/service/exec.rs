//! Further processes in a sandbox: `slipway exec`.
//!
//! [`begin`] checks the target, has the agent start the process ([`open`]), and leaves the streams
//! to two tasks: `forward` for the client's messages, and [`carry_exec`] for the process's.

use slipway_agent_protocol::v1 as agent_v1;
use slipway_telemetry::trace::Call;
use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tonic::{Status, Streaming};

use super::{QUEUE, Sender, first, forward, out};
use crate::agent::{Agent, Ended, process};
use crate::node::Node;
use crate::record::{Process, Settings};
use crate::stdio::{self, Input, Pieces};
use crate::target::Target;
use crate::v1::{self, run_in, run_out};
use crate::{Error, log, name, pause, process, traces};

/// Starts the process that the first of `messages` describes, and carries its streams. Returns the
/// messages for its client. `call` gets the names of the container, and ends with an error if the
/// program cannot be executed, which is no failure of the call.
pub(super) async fn begin(
    node: &Node,
    mut messages: Streaming<v1::RunIn>,
    call: &mut Call,
) -> Result<mpsc::Receiver<Result<v1::RunOut, Status>>, Status> {
    let run_in::Kind::Exec(spec) = first(&mut messages).await? else {
        return Err(Status::invalid_argument("Exec begins with an ExecSpec"));
    };
    let target = node.target(&spec.name)?;
    target.describe(call);
    target.has_process()?;
    let _turn = target.container.pausing.read().await;
    pause::check_runs(&target)?;
    let agent = target.sandbox.agent()?;
    let session = agent.session(&target.sandbox.name)?;
    let exec_id = name::new_id();
    let request = exec_request(&target, &spec, &exec_id)?;
    agent.check_process(request.spec.as_ref())?;
    if request.detach {
        check_detach(&spec)?;
        agent.check_detach()?;
    }
    let (input, input_end) = stdio::input_queue();
    let reference = process(&target.container.name, &exec_id);
    let (sender, receiver) = mpsc::channel(QUEUE);
    let opened = open(&agent, request, reference.clone(), (input_end, session)).await;
    let (output, started) = match opened {
        Ok(opened) => opened,
        Err(error) => {
            let Some(exit) = exit_of(&error) else { return Err(error.into()) };
            traces::end(call, Some(&error));
            let _ = sender.send(out(exit)).await;
            return Ok(receiver);
        }
    };
    let Some(output) = output else {
        for kind in [started, run_out::Kind::Exit(v1::Exit::default())] {
            let _ = sender.send(out(kind)).await;
        }
        return Ok(receiver);
    };
    let (open, waiting) = (agent.clone(), agent.clone());
    let process = reference.clone();
    tokio::spawn(forward(messages, input, move || Some(open.clone()), reference));
    tokio::spawn(async move {
        let _ = sender.send(out(started)).await;
        carry_exec(output, waiting, process, sender).await;
    });
    Ok(receiver)
}

/// Refuses a process that goes on without a client and would need one.
fn check_detach(spec: &v1::ExecSpec) -> crate::Result<()> {
    if spec.terminal || spec.stdin || spec.zygote.is_some() {
        let why = "a detached process has no input, no terminal and no zygote";
        return Err(Error::Invalid(why.to_owned()));
    }
    Ok(())
}

/// Has the agent set a process up, and opens its streams. Returns its output, which is `None` if
/// the process is detached, or a zygote was prepared and no process runs, and the message that this
/// was done.
///
/// # Errors
/// [`Error::Exec`] if the program cannot be executed; [`Error::Agent`].
async fn open(
    agent: &Agent,
    request: agent_v1::ExecRequest,
    reference: Option<agent_v1::ProcessRef>,
    (input, session): (mpsc::Receiver<Input>, OwnedSemaphorePermit),
) -> crate::Result<(Option<Pieces>, run_out::Kind)> {
    let prepares = request.zygote.as_ref().is_some_and(|zygote| zygote.prepare);
    let has_streams = !prepares && !request.detach;
    let reply = agent.exec(request).await?;
    if !has_streams {
        return Ok((None, started(reply)));
    }
    let output = stdio::open(agent, reference, input, session).await?;
    Ok((Some(output), started(reply)))
}

/// Returns the message that a program cannot be executed. Returns `None` for another error.
fn exit_of(error: &Error) -> Option<run_out::Kind> {
    let Error::Exec { status, reason } = error else { return None };
    let (status, reason) = (*status, reason.clone());
    Some(run_out::Kind::Exit(v1::Exit { status, reason, ..Default::default() }))
}

/// Returns the message that a process, or a zygote, was set up.
fn started(reply: agent_v1::ExecReply) -> run_out::Kind {
    let agent_v1::ExecReply { forked, refused, .. } = reply;
    run_out::Kind::Started(v1::Started { forked, not_forked: refused, ..Default::default() })
}

/// Returns the request for the agent to start the process of `spec` in a container.
///
/// # Errors
/// [`Error::Invalid`] if the process may not do what it asks for.
fn exec_request(
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
        oom_score_adj: settings.process.oom_score_adj,
        security: settings.process.security.of_exec(spec.security.as_ref(), spec.privileged)?,
    };
    Ok(agent_v1::ExecRequest {
        process: process(&target.container.name, exec_id),
        spec: Some(process::agent_spec(&asked)),
        privileged: spec.privileged || settings.privileged,
        detach: spec.detach,
        zygote: spec.zygote.as_ref().map(|zygote| agent_v1::Zygote {
            ready_ms: zygote.ready_ms,
            variables: zygote.variables.clone(),
            prepare: zygote.prepare,
            longest_ms: zygote.longest_ms,
        }),
    })
}

/// Carries the output of a process to its client, then its exit, until the client leaves.
async fn carry_exec(
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
