//! One stream: a local FIFO at one end, a connection at the other.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use slipway_ring::cross::{Arena, Error, Own, Region, Regions, Side, Stream as Fifo};

/// The engine's end of a local program's stream.
#[derive(Clone)]
pub struct End {
    /// The memory.
    pub arena: Arena,
    /// Who has which region of what the engine writes there: [`Regions::WORDS`] words, the same for all streams of
    /// the arena.
    pub regions: Arc<[AtomicU64]>,
    /// The stream in it.
    pub number: u32,
    /// The engine's side.
    pub side: Side,
    /// What the program sleeps on.
    pub bell: Arc<OwnedFd>,
}

impl End {
    /// Gives back a region that no stream has, and its pages before.
    fn give_back(&self, region: Region) {
        let (bits, shape) = (self.regions.clone(), self.arena.shape());
        self.arena.punch(self.side, region, move || Regions::new(&bits, shape).give(region));
    }

    /// Breaks off one that no byte went through.
    pub(crate) fn reset(self) {
        let mut stream = Stream::new(Phase::Open, 0, 0);
        stream.attach(self);
        stream.reset();
    }
}

/// How far a stream came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// The other side was asked, or will be when the connection is there.
    Asking,
    /// The other side asks.
    Asked,
    /// Both ends are there.
    Open,
}

/// What a look at the source found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Found {
    /// So many bytes.
    Bytes(usize),
    /// Nothing now.
    Nothing,
    /// Nothing any more.
    End,
    /// The program broke it off.
    Reset,
}

pub(crate) struct Stream {
    pub(crate) phase: Phase,
    end: Option<End>,
    /// The engine's own counters of the FIFO: tail, head seen, head, tail seen.
    words: [AtomicU64; 4],
    /// Bytes that may be sent.
    pub(crate) credit: u64,
    /// Bytes that the other side may still send.
    granted: u64,
    /// Bytes that are granted or unread: what is under way between the two programs at most.
    window: u64,
    /// The other side had used up most of it since the last grant.
    pressed: bool,
    /// It is larger than it was in the beginning.
    grown: bool,
    /// Came, and the FIFO has no room for it yet.
    waiting: Vec<u8>,
    /// This side's FIN was sent.
    pub(crate) finished: bool,
    /// The other side's came.
    pub(crate) ended: bool,
    /// It was passed on.
    passed: bool,
    /// The local program is gone.
    pub(crate) left: bool,
    /// It is looked at in every turn.
    pub(crate) hot: bool,
    /// Looks that found nothing, one after the other.
    pub(crate) idle: u8,
    /// It is due to be trimmed.
    pub(crate) resting: bool,
    /// Data or space was asked for, and not yet looked for again.
    wishes: (bool, bool),
    /// What the program was asked to tell and has not come to yet: it need not be asked again.
    asked: Asked,
}

/// Wishes that lie with the program.
#[derive(Default)]
struct Asked {
    /// The next byte.
    data: bool,
    /// That all but so many of the bytes in the FIFO are read.
    space: Option<u64>,
    /// No barrier has followed: the program may have overlooked the last one.
    unsure: bool,
}

impl Asked {
    /// So many bytes more lie in the FIFO, behind those that are to be read.
    fn wrote(&mut self, count: usize) {
        self.space = self.space.map(|left| left + count as u64);
    }
}

