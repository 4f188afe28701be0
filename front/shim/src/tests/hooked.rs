//! Tests of the calls that run hooks of a container that was created.

use super::super::fake::VMM;
use super::*;

/// Returns a container's configuration whose hooks are a shell's scripts.
fn config(started: &str, ended: &str) -> String {
    let hook = |script: &str| {
        let words = ["sh", "-c", script];
        json!([{"path": "/bin/sh", "args": words, "env": ["PATH=/usr/bin:/bin"]}])
    };
    json!({"hooks": {"poststart": hook(started), "poststop": hook(ended)}}).to_string()
}

#[tokio::test]
async fn hooks_run_after_the_start_and_after_the_end() {
    let shim = Shim::new();
    let config = config("cat >started", "cat >ended");
    std::fs::write(shim.bundle().join("config.json"), config).unwrap();
    let state = |file: &str| -> Option<serde_json::Value> {
        serde_json::from_slice(&std::fs::read(shim.bundle().join(file)).ok()?).ok()
    };
    let task = shim.put("one", TaskKind::Alone);
    assert!(state("started").is_none());
    shim.on::<cd::StartResponse>("Start", "one").await.unwrap();
    let started = state("started").unwrap();
    assert_eq!(started["status"], "running");
    assert_eq!(started["pid"].as_u64(), Some(VMM.into()));
    assert!(state("ended").is_none());
    shim.daemon.end(&task.name, 0, 0);
    shim.on::<cd::WaitResponse>("Wait", "one").await.unwrap();
    shim.on::<cd::DeleteResponse>("Delete", "one").await.unwrap();
    let ended = state("ended").unwrap();
    assert_eq!((&ended["status"], ended.get("pid")), (&json!("stopped"), None));
    assert_eq!(ended["id"], "one");
}

#[tokio::test]
async fn two_calls_at_once_delete_once() {
    let shim = Shim::new();
    std::fs::write(shim.bundle().join("config.json"), config("true", "echo >>ended")).unwrap();
    let task = shim.put("one", TaskKind::Alone);
    shim.on::<cd::StartResponse>("Start", "one").await.unwrap();
    shim.daemon.end(&task.name, 0, 0);
    shim.on::<cd::WaitResponse>("Wait", "one").await.unwrap();
    let delete = || shim.on::<cd::DeleteResponse>("Delete", "one");
    let (first, second) = tokio::join!(delete(), delete());
    assert!(first.is_ok() && second.is_ok());
    assert_eq!(std::fs::read_to_string(shim.bundle().join("ended")).unwrap(), "\n");
}

#[tokio::test]
async fn a_start_that_is_repeated_has_its_hooks_run() {
    let shim = Shim::new();
    std::fs::write(shim.bundle().join("config.json"), config("echo >>started", "true")).unwrap();
    shim.put("one", TaskKind::Alone);
    shim.on::<cd::StartResponse>("Start", "one").await.unwrap();
    // The process that was killed may not have come that far.
    std::fs::remove_file(shim.bundle().join("started")).unwrap();
    let request = cd::ProcessRequest { id: "one".into(), exec_id: String::new() };
    let (service, payload) = (Arc::clone(&shim.service), request.encode_to_vec());
    service.repeat(SERVICE.to_owned(), "Start".to_owned(), payload).await.unwrap();
    assert!(shim.bundle().join("started").exists());
}
