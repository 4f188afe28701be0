//! A connection to a server, for one thread.
//!
//! The client blocks, with a timeout on every wait, and is used from one thread. While it waits for
//! a reply it answers the server's accesses to memory by messages: it refuses them, but for those
//! to the message-only memory of feature `driver`.
//!
//! Over 500 lines: every request of one connection.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use slipway_peer::{Bin, Foreign};
use slipway_vfio_user_spec as spec;
use spec::{Command, Header, RegionAccess, device_state};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use slipway_vfio_user_wire::{
    Capabilities, End, MAX_DATA_XFER_SIZE, MAX_MESSAGE, MAX_MSG_FDS, Message, Wire, encode, parse,
};

/// The reason for which a call failed.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The connection cannot be made or has ended.
    #[error("the vfio-user connection: {0}")]
    Connection(String),
    /// The server did not answer in time, or did not read. The connection cannot be used any more.
    #[error("the server did not answer in time")]
    Timeout,
    /// The server refused the request with this errno.
    #[error("the server refused: {0}")]
    Refused(Errno),
    /// The reply violates the protocol.
    #[error("the server's reply is malformed: {0}")]
    Malformed(&'static str),
}

impl From<End> for ClientError {
    fn from(end: End) -> Self {
        match end {
            End::Broken(what) => Self::Malformed(what),
            End::Closed | End::Cut | End::Socket(_) => Self::Connection(end.to_string()),
        }
    }
}

impl From<Errno> for ClientError {
    fn from(error: Errno) -> Self {
        Self::Connection(error.to_string())
    }
}

/// A region as the server describes it.
#[derive(Debug)]
pub struct RegionDescription {
    /// The size in bytes; zero if the region does not exist.
    pub size: u64,
    /// The operations that are allowed.
    pub flags: spec::RegionFlags,
    /// Offset of the region's start in `file`.
    pub file_offset: u64,
    /// Parts that may be mapped, each as its offset in the region and its length in bytes.
    pub areas: Vec<(u64, u64)>,
    /// The file to map the parts from. A user of the file has to trust the server, see
    /// [`crate::RegisterWindow`].
    pub file: Option<Foreign>,
}

/// An interrupt type as the server describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IrqDescription {
    /// The operations that the type supports.
    pub flags: spec::IrqInfoFlags,
    /// The number of interrupts.
    pub count: u32,
}

/// A connection to a server.
pub struct Client {
    pub(crate) wire: Wire,
    next_id: u16,
    timeout: Duration,
    /// The time at which every wait ends, instead of `timeout` after the wait's begin.
    until: Option<Instant>,
    /// The time for which a wait for a reply looks before it sleeps.
    #[cfg(feature = "driver")]
    pub(crate) spin: Duration,
    pub(crate) server: Capabilities,
    #[cfg(feature = "driver")]
    pub(crate) memory: crate::memory::MessageMemory,
    /// The bin that closes the server's descriptors.
    bin: Bin,
}

/// The largest number of the server's accesses that are refused during one wait.
const MAX_REFUSALS: u32 = 64;
/// The bytes of a reply that a description of a region may have.
pub(crate) const ROOM: u32 = 4096;
/// The largest number of the server's descriptors that await closing.
const MAX_HELD: usize = 64;
/// The largest number of bytes that wait for the server to read.
const MAX_QUEUED: usize = 2 * MAX_MESSAGE;

/// Dropping a client shuts the connection down at once, so that the server is free for the next
/// client. The descriptor is closed elsewhere, which may take its time.
impl Drop for Client {
    fn drop(&mut self) {
        let _ = rustix::net::shutdown(self.wire.file(), rustix::net::Shutdown::Both);
    }
}

