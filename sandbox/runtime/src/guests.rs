//! The thread that guests and VMMs are spoken to from.
//!
//! Whatever the other end of an agent's port or of a control channel may do, this thread does the work that
//! it causes: taking frames apart, decoding replies, carrying output. The control thread, which serves the
//! daemon's clients, is handed values that were checked, one reply or one piece of output at a time. The
//! guests share this thread in turns: a connection reads a bounded number of bytes, then the next one's turn
//! comes ([`slipway_peer::tokio::InTurns`]).

use std::future::Future;
use std::io::Result;
use std::sync::Arc;

use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

/// Turns between two looks at what the kernel and other threads have for this one.
const LOOK: u32 = 8;
/// The guests' thread. Clones share it; it ends with the last one.
#[derive(Clone)]
pub struct Guests(Arc<Thread>);

struct Thread {
    runtime: Handle,
    /// Its end is the thread's.
    _alive: oneshot::Sender<()>,
}

impl Guests {
    /// Starts the thread.
    ///
    /// # Errors
    /// What making a thread or its epoll says.
    pub fn start() -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            // New connections and calls are looked for after so many turns, however many guests flood.
            .event_interval(LOOK)
            .global_queue_interval(LOOK)
            .build()?;
        let (alive, ended) = oneshot::channel();
        let thread = Thread { runtime: runtime.handle().clone(), _alive: alive };
        std::thread::Builder::new().name("guests".to_owned()).spawn(move || {
            let _ = runtime.block_on(ended);
            runtime.shutdown_background();
        })?;
        Ok(Self(Arc::new(thread)))
    }

    /// The runtime of the thread.
    pub fn runtime(&self) -> &Handle {
        &self.0.runtime
    }

    /// Has the guests' thread run `task`, whether or not anybody waits for it.
    pub fn spawn<T: Send + 'static>(
        &self,
        task: impl Future<Output = T> + Send + 'static,
    ) -> JoinHandle<T> {
        self.0.runtime.spawn(task)
    }

    /// Has the guests' thread run `task`, as long as the caller waits for it. Returns `None` if it panicked.
    pub async fn run<T: Send + 'static>(
        &self,
        task: impl Future<Output = T> + Send + 'static,
    ) -> Option<T> {
        let mut task = AbortOnDrop(self.spawn(task));
        (&mut task.0).await.ok()
    }
}

struct AbortOnDrop<T>(JoinHandle<T>);

impl<T> Drop for AbortOnDrop<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_task_ends_with_its_caller() {
        let guests = Guests::start().unwrap();
        let (alive, ended) = oneshot::channel::<()>();
        let task = async move {
            let _alive = alive;
            std::future::pending::<()>().await;
        };
        let run = guests.run(task);
        drop(tokio::time::timeout(std::time::Duration::from_millis(1), run).await);
        assert!(ended.await.is_err());
        assert_eq!(guests.run(async { 7 }).await, Some(7));
    }
}
