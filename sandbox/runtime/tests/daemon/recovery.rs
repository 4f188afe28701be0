//! A daemon that finds what another one has left: sandboxes that it can take over, and sandboxes
//! that it cannot.

use std::path::Path;
use std::process::{Child, Command};
use std::sync::Arc;

use serde_json::{Value, json};
use slipway_runtime::v1;
use tokio::sync::watch;

use crate::harness::guest::Guest;
use crate::harness::{Daemon, LONG, run_dir, sandbox_dir};

/// The user id of a VMM that has ended: no process has it.
const VMM_UID: u32 = 1_879_052_000;

/// Starts a daemon in `dir`.
async fn take_over(dir: tempfile::TempDir) -> Daemon {
    let guests = Arc::new(|listener, _: &str| Guest::default().speak(listener));
    Daemon::start_in(dir, guests, watch::channel(true).1).await
}

/// Puts the directories of sandbox `id` into `dir`, as a daemon that was killed leaves them.
fn leave(dir: &Path, id: &str, record: &str) {
    for made in [sandbox_dir(dir, id), run_dir(dir, id)] {
        std::fs::create_dir_all(made).unwrap();
    }
    std::fs::write(sandbox_dir(dir, id).join("record.json"), record).unwrap();
    std::fs::write(run_dir(dir, id).join("qmp.sock"), "").unwrap();
}

/// Returns the record of a sandbox in this state, whose VMM has ended.
fn record(id: &str, state: &str) -> String {
    let record = json!({
        "id": id, "name": id, "image": "i", "image_digest": "d", "image_path": "/i",
        "process": slipway_runtime::record::Process::default(), "stop_signal": 15,
        "privileged": false, "read_only": false, "state": state, "created_ns": 1,
        "exit_status": null, "reason": "", "memory_bytes": 1, "cpus": 1, "hostname": "h",
        "volumes": [], "kernel": null, "accelerator": "tcg", "labels": {}, "remove": false,
        "vmm_uid": VMM_UID, "vm": null, "timeline": slipway_telemetry::Timeline::new(id),
    });
    record.to_string()
}

/// Starts a process that stands for the VMM of a sandbox that runs, and leaves that sandbox.
fn leave_running(dir: &Path, id: &str) -> Child {
    let vmm = Command::new("sleep").arg("3600").spawn().unwrap();
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", vmm.id())).unwrap();
    // The name, which is field 2, may have spaces, and ends with the last bracket.
    let fields = stat.rsplit_once(") ").unwrap().1;
    let start_time: u64 = fields.split(' ').nth(19).unwrap().parse().unwrap();
    let mut record: Value = serde_json::from_str(&record(id, "running")).unwrap();
    record["vm"] = json!({
        "hypervisor": "slipway-vmm", "pid": vmm.id(), "start_time_ticks": start_time,
        "boot_id": slipway_peer::boot_id().unwrap(),
    });
    leave(dir, id, &record.to_string());
    vmm
}

/// Returns the record that is on the disk.
fn saved(daemon: &Daemon, id: &str) -> Value {
    let path = daemon.sandbox_dir(id).join("record.json");
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

#[tokio::test]
async fn a_sandbox_whose_record_cannot_be_read_is_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    leave(dir.path(), "aaaaaaaaaaaa", "{\"of\": \"a later version\"}");
    leave(dir.path(), "bbbbbbbbbbbb", &record("bbbbbbbbbbbb", "exited"));
    // This one has no record, and so no sandbox.
    std::fs::create_dir_all(run_dir(dir.path(), "cccccccccccc")).unwrap();
    let daemon = take_over(dir).await;
    let dir = daemon.dir.path();
    assert!(run_dir(dir, "aaaaaaaaaaaa").join("qmp.sock").exists());
    assert!(sandbox_dir(dir, "aaaaaaaaaaaa").join("record.json").exists());
    assert!(!run_dir(dir, "cccccccccccc").exists());
    assert_eq!(daemon.count().await, 1);
}

#[tokio::test]
async fn a_record_that_cannot_be_written_keeps_no_other_sandbox_from_being_taken_over() {
    let dir = tempfile::tempdir().unwrap();
    for id in ["aaaaaaaaaaaa", "bbbbbbbbbbbb"] {
        leave(dir.path(), id, &record(id, "running"));
    }
    std::fs::create_dir(sandbox_dir(dir.path(), "aaaaaaaaaaaa").join("record.json.new")).unwrap();
    let daemon = take_over(dir).await;
    for id in ["aaaaaaaaaaaa", "bbbbbbbbbbbb"] {
        assert_eq!(daemon.state(id).await.state, "lost", "{id}");
    }
    assert_eq!(saved(&daemon, "aaaaaaaaaaaa")["state"], "running");
    assert_eq!(saved(&daemon, "bbbbbbbbbbbb")["state"], "lost");
}

