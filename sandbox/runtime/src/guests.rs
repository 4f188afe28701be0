//! The thread that communicates with guests and VMMs.
//!
//! This thread does all the work that the peer at an agent's port or a control channel can cause:
//! parsing frames, decoding replies, carrying output. The control thread, which serves the daemon's
//! clients, receives only checked values, one reply or one piece of output at a time. The guests
//! share this thread in turns: a connection reads a bounded number of bytes, then the next
//! connection has its turn ([`slipway_peer::tokio::InTurns`]).

use std::future::Future;
use std::io::Result;
use std::sync::Arc;

use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

/// The number of turns between two checks for events of the kernel and tasks from other threads.
const LOOK: u32 = 8;
/// The guests' thread. Clones share it; the thread ends with the last clone.
#[derive(Clone)]
pub struct Guests(Arc<Thread>);

struct Thread {
    runtime: Handle,
    /// The thread ends when this is dropped.
    _alive: oneshot::Sender<()>,
}

impl Guests {
    /// Starts the thread.
    ///
    /// # Errors
    /// The error of creating a thread or its epoll.
    pub fn start() -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            // New connections and calls are noticed after so many turns, however many guests flood.
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

    /// Returns the handle of the thread's runtime.
    pub fn runtime(&self) -> &Handle {
        &self.0.runtime
    }

    /// Spawns `task` on the guests' thread. The task runs on if the handle is dropped.
    pub fn spawn<T: Send + 'static>(
        &self,
        task: impl Future<Output = T> + Send + 'static,
    ) -> JoinHandle<T> {
        self.0.runtime.spawn(task)
    }

    /// Runs `task` on the guests' thread, and aborts it if the caller stops waiting. Returns `None`
    /// if the task panicked.
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
