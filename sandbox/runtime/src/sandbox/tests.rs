use std::sync::mpsc::channel;

use super::*;
use crate::files::Files;

fn sandbox(dir: &std::path::Path) -> Arc<Sandbox> {
    let record = crate::adopt::tests::record_of(SandboxState::Created);
    let store = Store::new(dir, &record.id);
    store.create().unwrap();
    Sandbox::new(record, store, Files::start().unwrap().lane())
}

/// A thousand changes while the disk does not answer are written as two records at most.
#[tokio::test]
async fn changes_that_wait_are_written_together() {
    let dir = tempfile::tempdir().unwrap();
    let sandbox = sandbox(dir.path());
    let (release, held) = channel::<()>();
    let blocked = {
        let lane = sandbox.lane.clone();
        tokio::spawn(async move { lane.run(move || held.recv().is_err()).await })
    };
    let updates: Vec<_> = (0..1000)
        .map(|number| {
            let sandbox = Arc::clone(&sandbox);
            tokio::spawn(async move { sandbox.update(|record| record.created_ns = number).await })
        })
        .collect();
    tokio::task::yield_now().await;
    assert!(updates.iter().all(|update| !update.is_finished()));
    assert!(sandbox.store.load().unwrap().is_none());
    drop(release);
    blocked.await.unwrap();
    let mut versions = std::collections::BTreeSet::new();
    for update in updates {
        update.await.unwrap().unwrap();
        versions.insert(*sandbox.saved.lock().await);
    }
    assert!(versions.len() <= 2, "{versions:?}");
    assert_eq!(sandbox.store.load().unwrap().unwrap().created_ns, sandbox.record().created_ns);
}

#[tokio::test]
async fn a_change_that_a_later_one_has_saved_is_not_saved_again() {
    let dir = tempfile::tempdir().unwrap();
    let sandbox = sandbox(dir.path());
    let noted = sandbox.note(|record| record.created_ns = 7);
    assert!(sandbox.store.load().unwrap().is_none());
    sandbox.update(|record| record.cpus.count = 3).await.unwrap();
    let record = sandbox.store.load().unwrap().unwrap();
    assert_eq!((record.created_ns, record.cpus.count), (7, 3));
    std::fs::remove_file(sandbox.store.dir().join("record.json")).unwrap();
    sandbox.save(noted).await.unwrap();
    assert!(sandbox.store.load().unwrap().is_none(), "written again");
    sandbox.save(noted + 2).await.unwrap();
    assert_eq!(sandbox.store.load().unwrap().unwrap().cpus.count, 3);
}

#[tokio::test]
async fn a_state_is_announced_when_it_is_on_disk() {
    let dir = tempfile::tempdir().unwrap();
    let sandbox = sandbox(dir.path());
    let waiting = Arc::clone(&sandbox);
    let seen = tokio::spawn(async move {
        waiting.wait_state(|state| *state == SandboxState::Running).await;
        waiting.store.load().unwrap().unwrap().state
    });
    tokio::task::yield_now().await;
    sandbox.update(|record| record.state = SandboxState::Running).await.unwrap();
    assert_eq!(seen.await.unwrap(), SandboxState::Running);
}

/// A container with `--rm` may be gone before a client asks for its exit status.
#[tokio::test]
async fn a_removed_container_keeps_its_exit_status() {
    let dir = tempfile::tempdir().unwrap();
    let sandbox = sandbox(dir.path());
    let add = |exit_status| {
        let container = Container::new("one", dir.path().join("log"), SandboxState::Exited);
        sandbox.insert_added(Arc::clone(&container));
        let mut added = crate::adopt::tests::added_of("one", SandboxState::Exited);
        added.run.exit_status = exit_status;
        sandbox.note(|record| record.added.push(added));
        crate::target::Target { sandbox: Arc::clone(&sandbox), container }
    };
    let first = add(Some(7));
    sandbox.forget_added(&first.container);
    assert_eq!(first.exit().status, 7);
    let second = add(Some(8));
    sandbox.forget_added(&first.container);
    assert_eq!((first.exit().status, second.exit().status), (7, 8));
}

#[tokio::test]
async fn a_call_that_needs_a_guest_which_does_not_answer_yet_is_to_be_tried_again() {
    let dir = tempfile::tempdir().unwrap();
    let sandbox = sandbox(dir.path());
    let why = || (sandbox.agent().err().unwrap(), sandbox.live_vm().err().unwrap());
    sandbox.update(|record| record.state = SandboxState::Running).await.unwrap();
    let (agent, vm) = why();
    assert!(agent.to_string().contains(SILENT) && vm.to_string().contains(SILENT));
    sandbox.update(|record| record.state = SandboxState::Exited).await.unwrap();
    let (agent, vm) = why();
    assert!(agent.to_string().contains("does not run"), "{agent}");
    assert!(vm.to_string().contains("has ended"), "{vm}");
}
