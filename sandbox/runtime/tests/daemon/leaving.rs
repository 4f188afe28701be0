//! Clients that leave while their calls change a sandbox.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use slipway_runtime::v1;
use tokio::sync::watch;

use crate::harness::guest::Guest;
use crate::harness::{Daemon, LONG};

/// Waits until the record at `path` says whether its container is paused.
async fn says_paused(path: &Path, paused: bool) {
    let says = async {
        loop {
            let text = std::fs::read(path).unwrap();
            let record: serde_json::Value = serde_json::from_slice(&text).unwrap();
            if record["paused"] == paused {
                return;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(LONG, says).await.expect("the record says so");
}

/// A client leaves while the guest is asked to stop its container, which the guest refuses then.
/// The record does not go on saying that the container is paused.
#[tokio::test]
async fn a_pause_goes_on_to_its_end_without_its_client() {
    let (refuses, refuses_to_stop) = watch::channel(false);
    let guest = Guest { prints: 16, refuses_to_stop: Some(refuses_to_stop), ..Guest::default() };
    let guests = Arc::new(move |listener, _: &str| guest.clone().speak(listener));
    let daemon = Daemon::with(guests).await;
    let (id, mut replies) = daemon.run("one").await;
    tokio::spawn(async move { while let Ok(Some(_)) = replies.message().await {} });
    daemon.wait_state("one", "running").await;
    let mut client = daemon.another().await;
    let pause = async move { client.pause(v1::Name { name: "one".to_owned() }).await };
    let pause = tokio::spawn(pause);
    let record = daemon.sandbox_dir(&id).join("record.json");
    says_paused(&record, true).await;
    pause.abort();
    assert!(pause.await.unwrap_err().is_cancelled());
    daemon.list(3).await;
    refuses.send_replace(true);
    says_paused(&record, false).await;
    daemon.remove("one").await;
}
