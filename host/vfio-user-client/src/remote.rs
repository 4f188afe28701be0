//! A function behind a socket, for all threads of a VMM.
//!
//! Over 500 lines: one type whose calls share one mutex, a third of them documentation.

mod migration;

use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Condvar, Mutex, MutexGuard, RwLock};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use slipway_vfio_user_spec::{IrqSetFlags, RegionFlags, irq, region};

use crate::io_fds::{Bell, IoFds, Notification};
use crate::shape::{RegionShape, Shape};
use crate::told::{Ram, VmmSettings, route};
use crate::watch::Watch;
use crate::{Client, ClientError, IrqDescription};

/// The reason for which a call on a [`RemoteFunction`] failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FunctionError {
    /// The server refused the request with this errno, or the request cannot be made. The function
    /// goes on.
    #[error("the server refused: {0}")]
    Refused(Errno),
    /// The function cannot be used any more, for this reason.
    #[error("the function is broken: {0}")]
    Broken(String),
    /// The connection could not be set up, for this reason.
    #[error("the function cannot be connected: {0}")]
    Connection(String),
    /// The server presents another function than before. It differs in this.
    #[error("another function than before: {0}")]
    Different(&'static str),
}

/// The state of a [`RemoteFunction`]'s connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ConnectionState {
    /// The function is connected.
    Connected,
    /// The connection ended, for this reason. Accesses wait for [`RemoteFunction::reconnect`].
    Lost(String),
    /// The function cannot be used any more, for this reason. Reads give all ones and writes are
    /// dropped, as for a PCI function that was removed.
    Broken(String),
}

/// The function that a new connection has led to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Continuity {
    /// The function goes on where it was. Its guest has noticed a pause.
    Resumed,
    /// The function is in its state after a reset.
    Reset,
}

/// A PCI function behind a vfio-user socket, for all threads of a VMM.
///
/// One mutex guards the connection, so a call waits for the calls before it. Every call ends: its
/// waits on the server are bounded by the *patience* that the VMM gave. The server can reach only
/// memory that the VMM names by [`RemoteFunction::map`]; accesses by messages are refused.
///
/// # When the server goes away
/// The connection ends: [`RemoteFunction::as_fd`] becomes readable, and accesses wait, each as long
/// as the patience is. Another thread of the VMM connects to the new server and passes the socket
/// to [`RemoteFunction::reconnect`], which checks that the function is the same, gives it the RAM
/// and the interrupts that the VMM had set, and lets the waiting accesses go on. Then:
/// - If a server of Slipway left the function's state with a keeper, its successor has held the
///   function, and the function goes on where it was ([`Continuity::Resumed`]).
/// - Otherwise it is in its state after a reset ([`Continuity::Reset`]). A driver that meets such a
///   function finds it disabled and sets it up again, as after any failure of a device. The VMM
///   that keeps its own view of configuration space writes its registers (command, MSI-X control,
///   BARs) again.
/// - An access whose reply was not seen is done again. The old server may have done it before. To a
///   function that was reset this is the first time, and a function that goes on takes the last
///   write to a register twice without harm (`slipway_pci::Function`, on one with a journal).
/// - A write that was not waited for ([`RemoteFunction::put`]) is not done again. No server permits
///   such writes to a function that goes on.
/// - Every routed MSI-X vector is raised once, since an interrupt may have been lost. A driver
///   tolerates spurious interrupts.
/// - I/O descriptors are new: [`RemoteFunction::notifications`] has to be called again, and its
///   eventfds take the place of the old ones. As one of these may have been raised in vain, the VMM
///   then raises the new ones once ([`RemoteFunction::announce`]).
///
/// A function whose server keeps the *connection* (for a client that cannot connect again) sees
/// replies that take longer, and nothing else.
///
/// # When the server does wrong
/// A server that violates the protocol, or does not answer within the patience, breaks this
/// function for good and nothing else: reads give all ones, writes are dropped,
/// [`RemoteFunction::state`] has the reason. A lost connection breaks the function when an access
/// has waited for it as long as the patience is, and at once if the server has said that the
/// function ends with it (the capability `slipway_one_connection` of vfio-user's version message).
/// Every routed MSI-X vector is raised once then.
pub struct RemoteFunction {
    shape: Shape,
    patience: Duration,
    inner: Mutex<Inner>,
    /// Notified when `Inner::link` changes.
    changed: Condvar,
    /// The state for threads that must not wait for the connection.
    state: Mutex<(ConnectionState, u64)>,
    /// The registers that are written without messages, by region. Empty without a connection.
    io_fds: RwLock<Vec<(u32, IoFds)>>,
    watch: Watch,
}

