//! The channel to a guest's engine: messages, signals, arenas.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use slipway_ram::{Lasting, Memory};
use slipway_ring::cross::{Arena, Own, Regions, Shape, Side, Signals, Stream};
use slipway_ring::sleep::SleepWord;
use slipway_sgiov_spec::function::{
    Broken, CONTROL_PAGES, CONTROL_STREAMS, GUEST_ASLEEP, GUEST_OVERFLOW, HOST_ASLEEP,
    HOST_OVERFLOW, MESSAGE, Message, SIGNALS, TO_GUEST, TO_HOST, asleep, event, stream_of,
};

use crate::arenas::{Arenas, piece};
use crate::exchange::Exchange;

/// The longest FIFO of messages, in bytes.
const MOST: usize = 64 << 10;

/// The control memory, mapped.
struct Control {
    words: Lasting,
    arena: Arena,
    to_host: Signals,
    to_guest: Signals,
}

impl Control {
    fn open(memory: &Memory, at: u64) -> Result<Self, Broken> {
        let words = piece(memory, at)?;
        let (arena, to_host, to_guest) = parts(&words).ok_or(Broken::Memory)?;
        let arena = Arena::over(arena).map_err(|_| Broken::Arena)?.across_machines();
        if arena.shape() != (Shape { streams: CONTROL_STREAMS, pages: CONTROL_PAGES }) {
            return Err(Broken::Arena);
        }
        let signals = |words| Signals::new(words, SIGNALS).ok_or(Broken::Memory);
        Ok(Self { arena, to_host: signals(to_host)?, to_guest: signals(to_guest)?, words })
    }

    fn word(&self, offset: usize) -> &AtomicU64 {
        &self.words.words()[offset / 8]
    }

    fn host_asleep(&self) -> SleepWord<'_> {
        SleepWord::new(self.word(HOST_ASLEEP))
    }

    fn guest_asleep(&self) -> SleepWord<'_> {
        SleepWord::new(self.word(GUEST_ASLEEP))
    }
}

fn parts(words: &Lasting) -> Option<(Lasting, Lasting, Lasting)> {
    let (arena, rest) = words.split(TO_HOST)?;
    let (to_host, to_guest) = rest.split(TO_GUEST - TO_HOST)?;
    Some((arena, to_host, to_guest))
}

/// The result of [`Channel::attend`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attended {
    /// The channel can be used.
    On,
    /// The channel holds no memory until further notice: neither it nor its arenas can be used.
    Suspended,
    /// The channel was recalled: drop it as soon as nothing refers to its arenas.
    Over,
}

/// A channel to a guest's engine; the crate's head says who owns it.
pub struct Channel {
    memory: Memory,
    at: u64,
    exchange: Arc<Exchange>,
    /// The mapped control memory. `None` while the channel is suspended.
    control: Option<Control>,
    /// The positions of the signals while the channel is suspended.
    signals: Option<(Signals, Signals)>,
    arenas: Arenas,
    /// This side's counters of the message stream: tail, head seen, head, tail seen.
    own: [AtomicU64; 4],
    regions: Box<[AtomicU64]>,
    /// Bytes of messages that the guest's FIFO had no room for.
    unsaid: VecDeque<u8>,
    /// The beginning of a message that has not come whole.
    heard: Vec<u8>,
    /// `true` if something was written that the guest was not told of; `read` likewise for reading.
    wrote: bool,
    read: bool,
}

impl Channel {
    /// Opens the channel over the guest's control memory at address `at`.
    ///
    /// # Errors
    /// [`Broken`].
    pub(crate) fn open(memory: Memory, at: u64, exchange: Arc<Exchange>) -> Result<Self, Broken> {
        let control = Some(Control::open(&memory, at)?);
        let regions = (0..Regions::WORDS).map(|_| AtomicU64::new(0)).collect();
        Ok(Self {
            memory,
            at,
            exchange,
            control,
            signals: None,
            arenas: Arenas::default(),
            own: Default::default(),
            regions,
            unsaid: VecDeque::new(),
            heard: Vec::new(),
            wrote: false,
            read: false,
        })
    }

