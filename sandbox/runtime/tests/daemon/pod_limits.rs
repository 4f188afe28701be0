//! Updates of limits of a pod's containers, and what they do to the pod's microVM.
//!
//! Needs root, for the control groups of sandboxes.

use std::sync::Arc;
use std::time::{Duration, Instant};

use slipway_runtime::v1::{self, run_out};
use tokio::task::JoinHandle;

use crate::harness::guest::{Guest, LimitCalls, REFUSED};
use crate::harness::{self, Daemon, Guests, LONG, exit_of, run_with, spec};

const MIB: u64 = 1 << 20;

/// A running pod that began with 128 MiB, and has 160 if it has room, with a container `c`, whose
/// limit is 32 MiB.
struct Pod {
    daemon: Daemon,
    name: String,
    limits: Arc<LimitCalls>,
    _replies: [tonic::Streaming<v1::RunOut>; 2],
}

/// Starts a sandbox or a container.
async fn started(daemon: &Daemon, spec: v1::RunSpec) -> tonic::Streaming<v1::RunOut> {
    let mut replies = run_with(daemon.client.clone(), spec).await.unwrap().into_inner();
    let first = replies.message().await.unwrap().unwrap();
    assert!(matches!(first.kind, Some(run_out::Kind::Created(_))), "{first:?}");
    replies
}

impl Pod {
    /// Starts one with the settings' room, or room up to so many MiB.
    async fn new(name: &str, most_mib: u64) -> Self {
        let max_memory_bytes = most_mib * MIB;
        Self::of(name, v1::RunSpec { max_memory_bytes, ..v1::RunSpec::default() }).await
    }

    /// Starts one that `spec` describes further.
    async fn of(name: &str, spec: v1::RunSpec) -> Self {
        let limits = Arc::<LimitCalls>::default();
        let calls = Arc::clone(&limits);
        let guests: Guests = Arc::new(move |listener, _| {
            let (available, limits) = (900 * MIB, Some(Arc::clone(&calls)));
            Guest { prints: 4096, available, limits, ..Guest::default() }.speak(listener);
        });
        let daemon = Daemon::with(guests).await;
        let pod = v1::RunSpec {
            name: name.to_owned(),
            makes_pod: true,
            detach: true,
            memory_bytes: 128 * MIB,
            ..spec
        };
        let pod = started(&daemon, pod).await;
        daemon.wait_state(name, "running").await;
        let resources = Some(v1::Resources { memory_bytes: 32 * MIB, ..Default::default() });
        let member = v1::RunSpec { pod: name.to_owned(), resources, ..harness::spec("c") };
        let member = started(&daemon, member).await;
        let pod = Self { daemon, name: name.to_owned(), limits, _replies: [pod, member] };
        pod.wait("its container runs", |pod| pod.containers[0].state == "running").await;
        pod
    }

    async fn state(&self) -> v1::Sandbox {
        self.daemon.state(&self.name).await
    }

