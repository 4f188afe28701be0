//! A process's attachment to the engine: its connection, the family's table, the arenas.

use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering};

use rustix::io::Errno;
use slipway_ring::cross::Arena;
use slipway_sgiov_spec::Address;
use slipway_sgiov_spec::control::{Endpoint as Granted, NOT_OURS, Reply, Request, VERSION};

use crate::connection::{Answer, Connection, Descriptors};
use crate::endpoint::Endpoint;
use crate::hidden::Hidden;
use crate::lock::{Lock, LockGuard};
use crate::sharing::Sharing;
use crate::table::{Table, thread};

/// Returns the path of the engine's socket: `SLIPWAY_SOCKET`, or `socket.sock` in
/// `SLIPWAY_RUN_DIR`, or in the usual run directory.
pub fn engine_path() -> PathBuf {
    let in_run_dir = || {
        let dir = std::env::var_os("SLIPWAY_RUN_DIR");
        dir.map_or_else(|| PathBuf::from("/run/slipway"), PathBuf::from).join("socket.sock")
    };
    std::env::var_os("SLIPWAY_SOCKET").map_or_else(in_run_dir, PathBuf::from)
}

/// The reason why the engine made no connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotConnected {
    /// The engine does not know the address: the kernel may reach it.
    NotOurs,
    /// The error that connect(2) would return.
    Failed(Errno),
}

/// A connection that was opened, and the eventfd that its owner sleeps on.
pub struct Opened {
    /// This side of the connection.
    pub endpoint: Endpoint,
    /// The eventfd that is raised when the condition of [`Endpoint::arm`] holds.
    pub eventfd: OwnedFd,
}

/// A listener of the family.
#[derive(Debug)]
pub struct Listening {
    /// The number that identifies the listener.
    pub listener: u64,
    /// The address that it listens at.
    pub at: Address,
    /// The eventfd that is readable when a connection waits.
    pub eventfd: OwnedFd,
}

/// A family, as one of its processes sees it.
pub struct Family {
    control: Lock<Connection>,
    /// The connection's descriptor, for poll sets.
    descriptor: AtomicI32,
    table: Table,
    bell: Hidden,
    links: Lock<Vec<Option<Arena>>>,
    dead: AtomicBool,
    sharing: Sharing,
    /// The thread that waits for a reply; a signal handler may interrupt it.
    asking: AtomicU32,
    /// One more than the entry whose peer's eventfd such a handler could not raise; 0 for none.
    owed: AtomicU64,
}

impl Family {
    /// Attaches to the engine at `path` as a new family.
    ///
    /// # Errors
    /// There is no engine, or it refuses this program, or it speaks another version.
    pub fn attach(path: &Path) -> std::io::Result<Arc<Self>> {
        let mut control = Connection::open(path)?;
        let mut descriptors = attached(control.ask(Request::Attach { version: VERSION }, None)?)?;
        Self::over(control, &mut descriptors)
    }

    /// Attaches as the family of this process's image before execve(2), by its [`Family::ticket`].
    ///
    /// # Errors
    /// The engine is gone, or the ticket is invalid or has expired.
    pub fn resume(ticket: OwnedFd) -> std::io::Result<Arc<Self>> {
        let mut ticket = Connection::of(Hidden::new(ticket)?)?;
        let mut descriptors = attached(ticket.ask(Request::Resume, None)?)?;
        let [table, bell, control] =
            [descriptors.next()?, descriptors.next()?, descriptors.next()?];
        let control = Connection::of(Hidden::new(control)?)?;
        Self::over(control, &mut Descriptors::from([table, bell]))
    }

    fn over(control: Connection, descriptors: &mut Descriptors) -> std::io::Result<Arc<Self>> {
        // The table stays mapped as long as the process lives, and the descriptors are never
        // closed.
        let table = Table::open(Hidden::new(descriptors.next()?)?.into_inner())?;
        let bell = Hidden::new(descriptors.next()?)?;
        let links = Lock::new((0..table.links()).map(|_| None).collect());
        let descriptor = AtomicI32::new(control.socket().as_raw_fd());
        let (dead, sharing) = (AtomicBool::new(false), Sharing::default());
        let (control, asking, owed) = (Lock::new(control), AtomicU32::new(0), AtomicU64::new(0));
        let all = Self { control, descriptor, table, bell, links, dead, sharing, asking, owed };
        Ok(Arc::new(all))
    }