    /// Does what the function asks of the channel. To be called in every turn; it costs one load if
    /// there is nothing to do.
    ///
    /// # Errors
    /// [`Broken::Unmapped`]: after a suspension the guest's memory has changed. The function is
    /// marked as broken already.
    pub fn attend(&mut self) -> Result<Attended, Broken> {
        if self.exchange.take_notice() {
            let exchange = self.exchange.clone();
            let mut state = exchange.state();
            if state.recalled {
                return Ok(Attended::Over);
            }
            if state.suspend && !state.suspended {
                self.suspend();
                state.suspended = true;
            } else if !state.suspend && state.suspended {
                state.suspended = false;
                drop(state);
                self.resume().inspect_err(|why| exchange.broken(*why))?;
            }
        }
        Ok(if self.control.is_some() { Attended::On } else { Attended::Suspended })
    }

    /// Releases the guest's memory.
    pub(crate) fn suspend(&mut self) {
        self.arenas.suspend();
        if let Some(control) = self.control.take() {
            let unmapped = |signals: &Signals| signals.onto(Lasting::heap(Signals::bytes(SIGNALS)));
            self.signals = unmapped(&control.to_host).zip(unmapped(&control.to_guest));
        }
    }

    /// Maps the guest's memory again after a suspension.
    pub(crate) fn resume(&mut self) -> Result<(), Broken> {
        if self.control.is_some() {
            return Ok(());
        }
        let mut control = Control::open(&self.memory, self.at).map_err(|_| Broken::Unmapped)?;
        if let Some((to_host, to_guest)) = self.signals.take() {
            let (_, host, guest) = parts(&control.words).ok_or(Broken::Unmapped)?;
            control.to_host = to_host.onto(host).ok_or(Broken::Unmapped)?;
            control.to_guest = to_guest.onto(guest).ok_or(Broken::Unmapped)?;
        }
        self.arenas.resume(&self.memory)?;
        self.control = Some(control);
        Ok(())
    }

    /// Breaks the guest's function; its status register says why. The caller must then drop the
    /// channel.
    pub fn break_off(&self, why: Broken) {
        self.exchange.broken(why);
    }

    /// Opens an arena that the guest announced.
    ///
    /// # Errors
    /// [`Broken`], also for a number that is in use, and for memory that is another arena's.
    pub fn add_arena(&mut self, number: u32, at: u64) -> Result<(), Broken> {
        self.arenas.add(&self.memory, number, at, self.at)
    }

    /// Returns an arena, and the marks of the regions in use among those that this side writes.
    /// Returns `None` if there is no such arena, or the channel is suspended.
    #[inline]
    pub fn arena(&self, number: u32) -> Option<(&Arena, &Arc<[AtomicU64]>)> {
        self.arenas.get(number)
    }

    /// Returns the number of streams of an arena. Returns `None` if there is no such arena.
    pub fn streams(&self, number: u32) -> Option<u32> {
        self.arenas.streams(number)
    }

    /// Releases an arena. Returns whether there was one.
    pub fn remove_arena(&mut self, number: u32) -> bool {
        self.arenas.remove(number)
    }

    fn stream<'a>(own: &'a [AtomicU64; 4], arena: &'a Arena) -> Stream<'a> {
        let [tail, head_seen, head, tail_seen] = own;
        let (out, into) = (Own { own: tail, seen: head_seen }, Own { own: head, seen: tail_seen });
        Stream::new(arena, 0, Side::One, out, into)
    }

    /// Reads the next message. Returns `None` if no whole message has come.
    ///
    /// # Errors
    /// [`Broken`]: the guest's counters or its message are invalid.
    pub fn hear(&mut self) -> Result<Option<Message>, Broken> {
        let Some(control) = &self.control else { return Ok(None) };
        let stream = Self::stream(&self.own, &control.arena);
        let mut bytes = [0; MESSAGE];
        let missing = MESSAGE - self.heard.len();
        // No callback is needed: the guest never waits for this read.
        let count = stream.read(&mut bytes[..missing], || ()).map_err(|_| Broken::Spoiled)?;
        if count == 0 {
            let (_, ended) = stream.available().map_err(|_| Broken::Spoiled)?;
            return if ended { Err(Broken::Spoiled) } else { Ok(None) };
        }
        self.read = true;
        self.heard.extend_from_slice(&bytes[..count]);
        let Ok(whole) = <[u8; MESSAGE]>::try_from(&self.heard[..]) else { return Ok(None) };
        self.heard.clear();
        let message = Message::decode(&whole).filter(Message::is_guests);
        message.map(Some).ok_or(Broken::Message)
    }