struct Inner {
    link: ServerLink,
    told: VmmSettings,
}

enum ServerLink {
    Up(Box<Client>),
    Lost,
    Broken(String),
}

impl RemoteFunction {
    /// Negotiates on a connected stream socket and asks for the function's shape and its I/O
    /// descriptors. Every later wait takes at most `patience`; this call as well.
    ///
    /// # Errors
    /// [`FunctionError::Connection`].
    pub fn new(socket: OwnedFd, patience: Duration) -> Result<Self, FunctionError> {
        let failed = |error: ClientError| FunctionError::Connection(error.to_string());
        let Begun { client, shape, io_fds } = begin(socket, patience).map_err(failed)?;
        let failed = |error: Errno| FunctionError::Connection(error.to_string());
        let watch = Watch::new().map_err(failed)?;
        watch.follow(client.as_fd()).map_err(failed)?;
        let link = ServerLink::Up(Box::new(client));
        Ok(Self {
            shape,
            patience,
            inner: Mutex::new(Inner { link, told: VmmSettings::default() }),
            changed: Condvar::new(),
            state: Mutex::new((ConnectionState::Connected, 1)),
            io_fds: RwLock::new(io_fds),
            watch,
        })
    }

    /// Returns the regions, each at its index (`slipway_vfio_user_spec::region`).
    pub fn regions(&self) -> &[RegionShape] {
        &self.shape.regions
    }

    /// Returns the number and the abilities of the MSI-X vectors.
    pub fn vectors(&self) -> IrqDescription {
        self.shape.irqs[irq::MSIX as usize]
    }

    /// Returns the number (0 or 1) and the abilities of the interrupt pin.
    pub fn pin(&self) -> IrqDescription {
        self.shape.irqs[irq::INTX as usize]
    }

    /// Returns the state of the connection. Never waits for the server.
    pub fn state(&self) -> ConnectionState {
        // A call that has the connection at present notices its end by itself.
        if let Ok(mut inner) = self.inner.try_lock()
            && let ServerLink::Up(client) = &inner.link
            && client.wire.is_hung_up()
        {
            self.lose(&mut inner, "the server hung up".into());
        }
        lock(&self.state).0.clone()
    }

    /// Returns the number of connections so far.
    #[cfg(feature = "driver")]
    pub fn connections(&self) -> u64 {
        lock(&self.state).1
    }

    /// Reads registers. On an error, `into` is filled with ones.
    ///
    /// # Errors
    /// [`FunctionError::Refused`], [`FunctionError::Broken`].
    pub fn read(&self, region: u32, offset: u64, into: &mut [u8]) -> Result<(), FunctionError> {
        let outcome = self
            .check(region, offset, into.len(), RegionFlags::READ)
            .and_then(|()| self.perform(|client| client.read(region, offset, into)));
        if outcome.is_err() {
            into.fill(0xff);
        }
        outcome
    }

    /// Writes registers, and waits until the server has done the write.
    ///
    /// # Errors
    /// [`FunctionError::Refused`], [`FunctionError::Broken`]: the write is dropped.
    pub fn write(&self, region: u32, offset: u64, from: &[u8]) -> Result<(), FunctionError> {
        self.check(region, offset, from.len(), RegionFlags::WRITE)?;
        self.perform(|client| client.write(region, offset, from))
    }

