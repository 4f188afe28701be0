//! The switch: ports, their rules, and the way of a burst from one of them to the others.

use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

use slipway_ram::{fetch, fetch_to_write};
use slipway_rate::Bucket;

use crate::Port;
use crate::burst::{BURST, Burst, Pick};
use crate::cutter::Cutter;
use crate::decorators::{
    Impairment, Layer, Observed, Observer, replace_innermost, strip, wrap_here, wrap_innermost,
};
use crate::fan::Fan;
use crate::judge::{Kept, judge};
use crate::lookup::{Key, Lookup, Station, Target};
use crate::rules::{BadConfig, Link, PortConfig};
use crate::stats::{Drop, PortStats};

/// Most ports of a switch.
pub const MAX_PORTS: usize = 4096;
/// A port's number in its switch; used again after the port was detached.
pub type PortIndex = u16;

/// How many frames ahead of the look at where a frame may go the processor fetches the port's settings.
const SETTINGS_AHEAD: usize = 16;
/// How many ports ahead of a delivery it fetches the port, and of that what it is to write.
const PORT_AHEAD: usize = 16;
const AHEAD: usize = 8;

/// What a turn of a port found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// Nothing.
    Idle,
    /// Frames, and that was all.
    Done,
    /// Frames, and more wait.
    More,
    /// Frames may wait, but its rate does not let it send before this time.
    Held(Duration),
}

/// A place for a port. With many ports most of what a delivery reads has to be fetched: that lies in the
/// first line, the counters in another.
#[repr(C, align(64))]
struct Slot {
    port: Box<dyn Port>,
    /// It does things by time.
    timed: bool,
    config: PortConfig,
    stats: PortStats,
    bucket: Option<Bucket>,
    impairment: Option<Impairment>,
}

impl Slot {
    /// Has the processor fetch what a delivery to the port needs of it; the slot has been fetched.
    #[inline]
    fn fetch(&self) {
        fetch(&raw const *self.port);
        fetch_to_write(&raw const self.stats);
    }
}

/// A switch. One thread owns it, with all of its ports.
///
/// Nothing here waits, takes a lock, or allocates once it is warm; time is told by whoever calls.
pub struct Switch {
    slots: Vec<Option<Box<Slot>>>,
    lookup: Box<dyn Lookup>,
    burst: Burst,
    keys: Box<[Key; BURST]>,
    /// The frames of the burst that are forwarded, as numbers in it, in step with `keys`.
    kept: Box<[Kept; BURST]>,
    targets: Box<[Target; BURST]>,
    fan: Fan,
    picks: Vec<Pick>,
    cutter: Cutter,
    /// Ports that do things by time.
    timed: Vec<PortIndex>,
    /// When the present turn began.
    now: Duration,
}

impl Switch {
    /// A switch without ports.
    pub fn new(lookup: Box<dyn Lookup>) -> Self {
        Self {
            slots: Vec::new(),
            lookup,
            burst: Burst::new(),
            keys: Box::new([Key::default(); BURST]),
            kept: Box::new([Kept::default(); BURST]),
            targets: Box::new([Target::Drop; BURST]),
            fan: Fan::new(),
            picks: Vec::with_capacity(BURST),
            cutter: Cutter::default(),
            timed: Vec::new(),
            now: Duration::ZERO,
        }
    }

    /// Attaches a port.
    ///
    /// # Errors
    /// [`BadConfig`]; the port is handed back and the switch as before.
    pub fn attach(
        &mut self,
        port: Box<dyn Port>,
        config: PortConfig,
    ) -> Result<PortIndex, (BadConfig, Box<dyn Port>)> {
        let free = self.slots.iter().position(Option::is_none).unwrap_or(self.slots.len());
        if free == MAX_PORTS {
            return Err((BadConfig::Full, port));
        }
        // Below MAX_PORTS.
        let index = free as PortIndex;
        if let Err(error) = self.settle(index, &config) {
            return Err((error, port));
        }
        let mut port = port;
        port.set_link(config.link);
        let bucket = config.max_rate.map(Bucket::new);
        let (stats, impairment) = (PortStats::default(), None);
        let slot = Slot { port, timed: false, config, stats, bucket, impairment };
        if free == self.slots.len() {
            self.slots.push(None);
        }
        self.slots[free] = Some(Box::new(slot));
        self.fan.grow(self.slots.len());
        self.settle_time(index);
        Ok(index)
    }