    /// Sends a message to the guest, at once or as soon as there is room.
    ///
    /// # Errors
    /// [`Broken`]: the guest's counters are invalid.
    pub fn say(&mut self, message: &Message) -> Result<(), Broken> {
        self.unsaid.extend(message.encode());
        self.flush().map(drop)
    }

    /// Returns the number of messages that wait for room in the guest's FIFO.
    pub fn backlog(&self) -> usize {
        self.unsaid.len().div_ceil(MESSAGE)
    }

    /// Sends the bytes that wait for room. Returns whether any were sent.
    ///
    /// # Errors
    /// [`Broken`]: the guest's counters are invalid.
    pub fn flush(&mut self) -> Result<bool, Broken> {
        let Some(control) = &self.control else { return Ok(false) };
        if self.unsaid.is_empty() {
            return Ok(false);
        }
        let stream = Self::stream(&self.own, &control.arena);
        let regions = Regions::new(&self.regions, control.arena.shape());
        let bytes = self.unsaid.make_contiguous();
        let count = stream.write(bytes, MOST, regions, || ()).map_err(|_| Broken::Spoiled)?;
        self.unsaid.drain(..count);
        self.wrote |= count > 0;
        Ok(count > 0)
    }

    /// Takes the next signal: arena and stream, as the guest names them. Returns `None` if there is
    /// none.
    ///
    /// # Errors
    /// [`Broken`]: the guest's counter is invalid.
    #[inline]
    pub fn signal(&mut self) -> Result<Option<(u32, u32)>, Broken> {
        let Some(control) = &mut self.control else { return Ok(None) };
        let event = control.to_host.take().map_err(|_| Broken::Spoiled)?;
        Ok(event.map(stream_of))
    }

    /// Returns whether a signal found no room since the last call. If so, the caller must look at
    /// every stream.
    pub fn overflowed(&self) -> bool {
        self.control.as_ref().is_some_and(|control| {
            let word = control.word(HOST_OVERFLOW);
            // Acquire: the guest's stores before the signal are visible.
            word.load(Ordering::Relaxed) != 0 && word.swap(0, Ordering::Acquire) != 0
        })
    }

    /// Signals a stream to the guest, which asked to be told of it.
    ///
    /// # Errors
    /// [`Broken`]: the guest's counter is invalid.
    pub fn raise(&mut self, arena: u32, stream: u32) -> Result<(), Broken> {
        let Some(control) = &mut self.control else { return Ok(()) };
        let raised = control.to_guest.raise(event(arena, stream)).map_err(|_| Broken::Spoiled)?;
        if raised.is_err() {
            // Release: the stores before this one are visible to the side that sees it.
            control.word(GUEST_OVERFLOW).store(1, Ordering::Release);
        }
        self.wrote = true;
        Ok(())
    }

    /// Interrupts the guest, if it sleeps and wants to be told of something that was done. To be
    /// called at the end of every turn.
    pub fn tell(&mut self) {
        let (wrote, read) = (std::mem::take(&mut self.wrote), std::mem::take(&mut self.read));
        let Some(control) = &self.control else {
            // After a suspension the guest looks at everything.
            (self.wrote, self.read) = (wrote, read);
            return;
        };
        if !wrote && !read {
            return;
        }
        if control.guest_asleep().barrier_and_take(asleep::events(wrote, read)) {
            self.exchange.attention.raise();
        }
    }

    /// Asks to be woken, and looks once more. Returns `false` if there is work, for which the guest
    /// may send no wake-up. Without `hears` a waiting message is no work: a caller that has more
    /// messages than the guest reads will read again when there is room.
    pub fn sleep(&mut self, hears: bool) -> bool {
        let Some(control) = &self.control else { return true };
        let wants_room = !self.unsaid.is_empty();
        let has_work = || {
            let stream = Self::stream(&self.own, &control.arena);
            // An error counts as work: the caller finds it when it looks.
            let heard = hears && (stream.into.refresh() != Ok(0) || stream.into.tail().is_end());
            let room = wants_room && stream.space() != Ok(0);
            heard
                || room
                || control.to_host.is_raised()
                || control.word(HOST_OVERFLOW).load(Ordering::Relaxed) != 0
        };
        !control.host_asleep().arm(asleep::events(true, wants_room), has_work)
    }

    /// Withdraws the request to be woken.
    pub fn awake(&self) {
        if let Some(control) = &self.control {
            control.host_asleep().withdraw();
        }
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        // Released before the function learns that the channel is gone.
        self.control = None;
        self.arenas = Arenas::default();
        self.exchange.ended();
    }
}
