//! Messages of other threads to a reactor. The argument that no wake-up is lost is in the crate's
//! head.

use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::outside::{Arc, Bell, Mutex, MutexGuard};
use crate::{Task, TaskId};

/// Error: the reactor has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the reactor has ended")]
pub struct Stopped;

pub(crate) enum Message {
    Add(TaskId, Box<dyn Task>),
    Wake(TaskId),
    Stop,
}

pub(crate) struct Mailbox {
    queue: Mutex<Queue>,
    bell: Bell,
    next_id: AtomicU64,
    /// Time of rounds with work, in ns; written by the reactor's thread alone.
    busy_ns: AtomicU64,
}

#[derive(Default)]
struct Queue {
    messages: Vec<Message>,
    /// The tasks that `messages` has a wake of.
    woken: HashSet<TaskId>,
    closed: bool,
}

impl Queue {
    /// Takes all messages. Wakes that come later are kept again.
    fn take(&mut self) -> Vec<Message> {
        self.woken.clear();
        std::mem::take(&mut self.messages)
    }
}

impl Mailbox {
    pub(crate) fn new() -> std::io::Result<Self> {
        let queue = Mutex::new(Queue::default());
        let (next_id, busy_ns) = (AtomicU64::new(1), AtomicU64::new(0));
        Ok(Self { queue, bell: Bell::new()?, next_id, busy_ns })
    }

    pub(crate) fn bell(&self) -> &Bell {
        &self.bell
    }

    /// Sends a message. A wake of a task that has one here already is not kept: that one is still
    /// to be taken, and the step that it brings comes after whatever this sender did before. So the
    /// queue has at most one wake of each task, however slow the reactor and however often parties
    /// wake its tasks.
    pub(crate) fn push(&self, message: Message) -> Result<(), Stopped> {
        let mut queue = self.lock();
        if queue.closed {
            return Err(Stopped);
        }
        if let Message::Wake(id) = &message
            && !queue.woken.insert(*id)
        {
            return Ok(());
        }
        let was_empty = queue.messages.is_empty();
        queue.messages.push(message);
        drop(queue);
        if was_empty {
            self.bell.ring();
        }
        Ok(())
    }

    /// Silences the bell, then takes all messages: the order matters, see the crate's head.
    pub(crate) fn take(&self) -> Vec<Message> {
        self.bell.silence();
        self.lock().take()
    }

    /// Refuses messages from now on. Returns those that are still unread.
    pub(crate) fn close(&self) -> Vec<Message> {
        let mut queue = self.lock();
        queue.closed = true;
        queue.take()
    }

    /// Refuses messages from now on if none is waiting. Returns whether messages are refused.
    pub(crate) fn close_if_empty(&self) -> bool {
        let mut queue = self.lock();
        queue.closed |= queue.messages.is_empty();
        queue.closed
    }

    /// Returns whether messages are refused.
    pub(crate) fn is_closed(&self) -> bool {
        self.lock().closed
    }

    /// Adds `time` of the reactor's thread with work.
    pub(crate) fn worked(&self, time: Duration) {
        let time = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let before = self.busy_ns.load(Ordering::Relaxed);
        self.busy_ns.store(before.wrapping_add(time), Ordering::Relaxed);
    }

    fn next_id(&self) -> TaskId {
        TaskId(self.next_id.fetch_add(1, Ordering::Relaxed))
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        // A panic while the lock is held cannot leave the vector half-changed.
        self.queue.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// A reactor as other threads see it. Cheap to clone; harmless after the reactor has ended.
#[derive(Clone)]
pub struct Handle {
    pub(crate) mailbox: Arc<Mailbox>,
}

impl Handle {
    /// Gives a task to the reactor; it starts soon.
    ///
    /// # Errors
    /// [`Stopped`]; the task is dropped here.
    pub fn add(&self, task: Box<dyn Task>) -> Result<TaskId, Stopped> {
        let id = self.mailbox.next_id();
        self.mailbox.push(Message::Add(id, task))?;
        Ok(id)
    }

    /// Returns the total time of rounds in which any task had work since the reactor started. A
    /// step that returns `Idle`, `Sweep` or `Looking` does not count as work. The difference of two
    /// readings tells how busy the thread was in between.
    pub fn busy(&self) -> Duration {
        Duration::from_nanos(self.mailbox.busy_ns.load(Ordering::Relaxed))
    }

    /// Has the reactor poll a task. Does nothing if the task has ended.
    ///
    /// # Errors
    /// [`Stopped`].
    pub fn wake(&self, task: TaskId) -> Result<(), Stopped> {
        self.mailbox.push(Message::Wake(task))
    }
}
