//! The switch: its ports, and the forwarding of a burst from one port to others.
//!
//! [`Switch::turn`] takes a burst from a port and forwards it in two passes. The first judges each
//! frame, looks its destination up, and puts it on that port's list. The second delivers one list
//! after the other, so that each port's memory is touched once.
//!
//! `settings` attaches, detaches and changes ports. `stalled` leaves out ports whose peers' memory
//! made the thread sleep.

mod settings;
mod stalled;

use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

use slipway_ram::{fetch, fetch_to_write};
use slipway_rate::Bucket;

use self::stalled::StalledPorts;
use crate::burst::{BURST, Burst, Pick};
use crate::cutter::Cutter;
use crate::decorators::Impairment;
use crate::fan::Fan;
use crate::index::PortIndex;
use crate::judge::{AdmittedFrame, judge};
use crate::lookup::{Key, Lookup, Station, Target};
use crate::port::{LinkSetting, Port};
use crate::rules::PortConfig;
use crate::stats::{Drop, PortStats};

/// The number of frames by which a destination's settings are prefetched ahead.
const SETTINGS_AHEAD: usize = 16;
/// The number of deliveries by which a destination's port is prefetched ahead, and with [`AHEAD`]
/// the memory that the port writes.
const PORT_AHEAD: usize = 16;
const AHEAD: usize = 8;

/// The result of a port's turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PortTurn {
    /// There were no frames.
    Idle,
    /// There were frames, and no more wait.
    Done,
    /// There were frames, and more wait.
    More,
    /// Frames may wait, but the port may not send before this time: its rate does not let it, or it
    /// stands still because its peer's memory made the switch's thread sleep.
    Held(Duration),
}

/// The state of one port. With many ports, most of what a delivery reads is not in the cache: the
/// settings are in the first line, and the counters in another.
#[repr(C, align(64))]
struct Slot {
    port: Box<dyn Port>,
    /// The port has work that is [`Timed`](crate::decorators::Timed), or a decorator has: an
    /// impairment, a receive rate.
    timed: bool,
    /// The port is in the switch's list `waiting`.
    waits: bool,
    /// The port stands still, or did so lately: [`StalledPorts`] says which.
    stalled: bool,
    /// Frames were delivered in this turn, and the peer is not notified yet.
    untold: bool,
    config: PortConfig,
    stats: PortStats,
    bucket: Option<Bucket>,
    impairment: Option<Impairment>,
}

impl Slot {
    /// Prefetches the memory that a delivery to the port needs; the slot itself has been
    /// prefetched.
    #[inline]
    fn fetch(&self) {
        fetch(&raw const *self.port);
        fetch_to_write(&raw const self.stats);
    }

    /// Returns until when the port stands still, on the switch's clock. Returns `None` if it is
    /// served.
    #[inline]
    fn stalled_until(&mut self, index: PortIndex, ports: &StalledPorts) -> Option<Duration> {
        if !self.stalled {
            return None;
        }
        let until = ports.until(index);
        self.stalled = until.is_some();
        until
    }

    /// Passes the time to a port with timed work, and puts the port on the list `waiting`: the
    /// delivery or the turn that follows may leave frames that wait in it.
    #[cold]
    fn tick(&mut self, index: PortIndex, now: Duration, waiting: &mut Vec<PortIndex>) {
        tick(&mut *self.port, now);
        if !std::mem::replace(&mut self.waits, true) {
            waiting.push(index);
        }
    }
}

/// A switch. One thread owns it, with all of its ports.
///
/// No method waits, takes a lock, or allocates once warm. The caller passes the time.
pub struct Switch {
    slots: Vec<Option<Box<Slot>>>,
    lookup: Box<dyn Lookup>,
    burst: Burst,
    keys: Box<[Key; BURST]>,
    /// The frames of the burst that are forwarded, by number, in step with `keys`.
    kept: Box<[AdmittedFrame; BURST]>,
    targets: Box<[Target; BURST]>,
    fan: Fan,
    picks: Vec<Pick>,
    cutter: Cutter,
    /// The ports in which frames may wait: those with timed work since their last turn or delivery,
    /// until [`Switch::nothing_waits`].
    waiting: Vec<PortIndex>,
    /// The beginning of the present turn.
    now: Duration,
    stalled: StalledPorts,
}

