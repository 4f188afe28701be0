//! One stream: a local FIFO at one end, a connection at the other.
//!
//! - To the connection: [`Stream::look`] tells what the program has for it, and [`Stream::pull`]
//!   takes bytes, within the credit that the other side has given.
//! - From the connection: [`Stream::push`] takes bytes, [`Stream::pass`] those that found no room,
//!   and [`Stream::grant`] gives the other side credit for more.
//! - Before the engine sleeps: [`Stream::wish`] asks the program for a signal, and after a barrier
//!   [`Stream::take_wishes`] looks once more.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use slipway_ring::cross::{Arena, Error, Own, Region, Regions, Side, Stream as Fifo};

/// The engine's end of a local program's stream.
#[derive(Clone)]
pub struct End {
    /// The memory.
    pub arena: Arena,
    /// Allocation bitmap of the regions that the engine writes in the arena: [`Regions::WORDS`]
    /// words, the same for all streams of the arena.
    pub regions: Arc<[AtomicU64]>,
    /// The number of the stream in the arena.
    pub number: u32,
    /// The engine's side.
    pub side: Side,
    /// The eventfd that the program sleeps on.
    pub bell: Arc<OwnedFd>,
}

impl End {
    /// Frees a region that no stream uses, after its pages.
    fn give_back(&self, region: Region) {
        let (bits, shape) = (self.regions.clone(), self.arena.shape());
        self.arena.punch(self.side, region, move || Regions::new(&bits, shape).give(region));
    }

    /// Resets a stream that no byte went through.
    pub(crate) fn reset(self) {
        let mut stream = Stream::new(Phase::Open, 0, 0);
        stream.attach(self);
        stream.reset();
    }
}

/// The progress of a stream's opening.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// This side opens the stream, now or once the connection is up; the peer has not answered.
    OpenSent,
    /// The peer opens the stream, and the owner has not answered.
    OpenReceived,
    /// Both sides have agreed.
    Open,
}

/// The result of a look at the source FIFO.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SourceState {
    /// The number of bytes that can be sent.
    Bytes(usize),
    /// Nothing to send now.
    Nothing,
    /// The program has finished, and all bytes were taken.
    End,
    /// The program reset the stream.
    Reset,
}

/// The progress of the other side's FIN.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum PeerFin {
    #[default]
    Awaited,
    /// The FIN came, and bytes before it may still wait.
    Came,
    /// The FIN was passed on to the program.
    Passed,
}

/// A stream of a connection, as this engine has it.
pub(crate) struct Stream {
    pub(crate) phase: Phase,
    end: Option<End>,
    /// The engine's own counters of the FIFO: tail, head seen, head, tail seen.
    words: [AtomicU64; 4],
    /// Bytes that may be sent.
    pub(crate) credit: u64,
    /// Bytes that the other side may still send.
    granted: u64,
    /// Bytes that are granted or unread: the most that is in flight between the two programs.
    window: u64,
    /// The other side has used up most of its credit since the last grant.
    pressed: bool,
    /// The window is larger than at the beginning.
    grown: bool,
    /// Bytes that arrived and for which the FIFO has no room yet.
    waiting: Vec<u8>,
    /// This side's FIN was sent.
    pub(crate) finished: bool,
    fin: PeerFin,
    /// The local program is gone.
    pub(crate) left: bool,
    /// The stream is polled in every turn.
    pub(crate) hot: bool,
    /// Consecutive polls that found nothing.
    pub(crate) idle: u8,
    /// A trim of the stream's FIFO is scheduled.
    pub(crate) resting: bool,
    /// Pending checks for data and for space, which were asked for since the last check.
    wishes: (bool, bool),
    /// Signals that the program was asked for and has not sent: it need not be asked again.
    asked: StoredWishes,
}

/// Wishes that are stored for the program.
#[derive(Default)]
struct StoredWishes {
    /// A signal for the next byte.
    data: bool,
    /// A signal when all but this many bytes of the FIFO are read.
    space: Option<u64>,
    /// No barrier has followed: the program may have missed the last wish.
    unsure: bool,
}

impl StoredWishes {
    /// Counts `count` more bytes in the FIFO, behind those that are to be read.
    fn wrote(&mut self, count: usize) {
        self.space = self.space.map(|left| left + count as u64);
    }
}

