//! A reactor's thread: its settings, start and end.

use std::sync::mpsc::{Receiver, channel, sync_channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::mailbox::{Mailbox, Message};
use crate::run::{Run, Worker};
use crate::seat::Seat;
use crate::{Handle, Task, watchdog};

/// Settings of a reactor.
#[derive(Clone)]
pub struct Settings {
    /// The thread's name; Linux shows the first 15 bytes.
    pub name: String,
    /// CPU that the thread is pinned to, if any.
    pub cpu: Option<usize>,
    /// Longest time for which the thread polls for events after the last work before it sleeps; the
    /// shortest is an eighth of it. In between the time follows how long the thread slept until
    /// work came. With zero the thread sleeps at once. A longer time lowers latency (an idle CPU is
    /// slow to wake) and burns more CPU.
    pub poll_budget: Duration,
    /// Makes the reactor end with its last task instead of waiting for more.
    pub exit_when_empty: bool,
    /// Called with the reason for every task that was dropped because it panicked or could not
    /// start.
    pub on_panic: Arc<dyn Fn(&str) + Send + Sync>,
    /// Called, on another thread, for every task that slept in a step and was left behind with a
    /// thread of its own.
    pub on_stall: Arc<dyn Fn(&str) + Send + Sync>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            name: "reactor".into(),
            cpu: None,
            poll_budget: Duration::from_micros(200),
            exit_when_empty: false,
            on_panic: Arc::new(|what| eprintln!("reactor: a task was dropped: {what}")),
            on_stall: Arc::new(|what| eprintln!("reactor: {what}")),
        }
    }
}

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
    /// membarrier(2).
    pub fn spawn(settings: Settings) -> std::io::Result<Self> {
        watchdog::start()?;
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

/// Runs a reactor on this thread until it ends, or until it goes on in another thread because a
/// task sleeps in this one.
pub(crate) fn drive(run: Box<Run>) {
    // A reactor with a single task needs no seat: nothing else waits while that task sleeps.
    let seat = (!run.is_for_one_task()).then(Seat::taken);
    if let Some(seat) = &seat {
        watchdog::watch(seat);
    }
    Worker::new(&run, seat).run(run);
}

/// Pins this thread to `cpu`, if given.
pub(crate) fn pin(cpu: Option<usize>) -> std::io::Result<()> {
    let Some(cpu) = cpu else { return Ok(()) };
    if cpu >= rustix::thread::CpuSet::MAX_CPU {
        return Err(std::io::ErrorKind::InvalidInput.into());
    }
    let mut set = rustix::thread::CpuSet::new();
    set.set(cpu);
    Ok(rustix::thread::sched_setaffinity(None, &set)?)
}
