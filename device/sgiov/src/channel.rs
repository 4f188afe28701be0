//! The channel to a guest's engine: messages, signals, arenas.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use slipway_ram::{Lasting, Memory};
use slipway_ring::cross::{Arena, Own, Regions, Shape, Side, Signals, Stream};
use slipway_sgiov_spec::function::{
    Broken, CONTROL_PAGES, CONTROL_STREAMS, GUEST_ASLEEP, GUEST_OVERFLOW, HOST_ASLEEP,
    HOST_OVERFLOW, MESSAGE, Message, SIGNALS, TO_GUEST, TO_HOST, asleep, event, stream_of,
};

use crate::arenas::{Arenas, piece};
use crate::exchange::Exchange;

/// Longest FIFO of messages, in bytes.
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
}

fn parts(words: &Lasting) -> Option<(Lasting, Lasting, Lasting)> {
    let (arena, rest) = words.split(TO_HOST)?;
    let (to_host, to_guest) = rest.split(TO_GUEST - TO_HOST)?;
    Some((arena, to_host, to_guest))
}

/// What [`Channel::attend`] found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attended {
    /// Nothing: go on.
    On,
    /// The channel holds no memory until further notice: nothing can be done with it or its arenas.
    Suspended,
    /// It is over: drop it, once nothing refers to its arenas.
    Over,
}

/// See the crate's head.
pub struct Channel {
    memory: Memory,
    at: u64,
    exchange: Arc<Exchange>,
    /// None: it is suspended.
    control: Option<Control>,
    /// While it is suspended: how far the signals came.
    signals: Option<(Signals, Signals)>,
    arenas: Arenas,
    /// The own counters of the messages' stream: tail, head seen, head, tail seen.
    own: [AtomicU64; 4],
    regions: Box<[AtomicU64]>,
    /// Bytes of messages that there was no room for.
    unsaid: VecDeque<u8>,
    /// The beginning of a message.
    heard: Vec<u8>,
    /// Something was written, or read, that the guest was not told of.
    wrote: bool,
    read: bool,
}

impl Channel {
    /// Over the guest's control memory.
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

    /// Does what the function wants of it. To be called in every turn; costs a load when there is nothing.
    ///
    /// # Errors
    /// [`Broken::Unmapped`]: after a suspension the guest's memory is not what it was. The function is broken already.
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

    /// Lets go of the guest's memory.
    pub(crate) fn suspend(&mut self) {
        self.arenas.suspend();
        if let Some(control) = self.control.take() {
            let unmapped = |signals: &Signals| signals.onto(Lasting::heap(Signals::bytes(SIGNALS)));
            self.signals = unmapped(&control.to_host).zip(unmapped(&control.to_guest));
        }
    }

    /// Takes it again.
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

    /// The guest's function is broken: its register says why. The channel is to be dropped.
    pub fn break_off(&self, why: Broken) {
        self.exchange.broken(why);
    }

    /// Takes an arena that the guest announced.
    ///
    /// # Errors
    /// [`Broken`], also for a number that is in use and for memory that another arena lies in.
    pub fn add_arena(&mut self, number: u32, at: u64) -> Result<(), Broken> {
        self.arenas.add(&self.memory, number, at, self.at)
    }

    /// An arena, and which regions of what this side writes in it are in use. None: there is none, or the channel is
    /// suspended.
    #[inline]
    pub fn arena(&self, number: u32) -> Option<(&Arena, &Arc<[AtomicU64]>)> {
        self.arenas.get(number)
    }

    /// How many streams an arena has. None: there is no such arena.
    pub fn streams(&self, number: u32) -> Option<u32> {
        self.arenas.streams(number)
    }

    /// Gives an arena back. Whether there was one.
    pub fn remove_arena(&mut self, number: u32) -> bool {
        self.arenas.remove(number)
    }

    fn stream<'a>(own: &'a [AtomicU64; 4], arena: &'a Arena) -> Stream<'a> {
        let [tail, head_seen, head, tail_seen] = own;
        let (out, into) = (Own { own: tail, seen: head_seen }, Own { own: head, seen: tail_seen });
        Stream::new(arena, 0, Side::One, out, into)
    }