impl Stream {
    pub(crate) fn new(phase: Phase, credit: u32, granted: u32) -> Self {
        let (end, words, waiting, finished, fin) = Default::default();
        let (left, hot, idle) = Default::default();
        let (credit, granted) = (credit.into(), granted.into());
        Self {
            phase,
            end,
            words,
            credit,
            granted,
            window: granted,
            pressed: false,
            grown: false,
            waiting,
            finished,
            fin,
            left,
            hot,
            idle,
            resting: false,
            wishes: (false, false),
            asked: StoredWishes::default(),
        }
    }

    /// Gives the stream its local end.
    pub(crate) fn attach(&mut self, end: End) {
        self.end = Some(end);
    }

    pub(crate) fn is_attached(&self) -> bool {
        self.end.is_some()
    }

    /// Returns the FIFO with its regions and its end. Returns `None` without an end.
    fn fifo(&self) -> Option<(Fifo<'_>, Regions<'_>, &End)> {
        let end = self.end.as_ref()?;
        let [tail, head_seen, head, tail_seen] = &self.words;
        let (out, into) = (Own { own: tail, seen: head_seen }, Own { own: head, seen: tail_seen });
        let regions = Regions::new(&end.regions, end.arena.shape());
        Some((Fifo::new(&end.arena, end.number, end.side, out, into), regions, end))
    }

    /// Looks for bytes to send, or for the end of the stream.
    pub(crate) fn look(&self) -> Result<SourceState, Error> {
        let Some((fifo, ..)) = self.fifo() else { return Ok(SourceState::Nothing) };
        match fifo.available() {
            Ok((0, true)) => Ok(SourceState::End),
            Ok((0, false)) => Ok(SourceState::Nothing),
            Ok((count, _)) => Ok(SourceState::Bytes(count)),
            Err(Error::Reset) => Ok(SourceState::Reset),
            Err(error) => Err(error),
        }
    }

    /// Reads bytes to send straight from the FIFO.
    pub(crate) fn pull(&mut self, into: &mut [u8]) -> Result<usize, Error> {
        let Some((fifo, _, end)) = self.fifo() else { return Ok(0) };
        let mut told = true;
        let count = fifo.read(into, || told = slipway_peer::eventfd::raise(end.bell.as_fd()))?;
        // A program that cannot be notified without blocking loses its stream.
        told.then_some(()).ok_or(Error::Spoiled)?;
        self.credit -= count as u64;
        if count > 0 {
            self.asked.data = false;
        }
        Ok(count)
    }

    /// Takes bytes that arrived. Returns `false` if they are more than were granted.
    pub(crate) fn push(&mut self, bytes: &[u8], fifo: usize) -> Result<bool, Error> {
        let Some(left) = self.granted.checked_sub(bytes.len() as u64) else { return Ok(false) };
        self.granted = left;
        self.pressed |= left < self.window / 4;
        let done = if self.waiting.is_empty() { self.write(bytes, fifo)? } else { 0 };
        self.asked.wrote(done);
        self.waiting.extend_from_slice(&bytes[done..]);
        Ok(true)
    }

    /// Writes into the FIFO. A program that has shut its reading side gets nothing: the bytes are
    /// discarded, so that they hold up nobody.
    fn write(&self, bytes: &[u8], most: usize) -> Result<usize, Error> {
        let Some((fifo, regions, end)) = self.fifo() else { return Ok(0) };
        let before = fifo.out.tail().region();
        self.fit(&fifo, regions, most)?;
        let mut told = true;
        let tell = || told = slipway_peer::eventfd::raise(end.bell.as_fd());
        let written = match fifo.write(bytes, most, regions, tell) {
            Err(Error::Shut) => Ok(bytes.len()),
            other => other,
        };
        // A FIFO that grew has left its former region, which nobody else uses yet: free its pages.
        if let Some(before) = before.filter(|before| fifo.out.tail().region() != Some(*before))
            && regions.take_back(before)
        {
            end.give_back(before);
        }
        if told { written } else { Err(Error::Spoiled) }
    }

    /// Grows an empty FIFO that is smaller than a grown window, so that bytes need not wait beside
    /// it.
    fn fit(&self, fifo: &Fifo<'_>, regions: Regions<'_>, most: usize) -> Result<(), Error> {
        let wanted = usize::try_from(self.window).unwrap_or(most).min(most);
        let may = self.grown && !fifo.out.is_shut() && fifo.out.tail().size() > 0;
        if may && fifo.out.tail().size() < wanted as u64 && fifo.out.refresh()? == 0 {
            fifo.writable(wanted, wanted, regions)?;
        }
        Ok(())
    }

