//! Threads for work on the files of templates.

use crate::{Error, Result};

/// Runs work that takes a while on a thread of its own.
pub(crate) async fn apart<T: Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let done = tokio::task::spawn_blocking(work).await;
    // The work panicked, or the daemon is about to end.
    done.unwrap_or(Err(Error::Closed))
}
