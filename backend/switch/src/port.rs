//! The contract of a port.

use std::os::fd::BorrowedFd;

use crate::decorators::{Layer, Timed};
use crate::{Burst, Drop, Link, Pick, PortStats, Waker};

/// What a port's peer can take without the switch's help.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Abilities {
    /// Frames whose checksum is not filled in yet.
    pub checksum: bool,
    /// TCP segments over IPv4 to be cut.
    pub tcp4: bool,
    /// TCP segments over IPv6 to be cut.
    pub tcp6: bool,
    /// UDP datagrams to be cut.
    pub udp: bool,
}

impl Abilities {
    /// Everything.
    pub const ALL: Self = Self { checksum: true, tcp4: true, tcp6: true, udp: true };
    /// Only frames as they go over a wire.
    pub const NONE: Self = Self { checksum: false, tcp4: false, tcp6: false, udp: false };
}

/// How a delivery went: every pick is counted once, as had, as not fitting, or as refused; here, or later by
/// [`Port::account`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Delivered {
    /// The peer has them.
    pub frames: u32,
    /// Bytes of those that it has.
    pub bytes: u64,
    /// There was no room.
    pub full: u32,
    /// The peer cannot take a frame of this size, or its memory was gone.
    pub refused: u32,
}

impl Delivered {
    /// Adds another delivery.
    pub fn add(&mut self, other: &Self) {
        self.frames += other.frames;
        self.bytes += other.bytes;
        self.full += other.full;
        self.refused += other.refused;
    }
}

/// One end of a link to the switch. The *peer* is whoever is at the other end: a guest, a program, the
/// host's kernel.
///
/// All calls come from one thread, the switch's. None of them blocks, none allocates once it is warm,
/// and no peer's doing makes one panic.
///
/// # Duties of the port
/// - Everything that the peer says is read once; lengths are bounded ([`crate::MAX_FRAME`]) before they
///   are used. What is wrong with it is dropped and counted by the port ([`Port::malformed`]).
/// - A frame that [`Port::take`] gave stays where its spans say until [`Port::release`], as far as the
///   port is concerned; its peer may change it.
/// - It wakes the switch (by its [`Port::descriptor`] or its [`Waker`]) when frames come while it is
///   armed.
///
/// # Duties of the switch
/// - `take`, any number of `deliver`s to other ports, a full barrier, `notify` to each of those, and
///   `release`, in this order; no second `take` before.
/// - Before it sleeps it calls [`Port::arm`], and sleeps only if that found nothing.
pub trait Port: Send {
    /// What the peer can take; may change between two calls.
    fn abilities(&self) -> Abilities;

    /// Whether there is a peer that may take frames: the link's state as the peer's side has it.
    fn is_up(&self) -> bool;

    /// Appends frames that came from the peer to `burst`, at most `limit` of them, and tells whether
    /// more wait (or may).
    fn take(&mut self, burst: &mut Burst, limit: usize) -> bool;

    /// The frames taken last have been carried out: gives their memory back to the peer.
    fn release(&mut self);

    /// Gives the peer frames of `burst`, in order, as many as it has room for. A frame that there is no
    /// room for, and all after it, are left out.
    fn deliver(&mut self, burst: &Burst, picks: &[Pick]) -> Delivered;

    /// Tells the peer of what was delivered if it wants to be told. A full barrier lies between: a port
    /// stores what its peer looks at in `deliver`, and looks here whether the peer sleeps. So one barrier,
    /// which waits for all stores before it, serves all ports of a turn.
    fn notify(&mut self) {}

    /// A delivery of `frames` frames follows soon: has the processor fetch what it will write first.
    fn prepare(&self, frames: usize) {
        let _ = frames;
    }

    /// From now on the switch must be woken when a frame comes. Tells whether there is one already:
    /// then the switch must look and not sleep.
    fn arm(&mut self) -> bool;

    /// Told once, when it is attached: how it can have the switch look at it, beside its descriptor.
    fn attached(&mut self, waker: Waker) {
        drop(waker);
    }

    /// Told when it is attached and whenever it may have changed: what the host says of the link, for a
    /// peer that can be shown a carrier.
    fn set_link(&mut self, _: Link) {}

    /// Called when the port was woken though its rate does not let it send: other things than frames may
    /// wait (a peer that wants its memory back), and do not wait for a rate. Between `release` and `take`.
    fn attend(&mut self) {}

    /// A descriptor that is readable while the port is armed and frames have come. It is watched from
    /// when the port is attached, level-triggered, until there is none any more.
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Frames from the peer that were wrong (no frame, too long, in memory that is not there) since the
    /// last call.
    fn malformed(&mut self) -> u64 {
        0
    }

    /// Adds what happened since the last call and the switch was told nothing of.
    fn account(&mut self, stats: &mut PortStats) {
        stats.dropped_in[Drop::Malformed as usize] += self.malformed();
    }

    /// What it does by time. A port that begins or ceases to is attached anew, or decorated.
    fn timed(&mut self) -> Option<&mut dyn Timed> {
        None
    }

    /// Of a decorator: the port behind it.
    fn inner(&mut self) -> Option<(Layer, &mut Box<dyn Port>)> {
        None
    }
}
