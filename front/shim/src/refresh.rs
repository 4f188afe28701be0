//! Keeps the copies that containers have of the host's files up to date.
//!
//! The shim looks at the files from time to time. A watch would tell at once, but it would take one
//! of the 128 inotify instances that a user has, for each pod. Kubernetes itself looks whether a
//! configMap or a secret has changed about once a minute.

use std::sync::Arc;
use std::time::Duration;

use slipway_sandbox_api::copies::MOST;
use slipway_sandbox_api::v1;
use tokio::task::JoinSet;

use crate::copies::Copy;
use crate::task::Task;

/// The time between two looks.
const LOOK: Duration = Duration::from_millis(if cfg!(test) { 20 } else { 5000 });
/// The longest time between two looks after failures, each of which doubles it.
const LONGEST: Duration = Duration::from_secs(300);
/// The longest time that the daemon and the guest may take to put files into a container.
const PATIENCE: Duration = Duration::from_secs(60);

/// Keeps the copies of a container that runs up to date, until it ends.
pub fn serve(task: &Arc<Task>) {
    // Nobody panics with the lock held.
    let copies = task.copies.lock().map(|mut copies| std::mem::take(&mut *copies));
    let copies = copies.unwrap_or_default();
    if copies.is_empty() {
        return;
    }
    let task = Arc::clone(task);
    tokio::spawn(async move {
        // Each has a task of its own: one that fails does not delay the others.
        let refreshed = copies.into_iter().map(|copy| refresh(Arc::clone(&task), copy));
        let refreshed: JoinSet<()> = refreshed.collect();
        tokio::select! {
            _ = refreshed.join_all() => {}
            _ = task.init.ended() => {}
            _ = task.pod_ended() => {}
        }
    });
}

async fn refresh(task: Arc<Task>, mut copy: Copy) {
    let (mut told, mut wait) = (String::new(), LOOK);
    loop {
        tokio::time::sleep(wait).await;
        let read = tokio::task::spawn_blocking(move || {
            let change = copy.change();
            (copy, change)
        });
        let Ok((read, change)) = read.await else { return };
        copy = read;
        let outcome = match change {
            Ok(None) => Ok(()),
            Ok(Some((version, request))) => match put(&task, request).await {
                Ok(()) => {
                    copy.has(version);
                    task.keep_copies(std::slice::from_ref(&copy));
                    Ok(())
                }
                Err(reason) => {
                    copy.may_have(version);
                    task.keep_copies(std::slice::from_ref(&copy));
                    Err(reason)
                }
            },
            Err(reason) => Err(reason),
        };
        wait = if outcome.is_ok() { LOOK } else { (2 * wait).min(LONGEST) };
        // A reason is said once.
        let reason = outcome.err().unwrap_or_default();
        if !reason.is_empty() && reason != told {
            let id = &task.id;
            crate::log::warn(&format!("{id}: files that have changed stay as they were: {reason}"));
        }
        told = reason;
    }
}

/// Puts files into the container.
///
/// # Errors
/// One line. Some of the files may be in place.
async fn put(task: &Task, request: v1::PutFilesRequest) -> Result<(), String> {
    let mut client = task.daemon.connect().await.map_err(|failure| failure.message)?;
    for mut request in pieces(request) {
        request.name.clone_from(&task.name);
        match tokio::time::timeout(PATIENCE, client.put_files(request)).await {
            Ok(Ok(_)) => {}
            Ok(Err(status)) => return Err(status.message().to_owned()),
            Err(_) => return Err("the guest does not take them".to_owned()),
        }
    }
    Ok(())
}

/// Divides a request, since the daemon removes no more than [`MOST`] files at once, and failed
/// attempts may have left more. All files are in the first piece.
fn pieces(mut request: v1::PutFilesRequest) -> Vec<v1::PutFilesRequest> {
    let removed = std::mem::take(&mut request.removed);
    let mut removed = removed.chunks(MOST).map(<[String]>::to_vec);
    request.removed = removed.next().unwrap_or_default();
    let more = removed.map(|removed| v1::PutFilesRequest { removed, ..Default::default() });
    std::iter::once(request).chain(more).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_files_to_remove_are_several_requests() {
        let removed: Vec<_> = (0..2 * MOST + 1).map(|number| format!("/{number}")).collect();
        let files = vec![v1::File::default()];
        let request =
            |removed| v1::PutFilesRequest { files: files.clone(), removed, ..Default::default() };
        let divided = pieces(request(removed.clone()));
        let sizes: Vec<_> =
            divided.iter().map(|one| (one.files.len(), one.removed.len())).collect();
        assert_eq!(sizes, [(1, MOST), (0, MOST), (0, 1)]);
        assert_eq!(divided.iter().flat_map(|one| one.removed.clone()).collect::<Vec<_>>(), removed);
        assert_eq!(pieces(request(Vec::new())).len(), 1);
    }
}