#[tokio::test]
async fn an_ended_sandbox_gives_its_user_id_back_once_its_processes_are_gone() {
    let dir = tempfile::tempdir().unwrap();
    leave(dir.path(), "aaaaaaaaaaaa", &record("aaaaaaaaaaaa", "failed"));
    let daemon = take_over(dir).await;
    let saved = saved(&daemon, "aaaaaaaaaaaa");
    assert_eq!((&saved["state"], &saved["vmm_uid"]), (&json!("failed"), &Value::Null));
}

#[tokio::test]
async fn a_sandbox_in_a_file_that_was_ending_ends_and_one_without_its_file_is_lost() {
    let dir = tempfile::tempdir().unwrap();
    let [stays, ends, lost] = ["aaaaaaaaaaaa", "bbbbbbbbbbbb", "cccccccccccc"];
    for (id, state) in [(stays, "running"), (ends, "stopping"), (lost, "running")] {
        let mut record: Value = serde_json::from_str(&record(id, state)).unwrap();
        (record["in_file"], record["paused"]) = (json!(true), json!(true));
        leave(dir.path(), id, &record.to_string());
    }
    let file = |dir: &Path, id: &str| sandbox_dir(dir, id).join("paused");
    for id in [stays, ends] {
        std::fs::create_dir(file(dir.path(), id)).unwrap();
    }
    let daemon = take_over(dir).await;
    let paused = daemon.state(stays).await;
    assert_eq!((paused.state.as_str(), paused.in_file), ("paused", true));
    assert!(file(daemon.dir.path(), stays).exists());
    let killed = daemon.state(ends).await;
    let (state, reason) = (killed.state.as_str(), killed.reason.as_str());
    assert_eq!((state, reason, killed.in_file), ("exited", "killed", false));
    assert!(!file(daemon.dir.path(), ends).exists());
    let gone = daemon.state(lost).await;
    assert_eq!((gone.state.as_str(), gone.in_file), ("lost", false));
    assert!(gone.reason.contains("file of its memory is gone"), "{}", gone.reason);
    for id in [ends, lost] {
        assert_eq!(saved(&daemon, id)["in_file"], json!(false), "{id}");
    }
}

/// The VMMs answer after the time for which the daemon serves nobody, 20 s.
#[tokio::test]
async fn sandboxes_whose_vmms_answer_late_are_not_lost() {
    let dir = tempfile::tempdir().unwrap();
    let mut goes_on = leave_running(dir.path(), "aaaaaaaaaaaa");
    let mut removed = leave_running(dir.path(), "bbbbbbbbbbbb");
    let guests = Arc::new(|listener, _: &str| Guest::default().speak(listener));
    let (gate, opened) = watch::channel(false);
    // Serves, though no VMM has answered.
    let daemon = Daemon::start_as(dir, guests, opened, true).await;
    for id in ["aaaaaaaaaaaa", "bbbbbbbbbbbb"] {
        assert_eq!(daemon.state(id).await.state, "running", "{id}");
    }
    // A caller may end a sandbox that is waited for.
    daemon.remove("bbbbbbbbbbbb").await;
    removed.wait().unwrap();
    assert_eq!(daemon.count().await, 1);
    assert!(goes_on.try_wait().unwrap().is_none());
    // A request to stop waits for the guest.
    let mut client = daemon.client.clone();
    let stop = v1::StopRequest { name: "aaaaaaaaaaaa".to_owned(), timeout_s: 3600 };
    let stopped = tokio::spawn(async move { client.stop(stop).await });
    daemon.list(3).await;
    assert!(!stopped.is_finished());
    gate.send_replace(true);
    // Its guest answers that the container has ended, by itself.
    assert_eq!(daemon.wait_state("aaaaaaaaaaaa", "exited").await.exit_status, 0);
    tokio::time::timeout(LONG, stopped).await.expect("it stops").unwrap().unwrap();
    // The stand-in for the VMM that the daemon ended has no process.
    goes_on.kill().unwrap();
    goes_on.wait().unwrap();
}
