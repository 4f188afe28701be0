//! A client's connection, shared by the server and the client's message-only memory.
//!
//! Both use it on the endpoint's thread. While the function runs, an access to message-only memory
//! may send a message and wait for its reply; commands that arrive meanwhile are kept for the
//! server. The lock is therefore never contended. It exists because a memory handle may be sent to
//! another thread.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use slipway_ram::{Fault, MessageMemory};
use slipway_vfio_user_spec::{Command, DmaAccess, Header, U64};
use zerocopy::{FromBytes, IntoBytes};

use slipway_vfio_user_wire::{End, Message, Wire};

/// The largest number of commands that are kept while a reply is awaited, and of bytes in them.
const MAX_KEPT: usize = 64;
const MAX_KEPT_BYTES: usize = 4 << 20;

/// A client's connection, used by the server and by accesses to message-only memory.
pub(crate) struct Channel {
    inner: Mutex<Inner>,
    /// Accesses may wait: the endpoint has a thread of its own, where waiting delays no other
    /// client.
    may_wait: AtomicBool,
    deadline: Duration,
}

struct Inner {
    wire: Wire,
    kept: VecDeque<Message>,
    kept_bytes: usize,
    next_id: u16,
    /// The largest number of data bytes that the client accepts in a message.
    max_xfer: usize,
    /// The reason for which the connection is unusable, once the client broke the protocol or a
    /// deadline, or the server hung up. Never reset.
    broken: Option<&'static str>,
}

impl Channel {
    pub(crate) fn new(wire: Wire, deadline: Duration) -> Self {
        Self {
            inner: Mutex::new(Inner {
                wire,
                kept: VecDeque::new(),
                kept_bytes: 0,
                next_id: 0,
                max_xfer: 4096,
                broken: None,
            }),
            may_wait: AtomicBool::new(false),
            deadline,
        }
    }

    /// Sets whether accesses may wait for the client.
    pub(crate) fn allow_waiting(&self, allowed: bool) {
        self.may_wait.store(allowed, Ordering::Relaxed);
    }

    pub(crate) fn set_max_xfer(&self, bytes: usize) {
        self.lock().max_xfer = bytes;
    }

    /// Returns the next message: a kept one if there is any, else one from the socket.
    pub(crate) fn receive(&self) -> Result<Option<Message>, End> {
        let mut inner = self.lock();
        if let Some(why) = inner.broken {
            return Err(End::Broken(why));
        }
        match inner.kept.pop_front() {
            Some(message) => {
                inner.kept_bytes -= message.payload.len();
                Ok(Some(message))
            }
            None => inner.wire.receive(),
        }
    }

    /// Returns whether a kept message, or the end of the connection, awaits [`Channel::receive`].
    /// No descriptor announces it.
    pub(crate) fn has_kept(&self) -> bool {
        let inner = self.lock();
        !inner.kept.is_empty() || inner.broken.is_some()
    }

    /// Shuts the connection down. Accesses to memory that still refers to the channel fault from
    /// now on.
    pub(crate) fn hang_up(&self) {
        let mut inner = self.lock();
        inner.broken = Some("hung up");
        let _ = rustix::net::shutdown(inner.wire.file(), rustix::net::Shutdown::Both);
    }

    /// Calls `call` with the wire.
    pub(crate) fn with<T>(&self, call: impl FnOnce(&mut Wire) -> T) -> T {
        call(&mut self.lock().wire)
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Does one access of any length, in as many messages as it takes. Returns `None` if the client
    /// did not serve it.
    fn access(&self, address: u64, mut data: Data<'_>) -> Option<()> {
        if !self.may_wait.load(Ordering::Relaxed) {
            return None;
        }
        let deadline = Instant::now() + self.deadline;
        let mut inner = self.lock();
        let (len, step) = (data.len(), inner.max_xfer);
        for start in (0..len).step_by(step) {
            let end = len.min(start + step);
            inner.exchange(address.wrapping_add(start as u64), data.part(start, end), deadline)?;
        }
        Some(())
    }
}

/// The source or the destination of an access.
enum Data<'a> {
    Read(&'a mut [u8]),
    Write(&'a [u8]),
}

impl Data<'_> {
    fn len(&self) -> usize {
        match self {
            Self::Read(into) => into.len(),
            Self::Write(from) => from.len(),
        }
    }

    fn part(&mut self, start: usize, end: usize) -> Data<'_> {
        match self {
            Self::Read(into) => Data::Read(&mut into[start..end]),
            Self::Write(from) => Data::Write(&from[start..end]),
        }
    }
}

