//! A task's view of its reactor.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use rustix::event::epoll;

use crate::TaskId;

/// The readiness to wait for on a descriptor. Errors and hang-ups are always reported.
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
    /// Readable, of an eventfd by which other threads tell of requests, each by itself. As a
    /// message of another thread, it is no work but by what the task then does.
    Bell,
}

impl Interest {
    fn flags(self) -> epoll::EventFlags {
        match self {
            Self::Read | Self::Bell => epoll::EventFlags::IN | epoll::EventFlags::RDHUP,
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

/// A watched descriptor.
struct Watch {
    task: TaskId,
    token: u32,
    /// A duplicate of the task's descriptor, or that descriptor itself, which the task shares. So
    /// epoll can remove it even if the task has closed its own.
    file: Arc<OwnedFd>,
    /// Set if it was watched with [`Interest::Bell`].
    is_bell: bool,
}

/// All watched descriptors, by the keys of their epoll events.
#[derive(Default)]
struct Table {
    by_key: HashMap<u64, Watch>,
    last_key: u64,
}

/// The descriptors that a reactor waits for. The lock is taken by the reactor's thread, by steps
/// that change their watches, and by a thread that lost the reactor (see `seat`): it is hardly ever
/// contended.
pub(crate) struct Watches {
    pub(crate) epoll: OwnedFd,
    table: Mutex<Table>,
}

/// Key of the epoll events of the mailbox's bell.
pub(crate) const BELL: u64 = 0;

impl Watches {
    pub(crate) fn new(bell: BorrowedFd<'_>) -> std::io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let data = epoll::EventData::new_u64(BELL);
        epoll::add(&epoll, bell, data, epoll::EventFlags::IN)?;
        Ok(Self { epoll, table: Mutex::default() })
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        // No code that may panic runs under the lock.
        self.table.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Returns the task and the token of an event, and whether it is a bell's. Returns `None` if
    /// the descriptor was removed after epoll reported it.
    pub(crate) fn owner(&self, key: u64) -> Option<(TaskId, u32, bool)> {
        self.table().by_key.get(&key).map(|watch| (watch.task, watch.token, watch.is_bell))
    }

    /// Watches `file` and returns the key of its events.
    fn add(
        &self,
        (task, token): (TaskId, u32),
        file: Arc<OwnedFd>,
        interest: Interest,
    ) -> std::io::Result<u64> {
        let mut table = self.table();
        let key = table.last_key + 1;
        epoll::add(&self.epoll, &file, epoll::EventData::new_u64(key), interest.flags())?;
        table.last_key = key;
        let is_bell = interest == Interest::Bell;
        table.by_key.insert(key, Watch { task, token, file, is_bell });
        Ok(key)
    }

    fn modify(&self, key: u64, interest: Interest) -> std::io::Result<()> {
        if let Some(watch) = self.table().by_key.get(&key) {
            let data = epoll::EventData::new_u64(key);
            epoll::modify(&self.epoll, watch.file.as_fd(), data, interest.flags())?;
        }
        Ok(())
    }

    pub(crate) fn forget(&self, key: u64) {
        let watch = self.table().by_key.remove(&key);
        if let Some(watch) = watch {
            let _ = epoll::delete(&self.epoll, &watch.file);
        }
    }

    /// Removes all descriptors of a task without the list in its [`Body`](crate::tasks::Body).
    pub(crate) fn forget_task(&self, task: TaskId) {
        let keys: Vec<u64> = {
            let table = self.table();
            let of_task = table.by_key.iter().filter(|(_, watch)| watch.task == task);
            of_task.map(|(key, _)| *key).collect()
        };
        keys.into_iter().for_each(|key| self.forget(key));
    }
}

/// A task step's view of the reactor.
pub struct Context<'a> {
    pub(crate) id: TaskId,
    pub(crate) now: Instant,
    pub(crate) poll_budget: Duration,
    pub(crate) shared: bool,
    pub(crate) alone: bool,
    pub(crate) events: &'a mut Vec<Event>,
    pub(crate) watched: &'a mut Vec<(u32, u64)>,
    pub(crate) watches: &'a Watches,
}

impl Context<'_> {
    /// Returns the task's number on this reactor.
    pub fn id(&self) -> TaskId {
        self.id
    }

    /// Returns the time, which is read at most once per round.
    pub fn now(&self) -> Instant {
        self.now
    }

    /// Returns how long, at present, the reactor polls after the last work before it sleeps. A task
    /// that polls shared memory, which no descriptor announces, returns [`crate::Step::Looking`]
    /// for as long.
    pub fn poll_budget(&self) -> Duration {
        self.poll_budget
    }

    /// Returns whether another task of the reactor had work within the last millisecond and kept up
    /// with it ([`crate::Step::Busy`]). Steps should then be short, as that task waits for them.
    pub fn is_shared(&self) -> bool {
        self.shared
    }

    /// Returns whether the task slept in a step for so long that its reactor went on without it.
    /// The task then has a thread of its own, where it delays no other task, until it is done or
    /// leaves ([`crate::Step::Leave`]).
    pub fn is_alone(&self) -> bool {
        self.alone
    }

    /// Returns the descriptors found ready since the last step.
    pub fn events(&self) -> &[Event] {
        self.events
    }

    /// Watches `file` under the task's own number `token`, level-triggered, until the task ends or
    /// calls [`Context::unwatch`]. The reactor keeps a duplicate of the descriptor. If the token is
    /// watched already, `file` replaces its descriptor.
    ///
    /// # Errors
    /// Errors of dup(2) and epoll_ctl(2); a regular file cannot be watched.
    pub fn watch(
        &mut self,
        file: BorrowedFd<'_>,
        interest: Interest,
        token: u32,
    ) -> std::io::Result<()> {
        self.unwatch(token);
        self.watch_shared(Arc::new(file.try_clone_to_owned()?), interest, token)
    }

    /// Watches `file` as [`Context::watch`] does, without a duplicate: the reactor holds `file` as
    /// long as it watches it. For a task with very many descriptors. One reactor cannot watch the
    /// same descriptor twice.
    ///
    /// # Errors
    /// Errors of epoll_ctl(2), `AlreadyExists` if the reactor watches the descriptor already.
    pub fn watch_shared(
        &mut self,
        file: Arc<OwnedFd>,
        interest: Interest,
        token: u32,
    ) -> std::io::Result<()> {
        self.unwatch(token);
        let key = self.watches.add((self.id, token), file, interest)?;
        self.watched.push((token, key));
        Ok(())
    }

    /// Changes the readiness to wait for on a watched descriptor, which stays a bell if it is one.
    /// An unknown token is ignored.
    ///
    /// # Errors
    /// Errors of epoll_ctl(2).
    pub fn rewatch(&mut self, token: u32, interest: Interest) -> std::io::Result<()> {
        match self.watched.iter().find(|(watched, _)| *watched == token) {
            Some((_, key)) => self.watches.modify(*key, interest),
            None => Ok(()),
        }
    }

    /// Stops watching a descriptor. An unknown token is ignored.
    pub fn unwatch(&mut self, token: u32) {
        if let Some(index) = self.watched.iter().position(|(watched, _)| *watched == token) {
            let (_, key) = self.watched.swap_remove(index);
            self.watches.forget(key);
        }
    }
}