impl Client {
    /// Negotiates on a connected stream socket. With `resume`, as a client that connects again by
    /// itself when the server was replaced, and then calls [`Client::go_on`].
    pub(crate) fn begin(
        socket: OwnedFd,
        timeout: Duration,
        resume: Option<bool>,
    ) -> Result<Self, ClientError> {
        let bin = Bin::new();
        let mut client = Self {
            wire: Wire::new(Foreign::new(socket, &bin), &bin, MAX_QUEUED),
            next_id: 0,
            timeout,
            until: None,
            #[cfg(feature = "driver")]
            spin: Duration::ZERO,
            server: Capabilities::default(),
            #[cfg(feature = "driver")]
            memory: Default::default(),
            bin,
        };
        let proposal = Capabilities {
            max_msg_fds: Some(MAX_MSG_FDS as u64),
            max_data_xfer_size: Some(MAX_DATA_XFER_SIZE as u64),
            max_dma_maps: Some(spec::DEFAULT_MAX_DMA_MAPS),
            pgsizes: Some(spec::DEFAULT_PAGE_SIZES),
            write_multiple: Some(true),
            resume,
            one_connection: resume,
            posted_writes: resume,
        };
        let reply = client.call(Command::Version, &encode(spec::MINOR, proposal), &[])?;
        let (version, data) = spec::Version::read_from_prefix(&reply.payload)
            .map_err(|_| ClientError::Malformed("version"))?;
        if version.major.get() != spec::MAJOR || version.minor.get() > spec::MINOR {
            return Err(ClientError::Malformed("version"));
        }
        client.server = parse(data).ok_or(ClientError::Malformed("version data"))?;
        Ok(client)
    }

    /// Ends every later wait at `until` at the latest.
    pub(crate) fn limit(&mut self, until: Instant) {
        self.until = Some(until);
    }

    /// Returns the largest number of descriptors that the server takes with one message, at least
    /// one.
    pub(crate) fn max_files(&self) -> usize {
        let theirs = self.server.max_msg_fds.unwrap_or(spec::DEFAULT_MAX_MSG_FDS);
        usize::try_from(theirs).unwrap_or(MAX_MSG_FDS).clamp(1, MAX_MSG_FDS)
    }

    /// Returns whether a successor of the server holds the function for this client.
    pub(crate) fn resumes(&self) -> bool {
        self.server.resume == Some(true)
    }

    /// Returns whether the function ends with this connection.
    pub(crate) fn is_only_connection(&self) -> bool {
        self.server.one_connection == Some(true)
    }

