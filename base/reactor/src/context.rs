//! What a task sees of its reactor.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::epoll;

use crate::TaskId;

/// What to wait for on a descriptor. Errors and hang-ups are always reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interest {
    /// Readable.
    Read,
    /// Writable.
    Write,
    /// Either.
    Both,
    /// Errors and hang-ups only.
    None,
}

impl Interest {
    fn flags(self) -> epoll::EventFlags {
        match self {
            Self::Read => epoll::EventFlags::IN | epoll::EventFlags::RDHUP,
            Self::Write => epoll::EventFlags::OUT,
            Self::Both => epoll::EventFlags::IN | epoll::EventFlags::OUT | epoll::EventFlags::RDHUP,
            Self::None => epoll::EventFlags::empty(),
        }
    }
}

/// A descriptor that is ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// The token it was watched with.
    pub token: u32,
    /// Reading does not block (there is data, an end or an error).
    pub readable: bool,
    /// Writing does not block.
    pub writable: bool,
}

/// Every watched descriptor: key of the epoll event, task, token.
pub(crate) struct Watches {
    pub(crate) epoll: OwnedFd,
    by_key: HashMap<u64, (TaskId, u32)>,
    next_key: u64,
}

/// The mailbox's bell.
pub(crate) const BELL: u64 = 0;

impl Watches {
    pub(crate) fn new(bell: BorrowedFd<'_>) -> std::io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let data = epoll::EventData::new_u64(BELL);
        epoll::add(&epoll, bell, data, epoll::EventFlags::IN)?;
        Ok(Self { epoll, by_key: HashMap::new(), next_key: BELL + 1 })
    }

    /// Whose event this is; None for one that was removed after epoll reported it.
    pub(crate) fn owner(&self, key: u64) -> Option<(TaskId, u32)> {
        self.by_key.get(&key).copied()
    }
}

/// A descriptor that a task watches: kept as a duplicate, so that it can be removed from epoll
/// whatever the task has done with its own.
pub(crate) struct Watch {
    key: u64,
    token: u32,
    file: OwnedFd,
}

/// The reactor, as a task's step sees it.
pub struct Context<'a> {
    pub(crate) id: TaskId,
    pub(crate) now: Instant,
    pub(crate) poll_budget: Duration,
    pub(crate) shared: bool,
    pub(crate) events: &'a [Event],
    pub(crate) own: &'a mut Vec<Watch>,
    pub(crate) watches: &'a mut Watches,
}

impl Context<'_> {
    /// The task's name on this reactor.
    pub fn id(&self) -> TaskId {
        self.id
    }

    /// The time, read once per round.
    pub fn now(&self) -> Instant {
        self.now
    }

    /// For how long after the last work the reactor looks for more before it sleeps, at present. A
    /// task that polls shared memory, which no descriptor announces, goes on [`crate::Step::Looking`]
    /// for as long.
    pub fn poll_budget(&self) -> Duration {
        self.poll_budget
    }

    /// Whether another task of the reactor had work within the last millisecond and did all of it in
    /// its steps: steps should then be short, as that task waits meanwhile, or will.
    pub fn is_shared(&self) -> bool {
        self.shared
    }

    /// The descriptors found ready since the last step.
    pub fn events(&self) -> &[Event] {
        self.events
    }

    /// Watches `file` under the task's own number `token`, level-triggered, until the task ends or
    /// [`Context::unwatch`]. A duplicate of the descriptor is kept. A token watched already is
    /// watched anew.
    ///
    /// # Errors
    /// What dup(2) and epoll_ctl(2) say; a regular file cannot be watched.
    pub fn watch(
        &mut self,
        file: BorrowedFd<'_>,
        interest: Interest,
        token: u32,
    ) -> std::io::Result<()> {
        self.unwatch(token);
        let file = file.try_clone_to_owned()?;
        let key = self.watches.next_key;
        self.watches.next_key += 1;
        let data = epoll::EventData::new_u64(key);
        epoll::add(&self.watches.epoll, &file, data, interest.flags())?;
        self.watches.by_key.insert(key, (self.id, token));
        self.own.push(Watch { key, token, file });
        Ok(())
    }

    /// Waits for something else on a watched descriptor. An unknown token is ignored.
    ///
    /// # Errors
    /// What epoll_ctl(2) says.
    pub fn rewatch(&mut self, token: u32, interest: Interest) -> std::io::Result<()> {
        if let Some(watch) = self.own.iter().find(|watch| watch.token == token) {
            let data = epoll::EventData::new_u64(watch.key);
            epoll::modify(&self.watches.epoll, watch.file.as_fd(), data, interest.flags())?;
        }
        Ok(())
    }

    /// Forgets a descriptor. An unknown token is ignored.
    pub fn unwatch(&mut self, token: u32) {
        if let Some(index) = self.own.iter().position(|watch| watch.token == token) {
            self.own.swap_remove(index).forget(self.watches);
        }
    }
}

impl Watch {
    pub(crate) fn forget(self, watches: &mut Watches) {
        let _ = epoll::delete(&watches.epoll, &self.file);
        watches.by_key.remove(&self.key);
    }
}
