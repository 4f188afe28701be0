//! A stream with a guest at one end at least: its two ends, and the transfer between them. Its
//! states and their changes are in `lifecycle`.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use slipway_ring::cross::{Error, Fault, Own, Regions, Side, Stream, Tail};
use slipway_sgiov_spec::function;

use super::guest::{GuestTable, Tenants};
use crate::remote::Line;

/// The number of bytes that move one way in a turn.
const TURN: usize = 256 << 10;
/// The length of the longest FIFO in bytes.
const MOST: usize = 512 << 10;

/// The owner of an end.
pub enum EndOwner {
    /// A program of this node.
    Program {
        connection: u32,
        line: Line,
    },
    Guest {
        guest: u32,
        connection: u32,
        line: function::Line,
    },
}

/// One end of a pair.
pub struct PairEnd {
    pub owner: EndOwner,
    /// The engine's private words: tail, head seen, head, tail seen.
    own: [AtomicU64; 4],
    /// Set once the owner's program has closed the end.
    closed: bool,
    /// Set once nothing is written to the end any more.
    finished: bool,
    /// Set once nothing is read from the end any more.
    shut: bool,
    /// The wishes for data and for space that were made and not looked at again.
    wishes: (bool, bool),
}

impl PairEnd {
    pub fn new(owner: EndOwner) -> Self {
        let (own, wishes) = Default::default();
        Self { owner, own, closed: false, finished: false, shut: false, wishes }
    }

