//! A stream with a guest at one end at least: its two ends, and the transfer between them.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use slipway_ring::cross::{Error, Fault, Own, Regions, Side, Stream, Tail};
use slipway_sgiov_spec::function;

use super::guest::Guest;
use crate::remote::Line;

/// The number of bytes that move one way in a turn.
const TURN: usize = 256 << 10;
/// The length of the longest FIFO in bytes.
const MOST: usize = 512 << 10;

/// The owner of an end.
pub enum EndOwner {
    Host { connection: u32, line: Line },
    Guest { guest: u32, connection: u32, line: function::Line },
}

/// One end of a pair.
pub struct PairEnd {
    pub who: EndOwner,
    /// The engine's private words: tail, head seen, head, tail seen.
    own: [AtomicU64; 4],
    /// The program has closed the end.
    pub left: bool,
    /// Nothing is written to the end any more.
    finished: bool,
    /// Nothing is read from the end any more.
    shut: bool,
    /// The wishes for data and for space that were made and not looked at again.
    wishes: (bool, bool),
}

impl PairEnd {
    pub fn new(who: EndOwner) -> Self {
        let (own, wishes) = Default::default();
        Self { who, own, left: false, finished: false, shut: false, wishes }
    }

    /// Returns the end's stream, or `None` if the stream's memory is not mapped at present.
    fn stream<'a>(&'a self, guests: &'a BTreeMap<u32, Guest>) -> Option<(Stream<'a>, Regions<'a>)> {
        let (arena, bits, number, side) = match &self.who {
            EndOwner::Host { line, .. } => (&line.arena, &line.regions, line.stream, line.side),
            EndOwner::Guest { guest, line, .. } => {
                let channel = guests.get(guest)?.channel.as_ref()?;
                // After the guest has started anew, the arena with this number may be smaller.
                let there = channel.arena(line.arena);
                let (arena, bits) = there.filter(|(a, _)| line.stream < a.shape().streams)?;
                let side = if line.side == 0 { Side::Zero } else { Side::One };
                (arena, bits, line.stream, side)
            }
        };
        let [tail, head_seen, head, tail_seen] = &self.own;
        let (out, into) = (Own { own: tail, seen: head_seen }, Own { own: head, seen: tail_seen });
        Some((Stream::new(arena, number, side, out, into), Regions::new(bits, arena.shape())))
    }

    /// Returns the last tail that was written to the end.
    pub fn last(&self) -> Tail {
        Tail(self.own[0].load(Ordering::Relaxed))
    }

    /// Resets the end. Returns whether its program is to be woken.
    pub fn reset(&mut self, guests: &BTreeMap<u32, Guest>) -> bool {
        let told = self.stream(guests).map(|(stream, _)| {
            let told = [stream.out.reset(), stream.into.reset()];
            told.contains(&true)
        });
        (self.finished, self.shut) = (true, true);
        told.unwrap_or(false)
    }

    /// Finishes both halves of an end that its program has closed, and releases its region.
    pub fn end(&mut self, guests: &BTreeMap<u32, Guest>) {
        if let Some((stream, regions)) = self.stream(guests) {
            stream.out.finish();
            stream.into.shut();
            if let (EndOwner::Guest { .. }, Some(region)) = (&self.who, stream.out.tail().region())
            {
                regions.give(region);
            }
        }
        (self.finished, self.shut) = (true, true);
    }
}

/// A stream with a guest at one end at least.
pub struct Pair {
    /// The connecting end and the accepting end. `None` if an end is not there yet, or has ended.
    pub ends: [Option<PairEnd>; 2],
    /// The party whose answer is awaited.
    pub awaits: Option<Answerer>,
    /// The time at which a guest was asked for it.
    pub asked: Option<Instant>,
    pub opened: bool,
    /// Set if the pair is looked at in every turn.
    pub hot: bool,
    /// Consecutive looks that found nothing.
    pub idle: u8,
    /// Set while the pair is idle and queued to give up memory: the time at which it was queued,
    /// and the time since which it is idle.
    pub resting: Option<(Instant, Instant)>,
}

/// The party that answers whether a connection is accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answerer {
    /// The engine, on the request of this guest.
    Engine(u32),
    Guest(u32),
}

/// The result of a turn.
#[derive(Default)]
pub struct Done {
    pub worked: bool,
    /// By end: set if its program is to be woken.
    pub tell: [bool; 2],
    /// Bytes that came from each end.
    pub bytes: [u64; 2],
}

impl Pair {
    pub fn new(connector: PairEnd, awaits: Answerer) -> Self {
        let (asked, opened, hot, idle, resting) = Default::default();
        let (ends, awaits) = ([Some(connector), None], Some(awaits));
        Self { ends, awaits, asked, opened, hot, idle, resting }
    }

    /// Moves bytes both ways, up to the limit of a turn.
    pub fn turn(&mut self, guests: &BTreeMap<u32, Guest>) -> Done {
        let mut done = Done::default();
        if self.opened && !self.is_away(guests) {
            self.carry(0, guests, &mut done);
            self.carry(1, guests, &mut done);
        }
        done
    }

