//! Sandboxes that are stopped while their guests write back their volumes, and sandboxes that are
//! removed when they end.

use std::sync::Arc;
use std::time::Duration;

use slipway_runtime::v1::{self, run_out};
use tokio::sync::watch;

use crate::harness::guest::Guest;
use crate::harness::{Daemon, LONG, exit_of, run_with, spec};

/// The time for which a guest writes back nothing.
const STILL: Duration = Duration::from_secs(20);

/// A request to stop within no time waits until the guest has written back its volumes, also for
/// longer than a busy machine may stand still, and not for the time that a guest has at most.
#[tokio::test]
async fn a_stop_waits_while_the_guest_writes_back() {
    let (done, writes_back) = watch::channel(false);
    let guest = Guest { exit_status: 7, writes_back: Some(writes_back), ..Guest::default() };
    let guests = Arc::new(move |listener, _: &str| guest.clone().speak(listener));
    let daemon = Daemon::with(guests).await;
    let (_, _replies) = daemon.run("writer").await;
    daemon.wait_state("writer", "stopping").await;
    let stop = v1::StopRequest { name: "writer".to_owned(), timeout_s: 0 };
    let mut client = daemon.client.clone();
    let stopped = tokio::spawn(async move { client.stop(stop).await });
    daemon.list(3).await;
    tokio::time::sleep(STILL).await;
    assert!(!stopped.is_finished());
    assert_eq!(daemon.state("writer").await.state, "stopping");
    done.send_replace(true);
    let stopped = tokio::time::timeout(LONG, stopped).await.expect("it stops").unwrap();
    assert_eq!(stopped.unwrap().into_inner().status, 7);
    assert_eq!(daemon.state("writer").await.state, "exited");
}

/// The number of files in a sandbox's directory whose removal takes far longer than a reply.
const MANY_FILES: u32 = 5_000;

/// Runs a sandbox that is to be removed when it ends, and whose removal takes long. Returns its
/// exit, and the number of sandboxes that the daemon lists right after it.
async fn run_and_count(guest: Guest) -> (v1::Exit, usize) {
    let guests = Arc::new(move |listener, _: &str| guest.clone().speak(listener));
    let (gate, closed) = watch::channel(false);
    let daemon = Daemon::start(guests, closed).await;
    let asked = v1::RunSpec { remove: true, ..spec("brief") };
    let mut replies = run_with(daemon.client.clone(), asked).await.unwrap().into_inner();
    let first = replies.message().await.unwrap().unwrap();
    let Some(run_out::Kind::Created(created)) = first.kind else { panic!("{first:?}") };
    let files = daemon.sandbox_dir(&created.id).join("files");
    std::fs::create_dir_all(&files).unwrap();
    for number in 0..MANY_FILES {
        std::fs::write(files.join(number.to_string()), "").unwrap();
    }
    gate.send_replace(true);
    let exit = exit_of(replies).await;
    (exit, daemon.count().await)
}

#[tokio::test]
async fn a_client_that_hears_of_the_end_finds_nothing_of_a_sandbox_that_was_to_be_removed() {
    let (exit, left) = run_and_count(Guest { exit_status: 7, ..Guest::default() }).await;
    assert_eq!((exit.status, left), (7, 0));
    let refuses = Some("no room".to_owned());
    let (exit, left) = run_and_count(Guest { refuses, ..Guest::default() }).await;
    assert_ne!(exit.status, 0);
    assert_eq!(left, 0, "{}", exit.reason);
}
