//! Work that may take its time, each piece on a thread of its own, whose outcomes the event loop
//! takes.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::mpsc::{Receiver, Sender, channel};

use rustix::event::EventfdFlags;

/// Threads whose outcomes are of type `T`.
pub struct WorkerThreads<T> {
    sender: Sender<T>,
    receiver: Receiver<T>,
    /// Counts outcomes.
    ended: OwnedFd,
}

impl<T: Send + 'static> WorkerThreads<T> {
    /// Makes a place for outcomes.
    ///
    /// # Errors
    /// The reason in one line.
    pub fn new() -> Result<Self, String> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let ended = rustix::event::eventfd(0, flags).map_err(|e| format!("eventfd: {e}"))?;
        let (sender, receiver) = channel();
        Ok(Self { sender, receiver, ended })
    }

    /// Returns the descriptor that becomes readable when there is an outcome.
    pub fn ended(&self) -> BorrowedFd<'_> {
        self.ended.as_fd()
    }

    /// Starts a thread for `work`, which may end without an outcome.
    ///
    /// # Errors
    /// The reason why there is no thread.
    pub fn spawn(
        &self,
        name: &str,
        work: impl FnOnce() -> Option<T> + Send + 'static,
    ) -> Result<(), String> {
        let ended = self.ended.try_clone().map_err(|error| error.to_string())?;
        let sender = self.sender.clone();
        let run = move || {
            if let Some(outcome) = work() {
                // The event loop has the other end as long as the process lives.
                let _ = sender.send(outcome);
                let _ = rustix::io::write(&ended, &1u64.to_ne_bytes());
            }
        };
        let thread = std::thread::Builder::new().name(name.into()).spawn(run);
        thread.map(drop).map_err(|error| format!("a thread cannot be started: {error}"))
    }

    /// Takes one outcome, if there is any. The descriptor tells of others only once all have been
    /// taken.
    pub fn take_one(&self) -> Option<T> {
        // Before the look: an outcome that comes after it makes the descriptor readable again.
        let _ = rustix::io::read(&self.ended, &mut [0; 8]);
        self.receiver.try_recv().ok()
    }

    /// Takes the outcomes that there are.
    pub fn take(&self) -> Vec<T> {
        std::iter::from_fn(|| self.take_one()).collect()
    }
}