    /// Writes registers of a BAR as the bus does: without a message where [`RemoteFunction::ring`]
    /// does that, and else by one that is waited for only if the server wants that
    /// ([`Client::put`]). Later accesses find the write done.
    ///
    /// # Errors
    /// As [`RemoteFunction::write`]. A refusal is not reported if nothing was waited for.
    pub fn put(&self, region: u32, offset: u64, from: &[u8]) -> Result<(), FunctionError> {
        self.check(region, offset, from.len(), RegionFlags::WRITE)?;
        let rings = |value: [u8; 4]| self.ring(region, offset, u32::from_le_bytes(value));
        match from.try_into().is_ok_and(rings) {
            true => Ok(()),
            false => self.perform(|client| client.put(region, offset, from)),
        }
    }

    /// Writes registers, as [`RemoteFunction::write`] does, but fails at once if there is no
    /// connection: for whoever brings the connection, and so cannot wait for it.
    ///
    /// # Errors
    /// [`FunctionError::Connection`] if there is no connection or it ends, and those of
    /// [`RemoteFunction::write`].
    pub fn write_connected(
        &self,
        region: u32,
        offset: u64,
        from: &[u8],
    ) -> Result<(), FunctionError> {
        self.check(region, offset, from.len(), RegionFlags::WRITE)?;
        let lost = || FunctionError::Connection("it has ended".into());
        let mut inner = lock(&self.inner);
        let ServerLink::Up(client) = &mut inner.link else { return Err(lost()) };
        client.limit(Instant::now() + self.patience);
        match client.write(region, offset, from) {
            Ok(()) => Ok(()),
            Err(error) => self.failed(&mut inner, error).and(Err(lost())),
        }
    }

    /// Writes a 32-bit register without a message: stores the value in memory that the server
    /// shares, and raises the server's eventfd. Takes no mutex. Returns `false` if the register has
    /// to be written by a message: it has no bell, the eventfd was not raised, or the server was
    /// replaced meanwhile.
    ///
    /// The eventfd is raised by io_submit(2) or an io_uring ([`slipway_peer::eventfd`]), which
    /// never wait. Without these means (a VMM in a cage) a plain write(2) to an eventfd set not to
    /// wait is used (`io_fds::Event::raise`, which says when that may wait).
    pub fn ring(&self, region: u32, offset: u64, value: u32) -> bool {
        // No lock is held while it rings: a server may make that wait where eventfds are raised by
        // write(2), and other threads must not wait for it then.
        let Some(bell) = self.bell(region, offset) else { return false };
        // If the server was replaced meanwhile, the old one's eventfd was raised in vain.
        let is_same = |now: Bell| now.has_event_of(&bell);
        bell.ring(value) && self.bell(region, offset).is_some_and(is_same)
    }

    /// Raises every eventfd of the server once, so that it looks at all registers that are written
    /// without messages.
    pub fn announce(&self) {
        let io_fds = self.io_fds.read().unwrap_or_else(|poisoned| poisoned.into_inner()).clone();
        for (_, registers) in io_fds {
            registers.raise_all();
        }
    }

    /// Returns the bell of a register. Returns `None` if it has none.
    fn bell(&self, region: u32, offset: u64) -> Option<Bell> {
        let io_fds = self.io_fds.read().unwrap_or_else(|poisoned| poisoned.into_inner());
        let bells = io_fds.iter().find(|(index, _)| *index == region).map(|(_, one)| &one.bells)?;
        let found = bells.binary_search_by_key(&offset, |bell: &Bell| bell.offset);
        found.ok().map(|at| bells[at].clone())
    }

    /// Returns the registers of `region` whose writes raise an eventfd and whose value does not
    /// matter. The VMM registers them with KVM, and calls this again after each
    /// [`RemoteFunction::reconnect`]. Never waits for the server.
    pub fn notifications(&self, region: u32) -> Vec<Notification> {
        let io_fds = self.io_fds.read().unwrap_or_else(|poisoned| poisoned.into_inner());
        let found = io_fds.iter().find(|(index, _)| *index == region);
        found.map(|(_, one)| one.notifications.clone()).unwrap_or_default()
    }

