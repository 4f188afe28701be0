//! Threads for work on the files of templates.

use std::io;
use std::sync::{Arc, Weak};

use crate::{Error, Result};

/// Tells work on a thread of its own whether somebody still waits for its outcome.
pub(super) struct Waited(Weak<()>);

impl Waited {
    /// Returns the mark that the waiting side drops when it stops waiting, and the work's side.
    pub(super) fn new() -> (Arc<()>, Self) {
        let waits = Arc::new(());
        let waited = Self(Arc::downgrade(&waits));
        (waits, waited)
    }

    /// Checks that somebody still waits.
    ///
    /// # Errors
    /// Nobody does: the work is to end.
    pub(super) fn check(&self) -> io::Result<()> {
        match self.0.strong_count() {
            0 => Err(io::Error::other("nobody waits for it any more")),
            _ => Ok(()),
        }
    }
}

/// Runs work that takes a while on a thread of its own.
pub(crate) async fn apart<T: Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let done = tokio::task::spawn_blocking(work).await;
    // The work panicked, or the daemon is about to end.
    done.unwrap_or(Err(Error::Closed))
}
