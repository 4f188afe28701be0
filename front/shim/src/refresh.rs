//! Keeps the copies that containers have of the host's files up to date.
//!
//! The shim looks at the files from time to time. A watch would tell at once, but it would take one
//! of the 128 inotify instances that a user has, for each pod. Kubernetes itself looks whether a
//! configMap or a secret has changed about once a minute.

use std::sync::Arc;
use std::time::Duration;

use slipway_sandbox_api::v1;
use tonic::Code;

use crate::copies::Copies;
use crate::task::Task;

/// The time between two looks.
const LOOK: Duration = Duration::from_millis(if cfg!(test) { 20 } else { 5000 });
/// The longest time that the daemon and the guest may take to put files into a container.
const PATIENCE: Duration = Duration::from_secs(60);

/// Keeps the copies of a container that runs up to date, until it ends.
pub fn serve(task: &Arc<Task>) {
    // Nobody panics with the lock held.
    let copies = task.copies.lock().ok().and_then(|mut copies| copies.take());
    let Some(copies) = copies.filter(|copies| !copies.is_empty()) else { return };
    let task = Arc::clone(task);
    tokio::spawn(async move {
        tokio::select! {
            () = refresh(&task, Arc::new(copies)) => {}
            _ = task.init.ended() => {}
            _ = task.pod_ended() => {}
        }
    });
}

async fn refresh(task: &Task, mut copies: Arc<Copies>) {
    let mut told = String::new();
    loop {
        tokio::time::sleep(LOOK).await;
        let now = Arc::clone(&copies);
        let read = tokio::task::spawn_blocking(move || now.read_again()).await;
        let put = match read.map_err(|error| error.to_string()).and_then(|read| read) {
            Ok(None) => continue,
            Ok(Some((now, request))) => put(task, request).await.map(|()| now),
            Err(reason) => Err(Refused::Now(reason)),
        };
        match put {
            Ok(now) => copies = Arc::new(now),
            Err(Refused::Always(reason)) => return warn(task, &reason),
            // Tried again with the next look, and said once.
            Err(Refused::Now(reason)) if reason != told => {
                warn(task, &reason);
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