    /// Has a function that was just connected run, or stay stopped. RAM is mapped and interrupts
    /// are routed as they were. Returns `false` if the function is in its state after a reset: no
    /// server held it for this client.
    pub(crate) fn go_on(&mut self, stopped: bool) -> Result<bool, ClientError> {
        // A new server holds the function for this client.
        let held = self.resumes() && self.device_state()? == device_state::STOP;
        let state = if stopped { device_state::STOP } else { device_state::RUNNING };
        if !held && !stopped {
            return Ok(false);
        }
        match self.set_device_state(state) {
            Ok(()) => Ok(held),
            Err(ClientError::Refused(_)) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Asks for the descriptions of the regions `0..count` at once, and has each seen as it comes.
    pub(crate) fn regions<T>(
        &mut self,
        count: u32,
        mut see: impl FnMut(RegionDescription) -> Result<T, ClientError>,
    ) -> Result<Vec<T>, ClientError> {
        let requests: Vec<_> =
            (0..count).map(|index| spec::RegionInfo::request(index, ROOM)).collect();
        self.ask_all(Command::DeviceGetRegionInfo, &requests, |reply| see(described(reply)?))
    }

    /// Asks for the descriptions of the interrupt types `0..count` at once.
    pub(crate) fn irqs(&mut self, count: u32) -> Result<Vec<IrqDescription>, ClientError> {
        let requests: Vec<_> = (0..count).map(spec::IrqInfo::request).collect();
        let see = |reply: Message| Ok(interrupt(&parsed(&reply)?));
        self.ask_all(Command::DeviceGetIrqInfo, &requests, see)
    }

    /// Routes interrupts from `start` on to the eventfds in `files`. Without `files`, removes
    /// `count` routes.
    pub fn route_irqs(
        &mut self,
        index: u32,
        start: u32,
        count: u32,
        files: &[BorrowedFd<'_>],
    ) -> Result<(), ClientError> {
        let flags = spec::IrqSetFlags::DATA_EVENTFD | spec::IrqSetFlags::TRIGGER;
        self.set_irqs(flags, index, start, count, &[], files)
    }

    /// Sends a request about interrupts with any flags and data.
    pub fn set_irqs(
        &mut self,
        flags: spec::IrqSetFlags,
        index: u32,
        start: u32,
        count: u32,
        booleans: &[u8],
        files: &[BorrowedFd<'_>],
    ) -> Result<(), ClientError> {
        let request = spec::IrqSet::new(flags, index, start, count, booleans.len());
        let payload = [request.as_bytes(), booleans].concat();
        self.call(Command::DeviceSetIrqs, &payload, files).map(drop)
    }

    /// Permits the device to access `len` bytes at `offset` of `file` under the address `iova`.
    pub fn map(
        &mut self,
        iova: u64,
        len: u64,
        file: BorrowedFd<'_>,
        offset: u64,
        writable: bool,
    ) -> Result<(), ClientError> {
        let request = spec::DmaMap::new(iova, len, offset, writable);
        self.call(Command::DmaMap, request.as_bytes(), &[file]).map(drop)
    }

    /// Reads registers.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn read(&mut self, region: u32, offset: u64, into: &mut [u8]) -> Result<(), ClientError> {
        let request = RegionAccess::new(region, offset, into.len());
        copy_read(&self.call(Command::RegionRead, request.as_bytes(), &[])?, into)
    }

    /// Writes registers and waits until the server has done the write.
    pub fn write(&mut self, region: u32, offset: u64, from: &[u8]) -> Result<(), ClientError> {
        let payload = [RegionAccess::new(region, offset, from.len()).as_bytes(), from].concat();
        self.call(Command::RegionWrite, &payload, &[]).map(drop)
    }

    /// Writes registers of a BAR as the bus does: without waiting for the server if it permits that
    /// (the capability `slipway_posted_writes`), and else as [`Client::write`]. The server does the
    /// write before it answers any later request.
    ///
    /// # Errors
    /// [`ClientError`]; [`ClientError::Refused`] only if this has waited.
    pub fn put(&mut self, region: u32, offset: u64, from: &[u8]) -> Result<(), ClientError> {
        match self.server.posted_writes {
            Some(true) => self.post(region, offset, from),
            _ => self.write(region, offset, from),
        }
    }

    /// Writes registers and does not wait for a reply, whether or not the server has permitted it
    /// (`slipway_posted_writes`): [`Client::put`] heeds that. Without the permission, the caller
    /// sees to it that nothing depends on the order of the write and of eventfds that it raises,
    /// and that no successor of the server goes on with the function, for which a write that the
    /// server has not read would be lost. Waits while the server does not read earlier messages.
    ///
    /// # Errors
    /// [`ClientError`], but never [`ClientError::Refused`].
    pub fn post(&mut self, region: u32, offset: u64, from: &[u8]) -> Result<(), ClientError> {
        let (header, payload) = self.posted(region, offset, from);
        self.flush(self.deadline())?;
        Ok(self.wire.send(&header, &payload, Vec::new())?)
    }

    /// Returns header and payload of a write to registers that is not answered.
    pub(crate) fn posted(&mut self, region: u32, offset: u64, from: &[u8]) -> (Header, Vec<u8>) {
        let payload = [RegionAccess::new(region, offset, from.len()).as_bytes(), from].concat();
        let mut header = self.header(Command::RegionWrite, payload.len());
        header.flags = spec::U32::new(spec::flag::COMMAND | spec::flag::NO_REPLY);
        (header, payload)
    }

    /// Sends a command with any payload and returns the reply.
    pub(crate) fn call(
        &mut self,
        command: Command,
        payload: &[u8],
        files: &[BorrowedFd<'_>],
    ) -> Result<Message, ClientError> {
        let header = self.header(command, payload.len());
        let deadline = self.deadline();
        self.send(deadline, &header, payload, files)?;
        let reply = self.next_message(deadline, &[header])?;
        self.checked(command, reply)
    }

    /// Sends several requests of one command before the first reply, and has each reply seen as it
    /// comes. A server answers them in any order. Returns what was seen, in the order of the
    /// requests, which are few: a server that does not read before it has answered has room for
    /// them in the socket.
    fn ask_all<R: IntoBytes + Immutable, T>(
        &mut self,
        command: Command,
        requests: &[R],
        mut see: impl FnMut(Message) -> Result<T, ClientError>,
    ) -> Result<Vec<T>, ClientError> {
        let deadline = self.deadline();
        let (mut headers, mut bytes) = (Vec::with_capacity(requests.len()), Vec::new());
        for request in requests {
            let header = self.header(command, request.as_bytes().len());
            bytes.extend_from_slice(header.as_bytes());
            bytes.extend_from_slice(request.as_bytes());
            headers.push(header);
        }
        // At once: each message wakes a server that has read the ones before.
        if let Some(first) = headers.first() {
            self.send(deadline, first, &bytes[size_of::<Header>()..], &[])?;
        }
        let mut seen: Vec<Option<T>> = headers.iter().map(|_| None).collect();
        let mut waiting = headers.clone();
        while !waiting.is_empty() {
            let reply = self.next_message(deadline, &waiting)?;
            let is_its = |header: &Header| header.id == reply.header.id;
            let place = headers.iter().position(is_its);
            waiting.retain(|header| !is_its(header));
            let reply = self.checked(command, reply)?;
            if let Some(place) = place.and_then(|place| seen.get_mut(place)) {
                *place = Some(see(reply)?);
            }
        }
        Ok(seen.into_iter().flatten().collect())
    }

    pub(crate) fn send(
        &mut self,
        deadline: Instant,
        header: &Header,
        payload: &[u8],
        files: &[BorrowedFd<'_>],
    ) -> Result<(), ClientError> {
        self.flush(deadline)?;
        while !self.wire.send_with(header, payload, files)? {
            self.wait(deadline, PollFlags::OUT)?;
        }
        Ok(())
    }

    /// Refuses a reply to `command` that is an error, or brings what nobody asked for.
    pub(crate) fn checked(&self, command: Command, reply: Message) -> Result<Message, ClientError> {
        let brings_files =
            matches!(command, Command::DeviceGetRegionInfo | Command::DeviceGetRegionIoFds);
        // Descriptors that nobody asked for would take this process's numbers away.
        if reply.excess || !(brings_files || reply.files.is_empty()) || self.bin.held() > MAX_HELD {
            return Err(ClientError::Malformed("descriptors that nobody asked for"));
        }
        match reply.header.errno() {
            None => Ok(reply),
            Some(number) => Err(ClientError::Refused(errno(number))),
        }
    }

    /// Returns the time at which a wait that begins now ends.
    pub(crate) fn deadline(&self) -> Instant {
        self.until.unwrap_or_else(|| Instant::now() + self.timeout)
    }

    /// Waits until the server has read enough for all output to be in the socket.
    pub(crate) fn flush(&mut self, deadline: Instant) -> Result<(), ClientError> {
        let mut refusals = 0;
        while !self.wire.flush()? {
            // A server that waits for its own output to be read must not wait for ever.
            match self.wire.receive()? {
                Some(message) => self.take_command(&message, deadline, &mut refusals)?,
                None => self.wait(deadline, PollFlags::IN | PollFlags::OUT)?,
            }
        }
        Ok(())
    }

    /// Sends a command whose reply is a structure of the same type as the request.
    pub(crate) fn ask<T>(&mut self, command: Command, request: &T) -> Result<T, ClientError>
    where
        T: IntoBytes + FromBytes + Immutable + KnownLayout,
    {
        parsed(&self.call(command, request.as_bytes(), &[])?)
    }

    pub(crate) fn header(&mut self, command: Command, payload: usize) -> Header {
        self.next_id = self.next_id.wrapping_add(1);
        Header::command(self.next_id, command, payload)
    }

    /// Waits for the reply to one of `requests`, and serves the commands that arrive before it.
    pub(crate) fn next_message(
        &mut self,
        deadline: Instant,
        requests: &[Header],
    ) -> Result<Message, ClientError> {
        let mut refusals = 0;
        #[cfg(feature = "driver")]
        let begin = (!self.spin.is_zero()).then(Instant::now);
        loop {
            let sent = self.wire.flush()?;
            match self.wire.receive()? {
                Some(message) if message.header.is_reply() => {
                    let is_expected = |request: &Header| {
                        let (asked, got) = (request, &message.header);
                        (asked.id.get(), asked.command.get()) == (got.id.get(), got.command.get())
                    };
                    if !requests.iter().any(is_expected) {
                        return Err(ClientError::Malformed("a reply to nothing"));
                    }
                    return Ok(message);
                }
                Some(message) => self.take_command(&message, deadline, &mut refusals)?,
                #[cfg(feature = "driver")]
                None if begin.is_some_and(|begin| begin.elapsed() < self.spin) => {
                    std::hint::spin_loop();
                }
                None if sent => self.wait(deadline, PollFlags::IN)?,
                None => self.wait(deadline, PollFlags::IN | PollFlags::OUT)?,
            }
        }
    }

    /// Waits for `flags` on the socket.
    fn wait(&self, deadline: Instant, flags: PollFlags) -> Result<(), ClientError> {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ClientError::Timeout);
        }
        let file = self.wire.file();
        let timeout =
            Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
        match rustix::event::poll(&mut [PollFd::new(&file, flags)], Some(&timeout)) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Answers a command of the server. However many commands arrive, the wait ends at `deadline`.
    fn take_command(
        &mut self,
        message: &Message,
        deadline: Instant,
        refusals: &mut u32,
    ) -> Result<(), ClientError> {
        let header = &message.header;
        if !header.is_command() {
            return Err(ClientError::Malformed("a reply to nothing"));
        }
        if Instant::now() >= deadline {
            return Err(ClientError::Timeout);
        }
        #[cfg(feature = "driver")]
        let accessed = self.memory.access(message);
        #[cfg(not(feature = "driver"))]
        let accessed: Result<Vec<u8>, _> = Err(Errno::NOTSUP);
        match accessed {
            Ok(payload) => self.wire.send(&header.reply(payload.len()), &payload, Vec::new())?,
            Err(_) if *refusals == MAX_REFUSALS => {
                return Err(ClientError::Malformed("accesses to memory that is not mapped"));
            }
            Err(errno) => {
                *refusals += 1;
                self.wire.send(&header.error_reply(errno.raw_os_error()), &[], Vec::new())?;
            }
        }
        Ok(())
    }
}

impl AsFd for Client {
    /// Returns the socket, to wait on together with other descriptors.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.wire.file()
    }
}

/// Parses the description of a region.
pub(crate) fn described(mut reply: Message) -> Result<RegionDescription, ClientError> {
    let info: spec::RegionInfo = parsed(&reply)?;
    let flags = spec::RegionFlags::from_bits_retain(info.flags.get());
    let areas = info.areas(&reply.payload).ok_or(ClientError::Malformed("capabilities"))?;
    Ok(RegionDescription {
        size: info.size.get(),
        flags,
        file_offset: info.offset.get(),
        areas,
        file: reply.files.pop(),
    })
}

pub(crate) fn interrupt(reply: &spec::IrqInfo) -> IrqDescription {
    let flags = spec::IrqInfoFlags::from_bits_retain(reply.flags.get());
    IrqDescription { flags, count: reply.count.get() }
}

/// Parses a reply that is a structure.
fn parsed<T: FromBytes>(reply: &Message) -> Result<T, ClientError> {
    let parsed = T::read_from_prefix(&reply.payload);
    parsed.map(|(info, _)| info).map_err(|_| ClientError::Malformed("reply too short"))
}

/// Copies the data of a reply to a read.
pub(crate) fn copy_read(reply: &Message, into: &mut [u8]) -> Result<(), ClientError> {
    match RegionAccess::read_from_prefix(&reply.payload) {
        Ok((_, data)) if data.len() == into.len() => {
            into.copy_from_slice(data);
            Ok(())
        }
        _ => Err(ClientError::Malformed("length of what was read")),
    }
}

/// Returns the error that a server's errno means. Numbers that are no errno of Linux mean `EIO`.
fn errno(number: u32) -> Errno {
    match i32::try_from(number) {
        Ok(number @ 1..=4095) => Errno::from_raw_os_error(number),
        _ => Errno::IO,
    }
}