    /// Returns the end's stream, or `None` if the stream's memory is not mapped at present.
    fn stream<'a>(&'a self, guests: &'a GuestTable) -> Option<(Stream<'a>, Regions<'a>)> {
        let (arena, bits, number, side) = match &self.owner {
            EndOwner::Program { line, .. } => (&line.arena, &line.regions, line.stream, line.side),
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

    /// Notes that the owner's program has closed the end. Returns `false` if it had done so before.
    pub fn close(&mut self) -> bool {
        !std::mem::replace(&mut self.closed, true)
    }

    /// Resets the end. Returns whether its program is to be woken.
    pub fn reset(&mut self, guests: &GuestTable) -> bool {
        let wakes = self.stream(guests).map(|(stream, _)| {
            let wakes = [stream.out.reset(), stream.into.reset()];
            wakes.contains(&true)
        });
        (self.finished, self.shut) = (true, true);
        wakes.unwrap_or(false)
    }

    /// Finishes both halves of an end that its program has closed, and releases its region.
    pub fn finish(&mut self, guests: &GuestTable) {
        if let Some((stream, regions)) = self.stream(guests) {
            stream.out.finish();
            stream.into.shut();
            if let (EndOwner::Guest { .. }, Some(region)) =
                (&self.owner, stream.out.tail().region())
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
    state: PairState,
    /// The tenants of the ends, or `None` if the pair was never open.
    tenants: Option<Tenants>,
    pub activity: Activity,
}

/// The state of a pair. Each end has its own flags, for example that it was closed.
#[derive(Clone, Copy)]
enum PairState {
    /// The pair has no accepting end, and waits for an answer.
    Asked { answerer: Answerer, since: Instant },
    /// The pair has had both ends.
    Open,
}

/// The state of a pair in the schedule. Only [`Pairs`](super::pairs::Pairs) uses it.
#[derive(Default)]
pub struct Activity {
    /// Set if the pair gets a turn in every round.
    pub hot: bool,
    /// Consecutive turns that found nothing to do.
    pub idle: u8,
    /// Set while the pair is queued to give up memory: the time at which it was queued, and the
    /// time since which it is idle.
    pub resting: Option<(Instant, Instant)>,
    /// Set while the pair is left out, and `hot` meanwhile.
    pub left_out: bool,
}

/// The party that says whether a connection is accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answerer {
    /// The engine, on the request of this guest.
    Engine(u32),
    Guest(u32),
}

/// The result of a turn of a pair.
#[derive(Default)]
pub struct TurnReport {
    /// Set if there was something to do.
    pub worked: bool,
    /// By end: set if its program is to be woken.
    pub wake: [bool; 2],
    /// By end: set if the end is over: its program has closed it, and its bytes were passed on or
    /// never will be.
    pub over: [bool; 2],
    /// Bytes that came from each end.
    pub bytes: [u64; 2],
}

impl Pair {
    /// Makes a pair that waits for an answer since `since`.
    pub fn new(connector: PairEnd, answerer: Answerer, since: Instant) -> Self {
        let (ends, state) = ([Some(connector), None], PairState::Asked { answerer, since });
        Self { ends, state, tenants: None, activity: Activity::default() }
    }

    /// Returns the party whose answer is awaited. Returns `None` if the pair is open.
    pub fn awaits(&self) -> Option<Answerer> {
        match self.state {
            PairState::Asked { answerer, .. } => Some(answerer),
            PairState::Open => None,
        }
    }

    /// Returns the guest whose answer is awaited since `at`. Returns `None` if there is no such
    /// guest: the pair is open, or waits for the engine or since another time.
    pub fn guest_asked_at(&self, at: Instant) -> Option<u32> {
        match self.state {
            PairState::Asked { answerer: Answerer::Guest(guest), since } if since == at => {
                Some(guest)
            }
            _ => None,
        }
    }

    /// Returns whether the pair has had both ends.
    pub fn is_open(&self) -> bool {
        matches!(self.state, PairState::Open)
    }

    /// Adds the accepting end. `tenants` are those of both ends.
    pub fn open(&mut self, acceptor: PairEnd, mut tenants: Tenants) {
        self.ends[1] = Some(acceptor);
        self.state = PairState::Open;
        tenants.sort();
        self.tenants = Some(tenants);
    }

    /// Returns the tenants of the ends. Returns `None` if the pair was never open.
    pub fn tenants(&self) -> Option<&Tenants> {
        self.tenants.as_ref()
    }

    /// Returns whether the pair is open and has no end any more.
    pub fn is_over(&self) -> bool {
        self.is_open() && self.ends.iter().all(Option::is_none)
    }

    /// Moves bytes both ways, up to the limit of a turn.
    pub fn turn(&mut self, guests: &GuestTable) -> TurnReport {
        let mut report = TurnReport::default();
        if self.is_open() && !self.is_away(guests) {
            self.carry(0, guests, &mut report);
            self.carry(1, guests, &mut report);
        }
        report.over = self.over();
        report
    }

    /// Returns whether the memory of an end is not mapped at present.
    fn is_away(&self, guests: &GuestTable) -> bool {
        self.ends.iter().flatten().any(|end| end.stream(guests).is_none())
    }

    fn carry(&mut self, from: usize, guests: &GuestTable, report: &mut TurnReport) {
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
            report.wake[from] |=
                source.stream(guests).is_some_and(|(stream, _)| stream.into.shut());
            report.worked = true;
            return;
        };
        if target.finished {
            return;
        }
        match Self::copy(source, target, guests, (from, to), report) {
            Ok(()) => {}
            Err(Fault::Into(Error::Shut)) => {
                source.shut = true;
                if let Some((stream, _)) = source.stream(guests) {
                    report.wake[from] |= stream.into.shut();
                }
                report.worked = true;
            }
            Err(_) => {
                // One end was reset or has invalid counters, so the other one is reset, too.
                report.wake[from] |= source.reset(guests);
                report.wake[to] |= target.reset(guests);
                report.worked = true;
            }
        }
    }

    fn copy(
        source: &PairEnd,
        target: &mut PairEnd,
        guests: &GuestTable,
        (from, to): (usize, usize),
        report: &mut TurnReport,
    ) -> Result<(), Fault> {
        let Some((stream, _)) = source.stream(guests) else { return Ok(()) };
        let Some((into, regions)) = target.stream(guests) else { return Ok(()) };
        let [mut wake_from, mut wake_to] = [false; 2];
        let wakes = (|| wake_from = true, || wake_to = true);
        let count = stream.transfer(&into, TURN, MOST, regions, wakes)?;
        let over = count == 0 && stream.available().map_err(Fault::From)? == (0, true);
        if over {
            wake_to |= into.out.finish();
        }
        report.worked |= count > 0 || over;
        report.bytes[from] += count as u64;
        report.wake[from] |= wake_from;
        report.wake[to] |= wake_to;
        target.finished |= over;
        Ok(())
    }

    /// Returns, by end, whether the end is over: its program has closed it, and its bytes were
    /// passed on or never will be.
    fn over(&self) -> [bool; 2] {
        let passed = |other: &Option<PairEnd>| other.as_ref().is_none_or(|other| other.finished);
        let [first, second] = &self.ends;
        let is_over = |end: &Option<PairEnd>, other| {
            end.as_ref().is_some_and(|end| end.closed && (end.shut || passed(other)))
        };
        [is_over(first, second), is_over(second, first)]
    }

    /// Makes wishes at both ends for the next work. `slipway_ring::cross::heavy` and
    /// [`Pair::settle`] must follow. Returns `false` if counters are invalid, which the next turn
    /// handles.
    pub fn wish(&mut self, guests: &GuestTable) -> bool {
        if !self.is_open() || self.is_away(guests) {
            return true;
        }
        self.wish_one(0, guests) && self.wish_one(1, guests)
    }

    fn wish_one(&mut self, from: usize, guests: &GuestTable) -> bool {
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
    pub fn settle(&mut self, guests: &GuestTable) -> bool {
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
    pub fn trim(&self, guests: &GuestTable) {
        for end in self.ends.iter().flatten().filter(|end| !end.finished) {
            let Some((stream, regions)) = end.stream(guests) else { continue };
            match &end.owner {
                EndOwner::Program { line, .. } => _ = stream.trim(line.regions.clone()),
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
