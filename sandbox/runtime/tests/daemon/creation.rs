//! Sandboxes that are still being created when their client leaves or somebody removes them, whose
//! creation waits for its network, which answers when the test opens the gate; and the traces of
//! starts.

use std::ffi::OsStr;
use std::sync::Arc;

use slipway_plane_api::trace::Caller;
use slipway_runtime::traces::otlp::{Span, StatusCode};
use slipway_runtime::v1::{self, run_in};
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::harness::guest::{Guest, stage};
use crate::harness::{Daemon, LONG, collector, exit_of, run_with, spec};

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
    let request = v1::RemoveRequest { name: "victim".to_owned(), ..Default::default() };
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

/// The caller's place in its trace, and the ids in it.
const CALLER: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
const CALLERS_TRACE: u128 = 0x4bf9_2f35_77b3_4da6_a3ce_929d_0e0e_4736;
const CALLERS_SPAN: u64 = 0x00f0_67aa_0ba9_02b7;

/// Starts a daemon with a collector, whose guests are like `guest`. Returns the spans, too.
async fn traced(guest: Guest) -> (Daemon, UnboundedReceiver<Span>) {
    let dir = tempfile::tempdir().unwrap();
    let spans = collector::serve(dir.path());
    let guests = Arc::new(move |listener, _: &str| guest.clone().speak(listener));
    (Daemon::start_in(dir, guests, watch::channel(true).1).await, spans)
}

/// Runs a sandbox to its end as the client at [`CALLER`].
async fn run_as_caller(daemon: &Daemon, name: &str) -> v1::Exit {
    let first = v1::RunIn { kind: Some(run_in::Kind::Run(spec(name))) };
    let request = Caller::of(Some(OsStr::new(CALLER))).request(tokio_stream::once(first));
    exit_of(daemon.client.clone().run(request).await.unwrap().into_inner()).await
}

/// Returns the span of the next call, and those of its parts, which come before it.
async fn next_call(spans: &mut UnboundedReceiver<Span>) -> (Span, Vec<Span>) {
    let mut parts = Vec::new();
    loop {
        let span = tokio::time::timeout(LONG, spans.recv()).await.expect("a span comes").unwrap();
        match span.name.contains('/') {
            true => return (span, parts),
            false => parts.push(span),
        }
    }
}

/// Waits until the daemon has counted `sent` spans as sent, and checks that it has dropped none.
async fn counted(daemon: &Daemon, sent: u64) {
    let counted = async {
        loop {
            let figures = daemon.client.clone().figures(v1::Empty {}).await.unwrap().into_inner();
            let traces = figures.traces.expect("there is a collector");
            assert_eq!(traces.dropped_spans, 0);
            if traces.sent_spans >= sent {
                break;
            }
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(LONG, counted).await.expect("they are counted");
}

#[tokio::test]
async fn the_stages_of_a_start_are_parts_of_its_callers_trace() {
    let stages = vec![stage("kernel"), stage("agent")];
    let (daemon, mut spans) = traced(Guest { stages, ..Guest::default() }).await;
    assert_eq!(run_as_caller(&daemon, "one").await.status, 0);
    let (call, parts) = next_call(&mut spans).await;
    assert_eq!(call.name, "slipway.sandbox.v1.Sandboxes/Run");
    assert_eq!(call.trace_id, CALLERS_TRACE.to_be_bytes());
    assert_eq!(call.parent_span_id, CALLERS_SPAN.to_be_bytes());
    assert_eq!(call.status, None);
    assert!(call.attributes.iter().any(|one| one.key == "container.name"), "{call:?}");
    for name in ["memory", "cgroup", "rootfs", "vmm", "kernel", "agent", "container"] {
        assert_eq!(parts.iter().filter(|part| part.name == name).count(), 1, "{name}: {parts:?}");
    }
    for part in &parts {
        assert_eq!((&part.trace_id, &part.parent_span_id), (&call.trace_id, &call.span_id));
        assert!(part.start_time_unix_nano <= part.end_time_unix_nano, "{part:?}");
    }
    let begun = parts.iter().find(|part| part.name == "memory").unwrap().start_time_unix_nano;
    assert!((call.start_time_unix_nano..=call.end_time_unix_nano).contains(&begun));
    counted(&daemon, parts.len() as u64 + 1).await;
}

#[tokio::test]
async fn a_stage_that_fails_has_the_error_in_its_span() {
    let refuses = Some("no such root".to_owned());
    let (daemon, mut spans) = traced(Guest { refuses, ..Guest::default() }).await;
    assert_ne!(run_as_caller(&daemon, "one").await.status, 0);
    let (call, parts) = next_call(&mut spans).await;
    for failed in [&call, parts.last().unwrap()] {
        let status = failed.status.as_ref().expect("it failed");
        assert_eq!(status.code(), StatusCode::Error);
        assert!(status.message.contains("no such root"), "{status:?}");
    }
    assert_eq!(parts.last().unwrap().name, "container");
}

#[tokio::test]
async fn without_a_collector_there_are_no_spans() {
    let daemon = Daemon::with(Arc::new(|listener, _: &str| Guest::default().speak(listener))).await;
    assert_eq!(run_as_caller(&daemon, "one").await.status, 0);
    let figures = daemon.client.clone().figures(v1::Empty {}).await.unwrap().into_inner();
    assert_eq!(figures.traces, None);
}
