//! The messages of other threads to a switch.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use slipway_reactor::Stopped;

use crate::PortIndex;
use crate::running::Owner;

/// A job that another thread gives to the switch's thread.
pub(crate) type OwnerTask = Box<dyn FnOnce(&mut Owner<'_, '_>) + Send>;

/// A message.
pub(crate) enum Message {
    /// Frames wait in the port.
    Wake(PortIndex),
    Call(OwnerTask),
    /// The switch is to end.
    Stop,
}

pub(crate) struct Inbox {
    /// Messages wait. Written under the lock only.
    waiting: AtomicBool,
    post: Mutex<Post>,
}

struct Post {
    messages: Vec<Message>,
    closed: bool,
}

impl Inbox {
    pub(crate) fn new() -> Self {
        let post = Post { messages: Vec::new(), closed: false };
        Self { waiting: AtomicBool::new(false), post: Mutex::new(post) }
    }

    fn lock(&self) -> MutexGuard<'_, Post> {
        // The vector is changed in single calls, so a panic leaves it whole.
        self.post.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a message. The caller then wakes the switch.
    ///
    /// # Errors
    /// [`Stopped`] if the inbox is closed.
    pub(crate) fn push(&self, message: Message) -> Result<(), Stopped> {
        let mut post = self.lock();
        if post.closed {
            return Err(Stopped);
        }
        post.messages.push(message);
        self.waiting.store(true, Ordering::Release);
        Ok(())
    }

    /// Returns whether there are messages, without the lock.
    pub(crate) fn has_messages(&self) -> bool {
        self.waiting.load(Ordering::Relaxed)
    }

    /// Takes all messages.
    pub(crate) fn take(&self) -> Vec<Message> {
        let mut post = self.lock();
        self.waiting.store(false, Ordering::Relaxed);
        std::mem::take(&mut post.messages)
    }

    /// Refuses further messages, and takes those that are there.
    pub(crate) fn close(&self) -> Vec<Message> {
        let mut post = self.lock();
        post.closed = true;
        std::mem::take(&mut post.messages)
    }
}
