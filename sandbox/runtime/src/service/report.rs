//! Messages to the clients of a sandbox: the stages of its start, its output, its end.

use tokio::sync::mpsc;

use super::logs::KeptOutput;
use super::{Sender, out};
use crate::log;
use crate::record::SandboxState;
use crate::target::Target;
use crate::v1::{self, run_out};

/// Sends a container's stages, start, output and end to one client: the end once `output` is
/// closed, which is when a container that is to be removed is removed.
pub(super) async fn report(
    target: Target,
    mut output: mpsc::Receiver<log::Record>,
    until_started: bool,
    sender: Sender,
) {
    match (tell_start(&target, &sender).await, until_started) {
        (true, true) => return,
        (true, false) => tell_output(output, 0, &sender).await,
        (false, _) => while output.recv().await.is_some() {},
    }
    target.container.wait_state(|state| !state.is_live()).await;
    let _ = sender.send(out(run_out::Kind::Exit(target.exit()))).await;
}

/// Sends the stages of a start to the client until the start ends. Returns `true` if the container
/// runs or ran, and `false` if the sandbox ended without it.
async fn tell_start(target: &Target, sender: &Sender) -> bool {
    let container = &target.container;
    let mut stages = target.sandbox.stages();
    // A start that failed is stopping, too, before it is known to have failed.
    let is_settled = |state: &SandboxState| {
        !matches!(state, SandboxState::Created | SandboxState::Starting | SandboxState::Stopping)
    };
    let settled = container.wait_state(is_settled);
    tokio::pin!(settled);
    loop {
        tokio::select! {
            biased;
            _ = &mut settled => break,
            changed = stages.changed(), if target.is_own() => {
                let stage = stages.borrow_and_update().to_string();
                let told = sender.send(out(run_out::Kind::Stage(stage))).await;
                if changed.is_err() || told.is_err() {
                    break;
                }
            }
        }
    }
    // The container may have started and ended meanwhile.
    let state = container.wait_state(is_settled).await;
    // A sandbox that comes back from a file runs before its timeline has this stage.
    let ran = state == SandboxState::Running || has_run(target);
    if state == SandboxState::Failed || !ran {
        container.wait_state(|state| !state.is_live()).await;
        return false;
    }
    let started = v1::Started { stages: stages_of(target), ..Default::default() };
    let _ = sender.send(out(run_out::Kind::Started(started))).await;
    true
}

/// Returns whether the container's process, or the pod, runs or ran.
fn has_run(target: &Target) -> bool {
    match target.is_own() {
        true => target.sandbox.look(|record| record.timeline.stage("container").is_some()),
        false => target.look_added(|added| added.is_some_and(|added| added.started_ns.is_some())),
    }
}

/// Returns the stages of a sandbox's start. A container that was added to a pod has none.
fn stages_of(target: &Target) -> Vec<v1::Stage> {
    if !target.is_own() {
        return Vec::new();
    }
    let stages = target.sandbox.record().timeline.stages.into_iter().map(|stage| v1::Stage {
        name: stage.name,
        start_ns: stage.start_ns,
        end_ns: stage.end_ns,
    });
    stages.collect()
}

async fn tell_output(mut output: mpsc::Receiver<log::Record>, from: u64, sender: &Sender) {
    while let Some(record) = output.recv().await {
        if let Some(record) = record.from(from)
            && sender.send(out(output_of(record))).await.is_err()
        {
            return;
        }
    }
}

fn output_of(record: log::Record) -> run_out::Kind {
    match record.stream {
        log::Stream::Out => run_out::Kind::Stdout(record.data),
        log::Stream::Err => run_out::Kind::Stderr(record.data),
    }
}

/// Sends a client that lost its daemon the output that it has not received, and the exit. The
/// caller attached `output` before the log is read here, so that no output is lost between the
/// log's end and the first piece of `output`.
pub(super) async fn report_rest(
    target: Target,
    output: mpsc::Receiver<log::Record>,
    from: u64,
    sender: Sender,
) {
    let started = v1::Started::default();
    let _ = sender.send(out(run_out::Kind::Started(started))).await;
    let mut position = from;
    let mut reader = match KeptOutput::open(&target) {
        Ok(reader) => reader,
        Err(error) => return drop(sender.send(Err(error.into())).await),
    };
    loop {
        let records = match reader.read().await {
            Ok(records) if records.is_empty() => break,
            Ok(records) => records,
            Err(status) => return drop(sender.send(Err(status)).await),
        };
        for record in records {
            let Some(record) = record.from(position) else { continue };
            position = record.end();
            if sender.send(out(output_of(record))).await.is_err() {
                return;
            }
        }
    }
    drop(reader);
    tell_output(output, position, &sender).await;
    target.container.wait_state(|state| !state.is_live()).await;
    let _ = sender.send(out(run_out::Kind::Exit(target.exit()))).await;
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::adopt::tests::{record_of, sandbox_of};

    #[tokio::test(start_paused = true)]
    async fn a_client_of_a_container_that_has_just_come_back_hears_that_it_runs() {
        let dir = tempfile::tempdir().unwrap();
        let target = Target::own(sandbox_of(record_of(SandboxState::Running), dir.path()));
        assert!(!has_run(&target), "its timeline has no stage of the container");
        let (sender, mut messages) = mpsc::channel(1);
        let told = tokio::time::timeout(Duration::from_secs(60), tell_start(&target, &sender));
        assert!(told.await.expect("it waits for nothing"));
        let message = messages.recv().await.unwrap().unwrap();
        assert!(matches!(message.kind, Some(run_out::Kind::Started(_))), "{message:?}");
    }
}
