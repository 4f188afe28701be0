//! Tests of checkpoints against a daemon that runs nothing: the calls that it gets, and in which
//! order.

#[path = "hooked.rs"]
mod hooked;

use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use serde_json::json;
use slipway_sandbox_api::v1::{self, run_in};

use super::calls::Calls;
use super::fake::Fake;
use super::*;

/// A shim of the container "one" with its daemon.
struct Shim {
    service: Arc<Service>,
    daemon: Arc<Fake>,
    dir: tempfile::TempDir,
}

impl Calls for Shim {
    fn service(&self) -> &Arc<Service> {
        &self.service
    }
}

impl Shim {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("bundle")).unwrap();
        // In place of the program that makes images: it prints its arguments as the digest.
        std::os::unix::fs::symlink("/bin/echo", dir.path().join("slipway")).unwrap();
        let daemon = Fake::serve(dir.path());
        let service = Arc::new(Service {
            args: Args { namespace: "ns".into(), id: "one".into(), ..Args::default() },
            daemon: Daemon::at(dir.path()),
            events: Arc::new(Events::new("ns", None)),
            tasks: Tasks::default(),
            keep: RestartStore::default(),
            reads: Arc::new(Semaphore::new(MOST_READS)),
            form: Form::Version1,
            end: Notify::new(),
        });
        Self { service, daemon, dir }
    }

    fn bundle(&self) -> PathBuf {
        self.dir.path().join("bundle")
    }

    /// Puts a container there that was not created by a call.
    fn put(&self, id: &str, kind: TaskKind) -> Arc<Task> {
        let name = format!("{id}-0");
        let run = v1::RunSpec { name: name.clone(), ..Default::default() };
        let task = Arc::new(Task {
            id: id.into(),
            bundle: self.bundle(),
            name,
            kind,
            daemon: self.service.daemon.clone(),
            events: Arc::clone(&self.service.events),
            init: Arc::new(Process::new(String::new(), Paths::default(), run_in::Kind::Run(run))),
            execs: Default::default(),
            vmm: Default::default(),
            paused: Default::default(),
            private: None,
            copies: Default::default(),
            copied: 0,
            snapshot: Default::default(),
            message: None,
            kept: Default::default(),
            deleting: Default::default(),
        });
        self.service.tasks.reserve(id).unwrap().fill(Arc::clone(&task));
        task
    }

    async fn checkpoint(&self, id: &str, path: &Path, exit: bool) -> Result<cd::Empty, Failure> {
        let value = cd::CheckpointOptions { exit }.encode_to_vec();
        let type_url = "containerd.runc.v1.CheckpointOptions".to_owned();
        let request = cd::CheckpointTaskRequest {
            id: id.into(),
            path: text(path),
            options: Some(cd::Any { type_url, value }),
        };
        self.call("Checkpoint", &request).await
    }

    /// Creates the container "one" of a checkpoint.
    async fn create(&self, checkpoint: &Path, annotations: serde_json::Value) -> Option<Failure> {
        let bundle = self.bundle();
        let config = json!({
            "process": {"args": ["sleep"], "env": ["A=1"]}, "hostname": "web",
            "annotations": annotations, "root": {"path": "rootfs"},
            "mounts": [{"destination": "/data", "type": "bind", "source": "/srv"}],
            "linux": {"namespaces": [{"type": "pid"}, {"type": "ipc"}, {"type": "network"}]}
        });
        std::fs::write(bundle.join("config.json"), config.to_string()).unwrap();
        let request = cd::CreateTaskRequest {
            id: "one".into(),
            bundle: text(&bundle),
            checkpoint: text(checkpoint),
            ..Default::default()
        };
        self.call::<cd::CreateTaskResponse>("Create", &request).await.err()
    }
}

fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

#[tokio::test]
async fn a_checkpoint_is_a_snapshot_that_was_copied_out() {
    let shim = Shim::new();
    let task = shim.put("one", TaskKind::Alone);
    shim.on::<cd::StartResponse>("Start", "one").await.unwrap();
    let path = shim.dir.path().join("checkpoint");
    shim.checkpoint("one", &path, false).await.unwrap();
    assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o700);
    let calls = shim.daemon.calls();
    let name = calls[0].strip_prefix("save one-0 ").unwrap();
    assert!(name.starts_with("checkpoint-"), "{name}");
    let wanted = [calls[0].clone(), format!("export {name} {}", text(&path))];
    assert_eq!(calls, [&wanted[..], &[format!("forget {name}")]].concat());
    assert_eq!(task.init.phase(), Phase::Running);
    assert!(checkpoint::left_of(&shim.bundle()).is_empty());
    // Into the same directory, as containerd makes it before, and with an end.
    shim.checkpoint("one", &path, true).await.unwrap();
    assert_eq!(task.init.ended().await.status, 137);
    let calls = shim.daemon.calls();
    assert_eq!((calls.len(), calls[6].as_str()), (7, "signal one-0 9"));
    assert!(!calls[3].ends_with(name), "both have the name {name}");
}

