//! `update --cpus` with a VMM that lies: it gets no CPU time that it was not given.
//!
//! Needs root, for the control groups of sandboxes.
#![allow(clippy::unwrap_used, dead_code)]

mod harness;

use std::sync::Arc;

use harness::guest::Guest;
use harness::{Daemon, Guests, cpus, run_with, spec};
use slipway_runtime::v1::{self, run_out};

/// A running sandbox with one CPU and room for [`cpus::MOST`].
struct Started {
    daemon: Daemon,
    name: String,
    id: String,
    _replies: tonic::Streaming<v1::RunOut>,
}

impl Started {
    async fn new(name: &str) -> Self {
        let guests: Guests =
            Arc::new(|listener, _| Guest { prints: 4096, ..Guest::default() }.speak(listener));
        let daemon = Daemon::with(guests).await;
        let spec = v1::RunSpec { cpus: 1, max_cpus: cpus::MOST, ..spec(name) };
        let mut replies = run_with(daemon.client.clone(), spec).await.unwrap().into_inner();
        let first = replies.message().await.unwrap().unwrap();
        let Some(run_out::Kind::Created(created)) = first.kind else { panic!("{first:?}") };
        daemon.wait_state(name, "running").await;
        let started = Self { daemon, name: name.to_owned(), id: created.id, _replies: replies };
        started.has(1).await;
        started
    }

    async fn update(&self, cpus: u32) -> Result<(), tonic::Status> {
        let request =
            v1::UpdateRequest { name: self.name.clone(), cpus, ..v1::UpdateRequest::default() };
        self.daemon.client.clone().update(request).await.map(drop)
    }

    /// Checks the number of CPUs in the record, and the CPU time that the VMM may use.
    async fn has(&self, cpus: u32) {
        assert_eq!(self.daemon.state(&self.name).await.cpus, cpus);
        match quota(&self.id) {
            Some(quota) => assert_eq!(quota, u64::from(cpus + 1) * 100_000),
            None => println!("SKIPPED: the limit of CPU time: needs root and control groups"),
        }
    }
}

/// Returns the CPU time of a sandbox's VMM in each 100 ms, in microseconds.
fn quota(id: &str) -> Option<u64> {
    let unified = std::fs::read_to_string(format!("/sys/fs/cgroup/slipway/{id}/cpu.max"));
    let text = unified.or_else(|_| {
        std::fs::read_to_string(format!("/sys/fs/cgroup/cpu/slipway/{id}/cpu.cfs_quota_us"))
    });
    text.ok()?.split_whitespace().next()?.parse().ok()
}

#[tokio::test]
async fn cpus_that_were_not_given_are_not_counted() {
    let sandbox = Started::new("lists-all").await;
    assert!(sandbox.update(2).await.is_err());
    // Eight are listed; two were asked for.
    sandbox.has(2).await;
    // They do not go, and the others come no nearer.
    assert!(sandbox.update(1).await.is_err());
    sandbox.has(2).await;
}

#[tokio::test]
async fn a_vmm_that_falls_silent_keeps_no_more_cpu_time() {
    let sandbox = Started::new("falls-silent").await;
    assert!(sandbox.update(8).await.is_err());
    sandbox.has(1).await;
    assert!(sandbox.update(1).await.is_err());
    sandbox.has(1).await;
}

#[tokio::test]
async fn cpus_that_no_sandbox_has_are_not_looked_at() {
    let sandbox = Started::new("lists-many").await;
    sandbox.update(1).await.unwrap();
    sandbox.has(1).await;
}
