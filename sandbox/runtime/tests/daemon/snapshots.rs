//! Sandboxes that are to be saved as snapshots, on a hypervisor that saves no machine, and
//! snapshots that were saved elsewhere.

use std::fs::{self, File};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use sha2::{Digest, Sha256};
use slipway_runtime::record::Settings;
use slipway_runtime::v1;
use slipway_runtime::v1::snapshots_client::SnapshotsClient;
use tonic::Code;

use crate::harness::guest::Guest;
use crate::harness::{COPIES_FOR_EVER, Daemon, LONG};

/// A sandbox that could not be saved runs on, its record says so, and nothing of a snapshot is
/// left.
#[tokio::test]
async fn a_sandbox_that_cannot_be_saved_runs_on() {
    let guest = Guest { prints: 16, ..Guest::default() };
    let guests = Arc::new(move |listener, _: &str| guest.clone().speak(listener));
    let daemon = Daemon::with(guests).await;
    let (id, mut replies) = daemon.run("one").await;
    tokio::spawn(async move { while let Ok(Some(_)) = replies.message().await {} });
    daemon.wait_state("one", "running").await;
    let mut client = SnapshotsClient::new(daemon.channel().await);
    let mut create = async |sandbox: &str, name: &str| {
        let (sandbox, name) = (sandbox.to_owned(), name.to_owned());
        let refused = client.create(v1::CreateSnapshotRequest { sandbox, name }).await;
        refused.unwrap_err().message().to_owned()
    };
    assert!(create("one", "saved").await.contains("only slipway-vmm saves a machine"));
    assert!(create("one", "auto").await.contains("of the node's own"));
    assert!(create("one", "../x").await.contains("is no name for"));
    assert!(create("none", "saved").await.contains("there is no sandbox"));
    assert_eq!(daemon.state("one").await.state, "running");
    let record = std::fs::read(daemon.sandbox_dir(&id).join("record.json")).unwrap();
    let record: serde_json::Value = serde_json::from_slice(&record).unwrap();
    assert_eq!((&record["saving"], &record["paused"]), (&false.into(), &false.into()));
    let left = std::fs::read_dir(daemon.dir.path().join("data/templates"));
    assert_eq!(left.map_or(0, Iterator::count), 0);
    daemon.remove("one").await;
}

