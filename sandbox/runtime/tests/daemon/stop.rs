//! Sandboxes that are stopped while their guests write back their volumes.

use std::sync::Arc;

use slipway_runtime::v1;
use tokio::sync::watch;

use crate::harness::guest::Guest;
use crate::harness::{Daemon, LONG};

/// A request to stop within no time waits until the guest has written back its volumes, and not for
/// the time that a guest has at most.
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
    assert!(!stopped.is_finished());
    assert_eq!(daemon.state("writer").await.state, "stopping");
    done.send_replace(true);
    let stopped = tokio::time::timeout(LONG, stopped).await.expect("it stops").unwrap();
    assert_eq!(stopped.unwrap().into_inner().status, 7);
    assert_eq!(daemon.state("writer").await.state, "exited");
}