    /// The next message. None: none yet.
    ///
    /// # Errors
    /// [`Broken`]: the guest's counters or its message cannot be.
    pub fn hear(&mut self) -> Result<Option<Message>, Broken> {
        let Some(control) = &self.control else { return Ok(None) };
        let stream = Self::stream(&self.own, &control.arena);
        let mut bytes = [0; MESSAGE];
        let missing = MESSAGE - self.heard.len();
        // Nobody waits for what is told here.
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

    /// Says something to the guest, at once or as soon as there is room.
    ///
    /// # Errors
    /// [`Broken`]: the guest's counters cannot be.
    pub fn say(&mut self, message: &Message) -> Result<(), Broken> {
        self.unsaid.extend(message.encode());
        self.flush().map(drop)
    }

    /// Messages that the guest left no room for.
    pub fn backlog(&self) -> usize {
        self.unsaid.len().div_ceil(MESSAGE)
    }

    /// Says what there was no room for. Whether anything was.
    ///
    /// # Errors
    /// [`Broken`]: the guest's counters cannot be.
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

    /// The next signal: arena and stream, as the guest says. None: none now.
    ///
    /// # Errors
    /// [`Broken`]: the guest's counter cannot be.
    #[inline]
    pub fn signal(&mut self) -> Result<Option<(u32, u32)>, Broken> {
        let Some(control) = &mut self.control else { return Ok(None) };
        let event = control.to_host.take().map_err(|_| Broken::Spoiled)?;
        Ok(event.map(stream_of))
    }

    /// Whether a signal found no room since this was asked last: then every stream has to be looked at.
    pub fn overflowed(&self) -> bool {
        self.control.as_ref().is_some_and(|control| {
            let word = control.word(HOST_OVERFLOW);
            // Acquire: what was done before the signal is seen.
            word.load(Ordering::Relaxed) != 0 && word.swap(0, Ordering::Acquire) != 0
        })
    }

    /// Tells the guest of a stream that it was to be told of.
    ///
    /// # Errors
    /// [`Broken`]: the guest's counter cannot be.
    pub fn raise(&mut self, arena: u32, stream: u32) -> Result<(), Broken> {
        let Some(control) = &mut self.control else { return Ok(()) };
        let raised = control.to_guest.raise(event(arena, stream)).map_err(|_| Broken::Spoiled)?;
        if raised.is_err() {
            // Release: what was done before is seen by who sees this.
            control.word(GUEST_OVERFLOW).store(1, Ordering::Release);
        }
        self.wrote = true;
        Ok(())
    }

    /// Interrupts the guest, if it sleeps and something was done that it wants to be told of. To be called at the
    /// end of every turn.
    pub fn tell(&mut self) {
        let (wrote, read) = (std::mem::take(&mut self.wrote), std::mem::take(&mut self.read));
        let Some(control) = &self.control else {
            // It looks at everything after a suspension.
            (self.wrote, self.read) = (wrote, read);
            return;
        };
        if !wrote && !read {
            return;
        }
        fence(Ordering::SeqCst);
        let word = control.word(GUEST_ASLEEP);
        let wants = word.load(Ordering::Relaxed);
        let room = asleep::FOR_WORK_AND_ROOM & !asleep::FOR_WORK;
        if (wrote && wants & asleep::FOR_WORK != 0) || (read && wants & room != 0) {
            word.store(asleep::AWAKE, Ordering::Relaxed);
            self.exchange.attention.raise();
        }
    }

    /// Asks to be woken, and looks once more. False: there is something to do, and nobody may wake it. Without `hears`
    /// a message is nothing to do: who has more to say than the guest reads hears again when there is room.
    pub fn sleep(&mut self, hears: bool) -> bool {
        let Some(control) = &self.control else { return true };
        let wish =
            if self.unsaid.is_empty() { asleep::FOR_WORK } else { asleep::FOR_WORK_AND_ROOM };
        control.word(HOST_ASLEEP).store(wish, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let stream = Self::stream(&self.own, &control.arena);
        // What is wrong with it shows to who looks.
        let heard = hears && (stream.into.refresh() != Ok(0) || stream.into.tail().is_end());
        let room = !self.unsaid.is_empty() && stream.space() != Ok(0);
        let work = heard
            || room
            || control.to_host.is_raised()
            || control.word(HOST_OVERFLOW).load(Ordering::Relaxed) != 0;
        if work {
            self.awake();
        }
        !work
    }

    /// It is awake: nobody need wake it.
    pub fn awake(&self) {
        if let Some(control) = &self.control {
            control.word(HOST_ASLEEP).store(asleep::AWAKE, Ordering::Relaxed);
        }
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        // Before anybody hears that it is gone.
        self.control = None;
        self.arenas = Arenas::default();
        self.exchange.ended();
    }
}
