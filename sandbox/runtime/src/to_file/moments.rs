//! The moments of a sandbox that comes back from its file, once its container goes on: the answer
//! to an exec, the quiet after which its working set is known, and its last page.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use slipway_agent_protocol::v1 as agent_v1;
use slipway_telemetry::monotonic_ns;
use tonic::Code;

use super::NAME;
use crate::agent::{Agent, process};
use crate::name::new_id;
use crate::node::Node;
use crate::pause::containers;
use crate::process::agent_spec;
use crate::record::Process;
use crate::sandbox::Sandbox;
use crate::templates::{Templates, working_set};
use crate::{Error, Result, memory};

/// The time for which a guest that is quiet touches no page for the first time.
const QUIET: Duration = Duration::from_millis(100);
/// The longest time for which the rest of the memory waits for the guest to be quiet.
const LONGEST: Duration = Duration::from_secs(2);

/// Has the guest begin a process in the container, or in the first one of a pod that goes on, by
/// the way of every exec up to its program, which is none: a directory. So nothing of the image
/// runs. Returns the time of the answer, CLOCK_MONOTONIC, or `None` if the guest has none, as when
/// the container has ended, or if no container of a pod goes on.
pub(super) async fn first_exec(sandbox: &Sandbox, agent: &Agent) -> Option<u64> {
    let found = sandbox.look(|record| {
        let id = containers(record).into_iter().next()?;
        let settings = record.added(&id).map_or(&record.settings, |added| &added.settings);
        Some((id, settings.process.clone()))
    });
    let (id, settings) = found?;
    let spec = Process { args: vec!["/".to_owned()], ..settings };
    let request = agent_v1::ExecRequest {
        process: process(&id, &new_id()),
        spec: Some(agent_spec(&spec)),
        ..Default::default()
    };
    match agent.exec(request).await {
        Ok(_) | Err(Error::Exec { .. }) => Some(monotonic_ns()),
        Err(error) => {
            tracing::info!(sandbox = sandbox.name, %error, "its first exec is not answered");
            None
        }
    }
}

/// Returns the path of a sandbox's working set, which outlives each file of its memory.
fn path(sandbox: &Sandbox) -> PathBuf {
    working_set::path(sandbox.store.dir())
}

/// Has the pool copy ahead the working set that the sandbox had when it came back before, if it
/// ever did. `place` has its template loaded.
pub(super) async fn copy_ahead(node: &Node, sandbox: &Sandbox, place: &Templates) -> Result<()> {
    let template = place.get(NAME).await?;
    let (path, of) = (path(sandbox), sandbox.id.clone());
    working_set::copy_ahead(&node.plane, &template.memory, path, of).await;
    Ok(())
}

/// Waits until the guest is quiet, and keeps what it has touched since it came back: its working
/// set, for the next time. One that is not quiet in time has what it has touched by then. A set of
/// more than half of the memory is no use, and is forgotten.
pub(super) async fn learn(node: &Node, sandbox: &Sandbox, place: &Templates) {
    let Ok(template) = place.get(NAME).await else { return };
    let Some(memory) = sandbox.look(|record| record.plugged.client_memory) else { return };
    let (until, mut before) = (Instant::now() + LONGEST, None);
    let touched = loop {
        let touched = working_set::touched(&node.plane, &template.memory, memory.file).await;
        match touched {
            Ok(now) if before.as_ref() == Some(&now) || Instant::now() >= until => break Ok(now),
            Ok(now) => before = Some(now),
            Err(status) => break Err(status),
        }
        tokio::time::sleep(QUIET).await;
    };
    let kept = match touched {
        Ok(ranges) => working_set::keep(path(sandbox), sandbox.id.clone(), ranges).await,
        Err(status) if status.code() == Code::FailedPrecondition => {
            working_set::forget(path(sandbox)).await
        }
        Err(status) => Err(Error::plane(status)),
    };
    if let Err(error) = kept {
        tracing::info!(sandbox = sandbox.name, %error, "its working set is not kept");
    }
}

/// Copies what is left of a sandbox's memory. Returns the time at which the guest had all of it,
/// CLOCK_MONOTONIC, or `None` if that failed.
pub(super) async fn last_page(node: &Node, sandbox: &Sandbox) -> Option<u64> {
    let memory = sandbox.look(|record| record.plugged.client_memory)?;
    match memory::complete(node, memory).await {
        Ok(_) => Some(monotonic_ns()),
        Err(error) => {
            tracing::info!(sandbox = sandbox.name, %error, "its memory comes by demand alone");
            None
        }
    }
}
