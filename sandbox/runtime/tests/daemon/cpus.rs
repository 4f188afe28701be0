//! `update --cpus` with a VMM that lies: it gets no CPU time that it was not given. The CPUs of a
//! pod follow the limits of its containers.
//!
//! Needs root, for the control groups of sandboxes.
#![allow(dead_code)]

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use slipway_runtime::v1::{self, run_out};

use crate::harness::guest::Guest;
use crate::harness::{Daemon, Guests, LONG, cpus, exit_of, run_with, spec};

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

/// A running pod that began with one CPU and has room for [`cpus::MOST`]. Its containers end as
/// soon as they run.
struct Pod {
    daemon: Daemon,
    name: String,
    notes: Arc<Mutex<Vec<String>>>,
    _replies: tonic::Streaming<v1::RunOut>,
}

impl Pod {
    async fn new(name: &str) -> Self {
        let notes = Arc::<Mutex<Vec<String>>>::default();
        let guest = Guest { notes: Some(Arc::clone(&notes)), ..Guest::default() };
        let guests: Guests = Arc::new(move |listener, _| guest.clone().speak(listener));
        let daemon = Daemon::with(guests).await;
        let pod = v1::RunSpec {
            name: name.to_owned(),
            makes_pod: true,
            detach: true,
            cpus: 1,
            max_cpus: cpus::MOST,
            ..v1::RunSpec::default()
        };
        let replies = run_with(daemon.client.clone(), pod).await.unwrap().into_inner();
        daemon.wait_state(name, "running").await;
        Self { daemon, name: name.to_owned(), notes, _replies: replies }
    }

    /// Runs a container to its end, which may use so much CPU time in each 100 ms, microseconds.
    async fn run(&self, name: &str, cpu_quota_us: u64) {
        let resources = Some(v1::Resources { cpu_quota_us, ..Default::default() });
        let member = v1::RunSpec { pod: self.name.clone(), resources, ..spec(name) };
        let replies = run_with(self.daemon.client.clone(), member).await.unwrap().into_inner();
        assert_eq!(exit_of(replies).await.status, 0);
    }

    async fn has(&self, cpus: u32) {
        let begun = Instant::now();
        while self.daemon.state(&self.name).await.cpus != cpus {
            assert!(begun.elapsed() < LONG, "not {cpus}: {:?}", self.notes.lock().unwrap());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Returns what the guest was told since the last time.
    fn told(&self) -> Vec<String> {
        std::mem::take(&mut *self.notes.lock().unwrap())
    }
}

#[tokio::test]
async fn cpus_come_before_a_container_begins_and_go_after_it_has_ended() {
    let pod = Pod::new("obeys").await;
    for _ in 0..2 {
        pod.run("c", 250_000).await;
        pod.has(1).await;
        assert_eq!(pod.told(), ["3 CPUs", "create", "remove", "1 CPUs"]);
        remove(&pod, "c").await;
    }
    pod.run("many", 6400 * 100_000).await;
    pod.has(1).await;
    assert_eq!(pod.told()[0], format!("{} CPUs", cpus::MOST), "as far as there is room");
    pod.run("small", 100_000).await;
    pod.run("open", 0).await;
    assert_eq!(pod.told(), ["create", "remove", "create", "remove"], "it has enough");
}

#[tokio::test]
async fn the_number_of_cpus_that_a_user_chose_stays() {
    let pod = Pod::new("chosen").await;
    let update = async |cpus| {
        let request = v1::UpdateRequest { name: "chosen".to_owned(), cpus, ..Default::default() };
        pod.daemon.client.clone().update(request).await.unwrap();
    };
    update(2).await;
    pod.run("c", 400_000).await;
    assert_eq!(pod.told(), ["2 CPUs", "create", "remove"]);
    // The CPUs that it began with are asked for, so it follows the limits again.
    update(1).await;
    pod.run("d", 400_000).await;
    pod.has(1).await;
    assert_eq!(pod.told(), ["1 CPUs", "4 CPUs", "create", "remove", "1 CPUs"]);
}

async fn remove(pod: &Pod, name: &str) {
    let name = format!("{}/{name}", pod.name);
    let request = v1::RemoveRequest { name, ..Default::default() };
    pod.daemon.client.clone().remove(request).await.unwrap();
}