    /// Notes that the other side's FIN came. [`Stream::pass`] passes it on.
    pub(crate) fn take_fin(&mut self) {
        self.fin = PeerFin::Came;
    }

    /// Returns whether the other side's FIN came: no byte follows it.
    pub(crate) fn has_ended(&self) -> bool {
        self.fin != PeerFin::Awaited
    }

    /// Passes on waiting bytes, as far as there is room, and the FIN after them. Returns whether
    /// something was passed on.
    pub(crate) fn pass(&mut self, most: usize) -> Result<bool, Error> {
        let mut worked = false;
        if !self.waiting.is_empty() {
            let done = self.write(&self.waiting, most)?;
            self.asked.wrote(done);
            self.waiting.drain(..done);
            worked = done > 0;
            if self.waiting.is_empty() {
                self.waiting = Vec::new();
            }
        }
        if self.fin == PeerFin::Came && self.waiting.is_empty() && self.end.is_some() {
            self.fin = PeerFin::Passed;
            worked = true;
            if let Some((fifo, _, end)) = self.fifo()
                && fifo.out.finish()
                && !slipway_peer::eventfd::raise(end.bell.as_fd())
            {
                return Err(Error::Spoiled);
            }
        }
        Ok(worked)
    }

    /// Returns the bytes that the program has not read, including those that wait beside the FIFO,
    /// and the FIFO's size.
    fn unread(&self) -> Result<(u64, u64), Error> {
        let Some((fifo, ..)) = self.fifo() else { return Ok((self.waiting.len() as u64, 0)) };
        let unread = if fifo.out.is_shut() { 0 } else { fifo.out.refresh()? };
        Ok((unread + self.waiting.len() as u64, fifo.out.tail().size()))
    }

    /// Returns the credit to grant now: 0, or enough to be worth a frame. Credit and unread bytes
    /// together make up the window, which grows up to `most` if it is what slows the stream.
    pub(crate) fn grant(&mut self, most: usize) -> Result<u64, Error> {
        if !self.owes()? {
            return Ok(0);
        }
        let (unread, size) = self.unread()?;
        self.window = self.window.max(size);
        // The window is too small: the sender waits for credit while the program reads all that
        // comes.
        if std::mem::take(&mut self.pressed) && unread < self.window / 2 {
            self.window = (self.window * 2).min(most as u64).max(self.window);
            self.grown = true;
        }
        let more = self.window.saturating_sub(self.granted + unread);
        self.granted += more;
        Ok(more)
    }

    /// Returns whether [`Stream::grant`] has credit to give.
    fn owes(&self) -> Result<bool, Error> {
        if self.has_ended() || self.end.is_none() {
            return Ok(false);
        }
        let (unread, size) = self.unread()?;
        let window = self.window.max(size);
        Ok(window.saturating_sub(self.granted + unread) >= (window / 4).max(1))
    }

    /// Asks the program to signal when there is something to do. Returns whether a wish is stored
    /// that no barrier has followed yet: then, if `surely`, the caller calls
    /// `slipway_ring::cross::heavy`. [`Stream::take_wishes`] must follow.
    pub(crate) fn wish(&mut self, surely: bool) -> Result<bool, Error> {
        // Without credit, bytes of the program have to wait; its FIN does not.
        let sends = self.credit > 0 || !matches!(self.look()?, SourceState::Bytes(_));
        let Some((fifo, ..)) = self.fifo() else { return Ok(false) };
        let data = !self.finished && sends;
        let asks_data = data && !self.asked.data;
        if asks_data {
            fifo.wish_data(1);
        }
        let (unread, half) = (fifo.out.refresh()?, fifo.out.tail().size() / 2);
        let space = (!self.waiting.is_empty() || unread > half) && !fifo.out.is_shut();
        let asked = self.asked.space.filter(|left| unread > *left);
        let asks_space = space && asked.is_none();
        if asks_space {
            fifo.wish_space();
        }
        self.asked.data |= asks_data;
        // The program may have been asked for less to be left: then it is asked again too soon,
        // never too late.
        self.asked.space = if asks_space { Some(half) } else { asked };
        self.wishes = (data, space);
        let due = asks_data || asks_space || self.asked.unsure;
        self.asked.unsure = due && !surely;
        Ok(due)
    }

