//! A reactor's thread: its start and its end.

use std::sync::mpsc::{Receiver, channel, sync_channel};
use std::sync::{Arc, Mutex};
use std::task::Waker;

use crate::mailbox::{Mailbox, Message};
use crate::run::{Run, drive, pin};
use crate::{Handle, Settings, Task, watchdog};

/// A running reactor. Dropping it stops the thread and waits until the reactor's tasks are dropped;
/// it does not wait for tasks that were left behind because they sleep
/// ([`Context::is_alone`](crate::Context::is_alone)).
pub struct Reactor {
    handle: Handle,
    /// Channel that is closed when the reactor and its tasks are dropped. `None` if nothing waits
    /// for that.
    ended: Mutex<Option<Receiver<()>>>,
}

impl Reactor {
    /// Starts a reactor with no tasks (with `exit_when_empty` it still waits for its first one).
    ///
    /// # Errors
    /// If no descriptor or thread is left, the CPU cannot be used, or the kernel has no
    /// membarrier(2), which only reactors of several tasks need (those without `exit_when_empty`).
    pub fn spawn(settings: Settings) -> std::io::Result<Self> {
        if !settings.exit_when_empty {
            watchdog::start()?;
        }
        let mailbox = Arc::new(Mailbox::new()?);
        let handle = Handle { mailbox: Arc::clone(&mailbox) };
        let (end, ended) = channel();
        let (pinned, outcome) = sync_channel(1);
        std::thread::Builder::new().name(settings.name.clone()).spawn(move || {
            let settings = Arc::new(settings);
            let run = pin(settings.cpu).and_then(|()| Run::new(settings, mailbox, Some(end)));
            let run = match run {
                Ok(run) => run,
                Err(error) => return drop(pinned.send(Err(error))),
            };
            drop(pinned.send(Ok(())));
            drive(run);
        })?;
        outcome.recv().unwrap_or_else(|_| Err(std::io::ErrorKind::Other.into()))?;
        Ok(Self { handle, ended: Mutex::new(Some(ended)) })
    }

    /// Starts a reactor for `task` alone, which ends with the task. Returns the task's waker, too.
    /// Dropping the reactor ends the task and waits for it.
    ///
    /// # Errors
    /// As for [`Reactor::spawn`].
    pub fn of_one(mut settings: Settings, task: Box<dyn Task>) -> std::io::Result<(Self, Waker)> {
        settings.exit_when_empty = true;
        let reactor = Self::spawn(settings)?;
        let handle = reactor.handle();
        // Does not fail: the thread waits for its first task, so it has not ended.
        let task = handle.add(task).map_err(std::io::Error::other)?;
        Ok((reactor, handle.waker(task)))
    }

    /// Starts a reactor for `task` that ends with its last task; nothing waits for its thread.
    ///
    /// # Errors
    /// As for [`Reactor::spawn`]; the task is handed back.
    pub fn detached(
        mut settings: Settings,
        task: Box<dyn Task>,
    ) -> Result<Handle, (std::io::Error, Box<dyn Task>)> {
        settings.exit_when_empty = true;
        let reactor = match Self::spawn(settings) {
            Ok(reactor) => reactor,
            Err(error) => return Err((error, task)),
        };
        let handle = reactor.handle();
        // Cannot fail: the thread waits for its first task, so it has not ended.
        let _ = handle.add(task);
        reactor.take_ended();
        Ok(handle)
    }

    fn take_ended(&self) -> Option<Receiver<()>> {
        self.ended.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).take()
    }

    /// Returns a handle for other threads.
    pub fn handle(&self) -> Handle {
        self.handle.clone()
    }
}

impl Drop for Reactor {
    fn drop(&mut self) {
        if let Some(ended) = self.take_ended() {
            let _ = self.handle.mailbox.push(Message::Stop);
            // Nothing is ever sent: this waits until the other end is dropped.
            let _ = ended.recv();
        }
    }
}