    async fn wait(&self, what: &str, done: impl Fn(&v1::Sandbox) -> bool) {
        let begun = Instant::now();
        loop {
            let state = self.state().await;
            if done(&state) {
                return;
            }
            assert!(begun.elapsed() < LONG, "not: {what}: {state:?}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    async fn wait_memory(&self, mib: u64) {
        self.wait("its memory", |pod| pod.memory_bytes == mib * MIB).await;
    }

    /// Begins an update of the container's limit.
    fn update(&self, bytes: u64) -> JoinHandle<Result<(), String>> {
        self.update_of(format!("{}/c", self.name), bytes)
    }

    /// Begins an update of the limit of the pod as a whole.
    fn update_whole(&self, bytes: u64) -> JoinHandle<Result<(), String>> {
        self.update_of(self.name.clone(), bytes)
    }

    fn update_of(&self, name: String, bytes: u64) -> JoinHandle<Result<(), String>> {
        let mut client = self.daemon.client.clone();
        let resources = Some(v1::Resources { memory_bytes: bytes, ..Default::default() });
        let request = v1::UpdateRequest { name, resources, ..Default::default() };
        tokio::spawn(async move {
            let updated = client.update(request).await;
            updated.map(drop).map_err(|status| status.message().to_owned())
        })
    }

    /// Returns whether the record on the disk says that limits are being changed.
    async fn is_changing(&self) -> bool {
        let path = self.daemon.sandbox_dir(&self.state().await.id).join("record.json");
        let record = std::fs::read(path).unwrap();
        serde_json::from_slice::<serde_json::Value>(&record).unwrap()["changing_limits"] == true
    }

    /// Waits until so many updates have come to the guest.
    async fn came(&self, count: u32) {
        let mut came = self.limits.came.subscribe();
        tokio::time::timeout(LONG, came.wait_for(|came| *came >= count)).await.unwrap().unwrap();
    }

    /// Has the guest answer so many updates.
    fn answer(&self, count: u32) {
        self.limits.answered.send_replace(count);
    }
}

#[tokio::test]
async fn memory_comes_before_a_limit_and_goes_after_it() {
    let pod = Pod::new("order", 512).await;
    let grown = pod.update(256 * MIB);
    pod.came(1).await;
    assert_eq!(pod.state().await.memory_bytes, 384 * MIB, "before the guest has the limit");
    pod.answer(1);
    grown.await.unwrap().unwrap();
    let lowered = pod.update(48 * MIB);
    pod.came(2).await;
    assert_eq!(pod.state().await.memory_bytes, 384 * MIB, "as long as the limit needs it");
    pod.answer(2);
    lowered.await.unwrap().unwrap();
    // 48 MiB and what its guest needs.
    pod.wait_memory(176).await;
}

/// The next daemon settles an update if this one ends meanwhile.
#[tokio::test]
async fn limits_are_recorded_as_changing_until_all_that_follows_is_done() {
    let pod = Pod::new("recorded", 512).await;
    assert!(!pod.is_changing().await);
    for (count, mib) in [(1, 256), (2, 48)] {
        let update = pod.update(mib * MIB);
        pod.came(count).await;
        assert!(pod.is_changing().await, "{mib} MiB");
        pod.answer(count);
        update.await.unwrap().unwrap();
        let begun = Instant::now();
        // An update ends before its last record is saved.
        while pod.is_changing().await {
            assert!(begun.elapsed() < LONG, "{mib} MiB");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
    assert_eq!(pod.state().await.memory_bytes, 176 * MIB);
    let refused = pod.update(REFUSED);
    pod.came(3).await;
    pod.answer(3);
    assert!(refused.await.unwrap().is_err());
    assert!(!pod.is_changing().await, "nothing has changed");
}

#[tokio::test]
async fn an_update_tells_what_went_back() {
    let pod = Pod::new("tells", 512).await;
    pod.answer(u32::MAX);
    pod.update(256 * MIB).await.unwrap().unwrap();
    let resources = Some(v1::Resources { memory_bytes: 48 * MIB, ..Default::default() });
    let name = "tells/c".to_owned();
    let request = v1::UpdateRequest { name, resources, ..Default::default() };
    let reply = pod.daemon.client.clone().update(request).await.unwrap().into_inner();
    assert_eq!((reply.given_back_bytes, reply.kept.as_str()), (208 * MIB, ""));
    assert_eq!(reply.sandbox.unwrap().memory_bytes, 176 * MIB);
}

#[tokio::test]
async fn a_pods_own_limit_gives_memory_to_containers_without_one() {
    let pod = Pod::new("whole", 512).await;
    pod.answer(u32::MAX);
    pod.update_whole(256 * MIB).await.unwrap().unwrap();
    assert_eq!(pod.state().await.memory_bytes, 160 * MIB, "its container has a limit");
    pod.update(u64::MAX).await.unwrap().unwrap();
    assert_eq!(pod.state().await.memory_bytes, 384 * MIB, "it shares the pod's");
    let said = pod.update_whole(513 * MIB).await.unwrap().unwrap_err();
    assert!(said.contains("513 MiB is more than the 512 MiB"), "{said}");
    pod.update_whole(64 * MIB).await.unwrap().unwrap();
    pod.wait_memory(192).await;
    let said = pod.update_whole(0).await.unwrap().unwrap_err();
    assert!(said.contains("names no limit"), "{said}");
}

#[tokio::test]
async fn a_limit_that_the_guest_refuses_changes_nothing() {
    let pod = Pod::new("undone", 512).await;
    pod.answer(u32::MAX);
    let said = pod.update(REFUSED).await.unwrap().unwrap_err();
    assert!(said.contains("it uses more"), "{said}");
    assert_eq!(pod.state().await.memory_bytes, 160 * MIB);
    let said = pod.update(513 * MIB).await.unwrap().unwrap_err();
    assert!(said.contains("513 MiB is more than the 512 MiB"), "{said}");
}

#[tokio::test]
async fn memory_that_a_vmm_does_not_give_refuses_the_limit() {
    // The VMM claims all, so the guest is never seen to have what was asked for.
    let pod = Pod::new("claims-all", 512).await;
    pod.answer(u32::MAX);
    let said = pod.update(256 * MIB).await.unwrap().unwrap_err();
    assert!(said.contains("the pod's microVM cannot have 384 MiB of memory"), "{said}");
    assert_eq!(*pod.limits.came.borrow(), 0, "the guest was asked for the limit");
}

#[tokio::test]
async fn updates_at_once_take_turns() {
    let pod = Pod::new("turns", 512).await;
    let first = pod.update(256 * MIB);
    pod.came(1).await;
    let second = pod.update(64 * MIB);
    pod.answer(u32::MAX);
    first.await.unwrap().unwrap();
    second.await.unwrap().unwrap();
    pod.wait_memory(192).await;
}

/// A guest that does not answer makes the daemon hold no more updates than there may be.
#[tokio::test]
async fn updates_that_wait_are_few() {
    let pod = Pod::new("few", 512).await;
    let first = pod.update(64 * MIB);
    pod.came(1).await;
    let others: Vec<_> = (0..100).map(|_| pod.update(64 * MIB)).collect();
    let refused = async {
        while others.iter().filter(|update| update.is_finished()).count() < 85 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(LONG, refused).await.expect("85 of them are refused");
    pod.answer(u32::MAX);
    first.await.unwrap().unwrap();
    let mut made = 0;
    for update in others {
        match update.await.unwrap() {
            Ok(()) => made += 1,
            Err(said) => assert!(said.contains("few has 16 updates of limits"), "{said}"),
        }
    }
    assert_eq!(made, 15);
}

#[tokio::test]
async fn pods_have_the_settings_room_and_keep_what_a_user_gives_them() {
    let pod = Pod::new("default", 0).await;
    pod.answer(u32::MAX);
    assert_eq!(pod.state().await.max_memory_bytes, 256 * MIB);
    let request = v1::UpdateRequest {
        name: "default".to_owned(),
        memory_bytes: 240 * MIB,
        ..Default::default()
    };
    pod.daemon.client.clone().update(request).await.unwrap();
    pod.update(200 * MIB).await.unwrap().unwrap();
    pod.wait_memory(256).await;
    pod.update(16 * MIB).await.unwrap().unwrap();
    pod.wait_memory(240).await;
}

#[tokio::test]
async fn a_pod_that_names_its_size_as_the_most_has_no_room() {
    let pod = Pod::new("fixed", 128).await;
    pod.answer(u32::MAX);
    assert_eq!(pod.state().await.max_memory_bytes, 128 * MIB);
    pod.update(128 * MIB).await.unwrap().unwrap();
    let said = pod.update(129 * MIB).await.unwrap().unwrap_err();
    assert!(said.contains("129 MiB is more than the 128 MiB"), "{said}");
}

#[tokio::test]
async fn memory_comes_for_huge_pages_as_far_as_there_is_room() {
    let pod = Pod::new("huge", 512).await;
    let member = |name: &str, huge_page_bytes| {
        let memory_bytes = 32 * MIB;
        let limits = v1::Resources { memory_bytes, huge_page_bytes, ..Default::default() };
        v1::RunSpec { pod: "huge".to_owned(), resources: Some(limits), ..spec(name) }
    };
    let reason = exit_of(started(&pod.daemon, member("much", 384 * MIB)).await).await.reason;
    assert!(reason.contains("microVM can have 512 MiB"), "{reason}");
    assert_eq!(pod.state().await.memory_bytes, 160 * MIB);
    let _some = started(&pod.daemon, member("some", 64 * MIB)).await;
    pod.wait_memory(256).await;
}

#[tokio::test]
async fn a_container_with_a_limit_has_memory_of_its_own() {
    let binds = v1::RunSpec { bound_memory_bytes: 100 * MIB, ..v1::RunSpec::default() };
    let pod = Pod::of("bound", binds).await;
    pod.answer(u32::MAX);
    // Beside what the pod began with: the limit, and 4 MiB that the guest's kernel keeps free.
    assert_eq!(pod.state().await.memory_bytes, (128 + 36) * MIB);
    assert_eq!(pod.state().await.max_memory_bytes, (128 + 8 * 128) * MIB);
    pod.update(100 * MIB).await.unwrap().unwrap();
    assert_eq!(pod.state().await.memory_bytes, (128 + 104) * MIB);
    let said = pod.update(125 * MIB).await.unwrap().unwrap_err();
    assert!(said.contains("125 MiB is more than the 124 MiB"), "{said}");
    let said = pod.update(u64::MAX).await.unwrap().unwrap_err();
    assert!(said.contains("bound/c has memory of its own"), "{said}");
    pod.update(16 * MIB).await.unwrap().unwrap();
    assert_eq!(pod.state().await.memory_bytes, (128 + 20) * MIB);
    let member = |name: &str, memory_bytes, huge_page_bytes| {
        let limits = v1::Resources { memory_bytes, huge_page_bytes, ..Default::default() };
        v1::RunSpec { pod: "bound".to_owned(), resources: Some(limits), ..spec(name) }
    };
    let _open = started(&pod.daemon, member("open", 0, 0)).await;
    let reason = exit_of(started(&pod.daemon, member("much", 125 * MIB, 0)).await).await.reason;
    assert!(reason.contains("a larger --bind-memory"), "{reason}");
    let huge = member("huge", 16 * MIB, 2 * MIB);
    let reason = exit_of(started(&pod.daemon, huge).await).await.reason;
    assert!(reason.contains("no huge pages"), "{reason}");
    assert_eq!(pod.state().await.memory_bytes, (128 + 20) * MIB);
}

#[tokio::test]
async fn a_container_is_removed_with_its_memory() {
    let daemon = Daemon::with(Arc::new(|listener, _| Guest::default().speak(listener))).await;
    let pod = v1::RunSpec {
        name: "gives-slowly".to_owned(),
        makes_pod: true,
        detach: true,
        memory_bytes: 128 * MIB,
        bound_memory_bytes: 100 * MIB,
        ..Default::default()
    };
    let _pod = started(&daemon, pod).await;
    daemon.wait_state("gives-slowly", "running").await;
    let resources = Some(v1::Resources { memory_bytes: 32 * MIB, ..Default::default() });
    let member = v1::RunSpec { pod: "gives-slowly".to_owned(), resources, ..spec("c") };
    exit_of(started(&daemon, member).await).await;
    let name = "gives-slowly/c".to_owned();
    let request = v1::RemoveRequest { name, returns_memory: true, ..Default::default() };
    daemon.client.clone().remove(request).await.unwrap();
    assert_eq!(daemon.state("gives-slowly").await.memory_bytes, 128 * MIB);
}
