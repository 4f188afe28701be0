//! Messages from other threads to a thread of a controller.
//!
//! Nobody but its own thread touches a controller. Other threads post messages, and the thread
//! takes them at the start of its next poll. A message for a thread that is gone is dropped.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::task::Waker;

struct Shared<M> {
    /// `true` if the next poll is to look for messages or reports. A post sets it, and taking the
    /// messages clears it, under the lock.
    waiting: AtomicBool,
    post: Mutex<Post<M>>,
    /// The number of the next message.
    next: AtomicU64,
    /// The waker that has the receiver polled.
    waker: OnceLock<Waker>,
}

struct Post<M> {
    /// Messages with their numbers, in the order in which they were posted.
    messages: Vec<(u64, M)>,
    /// `true` if the receiver is gone.
    closed: bool,
}

impl<M> Shared<M> {
    fn lock(&self) -> MutexGuard<'_, Post<M>> {
        // The vector is changed by single calls, so a panic leaves it whole.
        self.post.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// The sending end of a mailbox. It is cheap to clone, and harmless after the receiver is gone.
pub(crate) struct Sender<M>(Arc<Shared<M>>);

impl<M> Clone for Sender<M> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<M> Sender<M> {
    /// Leaves a message for the receiver's next poll, and wakes the receiver if it can be woken.
    pub fn post(&self, message: M) {
        self.post_numbered(message);
    }

    /// Posts a message and returns its number, by which it can be taken back.
    pub fn post_numbered(&self, message: M) -> u64 {
        let number = self.0.next.fetch_add(1, Ordering::Relaxed);
        let mut post = self.0.lock();
        if !post.closed {
            post.messages.push((number, message));
            self.0.waiting.store(true, Ordering::Release);
        }
        drop(post);
        self.wake();
        number
    }

    /// Takes a message back. Returns `None` if the receiver has taken it, or is gone.
    pub fn take_back(&self, number: u64) -> Option<M> {
        let mut post = self.0.lock();
        let at = post.messages.iter().position(|(one, _)| *one == number)?;
        Some(post.messages.remove(at).1)
    }

    /// Makes the receiver look for messages elsewhere (an outbox) soon: in the next poll, or in the
    /// present one if it takes its messages just now and looks afterwards.
    pub fn look(&self) {
        self.0.waiting.store(true, Ordering::Release);
        self.wake();
    }

    /// Has the receiver polled, if a waker is known.
    pub fn wake(&self) {
        if let Some(waker) = self.0.waker.get() {
            waker.wake_by_ref();
        }
    }
}

/// The receiving end of a mailbox.
pub(crate) struct Inbox<M>(Arc<Shared<M>>);

impl<M> Default for Inbox<M> {
    fn default() -> Self {
        Self(Arc::new(Shared {
            waiting: AtomicBool::new(false),
            post: Mutex::new(Post { messages: Vec::new(), closed: false }),
            next: AtomicU64::new(0),
            waker: OnceLock::new(),
        }))
    }
}

impl<M> Inbox<M> {
    pub fn sender(&self) -> Sender<M> {
        Sender(Arc::clone(&self.0))
    }

    /// Returns whether there may be messages. A message posted at the same time is found by the
    /// next poll, which the poster requests after posting.
    pub fn has_post(&self) -> bool {
        self.0.waiting.load(Ordering::Relaxed)
    }

    /// Makes posted messages wake the receiver from now on.
    pub fn wake_by(&self, waker: Waker) {
        let _ = self.0.waker.set(waker);
    }

    /// Makes the next poll look for messages, whether there are any or not.
    pub fn look_again(&self) {
        self.0.waiting.store(true, Ordering::Relaxed);
    }

    /// Takes the messages that wait, in the order in which they were posted.
    pub fn take(&self) -> impl Iterator<Item = M> + use<M> {
        let mut post = self.0.lock();
        self.0.waiting.store(false, Ordering::Relaxed);
        std::mem::take(&mut post.messages).into_iter().map(|(_, message)| message)
    }
}

impl<M> Drop for Inbox<M> {
    fn drop(&mut self) {
        let messages = {
            let mut post = self.0.lock();
            post.closed = true;
            std::mem::take(&mut post.messages)
        };
        // Outside the lock: dropping a message may make its poster post again.
        drop(messages);
    }
}
