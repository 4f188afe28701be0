//! Reads of the host's files for new containers, whose file systems may never answer.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;
use tonic::Code;

use crate::ttrpc::Failure;

/// The longest time for reading the host's files that a container gets copies of.
const PATIENCE: Duration = Duration::from_secs(60);

/// The most reads of the host's files that a shim has at work for new containers, those that hang
/// included. It is more than a pod has containers that are made at once.
pub const MOST_READS: usize = 64;

/// Runs work on files of the host, whose file system may never answer: the thread hangs then, and
/// the caller goes on. The thread has one of `places` as long as it lives.
///
/// # Errors
/// [`Code::ResourceExhausted`] if no place is free; [`Code::DeadlineExceeded`] if the work takes
/// longer than a minute.
pub async fn on_a_thread<T: Send + 'static>(
    places: &Arc<Semaphore>,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Failure> {
    within(PATIENCE, places, work).await
}

async fn within<T: Send + 'static>(
    patience: Duration,
    places: &Arc<Semaphore>,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Failure> {
    let Ok(place) = Arc::clone(places).try_acquire_owned() else {
        let message = "too many reads of files that containers of this pod mount hang: a file \
                       system of the host does not answer; unmount it, or make the pod anew";
        return Err(Failure::new(Code::ResourceExhausted, message));
    };
    let work = move || {
        let done = work();
        drop(place);
        done
    };
    match tokio::time::timeout(patience, tokio::task::spawn_blocking(work)).await {
        Ok(done) => done.map_err(|error| Failure::from(error.to_string())),
        Err(_) => {
            let message = "the file system of a file that the container mounts does not answer";
            Err(Failure::new(Code::DeadlineExceeded, message))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_file_system_that_does_not_answer_fails_the_call() {
        let places = Arc::new(Semaphore::new(1));
        assert_eq!(on_a_thread(&places, || 7).await, Ok(7));
        let (held, hangs) = std::sync::mpsc::channel::<()>();
        let failed = within(Duration::from_millis(1), &places, move || hangs.recv()).await;
        assert_eq!(failed.unwrap_err().code, Code::DeadlineExceeded);
        // The thread hangs on, and no further one is begun beside it.
        let failed = on_a_thread(&places, || 7).await.unwrap_err();
        assert_eq!(failed.code, Code::ResourceExhausted);
        assert!(failed.message.contains("does not answer") && !failed.message.contains('\n'));
        drop(held);
        drop(places.acquire().await.unwrap());
        assert_eq!(on_a_thread(&places, || 7).await, Ok(7));
    }
}