    /// Permits the function to read `len` bytes of memory at `offset` of `file`, under the address
    /// `iova`, and to write them if they are `writable`; if not, a descriptor for reading only is
    /// enough. The file must be memory, sealed against shrinking for a server of Slipway. Without a
    /// connection, the function gets the memory when it is connected again.
    ///
    /// # Errors
    /// [`FunctionError::Refused`], [`FunctionError::Broken`].
    pub fn map(
        &self,
        iova: u64,
        len: u64,
        file: BorrowedFd<'_>,
        offset: u64,
        writable: bool,
    ) -> Result<(), FunctionError> {
        let ram = Ram { len, file: duplicate(file)?, offset, writable };
        self.tell(
            |client| client.map(iova, len, file, offset, writable),
            |told| drop(told.ram.insert(iova, ram)),
        )
    }

    /// Routes MSI-X vectors from `first` on to eventfds, one each.
    ///
    /// # Errors
    /// [`FunctionError::Refused`] (also if there are fewer vectors, with `EINVAL`),
    /// [`FunctionError::Broken`].
    pub fn route(&self, first: u32, files: &[BorrowedFd<'_>]) -> Result<(), FunctionError> {
        let end = u32::try_from(files.len()).ok().and_then(|count| first.checked_add(count));
        self.check_vectors(first..end.ok_or(FunctionError::Refused(Errno::INVAL))?)?;
        let kept = files.iter().map(|file| duplicate(*file)).collect::<Result<Vec<_>, _>>()?;
        self.tell(
            |client| route(client, irq::MSIX, first, files),
            |told| told.vectors.extend((first..).zip(kept)),
        )
    }

    /// Routes the interrupt pin (INTx) to an eventfd, or nowhere. The pin masks itself when it is
    /// delivered.
    ///
    /// # Errors
    /// [`FunctionError::Refused`], [`FunctionError::Broken`].
    pub fn route_pin(&self, file: Option<BorrowedFd<'_>>) -> Result<(), FunctionError> {
        let kept = file.map(duplicate).transpose()?;
        self.tell(
            |client| client.route_irqs(irq::INTX, 0, 1, file.as_slice()),
            |told| told.pin = kept,
        )
    }

    /// Unmasks the interrupt pin by a message. If the pin is still asserted, it is delivered again.
    ///
    /// # Errors
    /// [`FunctionError::Refused`], [`FunctionError::Broken`].
    pub fn unmask_pin(&self) -> Result<(), FunctionError> {
        let flags = IrqSetFlags::DATA_NONE | IrqSetFlags::UNMASK;
        self.perform(|client| client.set_irqs(flags, irq::INTX, 0, 1, &[], &[]))
    }

    /// Resets the function, which runs afterwards. RAM and routes stay.
    ///
    /// # Errors
    /// [`FunctionError::Refused`], [`FunctionError::Broken`].
    #[cfg(feature = "driver")]
    pub fn reset(&self) -> Result<(), FunctionError> {
        self.perform_and_note(Client::reset, |told| told.stopped = false)
    }

    /// Goes on with a new connection, in place of the present one if there is one. Takes as long as
    /// three times the patience at most.
    ///
    /// # Errors
    /// [`FunctionError::Connection`] and [`FunctionError::Different`]: the socket is closed, and
    /// the state is as before, so a further attempt may succeed. [`FunctionError::Refused`] with
    /// `EBUSY` while a function is connected that ends with its connection.
    /// [`FunctionError::Broken`].
    pub fn reconnect(&self, socket: OwnedFd) -> Result<Continuity, FunctionError> {
        let failed = |error: ClientError| FunctionError::Connection(error.to_string());
        let Begun { mut client, shape, io_fds } = begin(socket, self.patience).map_err(failed)?;
        if let Some(difference) = self.shape.difference(&shape) {
            return Err(FunctionError::Different(difference));
        }
        let mut inner = lock(&self.inner);
        match &inner.link {
            ServerLink::Broken(why) => return Err(FunctionError::Broken(why.clone())),
            ServerLink::Up(old) if old.is_only_connection() => {
                return Err(FunctionError::Refused(Errno::BUSY));
            }
            _ => {}
        }
        client.limit(Instant::now() + self.patience);
        inner.told.replay(&mut client).map_err(failed)?;
        let resumed = client.go_on(inner.told.stopped).map_err(failed)?;
        if matches!(inner.link, ServerLink::Up(_)) {
            self.lose(&mut inner, "another connection took its place".into());
        }
        let watched = self.watch.follow(client.as_fd());
        watched.map_err(|error| FunctionError::Connection(error.to_string()))?;
        *self.io_fds.write().unwrap_or_else(|poisoned| poisoned.into_inner()) = io_fds;
        inner.link = ServerLink::Up(Box::new(client));
        let mut state = lock(&self.state);
        *state = (ConnectionState::Connected, state.1 + 1);
        drop(state);
        self.changed.notify_all();
        inner.told.raise_vectors();
        drop(inner);
        self.announce();
        Ok(if resumed { Continuity::Resumed } else { Continuity::Reset })
    }

    /// Returns `EINVAL` if an access is not within its region, or not allowed.
    pub(crate) fn check(
        &self,
        index: u32,
        offset: u64,
        len: usize,
        needs: RegionFlags,
    ) -> Result<(), FunctionError> {
        let region = self.shape.regions.get(index as usize);
        let end = offset.checked_add(len as u64);
        let fits = |region: &&RegionShape| {
            region.flags.contains(needs) && end.is_some_and(|end| end <= region.size)
        };
        region.filter(fits).map(drop).ok_or(FunctionError::Refused(Errno::INVAL))
    }

    pub(crate) fn check_vectors(&self, vectors: Range<u32>) -> Result<(), FunctionError> {
        let fits = vectors.start <= vectors.end && vectors.end <= self.vectors().count;
        fits.then_some(()).ok_or(FunctionError::Refused(Errno::INVAL))
    }

    /// Carries out `request`, again after each reconnection until it is answered.
    pub(crate) fn perform<T>(
        &self,
        request: impl FnMut(&mut Client) -> Result<T, ClientError>,
    ) -> Result<T, FunctionError> {
        self.perform_and_note(request, |_| {})
    }

    /// Carries out `request`, as [`RemoteFunction::perform`] does, and then `note`, before any
    /// other connection can be told what the VMM has set.
    fn perform_and_note<T>(
        &self,
        mut request: impl FnMut(&mut Client) -> Result<T, ClientError>,
        note: impl FnOnce(&mut VmmSettings),
    ) -> Result<T, FunctionError> {
        let mut inner = lock(&self.inner);
        let until = Instant::now() + self.patience;
        loop {
            match &mut inner.link {
                ServerLink::Broken(why) => return Err(FunctionError::Broken(why.clone())),
                ServerLink::Lost => inner = self.wait_for_link(inner, until),
                ServerLink::Up(client) => {
                    client.limit(until);
                    match request(client) {
                        Ok(done) => {
                            note(&mut inner.told);
                            return Ok(done);
                        }
                        Err(error) => self.failed(&mut inner, error)?,
                    }
                }
            }
        }
    }

    /// Waits for a reconnection. If there is none until `until`, the function is broken.
    fn wait_for_link<'a>(
        &self,
        inner: MutexGuard<'a, Inner>,
        until: Instant,
    ) -> MutexGuard<'a, Inner> {
        let left = until.saturating_duration_since(Instant::now());
        let lost = |inner: &mut Inner| matches!(inner.link, ServerLink::Lost);
        let waited = self.changed.wait_timeout_while(inner, left, lost);
        let (mut inner, waited) = waited.unwrap_or_else(|poisoned| poisoned.into_inner());
        if waited.timed_out() && matches!(inner.link, ServerLink::Lost) {
            self.break_off(&mut inner, "the server did not come back in time".into());
        }
        inner
    }

    /// Sets something that is replayed after a reconnection: by `request`, if there is a
    /// connection, and then in the record of what was set. A function that breaks at this very
    /// request records nothing: [`RemoteFunction::break_off`] has raised every recorded vector.
    pub(crate) fn tell(
        &self,
        request: impl FnOnce(&mut Client) -> Result<(), ClientError>,
        note: impl FnOnce(&mut VmmSettings),
    ) -> Result<(), FunctionError> {
        let mut inner = lock(&self.inner);
        match &mut inner.link {
            ServerLink::Broken(why) => return Err(FunctionError::Broken(why.clone())),
            ServerLink::Lost => {}
            ServerLink::Up(client) => {
                client.limit(Instant::now() + self.patience);
                if let Err(error) = request(client) {
                    self.failed(&mut inner, error)?;
                }
            }
        }
        note(&mut inner.told);
        Ok(())
    }

    /// Takes an error of the present connection. Returns it if the caller has to know, and not if
    /// the connection was lost and another may follow.
    fn failed(&self, inner: &mut Inner, error: ClientError) -> Result<(), FunctionError> {
        match error {
            ClientError::Refused(errno) => return Err(FunctionError::Refused(errno)),
            ClientError::Connection(why) => self.lose(inner, why),
            ClientError::Timeout | ClientError::Malformed(_) => {
                self.break_off(inner, error.to_string());
            }
        }
        match &inner.link {
            ServerLink::Broken(why) => Err(FunctionError::Broken(why.clone())),
            _ => Ok(()),
        }
    }

    fn lose(&self, inner: &mut Inner, why: String) {
        match &inner.link {
            ServerLink::Up(client) if client.is_only_connection() => {
                self.break_off(inner, format!("{why}, and the function ends with its connection"));
            }
            _ => self.end(inner, ServerLink::Lost, ConnectionState::Lost(why)),
        }
    }

    fn break_off(&self, inner: &mut Inner, why: String) {
        self.end(inner, ServerLink::Broken(why.clone()), ConnectionState::Broken(why));
        // A driver that waits for an interrupt finds out when it reads a register.
        std::mem::take(&mut inner.told).raise_vectors();
    }

    fn end(&self, inner: &mut Inner, link: ServerLink, state: ConnectionState) {
        lock(&self.state).0 = state;
        self.io_fds.write().unwrap_or_else(|poisoned| poisoned.into_inner()).clear();
        if let ServerLink::Up(client) = std::mem::replace(&mut inner.link, link) {
            self.watch.leave(client.as_fd());
        }
        self.changed.notify_all();
    }
}

