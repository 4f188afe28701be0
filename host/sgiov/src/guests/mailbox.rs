//! Messages between the engine's thread and the carrying thread: a channel each way, and an eventfd
//! that wakes the receiver.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::task::{Wake, Waker};

use rustix::event::{EventfdFlags, eventfd};
use slipway_family::Family;
use slipway_sgiov_function::Peer;
use slipway_sgiov_spec::Address;
use slipway_vfio_user::Control;

use super::claims::Claims;
use crate::policy::Policy;
use crate::remote::{Event, Line};

/// A command to the carrying thread.
pub enum Command {
    Add {
        guest: u32,
        peer: Peer,
        control: Control,
    },
    Remove(u32),
    /// A family whose signals the carrying thread takes.
    Family(u32, Family),
    /// A family whose signals the links' thread takes.
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
    Stop,
}

/// A message of the carrying thread to the engine's thread.
pub enum News {
    Event(Event),
    /// A guest's VMM has gone.
    Gone(u32),
}

/// An eventfd that wakes a thread.
pub struct Bell(OwnedFd);

impl Bell {
    fn new() -> std::io::Result<Arc<Self>> {
        Ok(Arc::new(Self(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)))
    }

    /// Returns the eventfd, which is readable after a wake-up.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    /// Makes the eventfd unreadable until the next wake-up. Returns whether it is.
    pub fn lower(&self) -> bool {
        slipway_peer::eventfd::drain(self.0.as_fd())
    }
}

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        slipway_family::wake(&self.0);
    }

    fn wake_by_ref(self: &Arc<Self>) {
        slipway_family::wake(&self.0);
    }
}

/// The sender of commands.
#[derive(Clone)]
pub struct CommandSender {
    commands: Sender<Command>,
    wake: Arc<Bell>,
}

impl CommandSender {
    /// Sends a command and wakes the carrying thread. Does nothing once that thread has ended.
    pub fn send(&self, command: Command) {
        if self.commands.send(command).is_ok() {
            self.wake.wake_by_ref();
        }
    }

    /// Returns a waker of the carrying thread.
    pub fn waker(&self) -> Waker {
        Waker::from(self.wake.clone())
    }
}

/// The carrying thread's end of the commands.
pub struct CommandReceiver {
    commands: Receiver<Command>,
    wake: Arc<Bell>,
}

impl CommandReceiver {
    /// Takes the next command. Returns `None` if there is none.
    pub fn take(&self) -> Option<Command> {
        self.commands.try_recv().ok()
    }

    /// Returns the eventfd that wakes the carrying thread.
    pub fn bell(&self) -> Arc<Bell> {
        self.wake.clone()
    }
}

/// Makes the two ends of the commands.
///
/// # Errors
/// No descriptors are left.
pub fn commands() -> std::io::Result<(CommandSender, CommandReceiver)> {
    let (wake, (sender, receiver)) = (Bell::new()?, channel());
    let sender = CommandSender { commands: sender, wake: wake.clone() };
    Ok((sender, CommandReceiver { commands: receiver, wake }))
}

/// The carrying thread's end of the news.
pub struct NewsSender {
    news: Sender<News>,
    notice: Arc<Bell>,
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
            self.notice.wake_by_ref();
        }
    }
}

/// The engine's thread's end of the news.
pub struct NewsReceiver {
    news: Receiver<News>,
    notice: Arc<Bell>,
}

impl NewsReceiver {
    /// Returns an eventfd that is readable when there is news.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.notice.descriptor()
    }

    /// Takes all news.
    pub fn take(&self) -> Vec<News> {
        // Lowered before the look, or news that comes meanwhile would wake nobody.
        self.notice.lower();
        self.news.try_iter().collect()
    }
}

/// Makes the two ends of the news.
///
/// # Errors
/// No descriptors are left.
pub fn news() -> std::io::Result<(NewsSender, NewsReceiver)> {
    let (notice, (sender, receiver)) = (Bell::new()?, channel());
    let sender = NewsSender { news: sender, notice: notice.clone(), unannounced: false };
    Ok((sender, NewsReceiver { news: receiver, notice }))
}
