//! An endpoint that outlives its process: what it leaves behind, and in which order.
//!
//! Descriptors (the listening socket, the client's connection, memory, eventfds) lie on a keeper's
//! [`Shelf`]; what they mean, and how far the current message has come, lies in memory that
//! outlives the process ([`Lasting`]). The function has a journal of its own.
//!
//! A message stays in the socket until its effect and its reply are safe:
//! 1. it is *peeked* at, descriptors included (the kernel hands out duplicates);
//! 2. it is applied. Descriptors that it brought are put on the shelf first;
//! 3. what it changed of the session is written as one *snapshot*, together with the reply and the
//!    message's number; a message that changed nothing of the session needs none, since it can be
//!    applied again: registers are the function's business, and the last write to one may be done
//!    twice (`slipway_pci::Function` on a function with a journal);
//! 4. the reply is *recorded*; 5. it is sent; 6. the message is *consumed*: read from the socket.
//!
//! A successor finds one of these steps and goes on from there. Two of them are system calls whose
//! effect is outside of our memory, and a kill may come right after either. So their outcome is
//! written by the kernel itself, within the call: sendmmsg(2) and recvmmsg(2) store the number of
//! bytes into the message header that they are given, and these headers lie in the lasting memory.
//! A kill takes effect when a call returns, never between its two halves. So no reply is sent
//! twice, and no message is read twice or lost.
//!
//! A posted write (no reply, nothing of the session changes), which is what rings doorbells, takes
//! the short way: peek, apply, consume. One that was applied and not consumed is applied again. A
//! multiple write counts the writes done, since an older doorbell value must not follow a newer.
//!
//! A message that is larger than what fits the socket is read part by part into lasting memory, and is
//! there as it would be in the socket (`inbox`).
//!
//! A client that maps its doorbells goes on storing to the page, which lies on the shelf too; the
//! successor looks at it when it begins. The reply that carries its descriptor says so, and a
//! successor that has to send it adds the descriptor.
//!
//! Limits: the client's memory comes with descriptors (what needs a thread
//! of its own is refused); a message with descriptors must come in one piece, as all known clients
//! send it; a client that is just connecting when the process is killed may find itself hung up on.

mod inbox;
mod message;
mod state;

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use slipway_keeper::Shelf;
use slipway_pci::{CellPage, Doorbells};
use slipway_peer::{Bin, Foreign};
use slipway_ram::Lasting;

pub(crate) use message::{Progress, Steps};
pub(crate) use state::{Applied, NegotiatedState, RegionState, SessionState, States};

/// Bytes of lasting memory that an endpoint takes; most of it is never touched.
pub const KEPT_LEN: usize = CELLS_LEN + message::LEN + inbox::LEN + state::LEN;
/// Version of what lies in it, and on the shelf. An endpoint goes on with this version only.
pub const KEPT_VERSION: u32 = LAYOUT << 16 | state::VERSION;
/// Version of the layout, the session's state apart.
const LAYOUT: u32 = 3;
/// Slots of a shelf for one endpoint.
pub const KEPT_SLOTS: u32 = slipway_keeper::SHELF;
/// First of the slots that the endpoint leaves to its host, and their number.
pub const HOST_SLOTS: std::ops::Range<u32> = 8..64;

pub(crate) const LISTENER: u32 = 1;
pub(crate) const CLIENT: u32 = 2;
/// The page of doorbells that the client maps.
pub(crate) const DOORBELLS: u32 = 3;
pub(crate) const LINES: std::ops::Range<u32> = 64..256;
pub(crate) const REGIONS: std::ops::Range<u32> = 256..KEPT_SLOTS;

/// Doorbell cells: enough for 256 queue pairs.
const CELLS_LEN: usize = 4096;

/// Where an endpoint leaves what its successor needs, and what its predecessor left there.
pub struct Kept {
    /// [`KEPT_SLOTS`] slots. The endpoint uses those outside of [`HOST_SLOTS`], but never the first.
    pub shelf: Shelf,
    /// [`KEPT_LEN`] bytes.
    pub memory: Lasting,
    /// What a predecessor left on the shelf, by slot; empty for a new endpoint.
    pub found: BTreeMap<u32, OwnedFd>,
}

/// The same, taken apart.
pub(crate) struct Parts {
    pub shelf: Shelf,
    pub cells: Lasting,
    pub steps: Lasting,
    pub inbox: Lasting,
    pub states: States,
    /// The keeper gives back what the client sent.
    pub found: BTreeMap<u32, Foreign>,
    pub bin: Bin,
}

impl Kept {
    pub(crate) fn take_apart(self, bin: &Bin) -> std::io::Result<Parts> {
        let foreign = |(slot, file)| (slot, Foreign::new(file, bin));
        let found = self.found.into_iter().map(foreign).collect();
        let short = || std::io::Error::other("the endpoint's lasting memory is too short");
        let (cells, rest) = self.memory.split(CELLS_LEN).ok_or_else(short)?;
        let (steps, rest) = rest.split(message::LEN).ok_or_else(short)?;
        let (inbox, rest) = rest.split(inbox::LEN).ok_or_else(short)?;
        let states = States::new(&rest).ok_or_else(short)?;
        let (shelf, bin) = (self.shelf, bin.clone());
        Ok(Parts { shelf, cells, steps, inbox, states, found, bin })
    }
}

/// Doorbell cells in lasting memory.
struct Cells {
    memory: Lasting,
    count: usize,
}

pub(crate) fn cells(memory: &Lasting, count: usize) -> std::io::Result<Doorbells> {
    if count * 4 > memory.len() {
        return Err(std::io::Error::other("more doorbells than an endpoint can keep"));
    }
    Ok(Doorbells::lasting(Arc::new(Cells { memory: memory.clone(), count })))
}

// SAFETY: the memory stays mapped, at one address, as long as `memory` lives, and its file is sealed
// against shrinking.
unsafe impl CellPage for Cells {
    fn cells(&self) -> &[AtomicU32] {
        // SAFETY: `cells` checked the length; page-aligned or allocated as 8-byte words; only ever
        // accessed atomically, and as 32-bit words only.
        unsafe { std::slice::from_raw_parts(self.memory.as_ptr().cast::<AtomicU32>(), self.count) }
    }
}