    /// Returns the connection's descriptor: when it hangs up, the engine is dead
    /// ([`Family::bury`]).
    #[inline]
    pub fn descriptor(&self) -> RawFd {
        self.descriptor.load(Ordering::Relaxed)
    }

    /// Returns a duplicate of the connection, for a thread that waits for its end elsewhere. The
    /// engine considers this process alive as long as the duplicate is open.
    ///
    /// # Errors
    /// No descriptors are left.
    pub fn connection(&self) -> std::io::Result<OwnedFd> {
        self.control().socket().try_clone_to_owned()
    }

    /// Returns whether this process has noticed that the engine is gone.
    #[inline]
    pub fn is_dead(&self) -> bool {
        self.dead.load(Ordering::Relaxed)
    }

    /// Notes that the engine is gone: its connection hung up.
    pub fn bury(&self) {
        self.dead.store(true, Ordering::Relaxed);
    }

    /// Checks by a system call whether the engine is gone, and returns the answer.
    pub fn look(&self) -> bool {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        // SAFETY: the connection lives as long as the family, or is replaced in the child of a
        // fork, which has one thread.
        let socket = unsafe { BorrowedFd::borrow_raw(self.descriptor()) };
        let mut fds = [PollFd::new(&socket, PollFlags::empty())];
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        if poll(&mut fds, Some(&at_once)).is_ok_and(|ready| ready > 0) {
            self.bury();
        }
        self.is_dead()
    }

    pub(crate) fn table(&self) -> &Table {
        &self.table
    }

    pub(crate) fn signal(&self, entry: usize) {
        if self.table.signal(entry as u64) {
            // The engine made the bell, and no other program has it: a plain write needs no
            // resource that others could have used up.
            let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
        }
    }

