//! Guests that attack the daemon through the agent's protocol. Other clients and sandboxes must not
//! notice.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use slipway_agent_protocol::v1::{GroupIo, GroupStats, GuestStage};
use slipway_runtime::v1;

use crate::harness::guest::{Copied, Guest, stage};
use crate::harness::{Daemon, Guests, LONG, exit_of};

/// Makes `attacker` the guest of the sandbox of this name. Other sandboxes have honest guests.
fn beside_honest(attacker: Guest) -> Guests {
    Arc::new(move |listener, name| match name {
        "attacker" => attacker.clone().speak(listener),
        _ => Guest { exit_status: 7, ..Guest::default() }.speak(listener),
    })
}

/// Checks that an honest sandbox and a client that lists sandboxes are not affected by the attack.
async fn others_go_on(daemon: &Daemon, attack: &str) {
    let listed = daemon.list(200).await;
    assert_eq!(daemon.run_to_end("honest").await.status, 7, "{attack}");
    daemon.remove("honest").await;
    println!("{attack}: list of sandboxes: {listed}");
}

/// The reply has a quarter of a megabyte of stages without names.
#[tokio::test]
async fn a_reply_of_many_empty_stages_fails_its_own_sandbox() {
    let attacker = Guest { stages: vec![GuestStage::default(); 125_000], ..Guest::default() };
    let daemon = Daemon::with(beside_honest(attacker)).await;
    let exit = daemon.run_to_end("attacker").await;
    assert_eq!(exit.status, 125);
    assert!(exit.reason.contains("too large"), "{}", exit.reason);
    others_go_on(&daemon, "many stages").await;
}

/// The reply has as many stages as fit, and each known one twice. The record has each known stage
/// once, and is written as often as an honest guest's.
#[tokio::test]
async fn stages_are_recorded_by_their_known_names_only() {
    let mut stages = vec![GuestStage::default(); 20_000];
    stages.extend(["kernel", "kernel", "agent", "container", "\x1b[2J"].map(stage));
    let attacker = Guest { stages, exit_status: 3, ..Guest::default() };
    let daemon = Daemon::with(beside_honest(attacker)).await;
    assert_eq!(daemon.run_to_end("attacker").await.status, 3);
    let named = v1::Name { name: "attacker".to_owned() };
    let inspected = daemon.client.clone().inspect(named).await.unwrap().into_inner();
    let record: slipway_runtime::record::Record = serde_json::from_str(&inspected.json).unwrap();
    let of = |name: &str| record.timeline.stages.iter().filter(|s| s.name == name).count();
    assert_eq!((of("kernel"), of("agent"), of("container")), (1, 1, 1));
    assert!(record.timeline.stages.len() < 16, "{}", record.timeline.stages.len());
}

#[tokio::test]
async fn what_a_guest_says_is_short_and_printable() {
    let words = format!("\x1b]0;title\x07{}", "x".repeat(2000));
    let attacker = Guest { refuses: Some(words), ..Guest::default() };
    let daemon = Daemon::with(beside_honest(attacker)).await;
    // The guest refuses, but its VMM lives on: the daemon waits a moment for the VMM's end before
    // it gives up.
    let exit = daemon.run_to_end("attacker").await;
    assert!(exit.reason.starts_with("\\u001b]0;title"), "{}", exit.reason);
    assert!(exit.reason.len() < 600);
    let status = Guest { exit_status: u32::MAX, ..Guest::default() };
    let daemon = Daemon::with(beside_honest(status)).await;
    assert_eq!(daemon.run_to_end("attacker").await.status, 255);
}

/// The guest says hello and does not answer the following calls.
#[tokio::test]
async fn a_silent_guest_holds_up_nobody_and_is_stopped() {
    let attacker = Guest { silent: true, ..Guest::default() };
    let daemon = Daemon::with(beside_honest(attacker)).await;
    let (_, replies) = daemon.run("attacker").await;
    daemon.wait_state("attacker", "starting").await;
    others_go_on(&daemon, "silence").await;
    assert_eq!(daemon.state("attacker").await.state, "starting");
    let stop = v1::StopRequest { name: "attacker".to_owned(), timeout_s: 0 };
    let stopped = tokio::time::timeout(LONG, daemon.client.clone().stop(stop)).await;
    assert_eq!(stopped.expect("it stops").unwrap().into_inner().status, 137);
    assert_eq!(exit_of(replies).await.status, 137);
}

/// The guest names more processes and devices than there can be, and the largest counts.
#[tokio::test]
async fn what_a_guest_says_of_its_container_is_bounded() {
    let device = GroupIo { rbytes: u64::MAX, ..GroupIo::default() };
    let group = GroupStats { tasks: u64::MAX, io: vec![device; 500], ..GroupStats::default() };
    let pids = [&[0, u32::MAX][..], &[7; 6000]].concat();
    let attacker = Guest { prints: 1, group: Some(group), pids, ..Guest::default() };
    let daemon = Daemon::with(beside_honest(attacker)).await;
    let (_, _replies) = daemon.run("attacker").await;
    daemon.wait_state("attacker", "running").await;
    let named = || v1::Name { name: "attacker".to_owned() };
    let listed = daemon.client.clone().pids(named()).await.unwrap().into_inner();
    assert_eq!(listed.pids, [7; 4096]);
    let stats = daemon.client.clone().stats(named()).await.unwrap().into_inner();
    let group = stats.group.unwrap();
    assert_eq!((group.tasks, group.io.len()), (u64::MAX, 64));
    daemon.remove("attacker").await;
}

