//! Ports that a thread of their own serves, because calls on them may take as long as their peer
//! wants.
//!
//! A system call on a TAP interface runs code of the network namespace that the interface is in:
//! the kernel passes a written frame to packet sockets, traffic control and packet filters there,
//! and returns when they have finished. Programs in the namespace choose that code. So the switch
//! exchanges frames with the port by two rings in memory of this process, and a [`PortThread`]
//! moves them between the rings and the port.
//!
//! # What a slow port costs
//! - Frames for the peer wait in a ring of [`SLOTS`] slots. Frames for which the ring has no room
//!   are dropped and counted as [`Drop::Full`](crate::Drop::Full) of this port. A frame that waits
//!   is counted when the port has taken or refused it.
//! - Frames from the peer stay with the peer while their ring is full: the thread does not take
//!   them then, and the switch wakes it when it has made room.
//! - Dropping the [`ThreadedPort`] tells the thread to end, and waits for nothing. The thread ends
//!   after the call that it is in, and drops the port.
//!
//! # Sleeping
//! The thread sleeps in poll(2), without a timeout, on the port's descriptor and on an eventfd, the
//! *bell*. The switch rings the bell if the thread has armed its ring, or has asked for room. Both
//! requests follow the protocol of [`slipway_ring::sleep`].

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use slipway_ring::sleep::{ANY, SleepWord};
use slipway_ring::{Geometry, Link};

use super::rings::Rings;
use crate::{
    Abilities, Burst, Delivered, Drop as Cause, LinkSetting, MAX_FRAME, Pick, Port, PortStats,
    Waker,
};

/// Slots of each ring.
const SLOTS: u32 = 512;
/// Bytes that a slot holds.
const PAYLOAD: u32 = 2048;
/// The number of slots of the longest frame.
const LONGEST: usize = MAX_FRAME.div_ceil(PAYLOAD as usize);
/// The largest number of frames that the thread moves at a time.
const BATCH: usize = 32;

/// The switch's side of a port that a thread of its own serves.
pub struct ThreadedPort {
    rings: Rings,
    shared: Arc<Shared>,
}

/// The thread's side of a [`ThreadedPort`].
pub struct PortThread {
    rings: Rings,
    shared: Arc<Shared>,
    burst: Burst,
    picks: [Pick; BATCH],
    /// The link setting that the port was given last.
    link: u8,
}

/// The state that both sides of a port share beside the rings.
struct Shared {
    /// An eventfd on which the thread sleeps. Nobody else has it.
    bell: OwnedFd,
    /// The way to the switch, once the port is attached.
    waker: OnceLock<Waker>,
    /// The switch's side was dropped.
    ended: AtomicBool,
    /// The word of [`Shared::room_wanted`].
    room_wanted: AtomicU64,
    /// The port's peer may take frames.
    is_up: AtomicBool,
    /// The wanted link setting, as [`code`] makes it.
    link: AtomicU8,
    counts: Counts,
}

/// Results that the switch's side has not reported yet.
#[derive(Default)]
struct Counts {
    frames: AtomicU64,
    bytes: AtomicU64,
    full: AtomicU64,
    refused: AtomicU64,
    malformed: AtomicU64,
}

impl Counts {
    fn add(&self, delivered: &Delivered) {
        add(&self.frames, delivered.frames.into());
        add(&self.bytes, delivered.bytes);
        add(&self.full, delivered.full.into());
        add(&self.refused, delivered.refused.into());
    }
}

fn add(count: &AtomicU64, more: u64) {
    if more > 0 {
        count.fetch_add(more, Ordering::Relaxed);
    }
}

impl Shared {
    /// Returns the word by which the thread asks for room in the ring to the switch.
    fn room_wanted(&self) -> SleepWord<'_> {
        SleepWord::new(&self.room_wanted)
    }

    fn ring(&self) {
        // Fails only if the counter is full, and then the thread is awake.
        let _ = rustix::io::write(&self.bell, &1_u64.to_ne_bytes());
    }
}

