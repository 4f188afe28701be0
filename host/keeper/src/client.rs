//! The daemon's end of a connection to the keeper.

use std::io::{Error, ErrorKind};
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use slipway_peer::{Bin, Foreign};

use crate::SLOTS;
use crate::wire::{self, BATCH, CLEAR, PUT, TAKE};

/// A connection to a keeper, usable by any thread.
pub struct Keeper {
    socket: OwnedFd,
    occupied: Occupied,
}

/// The slots in which the keeper may hold a descriptor, as a bit each. A shelf has a thousand
/// slots, of which an endpoint uses a few: the others cost no message when the shelf is cleared.
struct Occupied(Box<[AtomicU64]>);

impl Occupied {
    /// Makes the set of all slots: before the first [`Keeper::take`] nobody knows.
    fn all() -> Self {
        Self((0..SLOTS / u64::BITS).map(|_| AtomicU64::new(u64::MAX)).collect())
    }

    fn set(&self, slot: u32) {
        self.change(slot, |word, bit| word.fetch_or(bit, Ordering::Relaxed));
    }

    /// Removes a slot. Returns whether the slot was in the set.
    fn remove(&self, slot: u32) -> bool {
        self.change(slot, |word, bit| word.fetch_and(!bit, Ordering::Relaxed))
    }

    /// Returns whether the slot was in the set before. The keeper ignores slots that it lacks.
    fn change(&self, slot: u32, change: impl FnOnce(&AtomicU64, u64) -> u64) -> bool {
        let bit = 1 << (slot % u64::BITS);
        let word = self.0.get((slot / u64::BITS) as usize);
        word.is_some_and(|word| change(word, bit) & bit != 0)
    }

    fn replace(&self, slots: impl Iterator<Item = u32>) {
        self.0.iter().for_each(|word| word.store(0, Ordering::Relaxed));
        slots.for_each(|slot| self.set(slot));
    }
}

impl Keeper {
    /// Connects to the keeper at `path`.
    ///
    /// # Errors
    /// Nothing listens there, or access is denied.
    pub fn connect(path: &Path) -> std::io::Result<Self> {
        let address = SocketAddrUnix::new(path).map_err(|_| {
            Error::new(ErrorKind::InvalidInput, "the path is too long for a socket")
        })?;
        let (kind, flags) = (SocketType::SEQPACKET, SocketFlags::CLOEXEC);
        let socket = rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None)?;
        rustix::net::connect(&socket, &address)?;
        Ok(Self { socket, occupied: Occupied::all() })
    }

    /// Returns whether a keeper listens at `path`. Never waits, and makes no request.
    pub fn is_there(path: &Path) -> bool {
        let Ok(address) = SocketAddrUnix::new(path) else { return false };
        let (kind, flags) = (SocketType::SEQPACKET, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK);
        let socket = rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None);
        let connected = socket.and_then(|socket| rustix::net::connect(&socket, &address));
        // `EAGAIN` means a full backlog, so a keeper listens.
        matches!(connected, Ok(()) | Err(rustix::io::Errno::AGAIN))
    }

    /// Puts a copy of `file` into `slot`, in place of the descriptor that is there. On return the
    /// keeper has it, whatever happens to this process.
    ///
    /// # Errors
    /// The keeper is gone.
    pub fn put(&self, slot: u32, file: impl AsFd) -> std::io::Result<()> {
        self.occupied.set(slot);
        let request = wire::request(PUT, slot);
        Ok(wire::send(self.socket.as_fd(), &request, &[file.as_fd()])?)
    }

    /// Has the keeper close the descriptor in `slot`. Sends nothing if the slot is known to be
    /// empty.
    ///
    /// # Errors
    /// The keeper is gone.
    pub fn clear(&self, slot: u32) -> std::io::Result<()> {
        if !self.occupied.remove(slot) {
            return Ok(());
        }
        Ok(wire::send(self.socket.as_fd(), &wire::request(CLEAR, slot), &[])?)
    }

    /// Takes copies of all descriptors that predecessors left, by slot in ascending order. Waits up
    /// to `patience` for a predecessor to end. No other thread may put or clear meanwhile.
    ///
    /// # Errors
    /// `TimedOut` if the predecessor has not ended; otherwise the keeper is gone, or no descriptors
    /// are left.
    pub fn take(&self, patience: Duration) -> std::io::Result<Vec<(u32, OwnedFd)>> {
        let taken = self.copies(patience)?;
        self.occupied.replace(taken.iter().map(|(slot, _)| *slot));
        Ok(taken)
    }

    fn copies(&self, patience: Duration) -> std::io::Result<Vec<(u32, OwnedFd)>> {
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
                // This process may have no descriptors left.
                return Err(Error::other("descriptors were lost on the way from the keeper"));
            }
            let slots =
                slots.map(|bytes| u32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]));
            // The keeper holds the originals, so closing such a copy is not the last close.
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
    /// Makes a shelf of the slots `slots` of `keeper`.
    pub fn new(keeper: Arc<Keeper>, slots: Range<u32>) -> Self {
        Self { keeper, slots }
    }

    /// Puts a copy of `file` into slot `at` of the shelf, as [`Keeper::put`] does.
    ///
    /// # Errors
    /// The keeper is gone; `InvalidInput` for a slot beyond the shelf.
    pub fn put(&self, at: u32, file: impl AsFd) -> std::io::Result<()> {
        self.keeper.put(self.slot(at)?, file)
    }

    /// Has the keeper close the descriptor in slot `at` of the shelf.
    ///
    /// # Errors
    /// The errors of [`Shelf::put`].
    pub fn clear(&self, at: u32) -> std::io::Result<()> {
        self.keeper.clear(self.slot(at)?)
    }

    /// Has the keeper close all descriptors of the shelf.
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
