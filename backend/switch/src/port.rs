//! The contract of a port.

use std::os::fd::BorrowedFd;
use std::time::Duration;

use crate::burst::{Burst, Pick};
use crate::inspect::QueuesView;
use crate::stats::{Delivered, Drop, PortStats};
use crate::waker::Waker;

/// Kinds of frames that a port's peer can take without the switch's help.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Abilities {
    /// Frames whose checksum is not filled in yet.
    pub checksum: bool,
    /// TCP segments over IPv4 that are still to be cut.
    pub tcp4: bool,
    /// TCP segments over IPv6 that are still to be cut.
    pub tcp6: bool,
    /// UDP datagrams that are still to be cut.
    pub udp: bool,
}

impl Abilities {
    /// All kinds of frames.
    pub const ALL: Self = Self { checksum: true, tcp4: true, tcp6: true, udp: true };
    /// Complete frames only, as they go over a wire.
    pub const NONE: Self = Self { checksum: false, tcp4: false, tcp6: false, udp: false };
}

/// The state of a port's link, as `ip link set … vf … state` has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum LinkSetting {
    /// The state on the peer's side; the peer sees a carrier as long as its port is attached.
    #[default]
    Auto,
    /// The state on the peer's side; the peer sees a carrier even after its switch has gone.
    Up,
    /// Down, whatever the peer says: nothing passes either way, and the peer sees no carrier.
    Down,
}

/// The kind of a decorator, by which it is found again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layer {
    /// A part of the port's impairment.
    Impairment,
    /// The queue of frames that wait for the port's receive rate.
    Pacing,
    /// The translation of the peer's address.
    Translation,
    /// An observer, by the number that its owner gave it.
    Observer(u64),
}

/// A port with timed work: frames wait in it.
///
/// The switch calls [`Timed::tick`] before each turn of the port and each delivery to it, and
/// whenever [`Timed::due`] has passed. Only a turn or a delivery makes frames wait: once none does,
/// the switch does not ask for their time until the next one.
pub trait Timed {
    /// Gives the peer the frames that are due at `now`, on the clock of [`crate::Switch::turn`].
    /// Returns whether frames from the peer are due, for which the port wants a turn.
    fn tick(&mut self, now: Duration) -> bool;

    /// Returns the time when the next frame for the peer is due or, with `inward`, the next frame
    /// in either direction. Returns `None` if none waits.
    fn due(&mut self, inward: bool) -> Option<Duration>;

    /// Drops and counts all frames that wait.
    fn close(&mut self);
}

/// One end of a link to the switch. The *peer* is at the other end: a guest, a program, the host's
/// kernel.
///
/// All calls come from one thread, the switch's. No call may block, allocate once warm, or panic
/// because of a peer.
///
/// # Duties of the port
/// - It reads everything that the peer writes once, and bounds lengths ([`crate::MAX_FRAME`])
///   before it uses them. It drops and counts malformed input ([`Port::malformed`]).
/// - It keeps the memory of frames that [`Port::take`] returned unchanged until [`Port::release`];
///   its peer may change it.
/// - While it is armed, it wakes the switch when frames come, by its [`Port::descriptor`] or its
///   [`Waker`].
///
/// # Duties of the switch
/// - It calls `take`, any number of `deliver`s to other ports, a full barrier, `notify` on each of
///   those, and `release`, in this order, with no second `take` in between.
/// - Before it sleeps it calls [`Port::arm`], and sleeps only if that found nothing.
pub trait Port: Send {
    /// Returns the kinds of frames that the peer can take; may change between two calls.
    fn abilities(&self) -> Abilities;

    /// Returns whether there is a peer that may take frames: the link's state on the peer's side.
    fn is_up(&self) -> bool;

    /// Appends frames from the peer to `burst`, at most `limit`. Returns whether more wait (or
    /// may).
    fn take(&mut self, burst: &mut Burst, limit: usize) -> bool;

    /// Gives the memory of the frames taken last, which have been delivered, back to the peer.
    fn release(&mut self);

    /// Gives the peer frames of `burst`, in order, as many as it has room for. The first frame
    /// without room, and all after it, are left out; a port with several queues leaves out those
    /// of the full queue.
    fn deliver(&mut self, burst: &Burst, picks: &[Pick]) -> Delivered;

    /// Notifies the peer of deliveries if it wants that. A full barrier lies between: in `deliver`
    /// a port stores what its peer reads, and here it reads whether the peer sleeps. So one
    /// barrier, which waits for all stores before it, serves all ports of a turn.
    fn notify(&mut self) {}

    /// Prefetches the memory that a delivery of `frames` frames, which follows soon, writes first.
    fn prepare(&self, frames: usize) {
        let _ = frames;
    }

    /// Makes the port wake the switch when a frame comes. Returns `true` if a frame waits already;
    /// the switch must then look and not sleep.
    fn arm(&mut self) -> bool;

    /// Passes a waker, by which the port can wake the switch without a descriptor. Called once,
    /// when the port is attached.
    fn attached(&mut self, waker: Waker) {
        drop(waker);
    }

    /// Passes the link state that the host has set, for a peer that can be shown a carrier. Called
    /// when the port is attached and whenever the state may have changed.
    fn set_link(&mut self, _: LinkSetting) {}

    /// Handles work other than frames (a peer that wants its memory back), which nothing holds up.
    /// Called when the port begins to be held, because its rate does not let it send or because its
    /// peer's memory made the switch's thread sleep, and whenever it is woken while it is held;
    /// between `release` and `take`. It touches a word of the peer's memory at most.
    fn attend(&mut self) {}

    /// Returns a descriptor that is readable while the port is armed and frames have come. It is
    /// watched, level-triggered, from when the port is attached until this returns `None`.
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Returns the number of malformed frames from the peer since the last call: no frame, too
    /// long, or in memory that does not exist.
    fn malformed(&mut self) -> u64 {
        0
    }

    /// Adds events since the last call that no other result has reported to `stats`.
    fn account(&mut self, stats: &mut PortStats) {
        stats.dropped_in[Drop::Malformed as usize] += self.malformed();
    }

    /// Adds the queues of the port to `view`, as they are now. Never looks at memory of the peer.
    fn inspect(&self, view: &mut QueuesView) {
        let _ = view;
    }

    /// Returns the port's timed work, or `None`. A port for which that changes must be attached
    /// anew, or decorated.
    fn timed(&mut self) -> Option<&mut dyn Timed> {
        None
    }

    /// Returns the port behind a decorator, or `None` for a port that is no decorator.
    fn inner(&mut self) -> Option<(Layer, &mut Box<dyn Port>)> {
        None
    }
}