impl Switch {
    /// Creates a switch without ports.
    pub fn new(lookup: Box<dyn Lookup>) -> Self {
        Self {
            slots: Vec::new(),
            lookup,
            burst: Burst::new(),
            keys: Box::new([Key::default(); BURST]),
            kept: Box::new([AdmittedFrame::default(); BURST]),
            targets: Box::new([Target::Drop; BURST]),
            fan: Fan::new(),
            picks: Vec::with_capacity(BURST),
            cutter: Cutter::default(),
            waiting: Vec::new(),
            now: Duration::ZERO,
            stalled: StalledPorts::new(),
        }
    }

    /// Returns a port's settings.
    pub fn config(&self, index: PortIndex) -> Option<&PortConfig> {
        self.slot(index).map(|slot| &slot.config)
    }

    /// Returns a port's counters.
    pub fn stats(&mut self, index: PortIndex) -> Option<&PortStats> {
        let slot = self.slot_mut(index)?;
        slot.port.account(&mut slot.stats);
        Some(&slot.stats)
    }

    /// Returns a port itself, for a caller that knows its type.
    pub fn port_mut(&mut self, index: PortIndex) -> Option<&mut (dyn Port + 'static)> {
        self.slot_mut(index).map(|slot| &mut *slot.port)
    }

    /// Returns the numbers of all ports, ascending.
    pub fn ports(&self) -> impl Iterator<Item = PortIndex> {
        let there = self.slots.iter().enumerate().filter(|(_, slot)| slot.is_some());
        there.map(|(index, _)| index as PortIndex)
    }

    /// Returns the known stations, each with its port and the second in which it was last heard, or
    /// `None` for an assigned address.
    pub fn stations(&self) -> Vec<(Station, PortIndex, Option<u32>)> {
        self.lookup.stations()
    }

    /// Forgets stations that were silent for long. The caller calls this every few seconds.
    pub fn age(&mut self, now: Duration) {
        self.lookup.age(seconds(now));
    }

    /// Releases all memory that a port's peer shares with the switch, except in the port itself: no
    /// span of an earlier burst refers to it any more.
    pub fn release(&mut self) {
        self.burst.release();
        self.cutter.release();
    }

    /// Makes the port wake the switch when frames come. Returns `true` if frames wait already.
    pub fn arm(&mut self, index: PortIndex) -> bool {
        let found = self.slot_mut(index).is_some_and(|slot| slot.port.arm());
        self.worked_on(index);
        found
    }

    /// Lets a port that may not send handle other work of its peer. Afterwards the switch does not
    /// refer to the peer's memory, except in the port itself.
    pub fn attend(&mut self, index: PortIndex) {
        // The cutter refers to no peer's memory.
        self.burst.release();
        if let Some(slot) = self.slot_mut(index) {
            slot.port.attend();
        }
        self.worked_on(index);
    }