impl AsFd for RemoteFunction {
    /// Returns a descriptor that is readable while there is no connection, also if no access has
    /// noticed yet. It stays the same after [`RemoteFunction::reconnect`]. Only to wait on: it is
    /// an epoll(7) descriptor. Once it is readable, [`RemoteFunction::state`] tells the reason.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.watch.as_fd()
    }
}

/// A connection, and what the server said about its function.
struct Begun {
    client: Client,
    shape: Shape,
    /// The registers that are written without messages, by region.
    io_fds: Vec<(u32, IoFds)>,
}

/// Negotiates on `socket` and asks for everything that a VMM needs to know first.
fn begin(socket: OwnedFd, patience: Duration) -> Result<Begun, ClientError> {
    let until = Instant::now() + patience;
    let mut client = Client::begin(socket, patience, Some(true))?;
    client.limit(until);
    let shape = Shape::learn(&mut client)?;
    let mut io_fds = Vec::new();
    for (index, one) in (region::BAR0..=region::BAR5).zip(&shape.regions) {
        if one.size > 0 {
            let mut found = client.io_fds(index, one.size)?;
            found.bells.sort_by_key(|bell| bell.offset);
            io_fds.push((index, found));
        }
    }
    Ok(Begun { client, shape, io_fds })
}

pub(crate) fn duplicate(file: BorrowedFd<'_>) -> Result<OwnedFd, FunctionError> {
    file.try_clone_to_owned().map_err(|_| FunctionError::Refused(Errno::MFILE))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}
