//! The thread.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use crate::mailbox::{Mailbox, Message};
use crate::run::Run;
use crate::{Handle, Task};

/// How a reactor behaves.
#[derive(Clone)]
pub struct Settings {
    /// The thread's name; Linux shows the first 15 bytes.
    pub name: String,
    /// The CPU that the thread is pinned to, if it is.
    pub cpu: Option<usize>,
    /// How long, at most, the thread looks for events without sleeping after the last work; an
    /// eighth of it at least. In between it follows how long the thread slept until work came.
    /// Zero: it sleeps at once. Longer is quicker (an idle CPU is slow to wake) and burns more of the
    /// CPU.
    pub poll_budget: Duration,
    /// Ends when its last task has ended, instead of waiting for more.
    pub exit_when_empty: bool,
    /// Told of every task that was dropped because it panicked or could not start.
    pub on_panic: Arc<dyn Fn(&str) + Send + Sync>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            name: "reactor".into(),
            cpu: None,
            poll_budget: Duration::from_micros(200),
            exit_when_empty: false,
            on_panic: Arc::new(|what| eprintln!("reactor: a task was dropped: {what}")),
        }
    }
}

/// A running reactor. Dropping it stops the thread, drops its tasks and waits for that.
pub struct Reactor {
    handle: Handle,
    thread: Option<JoinHandle<()>>,
}

impl Reactor {
    /// Starts a thread with no tasks (with `exit_when_empty` it still waits for its first one).
    ///
    /// # Errors
    /// No descriptors or threads left, or a CPU that cannot be used.
    pub fn spawn(settings: Settings) -> std::io::Result<Self> {
        let mailbox = Arc::new(Mailbox::new()?);
        let handle = Handle { mailbox: Arc::clone(&mailbox) };
        let (pinned, outcome) = std::sync::mpsc::sync_channel(1);
        let thread = std::thread::Builder::new().name(settings.name.clone()).spawn(move || {
            let run = pin(settings.cpu).and_then(|()| Run::new(settings, mailbox));
            let run = match run {
                Ok(run) => run,
                Err(error) => return drop(pinned.send(Err(error))),
            };
            drop(pinned.send(Ok(())));
            run.run();
        })?;
        outcome.recv().unwrap_or_else(|_| Err(std::io::ErrorKind::Other.into()))?;
        Ok(Self { handle, thread: Some(thread) })
    }

    /// Starts a thread that owns `task` and ends with it; nobody waits for the thread.
    ///
    /// # Errors
    /// As for [`Reactor::spawn`]; the task is handed back.
    pub fn detached(
        mut settings: Settings,
        task: Box<dyn Task>,
    ) -> Result<Handle, (std::io::Error, Box<dyn Task>)> {
        settings.exit_when_empty = true;
        let mut reactor = match Self::spawn(settings) {
            Ok(reactor) => reactor,
            Err(error) => return Err((error, task)),
        };
        let handle = reactor.handle();
        // The thread waits for its first task, so it cannot have stopped.
        let _ = handle.add(task);
        reactor.thread = None;
        Ok(handle)
    }

    /// How other threads reach it.
    pub fn handle(&self) -> Handle {
        self.handle.clone()
    }
}

impl Drop for Reactor {
    fn drop(&mut self) {
        if let Some(thread) = self.thread.take() {
            let _ = self.handle.mailbox.push(Message::Stop);
            // A panic there was reported; there is nothing to add here.
            let _ = thread.join();
        }
    }
}

fn pin(cpu: Option<usize>) -> std::io::Result<()> {
    let Some(cpu) = cpu else { return Ok(()) };
    if cpu >= rustix::thread::CpuSet::MAX_CPU {
        return Err(std::io::ErrorKind::InvalidInput.into());
    }
    let mut set = rustix::thread::CpuSet::new();
    set.set(cpu);
    Ok(rustix::thread::sched_setaffinity(None, &set)?)
}