    /// Returns whether there is something to do now. Follows [`Stream::wish`].
    pub(crate) fn take_wishes(&mut self) -> Result<bool, Error> {
        let (data, space) = std::mem::take(&mut self.wishes);
        let Some((fifo, ..)) = self.fifo() else { return Ok(false) };
        let data = data && fifo.is_data_there(1)?;
        let space = space && fifo.is_space_there()?;
        // A wish that is already fulfilled has been taken back.
        self.asked.data &= !data;
        self.asked.space = self.asked.space.filter(|_| !space);
        // Bytes that the program read between the last grant and the wish cause no signal.
        Ok(data || space || self.owes()?)
    }

    /// Frees the region of an empty FIFO, if it is more than the stream's own page.
    pub(crate) fn trim(&self) {
        if let Some((fifo, _, end)) = self.fifo() {
            fifo.trim(end.regions.clone());
        }
    }

    /// Returns the region of the FIFO that the engine writes, if it has one.
    pub(crate) fn region(&self) -> Option<Region> {
        self.fifo().and_then(|(fifo, ..)| fifo.out.tail().region())
    }

    /// Returns whether the FIFO that the engine writes has a region.
    pub(crate) fn has_region(&self) -> bool {
        self.region().is_some()
    }

    /// Returns whether the FIFO has memory that [`Stream::trim`] frees.
    pub(crate) fn has_more_than_a_page(&self) -> bool {
        self.region().is_some_and(|region| region.order > 0)
    }

    /// Returns whether bytes wait for a FIFO that has no memory and never will.
    pub(crate) fn is_stuck(&self) -> bool {
        !self.waiting.is_empty() && self.end.is_some() && !self.has_region()
    }

    /// Returns whether the program left bytes unread.
    pub(crate) fn is_unread(&self) -> bool {
        self.unread().is_ok_and(|(unread, _)| unread > 0)
    }

    /// Returns the bytes that wait beside the FIFO.
    #[cfg(any(test, feature = "fuzz"))]
    pub(crate) fn held(&self) -> usize {
        self.waiting.len()
    }

    /// Resets the stream for the local program.
    pub(crate) fn reset(&self) {
        if let Some((fifo, _, end)) = self.fifo() {
            let tell = [fifo.out.reset(), fifo.into.reset()];
            if tell.contains(&true) {
                // A program that cannot be notified sees the reset when it looks next, which is
                // within a second.
                let _ = slipway_peer::eventfd::raise(end.bell.as_fd());
            }
        }
    }

    /// Returns whether both directions have ended, and all was passed on.
    pub(crate) fn is_over(&self) -> bool {
        self.finished && self.fin == PeerFin::Passed
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    const WINDOW: u32 = 64 << 10;

    /// An engine that slept here would keep the other side without credit for ever.
    #[test]
    fn what_is_read_between_the_grant_and_the_wish_is_granted() {
        let arena = Arena::new(Regions::shape(1)).unwrap();
        let regions: Arc<[AtomicU64]> = (0..Regions::WORDS).map(|_| AtomicU64::new(0)).collect();
        let bell = Arc::new(eventfd(0, EventfdFlags::NONBLOCK).unwrap());
        let mut stream = Stream::new(Phase::Open, 0, WINDOW);
        stream.attach(End { arena: arena.clone(), regions, number: 0, side: Side::One, bell });
        assert_eq!(stream.push(&[1; WINDOW as usize], WINDOW as usize), Ok(true));
        assert_eq!(stream.grant(WINDOW as usize), Ok(0), "all of it is unread");

        let words: [AtomicU64; 4] = Default::default();
        let [tail, head_seen, head, tail_seen] = &words;
        let (out, into) = (Own { own: tail, seen: head_seen }, Own { own: head, seen: tail_seen });
        let program = Fifo::new(&arena, 0, Side::Zero, out, into);
        assert_eq!(
            program.read(&mut [0; WINDOW as usize], || panic!("nobody asked")),
            Ok(WINDOW as usize)
        );

        stream.wish(true).unwrap();
        assert_eq!(stream.take_wishes(), Ok(true));
        assert_eq!(stream.grant(WINDOW as usize), Ok(WINDOW.into()));
        stream.wish(true).unwrap();
        assert_eq!(stream.take_wishes(), Ok(false), "there is no more to be done");
    }
}