/// Returns the bytes of a copy out of the attacker's container, once it has come to its end.
async fn copied(daemon: &Daemon) -> Result<usize, tonic::Status> {
    use v1::copy_out_reply::Kind;
    let (name, path) = ("attacker".to_owned(), "/".to_owned());
    let request = v1::CopyOutRequest { name, path, ..Default::default() };
    let mut replies = daemon.client.clone().copy_out(request).await?.into_inner();
    let mut bytes = 0;
    loop {
        let reply = replies.message().await?.expect("a copy has an end or an error");
        match reply.kind.unwrap() {
            Kind::Found(found) => assert!(found.directory),
            Kind::Data(data) => bytes += data.len(),
            Kind::End(left_out) => {
                assert!(left_out.first.chars().count() <= 200, "{}", left_out.first);
                assert!(!left_out.first.contains('\x1b'), "{:?}", left_out.first);
                return Ok(bytes);
            }
        }
    }
}

/// The guest names in escape codes what it has left out of a copy, ends the copy half-way, does not
/// say what it copies, or knows no copies.
#[tokio::test]
async fn a_copy_out_of_a_guest_has_its_end_or_an_error() {
    let data = Copied::Data(1000);
    let end = Copied::End("\x1b[2J".repeat(1000));
    for (copies, expected) in [
        (vec![Copied::Found, data.clone(), data.clone(), end], Ok(2000)),
        (vec![Copied::Found, data.clone()], Err("half-way")),
        (vec![data], Err("did not say")),
        (Vec::new(), Err("earlier version")),
    ] {
        let attacker = Guest { copies, prints: 1, ..Guest::default() };
        let daemon = Daemon::with(beside_honest(attacker)).await;
        let (_, _replies) = daemon.run("attacker").await;
        daemon.wait_state("attacker", "running").await;
        match (copied(&daemon).await, expected) {
            (Ok(bytes), Ok(expected)) => assert_eq!(bytes, expected),
            (Err(status), Err(text)) => assert!(status.message().contains(text), "{status}"),
            (outcome, expected) => panic!("{outcome:?}: expected {expected:?}"),
        }
        daemon.remove("attacker").await;
    }
}

/// The guest prints pieces of one byte without end. One client reads them all, and another lists
/// sandboxes.
#[tokio::test]
async fn output_without_end_leaves_turns_to_others() {
    let attacker = Guest { prints: 1, ..Guest::default() };
    let daemon = Daemon::with(beside_honest(attacker)).await;
    let (_, mut replies) = daemon.run("attacker").await;
    let pieces = Arc::new(AtomicU64::new(0));
    let counter = Arc::clone(&pieces);
    let reader = tokio::spawn(async move {
        while let Ok(Some(_)) = replies.message().await {
            counter.fetch_add(1, Ordering::Relaxed);
        }
    });
    daemon.wait_state("attacker", "running").await;
    let before = pieces.load(Ordering::Relaxed);
    others_go_on(&daemon, "output of one byte at a time").await;
    assert!(pieces.load(Ordering::Relaxed) > before, "the attacker went on");
    daemon.remove("attacker").await;
    tokio::time::timeout(LONG, reader).await.expect("its client is told").unwrap();
}

/// The sandbox has as many readers of its output as it may have. The next reader is refused with
/// the reason.
#[tokio::test]
async fn what_one_sandbox_makes_the_daemon_hold_is_bounded() {
    let attacker = Guest { prints: 4096, ..Guest::default() };
    let daemon = Daemon::with(beside_honest(attacker)).await;
    let (_, _replies) = daemon.run("attacker").await;
    daemon.wait_state("attacker", "running").await;
    let attach = || async {
        let name = v1::Name { name: "attacker".to_owned() };
        let first = v1::RunIn { kind: Some(v1::run_in::Kind::Attach(name)) };
        daemon.another().await.attach(tokio_stream::once(first)).await
    };
    let exec = || async {
        let name = "attacker".to_owned();
        let spec = v1::ExecSpec { name, command: vec!["x".to_owned()], ..Default::default() };
        let first = v1::RunIn { kind: Some(v1::run_in::Kind::Exec(spec)) };
        daemon.another().await.exec(tokio_stream::once(first)).await
    };
    let mut held = Vec::new();
    let refused = loop {
        match attach().await {
            Ok(stream) => held.push(stream),
            Err(status) => break status,
        }
        assert!(held.len() < 1000);
    };
    assert_eq!(refused.code(), tonic::Code::ResourceExhausted);
    assert!(refused.message().contains("attacker has 32 clients attached"), "{refused}");
    let attached = held.len();
    let refused = loop {
        match exec().await {
            Ok(stream) => held.push(stream),
            Err(status) => break status,
        }
        assert!(held.len() < 1000);
    };
    assert!(refused.message().contains("48 commands and traces"), "{refused}");
    // None of the streams is read. Other sandboxes are not affected, and streams that end make
    // room.
    others_go_on(&daemon, "48 commands that nobody reads").await;
    held.truncate(attached);
    let again = async {
        while exec().await.is_err() {
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(LONG, again).await.expect("there is room again");
}