impl Inner {
    /// Sends one message and waits for its reply. Returns `None` if the client did not serve the
    /// access.
    fn exchange(&mut self, address: u64, data: Data<'_>, deadline: Instant) -> Option<()> {
        if self.broken.is_some() {
            return None;
        }
        let request = DmaAccess { address: U64::new(address), count: U64::new(data.len() as u64) };
        let (command, more): (_, &[u8]) = match &data {
            Data::Read(_) => (Command::DmaRead, &[]),
            Data::Write(from) => (Command::DmaWrite, from),
        };
        let payload = [request.as_bytes(), more].concat();
        self.next_id = self.next_id.wrapping_add(1);
        let header = Header::command(self.next_id, command, payload.len());
        let outcome = self.wire.send(&header, &payload, Vec::new());
        let outcome = outcome.and_then(|()| self.reply(&header, deadline));
        let reply = match outcome {
            Ok(reply) => reply,
            Err(end) => {
                self.broken = Some(match end {
                    End::Broken(why) => why,
                    _ => "the client hung up",
                });
                return None;
            }
        };
        if reply.header.errno().is_some() {
            return None; // refused: the device's business, not the connection's
        }
        match data {
            Data::Write(_) => Some(()),
            Data::Read(into) => self.take_data(&reply, into),
        }
    }

    fn take_data(&mut self, reply: &Message, into: &mut [u8]) -> Option<()> {
        let parsed = DmaAccess::read_from_prefix(&reply.payload).ok();
        match parsed {
            Some((access, data))
                if data.len() == into.len() && access.count.get() == into.len() as u64 =>
            {
                into.copy_from_slice(data);
                Some(())
            }
            _ => {
                self.broken = Some("a reply to a DMA read of another length");
                None
            }
        }
    }

    /// Waits for the reply to `request`; commands that arrive before it are kept.
    fn reply(&mut self, request: &Header, deadline: Instant) -> Result<Message, End> {
        loop {
            self.wire.flush()?;
            match self.wire.receive()? {
                Some(message) if message.header.is_reply() => {
                    let expected = (request.id.get(), request.command.get());
                    if (message.header.id.get(), message.header.command.get()) != expected {
                        return Err(End::Broken("a reply to nothing that was asked"));
                    }
                    return Ok(message);
                }
                Some(message) => self.keep(message)?,
                None => self.wait(deadline)?,
            }
        }
    }

    fn keep(&mut self, message: Message) -> Result<(), End> {
        self.kept_bytes += message.payload.len();
        if self.kept.len() >= MAX_KEPT || self.kept_bytes > MAX_KEPT_BYTES {
            return Err(End::Broken("too many commands while a reply was awaited"));
        }
        self.kept.push_back(message);
        Ok(())
    }

    fn wait(&mut self, deadline: Instant) -> Result<(), End> {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(End::Broken("the client did not answer a memory access in time"));
        }
        let mut flags = PollFlags::IN;
        flags.set(PollFlags::OUT, self.wire.has_output());
        let file = self.wire.file();
        let timeout =
            Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
        // An early return, be it for a signal, only leads to another look.
        let _ = rustix::event::poll(&mut [PollFd::new(&file, flags)], Some(&timeout));
        Ok(())
    }
}

/// Message-only memory of one client.
pub(crate) struct RemoteMemory(pub(crate) Arc<Channel>);

impl MessageMemory for RemoteMemory {
    fn read(&self, iova: u64, into: &mut [u8]) -> Result<(), Fault> {
        self.0.access(iova, Data::Read(into)).ok_or(Fault::Remote { iova })
    }

    fn write(&self, iova: u64, from: &[u8]) -> Result<(), Fault> {
        self.0.access(iova, Data::Write(from)).ok_or(Fault::Remote { iova })
    }
}
