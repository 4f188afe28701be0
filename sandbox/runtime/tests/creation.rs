//! Sandboxes that are still being created when their client leaves or somebody removes them. The
//! creation waits for its network, which answers when the test opens the gate.
#![allow(clippy::unwrap_used)]

mod harness;

use std::sync::Arc;

use harness::guest::Guest;
use harness::{Daemon, LONG, run_with, spec};
use slipway_runtime::v1;
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// Starts a daemon, and a client whose sandbox `name` waits for its network. Returns both and the
/// gate.
async fn creating(name: &str) -> (Daemon, JoinHandle<Option<tonic::Code>>, watch::Sender<bool>) {
    let guests = Arc::new(|listener, _: &str| Guest::default().speak(listener));
    let (gate, closed) = watch::channel(false);
    let daemon = Daemon::start(guests, closed).await;
    let client = daemon.another().await;
    let asked = v1::RunSpec { network: "default".to_owned(), ..spec(name) };
    let run = tokio::spawn(async move { run_with(client, asked).await.err().map(|e| e.code()) });
    while daemon.count().await == 0 {
        tokio::task::yield_now().await;
    }
    daemon.wait_state(name, "created").await;
    (daemon, run, gate)
}

/// Returns the number of directories of sandboxes.
fn dirs(daemon: &Daemon) -> usize {
    std::fs::read_dir(daemon.sandbox_dir("x").parent().unwrap()).unwrap().count()
}

#[tokio::test]
async fn a_sandbox_whose_client_left_during_its_creation_is_not_started() {
    let (daemon, run, gate) = creating("left").await;
    // A thread of its own makes the directory, after the sandbox is in the list.
    let made = async {
        while dirs(&daemon) == 0 {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(LONG, made).await.unwrap();
    run.abort();
    assert!(run.await.unwrap_err().is_cancelled());
    // The daemon answers these later than it reads the end of the client's connection.
    daemon.list(50).await;
    gate.send_replace(true);
    let removed = async {
        while daemon.count().await > 0 {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(LONG, removed).await.unwrap();
    assert_eq!(dirs(&daemon), 0);
}

#[tokio::test]
async fn a_sandbox_that_is_being_created_is_removed_by_force_and_wholly() {
    let (daemon, _run, gate) = creating("victim").await;
    let request = v1::RemoveRequest { name: "victim".to_owned(), force: false };
    let refused = daemon.client.clone().remove(request).await.unwrap_err();
    assert_eq!(refused.code(), tonic::Code::FailedPrecondition, "{refused}");
    let removal = async {
        daemon.list(5).await;
        gate.send_replace(true);
    };
    tokio::join!(daemon.remove("victim"), removal);
    assert_eq!(daemon.count().await, 0);
    assert_eq!(dirs(&daemon), 0);
}