/// Commands begin in a sandbox whose memory is copied ahead of a save. A VMM that its guest took
/// over can have that last for minutes.
#[tokio::test]
async fn commands_begin_while_memory_is_copied_ahead() {
    let guest = Guest { prints: 16, ..Guest::default() };
    let guests = Arc::new(move |listener, _: &str| guest.clone().speak(listener));
    let daemon = Daemon::with(guests).await;
    let (_, mut replies) = daemon.run(COPIES_FOR_EVER).await;
    tokio::spawn(async move { while let Ok(Some(_)) = replies.message().await {} });
    daemon.wait_state(COPIES_FOR_EVER, "running").await;
    let mut snapshots = SnapshotsClient::new(daemon.channel().await);
    let (sandbox, name) = (COPIES_FOR_EVER.to_owned(), "saved".to_owned());
    let create = v1::CreateSnapshotRequest { sandbox, name };
    let save = tokio::spawn(async move { snapshots.create(create).await });
    let memory = daemon.dir.path().join("data/templates/saved.unfinished/memory");
    let copies = async {
        while !memory.exists() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(LONG, copies).await.expect("its memory is copied");
    let (name, command) = (COPIES_FOR_EVER.to_owned(), vec!["x".to_owned()]);
    let spec = v1::ExecSpec { name, command, ..Default::default() };
    let first = v1::RunIn { kind: Some(v1::run_in::Kind::Exec(spec)) };
    let mut client = daemon.another().await;
    let begun = tokio::time::timeout(LONG, client.exec(tokio_stream::once(first))).await;
    begun.expect("the command begins").unwrap();
    daemon.remove(COPIES_FOR_EVER).await;
    assert!(save.await.unwrap().is_err());
}

/// Fills a directory as an export of the snapshot "saved" does, whose container has this image.
fn export_of(dir: &Path, image_digest: &str) {
    const MEMORY: u64 = 128 << 20;
    const LAYER: u64 = 1 << 20;
    fs::create_dir(dir).unwrap();
    fs::write(dir.join("machine"), "state").unwrap();
    for (name, bytes) in [("memory", MEMORY), ("layer", LAYER)] {
        File::create(dir.join(name)).unwrap().set_len(bytes).unwrap();
    }
    // Of a file without a page that is not zeros.
    let sha256 = |bytes: u64| hex::encode(Sha256::digest(bytes.to_le_bytes()));
    let (image, image_path) = ("debian:12".to_owned(), "/etc/shadow".into());
    let image_digest = image_digest.to_owned();
    let settings = Settings { image, image_digest, image_path, ..Settings::default() };
    let needs = json!({"sockets": false, "shared_root": false, "shares": false, "bridge": false});
    let mut description = json!({
        "version": 4, "name": "saved", "created_ns": 1, "mac": null, "touched_bytes": 0,
        "shape": {
            "kernel": "/dev/null", "initramfs": "/dev/null", "needs": needs, "cpus": 1,
            "memory_bytes": MEMORY, "max_cpus": 1, "cpu_template": "host", "interface": null
        },
        "machine_sha256": hex::encode(Sha256::digest("state")), "memory_sha256": sha256(MEMORY),
        "snapshot": {
            "sandbox": "one", "origin": {"disks": "0123456789ab", "slots": 0, "needs": needs},
            "settings": settings, "paused": false, "cpus": 1, "layers_bytes": 32 << 20,
            "kernel": null, "accelerator": "kvm", "volumes": [], "paused_ns": 1,
            "files": [{"name": "layer", "bytes": LAYER, "data_bytes": 0, "sha256": sha256(LAYER)}]
        }
    });
    description["sha256"] = hex::encode(Sha256::digest(description.to_string())).into();
    fs::write(dir.join("template.json"), description.to_string()).unwrap();
}

/// A snapshot gets the node's file of its image, whatever path its description has, and one without
/// an image here is refused.
#[tokio::test]
async fn a_snapshot_is_moved_in_a_directory() {
    let guest = Guest::default();
    let guests = Arc::new(move |listener, _: &str| guest.clone().speak(listener));
    let daemon = Daemon::with(guests).await;
    let [known, unknown, out] = ["known", "unknown", "out"].map(|dir| daemon.dir.path().join(dir));
    export_of(&known, &format!("sha256:{}", "2".repeat(64)));
    export_of(&unknown, &format!("sha256:{}", "3".repeat(64)));
    fs::create_dir(&out).unwrap();
    let mut client = SnapshotsClient::new(daemon.channel().await);
    let import = |dir: &Path, name: &str| v1::ImportSnapshotRequest {
        path: dir.to_str().unwrap().to_owned(),
        name: name.to_owned(),
        ..Default::default()
    };
    let imported = client.import(import(&known, "")).await.unwrap().into_inner();
    assert_eq!((imported.name.as_str(), imported.memory_bytes), ("saved", 128 << 20));
    let imported = client.import(import(&known, "other")).await.unwrap().into_inner();
    assert_eq!((imported.name.as_str(), imported.sandbox.as_str()), ("other", "one"));
    let place = daemon.dir.path().join("data/templates");
    let description = fs::read_to_string(place.join("other/template.json")).unwrap();
    assert!(description.contains(".erofs") && !description.contains("/etc/shadow"));
    for (dir, name, code) in [
        (&known, "other", Code::AlreadyExists),
        (&known, "auto", Code::InvalidArgument),
        (&known, "../x", Code::InvalidArgument),
        (&unknown, "more", Code::NotFound),
    ] {
        assert_eq!(client.import(import(dir, name)).await.unwrap_err().code(), code, "{name}");
    }
    let digest = |digit: &str| format!("sha256:{}", digit.repeat(64));
    let of_image = |name: &str, image_digest: String| v1::ImportSnapshotRequest {
        image_digest,
        ..import(&known, name)
    };
    let refused = client.import(of_image("more", digest("4"))).await.unwrap_err();
    assert!(refused.message().contains("was saved with the image"), "{}", refused.message());
    assert_eq!(fs::read_dir(&place).unwrap().count(), 2);
    let imported = client.import(of_image("more", digest("2"))).await.unwrap().into_inner();
    assert_eq!(imported.image_digest, digest("2"));
    let (name, path) = ("other".to_owned(), out.to_str().unwrap().to_owned());
    client.export(v1::ExportSnapshotRequest { name, path }).await.unwrap();
    assert_eq!(fs::read_dir(&out).unwrap().count(), 4);
    for name in ["saved", "other", "more"] {
        client.remove(v1::Name { name: name.to_owned() }).await.unwrap();
    }
    assert!(client.list(v1::Empty {}).await.unwrap().into_inner().snapshots.is_empty());
}