    /// Returns whether the memory of an end is not mapped at present.
    fn is_away(&self, guests: &BTreeMap<u32, Guest>) -> bool {
        self.ends.iter().flatten().any(|end| end.stream(guests).is_none())
    }

    fn carry(&mut self, from: usize, guests: &BTreeMap<u32, Guest>, done: &mut Done) {
        let to = 1 - from;
        let [first, second] = &mut self.ends;
        let (source, target) = if from == 0 { (first, second) } else { (second, first) };
        let Some(source) = source else { return };
        if source.shut {
            return;
        }
        let Some(target) = target else {
            // The other end is not read any more.
            source.shut = true;
            done.tell[from] |= source.stream(guests).is_some_and(|(stream, _)| stream.into.shut());
            done.worked = true;
            return;
        };
        if target.finished {
            return;
        }
        match Self::copy(source, target, guests, (from, to), done) {
            Ok(()) => {}
            Err(Fault::Into(Error::Shut)) => {
                source.shut = true;
                if let Some((stream, _)) = source.stream(guests) {
                    done.tell[from] |= stream.into.shut();
                }
                done.worked = true;
            }
            Err(_) => {
                // One end was reset or has invalid counters, so the other one is reset, too.
                done.tell[from] |= source.reset(guests);
                done.tell[to] |= target.reset(guests);
                done.worked = true;
            }
        }
    }

    fn copy(
        source: &PairEnd,
        target: &mut PairEnd,
        guests: &BTreeMap<u32, Guest>,
        (from, to): (usize, usize),
        done: &mut Done,
    ) -> Result<(), Fault> {
        let Some((stream, _)) = source.stream(guests) else { return Ok(()) };
        let Some((into, regions)) = target.stream(guests) else { return Ok(()) };
        let [mut tell_from, mut tell_to] = [false; 2];
        let tells = (|| tell_from = true, || tell_to = true);
        let count = stream.transfer(&into, TURN, MOST, regions, tells)?;
        let over = count == 0 && stream.available().map_err(Fault::From)? == (0, true);
        if over {
            tell_to |= into.out.finish();
        }
        done.worked |= count > 0 || over;
        done.bytes[from] += count as u64;
        done.tell[from] |= tell_from;
        done.tell[to] |= tell_to;
        target.finished |= over;
        Ok(())
    }

    /// Returns, by end, whether the end is over: its program has closed it, and its bytes were
    /// passed on or never will be.
    pub fn over(&self) -> [bool; 2] {
        let passed = |other: &Option<PairEnd>| other.as_ref().is_none_or(|other| other.finished);
        let [first, second] = &self.ends;
        let is_over = |end: &Option<PairEnd>, other| {
            end.as_ref().is_some_and(|end| end.left && (end.shut || passed(other)))
        };
        [is_over(first, second), is_over(second, first)]
    }

    /// Makes wishes at both ends for the next work. `slipway_ring::cross::heavy` and
    /// [`Pair::settle`] must follow. Returns `false` if counters are invalid, which the next turn
    /// handles.
    pub fn wish(&mut self, guests: &BTreeMap<u32, Guest>) -> bool {
        if !self.opened || self.is_away(guests) {
            return true;
        }
        self.wish_one(0, guests) && self.wish_one(1, guests)
    }

    fn wish_one(&mut self, from: usize, guests: &BTreeMap<u32, Guest>) -> bool {
        let [first, second] = &mut self.ends;
        let (source, target) = if from == 0 { (first, second) } else { (second, first) };
        let (Some(source), Some(target)) = (source, target) else { return true };
        if source.shut || target.finished {
            return true;
        }
        let Some((stream, _)) = source.stream(guests) else { return true };
        match stream.available() {
            Ok((0, _)) => {
                stream.wish_data(1);
                source.wishes.0 = true;
            }
            Ok(_) => {
                if let Some((into, _)) = target.stream(guests) {
                    into.wish_space();
                }
                target.wishes.1 = true;
            }
            Err(_) => return false,
        }
        true
    }

    /// Takes the wishes of both ends back. Returns whether there is something to do now.
    pub fn settle(&mut self, guests: &BTreeMap<u32, Guest>) -> bool {
        let mut some = false;
        for end in self.ends.iter_mut().flatten() {
            let (data, space) = std::mem::take(&mut end.wishes);
            let Some((stream, _)) = end.stream(guests) else { continue };
            some |= data && stream.is_data_there(1) != Ok(false);
            some |= space && stream.is_space_there() != Ok(false);
        }
        some
    }

    /// Releases the memory of empty FIFOs.
    pub fn trim(&self, guests: &BTreeMap<u32, Guest>) {
        for end in self.ends.iter().flatten().filter(|end| !end.finished) {
            let Some((stream, regions)) = end.stream(guests) else { continue };
            match &end.who {
                EndOwner::Host { line, .. } => _ = stream.trim(line.regions.clone()),
                // The pages are the guest's own, and stay.
                EndOwner::Guest { .. } => {
                    stream.untie().into_iter().for_each(|region| regions.give(region));
                }
            }
        }
    }

    /// Returns whether one of the pair's FIFOs has memory.
    pub fn has_memory(&self) -> bool {
        self.ends.iter().flatten().any(|end| end.last().region().is_some())
    }
}