    /// Takes up to `limit` frames from a port, at most [`BURST`], and delivers them to their
    /// destinations.
    pub fn turn(&mut self, index: PortIndex, limit: usize, now: Duration) -> PortTurn {
        let Some(slot) = self.slots.get_mut(usize::from(index)).and_then(Option::as_deref_mut)
        else {
            return PortTurn::Idle;
        };
        let opens = slot.bucket.as_ref().map(Bucket::opens_at);
        let opens = opens.max(slot.stalled_until(index, &self.stalled));
        if let Some(opens) = opens.filter(|opens| *opens > now) {
            return PortTurn::Held(opens);
        }
        self.now = now;
        if slot.timed {
            slot.tick(index, now, &mut self.waiting);
        }
        self.burst.clear();
        let more = slot.port.take(&mut self.burst, limit.min(self.stalled.most()));
        if self.burst.is_empty() {
            // Some frames may have been taken that were all malformed.
            slot.port.release();
            self.worked_on(index);
            return if more { PortTurn::More } else { PortTurn::Idle };
        }
        let Slot { config, stats, port, .. } = slot;
        let (keys, kept) = (&mut self.keys, &mut self.kept);
        let bytes = self.burst.bytes();
        stats.frames_in += self.burst.len() as u64;
        stats.bytes_in += bytes;
        if let Some(memory) = self.stalled.copies() {
            stats.drop_all_in(Drop::Malformed, self.burst.make_private(memory));
        }
        let kept = match config.link == LinkSetting::Down || !port.is_up() {
            true => stats.drop_all_in(Drop::Down, self.burst.len()),
            false => judge(config, stats, &mut self.burst, keys, kept),
        };
        if let Some(bucket) = &mut slot.bucket {
            bucket.take(bytes, now);
        }
        self.worked_on(index);
        let (keys, targets) = (&self.keys[..kept], &mut self.targets[..kept]);
        self.lookup.look_up(index, keys, targets, seconds(now));
        for at in 0..kept {
            if at + SETTINGS_AHEAD < kept {
                self.fetch_slot(self.targets[at + SETTINGS_AHEAD]);
            }
            self.direct(index, self.kept[at], self.keys[at].destination, self.targets[at]);
        }
        self.deliver();
        if let Some(slot) = self.slot_mut(index) {
            slot.port.release();
        }
        self.worked_on(index);
        if more { PortTurn::More } else { PortTurn::Done }
    }

    /// First pass, second half: puts a frame on the lists of its destinations.
    #[inline]
    fn direct(&mut self, from: PortIndex, kept: AdmittedFrame, station: Station, target: Target) {
        let nobody = match target {
            Target::Port(to) if to != from => !self.address(to, kept),
            Target::Port(_) | Target::Drop => true,
            Target::Flood => !self.flood(from, kept, |_| true),
            Target::Unknown => {
                !self.flood(from, kept, |config| config.takes_unknown(station.mac()))
            }
        };
        if nobody && let Some(slot) = self.slot_mut(from) {
            slot.stats.drop_in(Drop::Nobody);
        }
    }

    /// Puts a frame on one port's list. Returns `false` if the port is not in the frame's VLAN.
    #[inline]
    fn address(&mut self, to: PortIndex, kept: AdmittedFrame) -> bool {
        let Some(Some(slot)) = self.slots.get(usize::from(to)) else { return false };
        let Some(tci) = slot.config.tag_out(kept.tci) else { return false };
        self.fan.add(to, Pick { frame: kept.frame, tci });
        true
    }

    #[cold]
    fn flood(
        &mut self,
        from: PortIndex,
        kept: AdmittedFrame,
        takes: impl Fn(&PortConfig) -> bool,
    ) -> bool {
        let mut any = false;
        for to in 0..self.slots.len() as PortIndex {
            let Some(Some(slot)) = self.slots.get(usize::from(to)) else { continue };
            if to != from && takes(&slot.config) {
                any |= self.address(to, kept);
            }
        }
        any
    }

    /// Prefetches the settings of a frame's destination port.
    #[inline]
    fn fetch_slot(&self, target: Target) {
        if let Target::Port(to) = target
            && let Some(slot) = self.slot(to)
        {
            fetch(slot);
        }
    }

    /// Second pass: delivers each port's list, then notifies the peers that got frames.
    fn deliver(&mut self) {
        let count = self.fan.len();
        for at in 0..count.min(PORT_AHEAD) {
            self.fetch_port(at);
        }
        for at in 0..count.min(AHEAD) {
            self.prepare(at);
        }
        for at in 0..count {
            if at + PORT_AHEAD < count {
                self.fetch_port(at + PORT_AHEAD);
            }
            if at + AHEAD < count {
                self.prepare(at + AHEAD);
            }
            let to = self.fan.gather(at, &mut self.picks);
            self.drain(to);
            self.worked_on(to);
        }
        // See [`Port::notify`].
        fence(Ordering::SeqCst);
        for at in 0..count {
            let to = self.fan.port(at);
            // Frames for a stalled port were dropped: a look at its memory could sleep again.
            if let Some(slot) = self.slot_mut(to)
                && std::mem::take(&mut slot.untold)
            {
                slot.port.notify();
            }
            self.worked_on(to);
        }
        self.fan.clear();
    }