#[tokio::test]
async fn a_checkpoint_that_fails_leaves_the_container_and_no_snapshot() {
    let shim = Shim::new();
    let task = shim.put("one", TaskKind::Alone);
    shim.on::<cd::StartResponse>("Start", "one").await.unwrap();
    shim.daemon.lacks_room.store(true, Ordering::Relaxed);
    let path = shim.dir.path().join("checkpoint");
    let failed = shim.checkpoint("one", &path, true).await.unwrap_err();
    assert!(failed.message.contains("no space left"), "{failed}");
    let calls = shim.daemon.calls();
    assert!(calls.len() == 3 && calls[2].starts_with("forget checkpoint-"), "{calls:?}");
    assert_eq!(task.init.phase(), Phase::Running);
    let nowhere = shim.checkpoint("one", &path.join("a/b"), false).await.unwrap_err();
    assert!(nowhere.message.contains("for the checkpoint"), "{nowhere}");
}

#[tokio::test]
async fn a_snapshot_that_could_not_be_removed_goes_with_its_container() {
    let shim = Shim::new();
    let task = shim.put("one", TaskKind::Alone);
    shim.on::<cd::StartResponse>("Start", "one").await.unwrap();
    shim.daemon.makes_snapshots.store(true, Ordering::Relaxed);
    let path = shim.dir.path().join("checkpoint");
    shim.checkpoint("one", &path, true).await.unwrap();
    task.init.ended().await;
    // As `delete` finds it if this shim dies.
    let left = checkpoint::left_of(&shim.bundle());
    assert!(left.len() == 1 && left[0].starts_with("checkpoint-"), "{left:?}");
    let again = checkpoint::remove_within(&task.daemon, &left[0], Duration::ZERO).await;
    assert_eq!(again.unwrap_err().code, Code::Aborted);
    shim.daemon.makes_snapshots.store(false, Ordering::Relaxed);
    shim.on::<cd::DeleteResponse>("Delete", "one").await.unwrap();
    let calls = shim.daemon.calls();
    assert_eq!(calls.last().unwrap(), &format!("forget {}", left[0]));
}

#[tokio::test]
async fn what_cannot_be_saved_is_refused_in_one_line() {
    let shim = Shim::new();
    let pod = shim.put(
        "pod",
        TaskKind::Pod {
            network: String::new(),
            sandbox: None,
            empty_dirs: std::sync::Arc::default(),
        },
    );
    shim.put("member", TaskKind::Member(pod));
    shim.put("one", TaskKind::Alone);
    let path = shim.dir.path().join("checkpoint");
    for (id, why) in [
        ("pod", "a pod cannot be saved"),
        ("member", "a container of a pod cannot be saved without its pod"),
        ("one", "only one that runs"),
    ] {
        let failed = shim.checkpoint(id, &path, false).await.unwrap_err();
        assert_eq!(failed.code, Code::FailedPrecondition);
        assert!(failed.message.contains(why) && !failed.message.contains('\n'), "{failed}");
    }
    assert!(shim.daemon.calls().is_empty() && !path.exists());
}

