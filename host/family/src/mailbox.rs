//! Messages between an engine's thread and a carrier: a channel each way. The carrier is woken as a
//! task of its reactor, the engine's thread by an eventfd.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::task::Waker;

use rustix::event::{EventfdFlags, eventfd};

use crate::Family;

/// A message to a carrier.
pub(crate) enum Order<C> {
    /// Adds a family.
    Join(u32, Family),
    /// Removes a family.
    Part(u32),
    /// A command of the carrier's own.
    Obey(C),
}

/// The sender of a carrier's commands. Does nothing once the carrier has ended.
pub struct CommandSender<C> {
    orders: Sender<Order<C>>,
    wake: Waker,
}

// A derive would ask the same of the commands.
impl<C> Clone for CommandSender<C> {
    fn clone(&self) -> Self {
        Self { orders: self.orders.clone(), wake: self.wake.clone() }
    }
}

impl<C> CommandSender<C> {
    /// Makes a sender to the carrier that `wake` wakes and that has the channel's other end.
    pub(crate) fn new(orders: Sender<Order<C>>, wake: Waker) -> Self {
        Self { orders, wake }
    }

    /// Sends a command and wakes the carrier.
    pub fn send(&self, command: C) {
        self.order(Order::Obey(command));
    }

    pub(crate) fn order(&self, order: Order<C>) {
        // The wake comes after the command: the step that it brings takes the command.
        if self.orders.send(order).is_ok() {
            self.wake.wake_by_ref();
        }
    }

    /// Returns a waker of the carrier.
    pub(crate) fn waker(&self) -> Waker {
        self.wake.clone()
    }
}

/// A carrier's end of its news.
pub struct NewsSender<N> {
    news: Sender<N>,
    /// The eventfd that wakes the engine's thread.
    notice: Arc<OwnedFd>,
    /// Set while there is news for which the engine's thread was not woken.
    unannounced: bool,
}

impl<N> NewsSender<N> {
    /// Sends news. The engine's thread is woken by [`NewsSender::announce`].
    pub fn send(&mut self, news: N) {
        self.unannounced |= self.news.send(news).is_ok();
    }

    /// Wakes the engine's thread if there was news since the last call.
    pub fn announce(&mut self) {
        if std::mem::take(&mut self.unannounced) {
            crate::wake(&self.notice);
        }
    }
}

/// The engine's thread's end of a carrier's news.
pub struct NewsReceiver<N> {
    news: Receiver<N>,
    notice: Arc<OwnedFd>,
}

impl<N> NewsReceiver<N> {
    /// Returns an eventfd that is readable when there is news.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.notice.as_fd()
    }

    /// Takes all news. The eventfd does not become readable again for news that the caller leaves
    /// in the iterator.
    pub fn take(&self) -> impl Iterator<Item = N> + '_ {
        // Lowered before the look, or news that comes meanwhile would wake nobody.
        slipway_peer::eventfd::drain(self.notice.as_fd());
        self.news.try_iter()
    }

    /// Returns whether the carrier's end is dropped, so that no more news comes.
    pub fn is_over(&self) -> bool {
        Arc::strong_count(&self.notice) == 1
    }
}

/// Makes the two ends of a carrier's news.
///
/// # Errors
/// No descriptors are left.
pub fn news<N>() -> std::io::Result<(NewsSender<N>, NewsReceiver<N>)> {
    let notice = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
    let (sender, receiver) = channel();
    let sender = NewsSender { news: sender, notice: notice.clone(), unannounced: false };
    Ok((sender, NewsReceiver { news: receiver, notice }))
}
