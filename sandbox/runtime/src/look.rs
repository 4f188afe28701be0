//! Looks at the host's files that are to be shared, or that snapshots refer to.
//!
//! A file system of the network, or of a program, may never answer. So each look has a thread of
//! its own, and a deadline. A thread that is left behind counts against those for whom it looks,
//! until it returns.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Semaphore, oneshot};

use crate::{Error, Result};

/// The time that a file system may take.
const DEADLINE: Duration = Duration::from_secs(30);

/// The looks that may be under way at a time.
#[derive(Clone, Debug)]
pub struct Looks {
    free: Arc<Semaphore>,
    deadline: Duration,
}

impl Looks {
    /// Allows `most` looks at a time.
    pub fn new(most: usize) -> Self {
        Self { free: Arc::new(Semaphore::new(most)), deadline: DEADLINE }
    }

    /// Runs `look`, which accesses `path`, on a thread of its own.
    ///
    /// # Errors
    /// [`Error::File`]: the file system does not answer in time, too many earlier looks have not
    /// returned, or no thread is left.
    pub async fn run<T: Send + 'static>(
        &self,
        path: &Path,
        look: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T> {
        let failed = |error| Error::file("cannot look at", path)(error);
        let Ok(permit) = Arc::clone(&self.free).try_acquire_owned() else {
            let busy = "file systems of the host have not answered for earlier ones";
            return Err(failed(io::Error::new(io::ErrorKind::ResourceBusy, busy)));
        };
        let (done, outcome) = oneshot::channel();
        let run = move || {
            let outcome = look();
            drop(permit);
            // The caller may have given up.
            drop(done.send(outcome));
        };
        if let Err(error) = std::thread::Builder::new().name("look".into()).spawn(run) {
            return Err(failed(error));
        }
        match tokio::time::timeout(self.deadline, outcome).await {
            Ok(Ok(outcome)) => Ok(outcome),
            Ok(Err(_)) => Err(failed(io::Error::other("the thread for it has ended"))),
            Err(_) => {
                let late = "its file system does not answer";
                Err(failed(io::Error::new(io::ErrorKind::TimedOut, late)))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn looks_that_do_not_return_are_given_up_and_counted() {
        let looks = Looks::new(2);
        let impatient = Looks { deadline: Duration::from_millis(1), ..looks.clone() };
        assert_eq!(looks.run(Path::new("/a"), || 7).await.unwrap(), 7);
        let (release, held) = std::sync::mpsc::channel::<()>();
        let held = Arc::new(std::sync::Mutex::new(held));
        for path in ["/b", "/c"] {
            let held = Arc::clone(&held);
            let hang = move || held.lock().unwrap().recv().is_err();
            let late = impatient.run(Path::new(path), hang).await.unwrap_err().to_string();
            assert!(late.contains(path) && late.contains("does not answer"), "{late}");
        }
        let busy = looks.run(Path::new("/d"), || ()).await.unwrap_err().to_string();
        assert!(busy.contains("earlier ones"), "{busy}");
        drop(release);
        while looks.free.available_permits() < 2 {
            std::thread::yield_now();
        }
        looks.run(Path::new("/d"), || ()).await.unwrap();
    }
}