#[tokio::test]
async fn a_container_begins_with_a_checkpoint_and_goes_on() {
    let shim = Shim::new();
    let path = shim.dir.path().join("unpacked");
    std::fs::create_dir(&path).unwrap();
    assert_eq!(shim.create(&path, json!({"dev.slipway.network": "n"})).await, None);
    let calls = shim.daemon.calls();
    let name = calls[0].strip_prefix(&format!("import {} ", text(&path))).unwrap();
    // Its image is that of the container's root.
    let digest = shim.daemon.imports()[0].image_digest.clone();
    let root = format!("image import dir:{} ", text(&shim.bundle().join("rootfs")));
    assert!(digest.starts_with(&root), "{digest}");
    shim.daemon.removes_snapshots.store(true, Ordering::Relaxed);
    shim.on::<cd::StartResponse>("Start", "one").await.unwrap();
    let run = &shim.daemon.runs()[0];
    assert_eq!((run.template.as_str(), run.hostname.as_str()), (name, "web"));
    assert_eq!((run.network.as_str(), run.labels.len()), ("n", 2));
    let task = shim.service.tasks.find("one").unwrap();
    assert_eq!(run.name, task.name);
    // The snapshot has the others.
    let plain = v1::RunSpec {
        name: run.name.clone(),
        template: run.template.clone(),
        hostname: run.hostname.clone(),
        network: run.network.clone(),
        labels: run.labels.clone(),
        ..Default::default()
    };
    assert_eq!(*run, plain);
    // It runs, and its snapshot is being removed.
    assert!(task.init.phase() == Phase::Running && task.snapshot.lock().unwrap().is_some());
    shim.daemon.removes_snapshots.store(false, Ordering::Relaxed);
    let removed = async {
        while task.snapshot.lock().unwrap().is_some() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), removed).await.expect("a snapshot is left");
    let wanted = [calls[0].clone(), format!("resume {}", task.name), format!("forget {name}")];
    assert_eq!(shim.daemon.calls(), wanted);
}

#[tokio::test]
async fn a_checkpoint_that_was_never_begun_with_goes_with_its_container() {
    let shim = Shim::new();
    assert_eq!(shim.create(shim.dir.path(), json!({})).await, None);
    let name = checkpoint::left_of(&shim.bundle()).remove(0);
    let task = shim.service.tasks.find("one").unwrap();
    shim.on::<cd::DeleteResponse>("Delete", "one").await.unwrap();
    let later = [format!("remove {}", task.name), format!("forget {name}")];
    assert_eq!(shim.daemon.calls()[1..], later);
}

#[tokio::test]
async fn a_snapshot_is_removed_before_the_image_that_it_keeps() {
    let shim = Shim::new();
    assert_eq!(shim.create(shim.dir.path(), json!({})).await, None);
    let name = checkpoint::left_of(&shim.bundle()).remove(0);
    let task = shim.service.tasks.find("one").unwrap();
    assert!(task.private.is_some());
    // In place of the program that removes images: it fails.
    let program = shim.dir.path().join("slipway");
    std::fs::remove_file(&program).unwrap();
    std::os::unix::fs::symlink("/bin/false", &program).unwrap();
    assert!(shim.on::<cd::DeleteResponse>("Delete", "one").await.is_err());
    let later = [format!("remove {}", task.name), format!("forget {name}")];
    assert_eq!(shim.daemon.calls()[1..], later);
}

#[tokio::test]
async fn a_checkpoint_with_more_memory_than_its_container_may_have_is_refused() {
    let shim = Shim::new();
    let (program, log) = (shim.dir.path().join("slipway"), shim.dir.path().join("log"));
    std::fs::remove_file(&program).unwrap();
    // Prints its arguments, as the one before does, and notes them.
    let script = format!("#!/bin/sh\necho \"$@\" | tee -a {}\n", log.display());
    std::fs::write(&program, script).unwrap();
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
    let limit = json!({"dev.slipway.memory": "128M"});
    let failed = shim.create(shim.dir.path(), limit).await.unwrap();
    assert!(failed.message.contains("256 MiB of memory, and 128 are"), "{failed}");
    let calls = shim.daemon.calls();
    let name = shim.daemon.imports()[0].name.clone();
    assert_eq!((calls.len(), &calls[1]), (2, &format!("forget {name}")));
    // Its image as well: nobody asks for the deletion of what was refused.
    let image = crate::rootfs::private_of(&shim.bundle()).unwrap();
    let told = std::fs::read_to_string(log).unwrap();
    assert!(told.contains(&format!("image rm {image}")), "{told}");
}

#[tokio::test]
async fn a_checkpoint_that_is_none_is_refused_and_one_for_a_pod() {
    let shim = Shim::new();
    let failed = shim.create(Path::new("/no/such/directory"), json!({})).await.unwrap();
    assert!(failed.message.contains("there is no snapshot"), "{failed}");
    let pod = json!({
        "io.kubernetes.cri.container-type": "sandbox", "io.kubernetes.cri.sandbox-id": "one"
    });
    let failed = shim.create(shim.dir.path(), pod).await.unwrap();
    assert_eq!(failed.code, Code::Unimplemented);
    assert!(failed.message.contains("cannot begin with a checkpoint"), "{failed}");
}
