//! Checkpoints: a container with a sandbox of its own is saved as a snapshot, whose files
//! containerd gets, and another container begins with them.
//!
//! containerd stops the container's processes, has the shim fill a directory, keeps an archive of
//! that beside its images, and has the processes go on. For a container that begins with it,
//! containerd unpacks the archive and names the directory in Create: the daemon copies it in as a
//! snapshot, which is removed once the sandbox runs. The processes, which were stopped when they
//! were saved, go on then.

use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use prost::Message;
use sha2::{Digest, Sha256};
use slipway_sandbox_api::v1;
use tonic::{Code, Status};

use crate::containerd as cd;
use crate::daemon::{Daemon, failure};
use crate::process::{Phase, timestamp};
use crate::task::{ANSWER, Task, TaskKind};
use crate::ttrpc::Failure;

/// The name of the message with the options of a checkpoint.
const OPTIONS: &str = "containerd.runc.v1.CheckpointOptions";
/// The file in a bundle with the name of the snapshot with which its container begins.
const IMPORTED: &str = "slipway-snapshot";
/// The beginning of the names of the files in a bundle that stand for snapshots which are being
/// made of its container. The rest is the snapshot's name.
const SAVED: &str = "slipway-saved-";
/// The longest time that a daemon may take to remove a snapshot.
const REMOVAL: Duration = Duration::from_secs(30);
/// The time between two attempts to remove a snapshot that the daemon still makes.
const AGAIN: Duration = Duration::from_secs(1);

/// Returns whether a container is to end after its checkpoint. Other options are about the program
/// `criu`.
///
/// # Errors
/// One line: the options are said to be those of a checkpoint, and are not.
pub fn exits(options: Option<&cd::Any>) -> Result<bool, String> {
    let is_ours = |any: &&cd::Any| any.type_url.rsplit('/').next() == Some(OPTIONS);
    let Some(given) = options.filter(is_ours) else { return Ok(false) };
    let options = cd::CheckpointOptions::decode(given.value.as_slice());
    Ok(options.map_err(|error| format!("the options of the checkpoint: {error}"))?.exit)
}

/// Saves a container in the directory `path`, which is made if it is missing. The container goes
/// on.
///
/// # Errors
/// The container has no sandbox of its own, or does not run; the daemon refuses. The directory is
/// empty then.
pub async fn save(task: &Task, path: &str) -> Result<(), Failure> {
    let refused = match task.kind {
        TaskKind::Alone if task.init.phase() == Phase::Running => None,
        TaskKind::Alone => Some("the container does not run: only one that runs can be saved"),
        TaskKind::Pod { .. } => Some("a pod cannot be saved"),
        TaskKind::Member(_) => Some("a container of a pod cannot be saved without its pod"),
    };
    if let Some(message) = refused {
        return Err(Failure::new(Code::FailedPrecondition, message));
    }
    make(path)?;
    let name = made_up(&task.name);
    // Written first: the snapshot is found if this process dies.
    let note = note_of(&task.bundle, &name);
    std::fs::write(&note, "").map_err(|error| format!("{}: {error}", note.display()))?;
    let saved = save_as(task, &name, path).await;
    // Also after an error: a daemon that went away may have saved it.
    if discard(&task.daemon, &name).await {
        // A note that stays names a snapshot that is gone, which harms nothing.
        let _ = std::fs::remove_file(&note);
    }
    saved
}

fn note_of(bundle: &Path, name: &str) -> PathBuf {
    bundle.join(format!("{SAVED}{name}"))
}

async fn save_as(task: &Task, name: &str, path: &str) -> Result<(), Failure> {
    let mut client = task.daemon.snapshots().await?;
    let request = v1::CreateSnapshotRequest { sandbox: task.name.clone(), name: name.to_owned() };
    client.create(request).await.map_err(|status| refusal(&status))?;
    let request = v1::ExportSnapshotRequest { name: name.to_owned(), path: path.to_owned() };
    client.export(request).await.map_err(|status| refusal(&status))?;
    Ok(())
}

/// Makes a directory for its owner's eyes only. A directory that exists stays as it is.
fn make(path: &str) -> Result<(), String> {
    match std::fs::DirBuilder::new().mode(0o700).create(path) {
        Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
            Err(format!("the directory {path} for the checkpoint: {error}"))
        }
        _ => Ok(()),
    }
}

/// A checkpoint with which a container is to begin.
pub struct CheckpointRequest {
    /// The path of its directory.
    pub path: String,
    /// The digest of the container's image, which must be the checkpoint's.
    pub image_digest: String,
}

/// Copies a checkpoint in as a snapshot, for the container `owner` with this bundle.
///
/// # Errors
/// The daemon refuses the checkpoint.
pub async fn take(
    daemon: &Daemon,
    bundle: &Path,
    owner: &str,
    wanted: CheckpointRequest,
) -> Result<v1::Snapshot, Failure> {
    let name = made_up(owner);
    // Written first: the command `delete` finds the snapshot if this process dies.
    let noted = std::fs::write(bundle.join(IMPORTED), &name);
    noted.map_err(|error| format!("{}: {error}", bundle.display()))?;
    let CheckpointRequest { path, image_digest } = wanted;
    let request = v1::ImportSnapshotRequest { path, name, image_digest };
    let imported = daemon.snapshots().await?.import(request).await;
    Ok(imported.map_err(|status| refusal(&status))?.into_inner())
}