    /// Detaches a port and forgets what was behind it.
    ///
    /// # Errors
    /// [`BadConfig::NoSuchPort`].
    pub fn detach(&mut self, index: PortIndex) -> Result<Box<dyn Port>, BadConfig> {
        let slot = self.slots.get_mut(usize::from(index)).and_then(Option::take);
        let slot = slot.ok_or(BadConfig::NoSuchPort)?;
        self.lookup.remove(index);
        self.timed.retain(|timed| *timed != index);
        // Spans of an earlier burst may still name the peer's memory.
        self.burst.release();
        self.cutter.release();
        Ok(slot.port)
    }

    /// Puts another port in a port's place, which keeps its number, settings, counters and decorators: its
    /// peer is another one now. Who was behind it is remembered. Gives the former one.
    ///
    /// # Errors
    /// [`BadConfig::NoSuchPort`], and the port back.
    pub fn replace(
        &mut self,
        index: PortIndex,
        port: Box<dyn Port>,
    ) -> Result<Box<dyn Port>, (BadConfig, Box<dyn Port>)> {
        // Spans of an earlier burst may still name the former peer's memory.
        self.release();
        let Some(slot) = self.slot_mut(index) else { return Err((BadConfig::NoSuchPort, port)) };
        // What waits was the former peer's, or for it.
        close(&mut *slot.port);
        slot.port.account(&mut slot.stats);
        let former = replace_innermost(&mut slot.port, port);
        slot.port.set_link(slot.config.link);
        Ok(former)
    }

    /// Changes a port's settings.
    ///
    /// # Errors
    /// [`BadConfig`]; it then has its former ones.
    pub fn configure(&mut self, index: PortIndex, config: PortConfig) -> Result<(), BadConfig> {
        let former = self.config(index).ok_or(BadConfig::NoSuchPort)?.clone();
        self.lookup.remove(index);
        if let Err(error) = self.settle(index, &config) {
            // They were all right a moment ago.
            let _ = self.settle(index, &former);
            return Err(error);
        }
        if let Some(slot) = self.slot_mut(index) {
            if config.max_rate != slot.config.max_rate {
                slot.bucket = config.max_rate.map(Bucket::new);
            }
            if (config.link, &config.vlans) != (slot.config.link, &slot.config.vlans) {
                // What waits was judged by the former settings, or will be by the new ones.
                close(&mut *slot.port);
            }
            slot.port.set_link(config.link);
            slot.config = config;
        }
        Ok(())
    }

    /// Checks the settings and fixes the port's address in the table.
    fn settle(&mut self, index: PortIndex, config: &PortConfig) -> Result<(), BadConfig> {
        config.check()?;
        let own = config.mac.zip(config.own_vlan());
        match own {
            Some((mac, vlan)) if !self.lookup.fix(Station::new(mac, vlan), index) => {
                Err(BadConfig::MacTaken(mac))
            }
            _ => Ok(()),
        }
    }

    /// A port's settings.
    pub fn config(&self, index: PortIndex) -> Option<&PortConfig> {
        self.slot(index).map(|slot| &slot.config)
    }

    /// A port's counters.
    pub fn stats(&mut self, index: PortIndex) -> Option<&PortStats> {
        let slot = self.slot_mut(index)?;
        slot.port.account(&mut slot.stats);
        Some(&slot.stats)
    }

    /// A port itself, for whoever knows what it is.
    pub fn port_mut(&mut self, index: PortIndex) -> Option<&mut (dyn Port + 'static)> {
        self.slot_mut(index).map(|slot| &mut *slot.port)
    }

    /// Numbers of the ports there are, ascending.
    pub fn ports(&self) -> impl Iterator<Item = PortIndex> {
        let there = self.slots.iter().enumerate().filter(|(_, slot)| slot.is_some());
        there.map(|(index, _)| index as PortIndex)
    }

    /// Who is known behind which port; the last is the second in which they were heard of last, none
    /// for an assigned address.
    pub fn stations(&self) -> Vec<(Station, PortIndex, Option<u32>)> {
        self.lookup.stations()
    }

    /// Forgets stations that were silent for long; to be called every few seconds.
    pub fn age(&mut self, now: Duration) {
        self.lookup.age(seconds(now));
    }

    /// Lets go of what a port's peer shares with the switch, except in the port itself: no span of an
    /// earlier burst names it any more.
    pub fn release(&mut self) {
        self.burst.release();
        self.cutter.release();
    }

