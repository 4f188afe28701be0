//! An endpoint that outlives its process: the state that it leaves behind, and the order in which
//! it does.
//!
//! Descriptors (the listening socket, the client's connection, memory, eventfds) lie on a keeper's
//! [`Shelf`]. Their meaning, and the progress of the current message, lie in memory that outlives
//! the process ([`Lasting`]). The function has a journal of its own.
//!
//! A message stays in the socket until its effect and its reply are safe:
//! 1. The message is *peeked* at, descriptors included (the kernel hands out duplicates).
//! 2. The message is applied. Its descriptors are put on the shelf first.
//! 3. The changed session state is written as one *snapshot*, together with the reply and the
//!    message's number. A message that changed no session state needs no snapshot, since it can be
//!    applied again: registers are the function's business, and the last write to one may be done
//!    twice (`slipway_pci::Function` on a function with a journal).
//! 4. The reply is *recorded*.
//! 5. The reply is sent.
//! 6. The message is *consumed*: read from the socket.
//!
//! A successor finds one of these steps and continues from there. Steps 5 and 6 are system calls
//! whose effect is outside of our memory, and a kill may come right after either. So the kernel
//! itself records their outcome, within the call: sendmmsg(2) and recvmmsg(2) store the number of
//! bytes into the message header that they are given, and these headers lie in the lasting memory.
//! A kill takes effect when a call returns, never between its effect and that store. So no reply is
//! sent twice, and no message is read twice or lost.
//!
//! A posted write, which rings doorbells, has no reply and changes no session state. It takes three
//! steps: peek, apply, consume. One that was applied and not consumed is applied again. A multiple
//! write counts the writes done, since an older doorbell value must not follow a newer one.
//!
//! A message that is larger than the socket's capacity is read part by part into lasting memory,
//! where it is safe as in the socket (`inbox`).
//!
//! A client that maps its doorbells continues to store to the page, which lies on the shelf, too;
//! the successor looks at the page when it begins. The record of a reply says whether it carries
//! the page's descriptor, and a successor that sends the reply attaches it. The eventfd that a
//! client raises instead of sending messages lies on the shelf as well; a successor acts as if it
//! had just been raised.
//!
//! A client that connects again by itself needs none of this: of its session only the user is kept,
//! and its function waits for it (`server::resume`).
//!
//! Limits: the client's memory comes with descriptors (message-only memory that needs a thread of
//! its own is refused). A message with descriptors must arrive in one piece, as all known clients
//! send it. A client that is just connecting when the process is killed may find itself
//! disconnected.

mod call;
mod inbox;
mod message;
mod state;

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use slipway_doorbells::{CellPage, Doorbells};
use slipway_keeper::Shelf;
use slipway_peer::{Bin, Foreign};
use slipway_ram::Lasting;

pub(crate) use message::{Attachments, MessageJournal, Progress};
pub(crate) use state::{
    Applied, KeptRun, NegotiatedState, RegionState, SessionState, StateHistory,
};

/// The size in bytes of the lasting memory of an endpoint; most of it is never touched.
pub const KEPT_LEN: usize = CELLS_LEN + message::LEN + inbox::LEN + state::LEN;
/// The version of the contents of the lasting memory and of the shelf. An endpoint continues from
/// this version only.
pub const KEPT_VERSION: u32 = LAYOUT << 16 | state::VERSION;
/// The version of the layout, without the session's state.
const LAYOUT: u32 = 4;
/// The size of the doorbell cells in bytes: enough for 256 queue pairs.
const CELLS_LEN: usize = 4096;

/// The places for the state that an endpoint leaves to its successor, and the descriptors that its
/// predecessor left.
pub struct Kept {
    /// A shelf with `KEPT_SLOTS` slots. The endpoint uses the slots outside of `HOST_SLOTS`,
    /// but never the first one.
    pub shelf: Shelf,
    /// Lasting memory of [`KEPT_LEN`] bytes.
    pub memory: Lasting,
    /// The descriptors that a predecessor left on the shelf, by slot; empty for a new endpoint.
    pub found: BTreeMap<u32, OwnedFd>,
}

/// The contents of a [`Kept`], divided by purpose.
pub(crate) struct Parts {
    pub shelf: Shelf,
    pub cells: Lasting,
    pub steps: Lasting,
    pub inbox: Lasting,
    pub states: StateHistory,
    /// The descriptors that a predecessor left on the shelf, by slot. They may be a client's, so
    /// they are closed in `bin`.
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
        let states = StateHistory::new(&rest).ok_or_else(short)?;
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

// SAFETY: the memory stays mapped, at one address, as long as `memory` lives, and its file is
// sealed against shrinking.
unsafe impl CellPage for Cells {
    fn cells(&self) -> &[AtomicU32] {
        // SAFETY: `cells` checked the length; the memory is page-aligned or allocated as 8-byte
        // words, and is only ever accessed atomically, as 32-bit words.
        unsafe { std::slice::from_raw_parts(self.memory.as_ptr().cast::<AtomicU32>(), self.count) }
    }
}