    /// Prefetches the port and counters of a later delivery.
    #[inline]
    fn fetch_port(&self, at: usize) {
        if let Some(slot) = self.slot(self.fan.port(at)) {
            slot.fetch();
        }
    }

    /// Lets a port prefetch the memory that a delivery soon writes.
    #[inline]
    fn prepare(&self, at: usize) {
        let (port, frames) = self.fan.next(at);
        if let Some(slot) = self.slot(port) {
            slot.port.prepare(frames);
        }
    }

    /// Second pass: delivers a port's list to it.
    #[inline]
    fn drain(&mut self, to: PortIndex) {
        let Some(Some(slot)) = self.slots.get_mut(usize::from(to)) else { return };
        let picks = &self.picks[..];
        if slot.stalled_until(to, &self.stalled).is_some() {
            slot.stats.drop_out(Drop::Stalled, picks.len() as u64);
            return;
        }
        if slot.timed {
            slot.tick(to, self.now, &mut self.waiting);
        }
        if slot.config.link == LinkSetting::Down || !slot.port.is_up() {
            slot.stats.drop_out(Drop::Down, picks.len() as u64);
            return;
        }
        slot.untold = true;
        let (port, max_frame) = (&mut *slot.port, slot.config.max_frame);
        let delivered = self.cutter.deliver(&self.burst, picks, port, max_frame);
        slot.stats.count_out(&delivered);
    }

    /// Returns the port's present impairment.
    pub fn impairment(&self, index: PortIndex) -> Option<&Impairment> {
        self.slot(index)?.impairment.as_ref()
    }

    /// Returns the ports in which frames may wait.
    pub(crate) fn waiting(&self) -> &[PortIndex] {
        &self.waiting
    }

    /// Takes the port at this place from the list of those in which frames may wait, until its next
    /// turn or delivery.
    pub(crate) fn nothing_waits(&mut self, at: usize) {
        let index = self.waiting.swap_remove(at);
        if let Some(slot) = self.slot_mut(index) {
            slot.waits = false;
        }
    }

    /// Returns the time of the next timed work of such a port, with `inward` also that of its next
    /// frame from its peer. Nothing is due while the port stands still. Returns `None` if there is
    /// none.
    pub(crate) fn due(&mut self, index: PortIndex, inward: bool) -> Option<Duration> {
        let stalled = self.stalled_until(index).unwrap_or_default();
        Some(self.slot_mut(index)?.port.timed()?.due(inward)?.max(stalled))
    }

    /// Does the due timed work of such a port. Returns whether the port wants a turn.
    pub(crate) fn tick(&mut self, index: PortIndex, now: Duration) -> bool {
        let wants_turn = self.slot_mut(index).is_some_and(|slot| tick(&mut *slot.port, now));
        self.worked_on(index);
        wants_turn
    }

    fn slot(&self, index: PortIndex) -> Option<&Slot> {
        self.slots.get(usize::from(index))?.as_deref()
    }

    fn slot_mut(&mut self, index: PortIndex) -> Option<&mut Slot> {
        self.slots.get_mut(usize::from(index))?.as_deref_mut()
    }
}

/// Passes the time to the port. Returns whether the port wants a turn.
#[cold]
fn tick(port: &mut dyn Port, now: Duration) -> bool {
    port.timed().is_some_and(|timed| timed.tick(now))
}

/// Returns the time in whole seconds, as the table counts it; it wraps after 136 years.
fn seconds(now: Duration) -> u32 {
    now.as_secs() as u32
}