impl ThreadedPort {
    /// Makes both sides of a port whose peer has these abilities. Frames pass once a thread runs
    /// [`PortThread::serve`].
    ///
    /// # Errors
    /// If no memory or no descriptor is left.
    pub fn new(abilities: Abilities) -> std::io::Result<(Self, PortThread)> {
        let link = Link::new(Geometry { slots: SLOTS, payload: PAYLOAD })?;
        let (ours, theirs) = Rings::pair(&link, abilities);
        let shared = Arc::new(Shared {
            bell: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            waker: OnceLock::new(),
            ended: AtomicBool::new(false),
            room_wanted: AtomicU64::new(0),
            is_up: AtomicBool::new(true),
            link: AtomicU8::new(code(LinkSetting::Auto)),
            counts: Counts::default(),
        });
        let thread = PortThread {
            rings: theirs,
            shared: shared.clone(),
            burst: Burst::new(),
            // A batch has at most 32 frames.
            picks: std::array::from_fn(|frame| Pick { frame: frame as u16, tci: 0 }),
            link: code(LinkSetting::Auto),
        };
        Ok((Self { rings: ours, shared }, thread))
    }
}

impl Drop for ThreadedPort {
    fn drop(&mut self) {
        self.shared.ended.store(true, Ordering::Release);
        self.shared.ring();
    }
}

impl Port for ThreadedPort {
    fn abilities(&self) -> Abilities {
        self.rings.abilities
    }

    fn is_up(&self) -> bool {
        self.shared.is_up.load(Ordering::Relaxed)
    }

    fn take(&mut self, burst: &mut Burst, limit: usize) -> bool {
        self.rings.take(burst, limit)
    }

    fn release(&mut self) {
        if self.rings.release() && self.shared.room_wanted().barrier_and_take(ANY) {
            self.shared.ring();
        }
    }

    /// Frames that have room are counted later, by [`Port::account`].
    fn deliver(&mut self, burst: &Burst, picks: &[Pick]) -> Delivered {
        let put = self.rings.deliver(burst, picks);
        Delivered { frames: 0, bytes: 0, ..put }
    }

    fn notify(&mut self) {
        if self.rings.output.must_tell() {
            self.shared.ring();
        }
    }

    fn prepare(&self, frames: usize) {
        self.rings.prepare(frames);
    }

    fn arm(&mut self) -> bool {
        self.rings.input.arm()
    }

    fn attached(&mut self, waker: Waker) {
        // A port is attached once.
        let _ = self.shared.waker.set(waker);
    }

    fn set_link(&mut self, link: LinkSetting) {
        if self.shared.link.swap(code(link), Ordering::Relaxed) != code(link) {
            self.shared.ring();
        }
    }

    fn account(&mut self, stats: &mut PortStats) {
        let take = |count: &AtomicU64| count.swap(0, Ordering::Relaxed);
        let counts = &self.shared.counts;
        stats.frames_out += take(&counts.frames);
        stats.bytes_out += take(&counts.bytes);
        stats.drop_out(Cause::Full, take(&counts.full));
        stats.drop_out(Cause::Refused, take(&counts.refused));
        stats.dropped_in[Cause::Malformed as usize] += take(&counts.malformed);
    }
}

/// The events for which the thread woke up.
#[derive(Clone, Copy, Default)]
struct Events {
    /// The port has frames.
    readable: bool,
    /// The port's descriptor reports an error.
    failed: bool,
}

impl PortThread {
    /// Moves frames between the switch and `port` until the switch's side is dropped or the port's
    /// peer is gone, and then drops `port`. Blocks as long. `port` has a descriptor as long as it
    /// is up.
    pub fn serve(mut self, mut port: Box<dyn Port>) {
        let mut events = Events { readable: true, failed: false };
        while !self.has_ended() && port.is_up() {
            self.pass_link(&mut *port);
            let moved = self.outward(&mut *port);
            let taken = (events.readable || events.failed) && self.inward(&mut *port);
            if events.failed && !taken {
                break;
            }
            events = self.wait(&*port, moved);
        }
        self.shared.is_up.store(false, Ordering::Relaxed);
    }

