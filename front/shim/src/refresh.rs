//! Keeps the copies that containers have of the host's files up to date.
//!
//! The shim looks at the files from time to time. A watch would tell at once, but it would take one
//! of the 128 inotify instances that a user has, for each pod. Kubernetes itself looks whether a
//! configMap or a secret has changed about once a minute.

use std::sync::Arc;
use std::time::Duration;

use slipway_sandbox_api::v1;
use tonic::Code;

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
    let copies = task.copies.lock().ok().and_then(|mut copies| copies.take());
    let Some(copies) = copies.filter(|copies| !copies.is_empty()) else { return };
    let task = Arc::clone(task);
    tokio::spawn(async move {
        // One that cannot be read or put keeps none of the others.
        let refreshed = copies.into_iter().map(|copy| refresh(Arc::clone(&task), copy));
        let mut all = tokio::task::JoinSet::new();
        for one in refreshed {
            all.spawn(one);
        }
        tokio::select! {
            () = async { while all.join_next().await.is_some() {} } => {}
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
            Ok(Some(change)) => {
                let (stamp, paths, request) = change.split();
                let put = put(&task, request).await;
                copy.note(stamp, paths, put.is_ok());
                put
            }
            Err(reason) => Err(Refused::Now(reason)),
        };
        wait = if outcome.is_ok() { LOOK } else { (2 * wait).min(LONGEST) };
        match outcome {
            Ok(()) => told.clear(),
            Err(Refused::Always(reason)) => return warn(&task, &reason),
            // Said once.
            Err(Refused::Now(reason)) if reason != told => {
                warn(&task, &reason);
                told = reason;
            }
            Err(Refused::Now(_)) => {}
        }
    }
}

fn warn(task: &Task, reason: &str) {
    crate::log::warn(&format!("{}: files that have changed stay as they were: {reason}", task.id));
}

/// The reason why files were not put into a container.
enum Refused {
    /// The next attempt may succeed.
    Now(String),
    /// No attempt will succeed.
    Always(String),
}

async fn put(task: &Task, mut request: v1::PutFilesRequest) -> Result<(), Refused> {
    request.name = task.name.clone();
    let mut client =
        task.daemon.connect().await.map_err(|failure| Refused::Now(failure.message))?;
    let called = tokio::time::timeout(PATIENCE, client.put_files(request)).await;
    match called {
        Ok(Ok(_)) => Ok(()),
        // A daemon, or a guest, of an earlier version.
        Ok(Err(status)) if status.code() == Code::Unimplemented => {
            Err(Refused::Always(status.message().to_owned()))
        }
        Ok(Err(status)) => Err(Refused::Now(status.message().to_owned())),
        Err(_) => Err(Refused::Now("the guest does not take them".to_owned())),
    }
}
