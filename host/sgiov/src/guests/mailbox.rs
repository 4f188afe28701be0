//! Messages between the engine's thread and the carrier of guests: a channel each way. The carrier
//! is woken as a task of its reactor, the engine's thread by an eventfd.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::task::Waker;

use rustix::event::{EventfdFlags, eventfd};
use slipway_family::Family;
use slipway_sgiov_function::Peer;
use slipway_sgiov_spec::Address;
use slipway_vfio_user::Control;

use super::claims::Claims;
use crate::policy::Policy;
use crate::remote::{Event, Line};

/// A command to the carrier.
pub enum Command {
    Add {
        guest: u32,
        peer: Peer,
        control: Control,
    },
    Remove(u32),
    /// A family whose signals the carrier takes.
    Family(u32, Family),
    /// A family whose signals the links' carrier takes.
    ClaimedFamily(u32, Arc<Claims>),
    /// An entry of a family of [`Command::ClaimedFamily`] has signalled. Without an entry, any
    /// entry of the family may have.
    Signalled(u32, Option<u32>),
    /// The signals of a family of [`Command::ClaimedFamily`] are invalid.
    Spoiled(u32),
    FamilyEnded(u32),
    Policy(Policy),
    /// A program of this node connects to a guest. `guest` is `None` if no guest listens at `to`
    /// any more.
    Connect {
        connection: u32,
        guest: Option<u32>,
        from: Address,
        to: Address,
        line: Line,
    },
    /// The engine's answer to [`Event::FromGuest`].
    Answer {
        incoming: u32,
        answer: Result<(u32, Line), u32>,
    },
    /// A program of this node has closed its connection.
    Closed(u32),
}

/// A message of the carrier to the engine's thread.
pub enum News {
    Event(Event),
    /// A guest's VMM has gone.
    Gone(u32),
}

/// The sender of commands.
#[derive(Clone)]
pub struct CommandSender {
    commands: Sender<Command>,
    wake: Waker,
}

impl CommandSender {
    /// Makes a sender to the carrier that `wake` wakes and that has the channel's other end.
    pub fn new(commands: Sender<Command>, wake: Waker) -> Self {
        Self { commands, wake }
    }

    /// Sends a command and wakes the carrier. Does nothing once the carrier has ended.
    pub fn send(&self, command: Command) {
        if self.commands.send(command).is_ok() {
            self.wake.wake_by_ref();
        }
    }

    /// Returns a waker of the carrier.
    pub fn waker(&self) -> Waker {
        self.wake.clone()
    }
}

/// The carrier's end of the news.
pub struct NewsSender {
    news: Sender<News>,
    /// The eventfd that wakes the engine's thread.
    notice: Arc<OwnedFd>,
    /// Set while there is news for which the engine's thread was not woken.
    unannounced: bool,
}

impl NewsSender {
    /// Sends news. The engine's thread is woken by [`NewsSender::announce`].
    pub fn send(&mut self, news: News) {
        self.unannounced |= self.news.send(news).is_ok();
    }

    /// Wakes the engine's thread if there was news since the last call.
    pub fn announce(&mut self) {
        if std::mem::take(&mut self.unannounced) {
            slipway_family::wake(&self.notice);
        }
    }
}

/// The engine's thread's end of the news.
pub struct NewsReceiver {
    news: Receiver<News>,
    notice: Arc<OwnedFd>,
}

impl NewsReceiver {
    /// Returns an eventfd that is readable when there is news.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.notice.as_fd()
    }

    /// Takes all news.
    pub fn take(&self) -> Vec<News> {
        // Lowered before the look, or news that comes meanwhile would wake nobody.
        slipway_peer::eventfd::drain(self.notice.as_fd());
        self.news.try_iter().collect()
    }
}

/// Makes the two ends of the news.
///
/// # Errors
/// No descriptors are left.
pub fn news() -> std::io::Result<(NewsSender, NewsReceiver)> {
    let notice = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
    let (sender, receiver) = channel();
    let sender = NewsSender { news: sender, notice: notice.clone(), unannounced: false };
    Ok((sender, NewsReceiver { news: receiver, notice }))
}