    /// Has the port tell when frames come; true: there are some already.
    pub fn arm(&mut self, index: PortIndex) -> bool {
        self.slot_mut(index).is_some_and(|slot| slot.port.arm())
    }

    /// Has a port that may not send look at what else there is: nothing of its peer's memory is named by
    /// the switch after that, but in the port itself.
    pub fn attend(&mut self, index: PortIndex) {
        self.release();
        if let Some(slot) = self.slot_mut(index) {
            slot.port.attend();
        }
    }

    /// Takes up to `limit` frames from a port, at most [`BURST`], and gives them to those that they are
    /// for.
    pub fn turn(&mut self, index: PortIndex, limit: usize, now: Duration) -> Turn {
        let Some(slot) = self.slots.get_mut(usize::from(index)).and_then(Option::as_deref_mut)
        else {
            return Turn::Idle;
        };
        let opens = slot.bucket.as_ref().map(Bucket::opens_at).filter(|opens| *opens > now);
        if let Some(opens) = opens {
            return Turn::Held(opens);
        }
        self.now = now;
        if slot.timed {
            tick(&mut *slot.port, now);
        }
        self.burst.clear();
        let more = slot.port.take(&mut self.burst, limit.min(BURST));
        if self.burst.is_empty() {
            // What was taken may have been malformed only.
            slot.port.release();
            return if more { Turn::More } else { Turn::Idle };
        }
        let Slot { config, stats, port, .. } = slot;
        let (keys, kept) = (&mut self.keys, &mut self.kept);
        let bytes = self.burst.bytes();
        stats.frames_in += self.burst.len() as u64;
        stats.bytes_in += bytes;
        let kept = match config.link == Link::Down || !port.is_up() {
            true => stats.drop_all_in(Drop::Down, self.burst.len()),
            false => judge(config, stats, &mut self.burst, keys, kept),
        };
        if let Some(bucket) = &mut slot.bucket {
            bucket.take(bytes, now);
        }
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
        if more { Turn::More } else { Turn::Done }
    }

