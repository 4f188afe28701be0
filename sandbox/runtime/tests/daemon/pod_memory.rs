//! The memory of pods, which comes for the limits of containers that begin, and goes back to the
//! host after their end.
//!
//! Needs root, for the control groups of sandboxes.

use std::sync::Arc;
use std::time::{Duration, Instant};

use slipway_runtime::v1::{self, run_out};
use tokio::sync::watch;

use crate::harness::guest::Guest;
use crate::harness::memory::limit;
use crate::harness::{Daemon, LONG, run_with, spec};

const MIB: u64 = 1 << 20;
/// The memory of the host that a pod may take for directories of the host that it shares.
const SHARES: u64 = 128 * MIB;

/// A daemon whose sandboxes' containers end when the test says so.
struct Node {
    daemon: Daemon,
    ended: watch::Sender<Vec<String>>,
    replies: Vec<tonic::Streaming<v1::RunOut>>,
}

impl Node {
    /// Starts one whose guests say that so much of their memory is available.
    async fn new(available_mib: u64) -> Self {
        let (ended, ends) = watch::channel(Vec::new());
        let available = available_mib * MIB;
        let guest = Guest { available, ended: Some(ends), ..Guest::default() };
        let daemon = Daemon::with(Arc::new(move |listener, _| guest.clone().speak(listener))).await;
        Self { daemon, ended, replies: Vec::new() }
    }

    async fn start(&mut self, spec: v1::RunSpec) {
        let replies = run_with(self.daemon.client.clone(), spec).await.unwrap();
        let mut replies = replies.into_inner();
        let first = replies.message().await.unwrap().unwrap();
        assert!(matches!(first.kind, Some(run_out::Kind::Created(_))), "{first:?}");
        self.replies.push(replies);
    }

    /// Starts a pod of 128 MiB with room for 512.
    async fn pod(&mut self, name: &str) {
        let pod = v1::RunSpec {
            name: name.to_owned(),
            makes_pod: true,
            detach: true,
            memory_bytes: 128 * MIB,
            max_memory_bytes: 512 * MIB,
            ..v1::RunSpec::default()
        };
        self.start(pod).await;
        self.daemon.wait_state(name, "running").await;
    }

    /// Runs a container with a limit of so many MiB, 0: none. Returns when it runs.
    async fn run(&mut self, pod: &str, name: &str, limit_mib: u64) {
        let memory_bytes = limit_mib * MIB;
        let resources = Some(v1::Resources { memory_bytes, ..Default::default() });
        self.start(v1::RunSpec { pod: pod.to_owned(), resources, ..spec(name) }).await;
        self.wait(pod, "the container runs", |one| state(one, name) == "running").await;
    }

    /// Has the process of a container end, and waits for the container's end.
    async fn end(&self, pod: &str, name: &str) {
        self.ended.send_modify(|all| all.push(name.to_owned()));
        self.wait(pod, "the container has ended", |one| state(one, name) == "exited").await;
    }

    async fn wait(&self, pod: &str, what: &str, done: impl Fn(&v1::Sandbox) -> bool) {
        let begun = Instant::now();
        loop {
            let one = self.daemon.state(pod).await;
            if done(&one) {
                return;
            }
            assert!(begun.elapsed() < LONG, "not: {what}: {one:?}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Checks the memory in the record, and what the VMM may use.
    async fn has(&self, pod: &str, mib: u64) {
        let one = self.daemon.state(pod).await;
        assert_eq!(one.memory_bytes, mib * MIB);
        match limit(&one.id) {
            Some(limit) => assert_eq!(limit, mib * MIB + SHARES),
            None => println!("SKIPPED: the limit of memory: needs root and control groups"),
        }
    }

    /// Waits until the pod has so much memory.
    async fn comes_to(&self, pod: &str, mib: u64) {
        self.wait(pod, "its memory", |one| one.memory_bytes == mib * MIB).await;
        self.has(pod, mib).await;
    }
}

/// Returns the state of a container, or nothing without one.
fn state<'a>(pod: &'a v1::Sandbox, name: &str) -> &'a str {
    pod.containers.iter().find(|one| one.name == name).map_or("", |one| one.state.as_str())
}

#[tokio::test]
async fn memory_comes_before_a_container_begins_and_goes_after_it_has_ended() {
    let mut node = Node::new(900).await;
    node.pod("follows").await;
    node.run("follows", "a", 256).await;
    node.has("follows", 384).await;
    node.run("follows", "b", 64).await;
    node.has("follows", 448).await;
    node.run("follows", "open", 0).await;
    node.run("follows", "many", 1000).await;
    node.has("follows", 512).await;
    node.end("follows", "many").await;
    node.comes_to("follows", 448).await;
    node.end("follows", "a").await;
    // The memory of `b`, and the guest's own.
    node.comes_to("follows", 192).await;
    node.end("follows", "b").await;
    node.comes_to("follows", 128).await;
    node.run("follows", "again", 256).await;
    node.has("follows", 384).await;
}

#[tokio::test]
async fn a_container_that_is_removed_while_it_runs_leaves_no_memory() {
    let mut node = Node::new(900).await;
    node.pod("follows").await;
    node.run("follows", "a", 256).await;
    let ends = async {
        // The guest says so some time after the signal.
        tokio::time::sleep(Duration::from_millis(50)).await;
        node.ended.send_modify(|all| all.push("a".to_owned()));
    };
    tokio::join!(node.daemon.remove("follows/a"), ends);
    node.comes_to("follows", 128).await;
}

#[tokio::test]
async fn memory_that_programs_use_stays() {
    let mut node = Node::new(0).await;
    node.pod("follows").await;
    node.run("follows", "a", 256).await;
    node.run("follows", "b", 32).await;
    node.end("follows", "a").await;
    // The first attempt is over when an update has its turn.
    let resources = Some(v1::Resources { memory_bytes: 16 * MIB, ..Default::default() });
    let name = "follows/b".to_owned();
    let request = v1::UpdateRequest { name, resources, ..Default::default() };
    let reply = node.daemon.client.clone().update(request).await.unwrap().into_inner();
    assert!(reply.kept.contains("its programs use 1024 MiB"), "{}", reply.kept);
    node.has("follows", 416).await;
}

#[tokio::test]
async fn a_guest_that_gives_nothing_back_holds_up_nobody_else() {
    let mut node = Node::new(900).await;
    node.pod("keeps-all").await;
    node.pod("follows").await;
    for number in 0..2 {
        let name = format!("hostile-{number}");
        node.run("keeps-all", &name, 256).await;
        node.end("keeps-all", &name).await;
        node.run("follows", &format!("honest-{number}"), 256).await;
        node.end("follows", &format!("honest-{number}")).await;
        node.comes_to("follows", 128).await;
    }
    node.has("keeps-all", 384).await;
    // A container that needs no memory begins in this pod, too.
    node.run("keeps-all", "open", 0).await;
    let listed = node.daemon.list(100).await;
    println!("lists beside a guest that keeps all: {listed}");
    node.daemon.remove("keeps-all").await;
}