    fn control(&self) -> LockGuard<'_, Connection> {
        self.control.hold()
    }

    fn ask(&self, request: Request, with: Option<BorrowedFd<'_>>) -> Result<Answer, Errno> {
        self.call(|control| {
            let answer = control.ask(request, with)?;
            // Under the lock: the next reply may refer to the arena, and a child of fork(2) is not
            // given it again.
            Ok(self.take_arena(control, answer))
        })
    }

    /// Calls the engine by its connection, which no other thread uses meanwhile.
    fn call<T>(&self, call: impl FnOnce(&mut Connection) -> Result<T, Errno>) -> Result<T, Errno> {
        let answer = {
            let mut control = self.control();
            self.asking.store(thread(), Ordering::Relaxed);
            let answer = call(&mut control);
            self.asking.store(0, Ordering::Relaxed);
            answer
        };
        let owed = self.owed.swap(0, Ordering::Relaxed);
        if owed > 0 {
            // The engine raises the eventfd when it answers.
            let _ = self.peer(owed as usize - 1);
        }
        if answer.as_ref().is_err_and(|errno| *errno != Errno::NOBUFS) {
            // Replies can no longer be matched to requests. After `ENOBUFS` they can: the request
            // was not sent.
            self.bury();
        }
        answer
    }

    /// Keeps the arena that came with a reply. If that fails, closes the connection again and
    /// refuses it.
    fn take_arena(&self, control: &mut Connection, mut answer: Answer) -> Answer {
        let Reply::Connected { endpoint, new_link: true, .. } = answer.reply else { return answer };
        if let Err(errno) = self.link(endpoint.place.link, &mut answer.descriptors) {
            control.close(endpoint.entry);
            answer.reply = Reply::Refused(errno.raw_os_error().unsigned_abs());
        }
        answer
    }

    fn link(&self, link: u16, descriptors: &mut Descriptors) -> Result<(), Errno> {
        let mut links = self.links.hold();
        let place = links.get_mut(usize::from(link)).ok_or(Errno::PROTO)?;
        // The arena of an earlier link with this number is unused in any case.
        *place = None;
        let file = Hidden::new(descriptors.last()?).map_err(|_| Errno::MFILE)?.into_inner();
        *place = Some(Arena::open(file).map_err(|_| Errno::PROTO)?);
        Ok(())
    }

    /// Connects to `to`, from `from` if that is not [`Address::ANY`].
    ///
    /// # Errors
    /// [`NotConnected`]: `NotOurs`, too, if the engine ends meanwhile or does not answer in time.
    /// The family is dead then ([`Family::is_dead`]).
    pub fn connect(self: &Arc<Self>, to: Address, from: Address) -> Result<Opened, NotConnected> {
        self.tell_whether_to_share();
        let answer = self.ask(Request::Connect { to, from }, None);
        let Ok(Answer { reply, descriptors }) = answer else { return Err(NotConnected::NotOurs) };
        match reply {
            Reply::Connected { .. } => {
                self.open(reply, descriptors, true).map_err(NotConnected::Failed)
            }
            Reply::Refused(NOT_OURS) => Err(NotConnected::NotOurs),
            Reply::Refused(errno) => Err(NotConnected::Failed(errno_of(errno))),
            _ => Err(NotConnected::NotOurs),
        }
    }

    /// Listens at `at`. `proof` is the kernel's listening socket of that address.
    ///
    /// # Errors
    /// The engine's error.
    pub fn listen(
        &self,
        at: Address,
        backlog: u32,
        shared: bool,
        v6_only: bool,
        proof: Option<BorrowedFd<'_>>,
    ) -> Result<Listening, Errno> {
        let backlog = backlog.clamp(1, 4096);
        let request = Request::Listen { at, backlog, shared, v6_only };
        listening(self.ask(request, proof)?)
    }

    /// Removes this process from the holders of a listener. If there is no memory for the message
    /// (`ENOBUFS`), the engine is told before the next request that has a reply.
    pub fn unlisten(&self, listener: u64) {
        // A dead engine needs no message.
        let _ = self.call(|control| control.unlisten(listener));
    }

    /// Takes the next connection that waits at a listener.
    ///
    /// # Errors
    /// `EAGAIN`: no connection waits; otherwise the engine's error.
    pub fn accept(self: &Arc<Self>, listener: u64) -> Result<Opened, Errno> {
        self.tell_whether_to_share();
        let Answer { reply, descriptors } = self.ask(Request::Accept { listener }, None)?;
        self.open(reply, descriptors, true)
    }

    /// Takes over, after [`Family::resume`], the connection with the lowest entry not below `from`
    /// that the former image had.
    ///
    /// # Errors
    /// `ENOENT`: there is none; otherwise the engine's error.
    pub fn held(self: &Arc<Self>, from: u64) -> Result<Opened, Errno> {
        let Answer { reply, descriptors } = self.ask(Request::Held { entry: from }, None)?;
        self.open(reply, descriptors, false)
    }

    /// Takes over, after [`Family::resume`], the listener with the lowest number not below `from`
    /// that the former image had.
    ///
    /// # Errors
    /// The errors of [`Family::held`].
    pub fn held_listener(&self, from: u64) -> Result<Listening, Errno> {
        let answer = self.ask(Request::HeldListener { listener: from }, None)?;
        listening(answer)
    }

    fn open(
        self: &Arc<Self>,
        reply: Reply,
        descriptors: Descriptors,
        is_new: bool,
    ) -> Result<Opened, Errno> {
        let (granted, group, peer_later) = match reply {
            Reply::Connected { endpoint, group, peer_later, .. } => (endpoint, group, peer_later),
            Reply::Refused(errno) => return Err(errno_of(errno)),
            _ => return Err(Errno::PROTO),
        };
        let entry = granted.entry;
        self.open_granted(granted, group, peer_later, descriptors, is_new).inspect_err(|_| {
            // The engine counts the endpoint as held by this process until it is told.
            self.control().close(entry);
        })
    }

    fn open_granted(
        self: &Arc<Self>,
        granted: Granted,
        group: u32,
        peer_later: bool,
        mut descriptors: Descriptors,
        is_new: bool,
    ) -> Result<Opened, Errno> {
        let eventfd = descriptors.next()?;
        let has_peer = !granted.place.engine && !peer_later;
        // One for which this process had no number is asked for when it is needed.
        let peer = if has_peer { descriptors.next().ok() } else { None };
        let arena = self.arena(granted.place.link)?;
        let possible =
            self.table.has(granted.entry) && granted.place.stream < arena.shape().streams;
        if !possible {
            return Err(Errno::PROTO);
        }
        let peer = peer.map(Hidden::new).transpose().map_err(|_| Errno::MFILE)?;
        let endpoint = Endpoint::new(self.clone(), granted, arena, peer, group);
        self.sharing.opened(group != 0);
        if is_new {
            endpoint.begin();
        } else {
            endpoint.go_on();
        }
        Ok(Opened { endpoint, eventfd })
    }

    fn arena(&self, link: u16) -> Result<Arena, Errno> {
        let links = self.links.hold();
        links.get(usize::from(link)).and_then(Clone::clone).ok_or(Errno::PROTO)
    }

    /// Tells the engine that this process has closed its last descriptor of the endpoint. With
    /// `waits`, returns after the engine has ended the endpoint, if this process was the last that
    /// had it: the peer sees that end before anything that this process does next.
    pub(crate) fn close(&self, entry: usize, shared: bool, waits: bool) {
        self.sharing.closed(shared);
        self.control().close(entry as u64);
        if waits && !self.is_dead() {
            // The engine serves requests in turn. There is no listener of this number, and the
            // answer does not matter.
            let _ = self.ask(Request::HeldListener { listener: u64::MAX }, None);
        }
    }

    /// Asks the engine for the eventfd that the peer of an endpoint sleeps on.
    ///
    /// # Errors
    /// `EAGAIN`: nobody holds the other side, or this thread is inside a request; otherwise the
    /// engine's error.
    pub(crate) fn peer(&self, entry: usize) -> Result<Hidden, Errno> {
        if self.asking.load(Ordering::Relaxed) == thread() {
            self.owed.store(entry as u64 + 1, Ordering::Relaxed);
            return Err(Errno::AGAIN);
        }
        // A peer that cannot be woken must not sleep on: the stream ends, as without an engine.
        let answer = self.ask(Request::Peer { entry: entry as u64 }, None);
        let Answer { reply, mut descriptors } = answer.inspect_err(|_| self.bury())?;
        match reply {
            Reply::Done => Hidden::new(descriptors.next()?).map_err(|_| Errno::MFILE),
            Reply::Refused(errno) => Err(errno_of(errno)),
            _ => Err(Errno::PROTO),
        }
    }

    pub(crate) fn sharing(&self) -> &Sharing {
        &self.sharing
    }

    fn tell_whether_to_share(&self) {
        if let Some(on) = self.sharing.changes() {
            // If the engine is gone, the request that follows notices.
            let _ = self.control().tell(Request::Share { on }, None);
        }
    }

    /// Returns a connection for the child, before fork(2).
    ///
    /// # Errors
    /// The engine is gone, or has no descriptors left.
    pub fn fork(&self) -> Result<OwnedFd, Errno> {
        self.copy(Request::Fork)
    }

    /// Returns a ticket, before execve(2), by which the new image can [`Family::resume`] within ten
    /// seconds. It holds all that this process holds.
    ///
    /// # Errors
    /// The errors of [`Family::fork`].
    pub fn ticket(&self) -> Result<OwnedFd, Errno> {
        self.copy(Request::Exec)
    }

    fn copy(&self, request: Request) -> Result<OwnedFd, Errno> {
        let Answer { reply, mut descriptors } = self.ask(request, None)?;
        match reply {
            Reply::Done => descriptors.next(),
            Reply::Refused(errno) => Err(errno_of(errno)),
            _ => Err(Errno::PROTO),
        }
    }

    /// Continues in the child of fork(2) with a connection of its own, or without any.
    pub fn forked(&self, connection: Option<OwnedFd>) {
        let own = connection.map(|fd| Hidden::new(fd).and_then(Connection::of));
        let Some(Ok(own)) = own else {
            self.control().give_up();
            self.bury();
            return;
        };
        self.descriptor.store(own.socket().as_raw_fd(), Ordering::Relaxed);
        self.control().replace(own);
    }

    /// Locks out other threads while this one forks.
    pub fn hold(&self) {
        self.control.take();
        self.links.take();
    }

    /// Undoes [`Family::hold`], in the parent and in the child.
    pub fn release(&self) {
        self.links.release();
        self.control.release();
    }
}

fn attached(Answer { reply, descriptors }: Answer) -> std::io::Result<Descriptors> {
    match reply {
        Reply::Attached { .. } => Ok(descriptors),
        Reply::Refused(errno) => Err(errno_of(errno).into()),
        _ => Err(Errno::PROTO.into()),
    }
}

fn listening(Answer { reply, mut descriptors }: Answer) -> Result<Listening, Errno> {
    match reply {
        Reply::Listening { listener, at } => {
            Ok(Listening { listener, at, eventfd: descriptors.next()? })
        }
        Reply::Refused(errno) => Err(errno_of(errno)),
        _ => Err(Errno::PROTO),
    }
}

fn errno_of(number: u32) -> Errno {
    Errno::from_raw_os_error(
        i32::try_from(number).ok().filter(|n| (1..4096).contains(n)).unwrap_or(5),
    )
}
