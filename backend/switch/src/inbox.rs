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

#[derive(Default)]
struct Post {
    messages: Vec<Message>,
    /// Set by port: `messages` has a wake-up for it.
    woken: Vec<bool>,
    closed: bool,
}

impl Post {
    /// Notes a wake-up for `port`. Returns `false` if one is noted already.
    fn note_wake(&mut self, port: PortIndex) -> bool {
        let at = usize::from(port);
        let len = self.woken.len().max(at + 1);
        self.woken.resize(len, false);
        !std::mem::replace(&mut self.woken[at], true)
    }
}

impl Inbox {
    pub(crate) fn new() -> Self {
        Self { waiting: AtomicBool::new(false), post: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, Post> {
        // The vectors are changed in single calls, so a panic leaves them whole.
        self.post.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a message. The caller then wakes the switch. A further wake-up for a port is not kept:
    /// the one that is there comes after whatever this caller did before. So a peer that has its
    /// port woken again and again makes no inbox grow while the switch is slow.
    ///
    /// # Errors
    /// [`Stopped`] if the inbox is closed.
    pub(crate) fn push(&self, message: Message) -> Result<(), Stopped> {
        let mut post = self.lock();
        if post.closed {
            return Err(Stopped);
        }
        if let Message::Wake(port) = message
            && !post.note_wake(port)
        {
            return Ok(());
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
        post.woken.fill(false);
        std::mem::take(&mut post.messages)
    }

    /// Refuses further messages, and takes those that are there.
    pub(crate) fn close(&self) -> Vec<Message> {
        let mut post = self.lock();
        post.closed = true;
        std::mem::take(&mut post.messages)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wakes(messages: &[Message]) -> Vec<PortIndex> {
        let port = |message: &Message| match message {
            Message::Wake(port) => Some(*port),
            Message::Call(_) | Message::Stop => None,
        };
        messages.iter().filter_map(port).collect()
    }

    #[test]
    fn wake_ups_that_nobody_reads_are_one_for_each_port() {
        let inbox = Inbox::new();
        for _ in 0..3 {
            for port in [7, 0] {
                inbox.push(Message::Wake(port)).unwrap();
            }
            inbox.push(Message::Stop).unwrap();
        }
        let messages = inbox.take();
        assert_eq!((messages.len(), wakes(&messages)), (5, vec![7, 0]));
        // A wake-up that comes after they were read is kept.
        inbox.push(Message::Wake(7)).unwrap();
        assert!(inbox.has_messages());
        assert_eq!(wakes(&inbox.take()), [7]);
        assert!(inbox.take().is_empty());
    }
}