    /// First pass, second half: puts a frame on the lists of those that it is for.
    #[inline]
    fn direct(&mut self, from: PortIndex, kept: Kept, station: Station, target: Target) {
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

    /// Puts a frame on one port's list. False: the port is not in the frame's VLAN.
    #[inline]
    fn address(&mut self, to: PortIndex, kept: Kept) -> bool {
        let Some(Some(slot)) = self.slots.get(usize::from(to)) else { return false };
        let Some(tci) = slot.config.tag_out(kept.tci) else { return false };
        self.fan.add(to, Pick { frame: kept.frame, tci });
        true
    }

    #[cold]
    fn flood(&mut self, from: PortIndex, kept: Kept, takes: impl Fn(&PortConfig) -> bool) -> bool {
        let mut any = false;
        for to in 0..self.slots.len() as PortIndex {
            let Some(Some(slot)) = self.slots.get(usize::from(to)) else { continue };
            if to != from && takes(&slot.config) {
                any |= self.address(to, kept);
            }
        }
        any
    }

    /// Has the processor fetch the settings of the port that a frame may go to.
    #[inline]
    fn fetch_slot(&self, target: Target) {
        if let Target::Port(to) = target
            && let Some(slot) = self.slot(to)
        {
            fetch(slot);
        }
    }

    /// Second pass: gives each port the frames of its list, then tells those that want to be told.
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
        }
        // See `Port::notify`.
        fence(Ordering::SeqCst);
        for at in 0..count {
            if let Some(slot) = self.slot_mut(self.fan.port(at)) {
                slot.port.notify();
            }
        }
        self.fan.clear();
    }

    /// A delivery to a port follows, but not at once.
    #[inline]
    fn fetch_port(&self, at: usize) {
        if let Some(slot) = self.slot(self.fan.port(at)) {
            slot.fetch();
        }
    }

    /// A delivery to a port follows soon.
    #[inline]
    fn prepare(&self, at: usize) {
        let (port, frames) = self.fan.next(at);
        if let Some(slot) = self.slot(port) {
            slot.port.prepare(frames);
        }
    }

    /// Second pass: gives a port the frames of its list.
    #[inline]
    fn drain(&mut self, to: PortIndex) {
        let Some(Some(slot)) = self.slots.get_mut(usize::from(to)) else { return };
        let picks = &self.picks[..];
        if slot.timed {
            tick(&mut *slot.port, self.now);
        }
        if slot.config.link == Link::Down || !slot.port.is_up() {
            slot.stats.drop_out(Drop::Down, picks.len() as u64);
            return;
        }
        let delivered = match self.cutter.suits(&self.burst, slot.port.abilities(), &slot.config) {
            true => slot.port.deliver(&self.burst, picks),
            false => self.cutter.deliver(&self.burst, picks, &mut *slot.port, &slot.config),
        };
        slot.stats.count_out(&delivered);
    }

    /// Sets what is done to the port's frames from now on, or takes it away. What waits in a former
    /// impairment is dropped.
    ///
    /// # Errors
    /// [`BadConfig::NoSuchPort`], [`BadConfig::Impairment`]: nothing has changed then.
    pub fn impair(
        &mut self,
        index: PortIndex,
        impairment: Option<Impairment>,
    ) -> Result<(), BadConfig> {
        if let Some(impairment) = &impairment {
            impairment.check()?;
        }
        // From now on frames may go through a decorator's burst, and nothing empties ours of the peer's memory.
        self.release();
        let slot = self.slot_mut(index).ok_or(BadConfig::NoSuchPort)?;
        strip(&mut slot.port, Layer::Impairment, &mut slot.stats);
        if let Some(impairment) = &impairment {
            wrap_here(&mut slot.port, |port| impairment.wrap(port));
        }
        slot.impairment = impairment;
        self.settle_time(index);
        Ok(())
    }

    /// What is done to the port's frames at present.
    pub fn impairment(&self, index: PortIndex) -> Option<&Impairment> {
        self.slot(index)?.impairment.as_ref()
    }

    /// Has `observer` see what passes the port from now on; `number` names it.
    ///
    /// # Errors
    /// [`BadConfig::NoSuchPort`].
    pub fn observe(
        &mut self,
        index: PortIndex,
        number: u64,
        observer: Box<dyn Observer>,
    ) -> Result<(), BadConfig> {
        let slot = self.slot_mut(index).ok_or(BadConfig::NoSuchPort)?;
        wrap_innermost(&mut slot.port, |port| Box::new(Observed::new(port, number, observer)));
        Ok(())
    }

    /// Drops the observer of this number. False: the port has none such.
    pub fn unobserve(&mut self, index: PortIndex, number: u64) -> bool {
        let Some(slot) = self.slot_mut(index) else { return false };
        strip(&mut slot.port, Layer::Observer(number), &mut slot.stats)
    }

    /// Ports that do things by time.
    pub(crate) fn timed(&self) -> &[PortIndex] {
        &self.timed
    }

    /// When such a port does something next; with `inward` also: when it has a frame from its peer.
    pub(crate) fn due(&mut self, index: PortIndex, inward: bool) -> Option<Duration> {
        self.slot_mut(index)?.port.timed()?.due(inward)
    }

    /// Has such a port do what is due; true: it wants a turn.
    pub(crate) fn tick(&mut self, index: PortIndex, now: Duration) -> bool {
        self.slot_mut(index).is_some_and(|slot| tick(&mut *slot.port, now))
    }

    /// Takes note of whether the port does things by time.
    fn settle_time(&mut self, index: PortIndex) {
        self.timed.retain(|timed| *timed != index);
        let Some(slot) = self.slot_mut(index) else { return };
        slot.timed = slot.port.timed().is_some();
        if slot.timed {
            self.timed.push(index);
        }
    }

    fn slot(&self, index: PortIndex) -> Option<&Slot> {
        self.slots.get(usize::from(index))?.as_deref()
    }

    fn slot_mut(&mut self, index: PortIndex) -> Option<&mut Slot> {
        self.slots.get_mut(usize::from(index))?.as_deref_mut()
    }
}

/// Tells the port the time; true: it wants a turn.
#[cold]
fn tick(port: &mut dyn Port, now: Duration) -> bool {
    port.timed().is_some_and(|timed| timed.tick(now))
}

/// Drops the frames that wait in front of a port.
fn close(port: &mut dyn Port) {
    if let Some(timed) = port.timed() {
        timed.close();
    }
}

/// The time in whole seconds, as the table counts it; it wraps after 136 years.
fn seconds(now: Duration) -> u32 {
    now.as_secs() as u32
}