impl Stream {
    pub(crate) fn new(phase: Phase, credit: u32, granted: u32) -> Self {
        let (end, words, waiting, finished, ended) = Default::default();
        let (passed, left, hot, idle) = Default::default();
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
            ended,
            passed,
            left,
            hot,
            idle,
            resting: false,
            wishes: (false, false),
            asked: Asked::default(),
        }
    }

    pub(crate) fn attach(&mut self, end: End) {
        self.end = Some(end);
    }

    pub(crate) fn is_attached(&self) -> bool {
        self.end.is_some()
    }

    fn fifo(&self) -> Option<(Fifo<'_>, Regions<'_>, &End)> {
        let end = self.end.as_ref()?;
        let [tail, head_seen, head, tail_seen] = &self.words;
        let (out, into) = (Own { own: tail, seen: head_seen }, Own { own: head, seen: tail_seen });
        let regions = Regions::new(&end.regions, end.arena.shape());
        Some((Fifo::new(&end.arena, end.number, end.side, out, into), regions, end))
    }

    /// Whether there is something to send, or the end of it.
    pub(crate) fn look(&self) -> Result<Found, Error> {
        let Some((fifo, ..)) = self.fifo() else { return Ok(Found::Nothing) };
        match fifo.available() {
            Ok((0, true)) => Ok(Found::End),
            Ok((0, false)) => Ok(Found::Nothing),
            Ok((count, _)) => Ok(Found::Bytes(count)),
            Err(Error::Reset) => Ok(Found::Reset),
            Err(error) => Err(error),
        }
    }

    /// Takes bytes to send, straight from the FIFO.
    pub(crate) fn pull(&mut self, into: &mut [u8]) -> Result<usize, Error> {
        let Some((fifo, _, end)) = self.fifo() else { return Ok(0) };
        let mut told = true;
        let count = fifo.read(into, || told = slipway_peer::eventfd::raise(end.bell.as_fd()))?;
        // Who cannot be told without waiting is not waited for: the stream ends.
        told.then_some(()).ok_or(Error::Spoiled)?;
        self.credit -= count as u64;
        if count > 0 {
            self.asked.data = false;
        }
        Ok(count)
    }

    /// Bytes that came. False: more than were granted.
    pub(crate) fn push(&mut self, bytes: &[u8], fifo: usize) -> Result<bool, Error> {
        let Some(left) = self.granted.checked_sub(bytes.len() as u64) else { return Ok(false) };
        self.granted = left;
        self.pressed |= left < self.window / 4;
        let done = if self.waiting.is_empty() { self.write(bytes, fifo)? } else { 0 };
        self.asked.wrote(done);
        self.waiting.extend_from_slice(&bytes[done..]);
        Ok(true)
    }

    /// A program that has said that it reads no more gets nothing more, and nobody is held up by it.
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
        // Who grew has let go of the place before, which nobody has yet: its pages go.
        if let Some(before) = before.filter(|before| fifo.out.tail().region() != Some(*before))
            && regions.take_back(before)
        {
            end.give_back(before);
        }
        if told { written } else { Err(Error::Spoiled) }
    }

    /// An empty FIFO that has less room than a window that has grown grows, too: what comes has not to wait
    /// beside it.
    fn fit(&self, fifo: &Fifo<'_>, regions: Regions<'_>, most: usize) -> Result<(), Error> {
        let wanted = usize::try_from(self.window).unwrap_or(most).min(most);
        let may = self.grown && !fifo.out.is_shut() && fifo.out.tail().size() > 0;
        if may && fifo.out.tail().size() < wanted as u64 && fifo.out.refresh()? == 0 {
            fifo.writable(wanted, wanted, regions)?;
        }
        Ok(())
    }

    /// Passes on what waits, as far as there is room, and the end after it. Whether something was.
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
        if self.ended && !self.passed && self.waiting.is_empty() && self.end.is_some() {
            self.passed = true;
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

    /// Bytes that the program has not read.
    fn unread(&self) -> Result<(u64, u64), Error> {
        let Some((fifo, ..)) = self.fifo() else { return Ok((self.waiting.len() as u64, 0)) };
        let unread = if fifo.out.is_shut() { 0 } else { fifo.out.refresh()? };
        Ok((unread + self.waiting.len() as u64, fifo.out.tail().size()))
    }

    /// Bytes that the other side is to be granted now: enough to be worth a frame. The window at least, which
    /// grows up to `most` where it is what holds a stream up, is always granted or unread.
    pub(crate) fn grant(&mut self, most: usize) -> Result<u64, Error> {
        if !self.owes()? {
            return Ok(0);
        }
        let (unread, size) = self.unread()?;
        self.window = self.window.max(size);
        // One side waits for credit, and the other reads what comes.
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
        if self.ended || self.end.is_none() {
            return Ok(false);
        }
        let (unread, size) = self.unread()?;
        let window = self.window.max(size);
        Ok(window.saturating_sub(self.granted + unread) >= (window / 4).max(1))
    }

    /// Asks to be told of what is to be done next. [`Stream::settle`] follows, and before it, if `surely` and this
    /// says that something is asked for that no barrier has followed yet, `slipway_ring::cross::heavy`.
    pub(crate) fn wish(&mut self, surely: bool) -> Result<bool, Error> {
        // Without credit what is there has to wait; the end of it has not.
        let sends = self.credit > 0 || !matches!(self.look()?, Found::Bytes(_));
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
        // It may have asked for less to be left: then it asks again too soon, and never too late.
        self.asked.space = if asks_space { Some(half) } else { asked };
        self.wishes = (data, space);
        let due = asks_data || asks_space || self.asked.unsure;
        self.asked.unsure = due && !surely;
        Ok(due)
    }

    /// Whether there is something now.
    pub(crate) fn settle(&mut self) -> Result<bool, Error> {
        let (data, space) = std::mem::take(&mut self.wishes);
        let Some((fifo, ..)) = self.fifo() else { return Ok(false) };
        let data = data && fifo.is_data_there(1)?;
        let space = space && fifo.is_space_there()?;
        // Who finds it there takes the wish back.
        self.asked.data &= !data;
        self.asked.space = self.asked.space.filter(|_| !space);
        // What the program read between the last grant and the wish made it need no wish.
        Ok(data || space || self.owes()?)
    }

    /// Gives up the region of a FIFO that is empty, if it is more than the stream's own page.
    pub(crate) fn trim(&self) {
        if let Some((fifo, _, end)) = self.fifo() {
            fifo.trim(end.regions.clone());
        }
    }

    /// Where its FIFO has memory.
    pub(crate) fn region(&self) -> Option<Region> {
        self.fifo().and_then(|(fifo, ..)| fifo.out.tail().region())
    }

    /// Whether its FIFO has memory.
    pub(crate) fn has_region(&self) -> bool {
        self.region().is_some()
    }

    /// Whether its FIFO has memory that [`Stream::trim`] gives up.
    pub(crate) fn has_more_than_a_page(&self) -> bool {
        self.region().is_some_and(|region| region.order > 0)
    }

    /// Whether something came that the FIFO has no memory for, and never will.
    pub(crate) fn is_stuck(&self) -> bool {
        !self.waiting.is_empty() && self.end.is_some() && !self.has_region()
    }

    /// Whether the program left bytes unread.
    pub(crate) fn is_unread(&self) -> bool {
        self.unread().is_ok_and(|(unread, _)| unread > 0)
    }

    /// Bytes that wait beside the FIFO.
    #[cfg(any(test, feature = "fuzz"))]
    pub(crate) fn held(&self) -> usize {
        self.waiting.len()
    }

    /// Breaks it off for the local program.
    pub(crate) fn reset(&self) {
        if let Some((fifo, _, end)) = self.fifo() {
            let tell = [fifo.out.reset(), fifo.into.reset()];
            if tell.contains(&true) {
                // A program that cannot be told sees the reset when it looks next, which is within a second.
                let _ = slipway_peer::eventfd::raise(end.bell.as_fd());
            }
        }
    }

    /// Whether both directions have ended, and all was passed on.
    pub(crate) fn is_over(&self) -> bool {
        self.finished && self.passed
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    const WINDOW: u32 = 64 << 10;

    /// An engine that sleeps then would keep the other side without credit for ever.
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
        assert_eq!(stream.settle(), Ok(true));
        assert_eq!(stream.grant(WINDOW as usize), Ok(WINDOW.into()));
        stream.wish(true).unwrap();
        assert_eq!(stream.settle(), Ok(false), "there is no more to be done");
    }
}
