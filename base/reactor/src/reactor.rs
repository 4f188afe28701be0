//! The thread.

use std::sync::mpsc::{Receiver, channel, sync_channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::mailbox::{Mailbox, Message};
use crate::run::{Run, Worker};
use crate::seat::Seat;
use crate::{Handle, Task, watchdog};

/// How a reactor behaves.
#[derive(Clone)]
pub struct Settings {
    /// The thread's name; Linux shows the first 15 bytes.
    pub name: String,
    /// The CPU that the thread is pinned to, if it is.
    pub cpu: Option<usize>,
    /// How long, at most, the thread looks for events without sleeping after the last work; an
    /// eighth of it at least. In between it follows how long the thread slept until work came.
    /// Zero: it sleeps at once. Longer is quicker (an idle CPU is slow to wake) and burns more of
    /// the CPU.
    pub poll_budget: Duration,
    /// Ends when its last task has ended, instead of waiting for more.
    pub exit_when_empty: bool,
    /// Told of every task that was dropped because it panicked or could not start.
    pub on_panic: Arc<dyn Fn(&str) + Send + Sync>,
    /// Told, on another thread, of every task that slept in a step and was left behind with a
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

/// A running reactor. Dropping it ends the thread, drops its tasks and waits for that; it does not
/// wait for tasks that were left behind because they sleep
/// ([`Context::is_alone`](crate::Context::is_alone)).
pub struct Reactor {
    handle: Handle,
    /// Closed when the reactor and its tasks are gone. `None`: nobody waits for that.
    ended: Mutex<Option<Receiver<()>>>,
}

impl Reactor {
    /// Starts a thread with no tasks (with `exit_when_empty` it still waits for its first one).
    ///
    /// # Errors
    /// No descriptors or threads left, a CPU that cannot be used, or a kernel without
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

    /// Starts a thread that owns `task` and ends with it; nobody waits for the thread.
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
        // The thread waits for its first task, so it cannot have stopped.
        let _ = handle.add(task);
        reactor.take_ended();
        Ok(handle)
    }

    fn take_ended(&self) -> Option<Receiver<()>> {
        self.ended.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).take()
    }

    /// How other threads reach it.
    pub fn handle(&self) -> Handle {
        self.handle.clone()
    }
}

impl Drop for Reactor {
    fn drop(&mut self) {
        if let Some(ended) = self.take_ended() {
            let _ = self.handle.mailbox.push(Message::Stop);
            // Nothing is ever sent: this waits for the other end to be dropped.
            let _ = ended.recv();
        }
    }
}

/// Runs a reactor on this thread until it ends, or until it goes on elsewhere because a task sleeps
/// here.
pub(crate) fn drive(run: Box<Run>) {
    // One that has a single task needs no seat: nothing else waits while that sleeps.
    let seat = (!run.is_for_one_task()).then(Seat::taken);
    if let Some(seat) = &seat {
        watchdog::watch(seat);
    }
    Worker::new(&run, seat).run(run);
}

/// Pins this thread to `cpu`, if there is one.
pub(crate) fn pin(cpu: Option<usize>) -> std::io::Result<()> {
    let Some(cpu) = cpu else { return Ok(()) };
    if cpu >= rustix::thread::CpuSet::MAX_CPU {
        return Err(std::io::ErrorKind::InvalidInput.into());
    }
    let mut set = rustix::thread::CpuSet::new();
    set.set(cpu);
    Ok(rustix::thread::sched_setaffinity(None, &set)?)
}
