//! `update --memory`: what a guest plugs and gives back, and guests and VMMs that lie.
//!
//! Needs root, for the control groups of sandboxes.
#![allow(dead_code)]

use std::sync::Arc;

use slipway_runtime::v1::{self, run_out};

use crate::harness::guest::Guest;
use crate::harness::memory::limit;
use crate::harness::{Daemon, Guests, run_with, spec};

const MIB: u64 = 1 << 20;

/// A running sandbox with 128 MiB and room for 512.
struct Started {
    daemon: Daemon,
    name: String,
    id: String,
    _replies: tonic::Streaming<v1::RunOut>,
}

fn wanted(name: &str) -> v1::RunSpec {
    v1::RunSpec { memory_bytes: 128 * MIB, max_memory_bytes: 512 * MIB, ..spec(name) }
}

impl Started {
    /// Starts one whose guest says that so much of its memory is available.
    async fn new(name: &str, available_mib: u64) -> Self {
        let available = available_mib * MIB;
        let guests: Guests = Arc::new(move |listener, _| {
            Guest { prints: 4096, available, ..Guest::default() }.speak(listener);
        });
        let daemon = Daemon::with(guests).await;
        let mut replies = run_with(daemon.client.clone(), wanted(name)).await.unwrap().into_inner();
        let first = replies.message().await.unwrap().unwrap();
        let Some(run_out::Kind::Created(created)) = first.kind else { panic!("{first:?}") };
        daemon.wait_state(name, "running").await;
        let started = Self { daemon, name: name.to_owned(), id: created.id, _replies: replies };
        started.has(128).await;
        started
    }

    async fn update(&self, mib: u64) -> Result<(), String> {
        let (name, memory_bytes) = (self.name.clone(), mib * MIB);
        let request = v1::UpdateRequest { name, memory_bytes, ..v1::UpdateRequest::default() };
        let updated = self.daemon.client.clone().update(request).await;
        updated.map(drop).map_err(|status| status.message().to_owned())
    }

    /// Checks the memory in the record, and what the VMM may use.
    async fn has(&self, mib: u64) {
        assert_eq!(self.daemon.state(&self.name).await.memory_bytes, mib * MIB);
        match limit(&self.id) {
            Some(limit) => assert_eq!(limit, mib * MIB),
            None => println!("SKIPPED: the limit of memory: needs root and control groups"),
        }
    }
}

#[tokio::test]
async fn memory_comes_and_goes_in_whole_blocks() {
    let sandbox = Started::new("follows", 900).await;
    for (asked, expected) in [(512, 512), (129, 130), (256, 256), (128, 128)] {
        sandbox.update(asked).await.unwrap();
        sandbox.has(expected).await;
    }
    for (mib, said) in [(127, "too little"), (513, "at most 512 MiB")] {
        let refused = sandbox.update(mib).await.unwrap_err();
        assert!(refused.contains(said), "{refused}");
        sandbox.has(128).await;
    }
}

#[tokio::test]
async fn memory_in_use_is_not_asked_for() {
    let sandbox = Started::new("is-used", 100).await;
    sandbox.update(512).await.unwrap();
    // 100 MiB are available, of which 32 stay so.
    let said = sandbox.update(128).await.unwrap_err();
    sandbox.has(444).await;
    assert!(said.contains("is-used has 444 MiB of memory now: its programs use 924 MiB"), "{said}");
}

#[tokio::test]
async fn a_guest_that_gives_back_nothing_keeps_what_it_has() {
    let sandbox = Started::new("keeps-all", 400).await;
    sandbox.update(256).await.unwrap();
    let said = sandbox.update(128).await.unwrap_err();
    assert!(said.contains("has 256 MiB of memory now"), "{said}");
    sandbox.has(256).await;
}

#[tokio::test]
async fn a_vmm_that_tells_of_large_blocks_gets_no_more_than_its_room() {
    let sandbox = Started::new("claims-large-blocks", 900).await;
    sandbox.update(256).await.unwrap();
    sandbox.has(512).await;
}

#[tokio::test]
async fn memory_that_was_not_given_is_not_counted() {
    let sandbox = Started::new("claims-all", 400).await;
    assert!(sandbox.update(256).await.is_err());
    sandbox.has(128).await;
}

#[tokio::test]
async fn a_vmm_that_falls_silent_has_what_it_was_given() {
    let sandbox = Started::new("memory-silent", 400).await;
    let said = sandbox.update(256).await.unwrap_err();
    assert!(said.contains("has 128 MiB of memory now: "), "{said}");
    assert_eq!(sandbox.daemon.state(&sandbox.name).await.memory_bytes, 128 * MIB);
}

#[tokio::test]
async fn a_size_that_cannot_be_is_refused_when_a_sandbox_is_made() {
    let sandbox = Started::new("first", 0).await;
    let refused = [
        (v1::RunSpec { max_memory_bytes: 64 * MIB, ..wanted("a") }, "less than the 128 MiB"),
        (v1::RunSpec { max_memory_bytes: u64::MAX, ..wanted("b") }, "more than this host has"),
        (v1::RunSpec { template: "base".into(), ..wanted("c") }, "no template or snapshot"),
    ];
    for (spec, said) in refused {
        let status = run_with(sandbox.daemon.client.clone(), spec).await.unwrap_err();
        assert!(status.message().contains(said), "{status}");
    }
}