/// Returns the names of the snapshots that the container of a bundle may have left: the one with
/// which it begins, and those that were being made of it.
pub fn left_of(bundle: &Path) -> Vec<String> {
    let imported = std::fs::read_to_string(bundle.join(IMPORTED)).ok();
    let imported = imported.filter(|name| !name.is_empty());
    imported.into_iter().chain(saved_of(bundle)).collect()
}

/// Returns the names of the snapshots that were being made of the container of a bundle.
fn saved_of(bundle: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(bundle).into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    names.filter_map(|name| name.strip_prefix(SAVED).map(str::to_owned)).collect()
}

/// Has a container that began with a checkpoint go on, once its sandbox runs. The snapshot is
/// removed meanwhile, which may take as long as its files are large. If this process or the daemon
/// dies before, the name of the snapshot is found when the container is deleted.
pub async fn begun(task: &Arc<Task>) {
    if snapshot(task).is_none() {
        return;
    }
    if task.init.phase() == Phase::Starting
        && let Err(reason) = resume(task).await
    {
        crate::log::warn(&format!("{}: its processes may stand still: {reason}", task.id));
    }
    let task = Arc::clone(task);
    tokio::spawn(async move { forget(&task).await });
}

/// Has the processes of a container go on. Processes that run already are not affected.
async fn resume(task: &Task) -> Result<(), String> {
    let resumed = async {
        let mut client = task.daemon.connect().await?;
        let name = v1::Name { name: task.name.clone() };
        client.resume(name).await.map_err(|status| failure(&status))
    };
    match tokio::time::timeout(ANSWER, resumed).await {
        Ok(resumed) => resumed.map(drop).map_err(|failed| failed.message),
        Err(_) => Err("the daemon does not answer".to_owned()),
    }
}

/// Removes the snapshots that were made of a container and could not be removed then.
pub async fn forget_saved(task: &Task) {
    for name in saved_of(&task.bundle) {
        let removed = tokio::time::timeout(REMOVAL, discard(&task.daemon, &name)).await;
        if removed.is_err() {
            warn_left(&name, "the daemon does not answer");
        }
    }
}

/// Removes the snapshot with which a container's sandbox begins, if there is one still. Waits for
/// another call that removes it.
pub async fn forget(task: &Task) {
    let Some(name) = snapshot(task).clone() else { return };
    let removed = tokio::time::timeout(REMOVAL, remove_within(&task.daemon, &name, REMOVAL)).await;
    match removed {
        Ok(Ok(())) => *snapshot(task) = None,
        Ok(Err(failed)) => warn_left(&name, &failed.message),
        Err(_) => warn_left(&name, "the daemon does not answer"),
    }
}

fn snapshot(task: &Task) -> std::sync::MutexGuard<'_, Option<String>> {
    // The value is valid after any panic: it is replaced whole.
    task.snapshot.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Removes a snapshot. That there is none is no error.
///
/// # Errors
/// The daemon does not serve, or refuses.
pub async fn remove(daemon: &Daemon, name: &str) -> Result<(), Failure> {
    let request = v1::Name { name: name.to_owned() };
    match daemon.snapshots().await?.remove(request).await {
        Err(status) if status.code() != Code::NotFound => Err(refusal(&status)),
        _ => Ok(()),
    }
}

/// Removes a snapshot, as [`remove`] does. A snapshot that the daemon is still making is removed
/// once it is whole, if that is within `patience`.
///
/// # Errors
/// The errors of [`remove`]; [`Code::Aborted`] if the daemon still makes the snapshot.
pub async fn remove_within(daemon: &Daemon, name: &str, patience: Duration) -> Result<(), Failure> {
    let begun = Instant::now();
    loop {
        match remove(daemon, name).await {
            Err(failed) if failed.code != Code::FailedPrecondition => return Err(failed),
            Err(failed) if begun.elapsed() >= patience => {
                return Err(Failure::new(Code::Aborted, failed.message));
            }
            Err(_) => tokio::time::sleep(AGAIN).await,
            Ok(()) => return Ok(()),
        }
    }
}

/// Removes a snapshot. Returns `false` after logging so if it stays.
pub async fn discard(daemon: &Daemon, name: &str) -> bool {
    let removed = remove(daemon, name).await;
    if let Err(failed) = &removed {
        warn_left(name, &failed.message);
    }
    removed.is_ok()
}

fn warn_left(name: &str, reason: &str) {
    let what = format!("snapshot {name} is left (`slipway snapshot rm {name}`): {reason}");
    crate::log::warn(&what);
}

/// Returns a name that no other snapshot has.
fn made_up(owner: &str) -> String {
    let now = timestamp();
    let text = format!("{owner} {} {} {}", std::process::id(), now.seconds, now.nanos);
    format!("checkpoint-{}", &hex::encode(Sha256::digest(text))[..16])
}

/// Converts the refusal of a call about snapshots.
fn refusal(status: &Status) -> Failure {
    match status.code() {
        Code::Unimplemented => {
            let message = "the daemon is of an earlier version, without snapshots that can be \
                           moved: start the daemon again";
            Failure::new(Code::FailedPrecondition, message)
        }
        _ => failure(status),
    }
}