    fn has_ended(&self) -> bool {
        self.shared.ended.load(Ordering::Acquire)
    }

    fn pass_link(&mut self, port: &mut dyn Port) {
        let wanted = self.shared.link.load(Ordering::Relaxed);
        if wanted != self.link {
            self.link = wanted;
            port.set_link(setting(wanted));
        }
    }

    /// Gives the port the frames that wait for it. Returns whether there were any.
    fn outward(&mut self, port: &mut dyn Port) -> bool {
        self.burst.clear();
        self.rings.take(&mut self.burst, BATCH);
        let count = self.burst.len();
        for pick in &self.picks[..count] {
            // Each frame may take long.
            if self.has_ended() {
                break;
            }
            let done = port.deliver(&self.burst, std::slice::from_ref(pick));
            self.shared.counts.add(&done);
        }
        if count > 0 {
            slipway_ring::barrier();
            port.notify();
        }
        self.rings.release();
        count > 0
    }

    /// Takes frames from the port, as many as the ring to the switch surely has room for. Returns
    /// whether there were any, malformed ones included.
    fn inward(&mut self, port: &mut dyn Port) -> bool {
        let frames = self.room().min(BATCH);
        if frames == 0 {
            return false;
        }
        self.burst.clear();
        let more = port.take(&mut self.burst, frames);
        let count = self.burst.len();
        if count > 0 {
            let put = self.rings.deliver(&self.burst, &self.picks[..count]);
            debug_assert_eq!(put.full, 0, "there was room");
            slipway_ring::barrier();
            if self.rings.output.must_tell()
                && let Some(waker) = self.shared.waker.get()
            {
                waker.wake();
            }
        }
        port.release();
        add(&self.shared.counts.malformed, port.malformed());
        count > 0 || more
    }

    /// Returns the number of frames of any length for which the ring to the switch has room. Asks
    /// for the bell if there is no room.
    fn room(&mut self) -> usize {
        // The other end is this process's own, and moves no counter to an impossible value. More
        // slots than there are: the tail is read.
        let room = |rings: &mut Rings| rings.output.free(usize::MAX).unwrap_or(0) / LONGEST;
        match room(&mut self.rings) {
            0 => {
                let mut frames = 0;
                self.shared.room_wanted().arm(ANY, || {
                    frames = room(&mut self.rings);
                    frames > 0
                });
                frames
            }
            frames => frames,
        }
    }

    /// Waits for events, unless `moved` says that there may be more frames for the port. Poll(2)
    /// returns at once if the port has more frames.
    fn wait(&mut self, port: &dyn Port, moved: bool) -> Events {
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        let patience = (moved || self.rings.input.arm()).then_some(&at_once);
        let Some(descriptor) = port.descriptor() else { return Events::default() };
        let wanted = if self.room() > 0 { PollFlags::IN } else { PollFlags::empty() };
        let bell = self.shared.bell.as_fd();
        let mut polled = [
            PollFd::from_borrowed_fd(bell, PollFlags::IN),
            PollFd::from_borrowed_fd(descriptor, wanted),
        ];
        // An interrupted call has no events, and the next one tells.
        let _ = poll(&mut polled, patience);
        let [bell, port] = polled.map(|one| one.revents());
        if bell.contains(PollFlags::IN) {
            let _ = rustix::io::read(&self.shared.bell, &mut [0; 8]);
        }
        let failed = port.intersects(PollFlags::ERR | PollFlags::HUP | PollFlags::NVAL);
        Events { readable: port.contains(PollFlags::IN), failed }
    }
}

fn code(link: LinkSetting) -> u8 {
    match link {
        LinkSetting::Auto => 0,
        LinkSetting::Up => 1,
        LinkSetting::Down => 2,
    }
}

fn setting(code: u8) -> LinkSetting {
    match code {
        1 => LinkSetting::Up,
        2 => LinkSetting::Down,
        _ => LinkSetting::Auto,
    }
}
