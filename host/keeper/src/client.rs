//! The daemon's end.

use std::io::{Error, ErrorKind};
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use slipway_peer::{Bin, Foreign};

use crate::wire::{self, BATCH, CLEAR, PUT, TAKE};

/// A connection to a keeper. Any thread may use it.
pub struct Keeper {
    socket: OwnedFd,
}

impl Keeper {
    /// Connects to the keeper at `path`.
    ///
    /// # Errors
    /// Nobody listens there; no right to.
    pub fn connect(path: &Path) -> std::io::Result<Self> {
        let address = SocketAddrUnix::new(path).map_err(|_| {
            Error::new(ErrorKind::InvalidInput, "the path is too long for a socket")
        })?;
        let (kind, flags) = (SocketType::SEQPACKET, SocketFlags::CLOEXEC);
        let socket = rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None)?;
        rustix::net::connect(&socket, &address)?;
        Ok(Self { socket })
    }

    /// Whether a keeper listens at `path`. Never waits, and asks nothing of it.
    pub fn is_there(path: &Path) -> bool {
        let Ok(address) = SocketAddrUnix::new(path) else { return false };
        let (kind, flags) = (SocketType::SEQPACKET, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK);
        let socket = rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None);
        let connected = socket.and_then(|socket| rustix::net::connect(&socket, &address));
        // A full queue of clients is one that somebody listens on.
        matches!(connected, Ok(()) | Err(rustix::io::Errno::AGAIN))
    }

    /// Leaves a copy of `file` in `slot`, in the place of what is there. On return it is the
    /// keeper's, whatever happens to this process.
    ///
    /// # Errors
    /// The keeper is gone.
    pub fn put(&self, slot: u32, file: impl AsFd) -> std::io::Result<()> {
        let request = wire::request(PUT, slot);
        Ok(wire::send(self.socket.as_fd(), &request, &[file.as_fd()])?)
    }

    /// Has what is in `slot` closed.
    ///
    /// # Errors
    /// The keeper is gone.
    pub fn clear(&self, slot: u32) -> std::io::Result<()> {
        Ok(wire::send(self.socket.as_fd(), &wire::request(CLEAR, slot), &[])?)
    }

    /// Copies of everything that predecessors left, by slot in ascending order. Waits up to
    /// `patience` for a predecessor to be gone.
    ///
    /// # Errors
    /// `TimedOut`; the keeper is gone, or no descriptors are left.
    pub fn take(&self, patience: Duration) -> std::io::Result<Vec<(u32, OwnedFd)>> {
        set_socket_timeout(&self.socket, Timeout::Recv, Some(patience))?;
        wire::send(self.socket.as_fd(), &wire::request(TAKE, 0), &[])?;
        let (mut taken, bin) = (Vec::new(), Bin::new());
        loop {
            let mut numbers = [0u8; BATCH * 4];
            let received = wire::receive(self.socket.as_fd(), &mut numbers, &bin);
            let (count, files) = received.map_err(|error| match error {
                rustix::io::Errno::AGAIN => ErrorKind::TimedOut.into(),
                other => Error::from(other),
            })?;
            if count == 0 {
                return Err(ErrorKind::UnexpectedEof.into());
            }
            if count == 4 && files.is_empty() {
                return Ok(taken);
            }
            let slots = numbers[..count].chunks_exact(4);
            if slots.len() != files.len() {
                // This process may have no more of them.
                return Err(Error::other("descriptors were lost on the way from the keeper"));
            }
            let slots =
                slots.map(|bytes| u32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]));
            // The keeper has them too, so the close of such a copy is not the last one.
            taken.extend(slots.zip(files.into_iter().map(Foreign::into_owned)));
        }
    }
}

/// A range of a keeper's slots that one owner numbers from zero. Cheap to clone.
#[derive(Clone)]
pub struct Shelf {
    keeper: Arc<Keeper>,
    slots: Range<u32>,
}

impl Shelf {
    /// The slots `slots` of `keeper`.
    pub fn new(keeper: Arc<Keeper>, slots: Range<u32>) -> Self {
        Self { keeper, slots }
    }

    /// See [`Keeper::put`].
    ///
    /// # Errors
    /// The same; `InvalidInput` for a slot beyond the shelf.
    pub fn put(&self, at: u32, file: impl AsFd) -> std::io::Result<()> {
        self.keeper.put(self.slot(at)?, file)
    }

    /// See [`Keeper::clear`].
    ///
    /// # Errors
    /// As for [`Shelf::put`].
    pub fn clear(&self, at: u32) -> std::io::Result<()> {
        self.keeper.clear(self.slot(at)?)
    }

    /// Has everything on it closed.
    ///
    /// # Errors
    /// The keeper is gone.
    pub fn clear_all(&self) -> std::io::Result<()> {
        self.slots.clone().try_for_each(|slot| self.keeper.clear(slot))
    }

    fn slot(&self, at: u32) -> std::io::Result<u32> {
        let slot = self.slots.start.checked_add(at).filter(|slot| self.slots.contains(slot));
        slot.ok_or_else(|| Error::new(ErrorKind::InvalidInput, "a slot beyond the shelf"))
    }
}
