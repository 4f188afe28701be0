//! The control memory: messages and signals both ways, and the sleepers' words.

use std::sync::atomic::{AtomicU64, Ordering};

use slipway_ram::Lasting;
use slipway_ring::cross::{Arena, Own, Regions, Shape, Side, Signals, Stream};
use slipway_ring::sleep::SleepWord;
use slipway_sgiov_spec::function::{
    CONTROL_PAGES, CONTROL_STREAMS, GUEST_ASLEEP, GUEST_OVERFLOW, HOST_ASLEEP, HOST_OVERFLOW,
    MESSAGE, Message, SIGNALS, TO_GUEST, TO_HOST, asleep,
};

use super::{FunctionError, Piece};

/// The number of bytes of messages that may be in flight to the machine.
const MOST: usize = 64 << 10;

const SPOILED: FunctionError = FunctionError::Protocol("a counter that cannot be");

pub struct Control {
    memory: Lasting,
    arena: Arena,
    /// This side's private words of the stream of messages: tail, head seen, head, tail seen.
    own: [AtomicU64; 4],
    bits: Box<[AtomicU64]>,
    to_host: Signals,
    to_guest: Signals,
    /// The guest-physical address of the control memory.
    pub at: u64,
}

impl Control {
    pub fn new(piece: Piece) -> std::io::Result<Self> {
        let Piece { memory, at } = piece;
        let short = || std::io::Error::from(std::io::ErrorKind::InvalidInput);
        let (first, rest) = memory.split(TO_HOST).ok_or_else(short)?;
        let (to_host, to_guest) = rest.split(TO_GUEST - TO_HOST).ok_or_else(short)?;
        let shape = Shape { streams: CONTROL_STREAMS, pages: CONTROL_PAGES };
        if memory.len() <= GUEST_OVERFLOW {
            return Err(short());
        }
        Ok(Self {
            memory,
            arena: Arena::within(first, shape)?,
            own: Default::default(),
            bits: (0..Regions::WORDS).map(|_| AtomicU64::new(0)).collect(),
            to_host: Signals::new(to_host, SIGNALS).ok_or_else(short)?,
            to_guest: Signals::new(to_guest, SIGNALS).ok_or_else(short)?,
            at,
        })
    }

    fn stream(&self) -> Stream<'_> {
        let [tail, head_seen, head, tail_seen] = &self.own;
        let (out, into) = (Own { own: tail, seen: head_seen }, Own { own: head, seen: tail_seen });
        Stream::new(&self.arena, 0, Side::Zero, out, into)
    }

    /// Sends a message to the machine. Returns `false` if there is no room now.
    pub fn send(&self, message: &Message) -> Result<bool, FunctionError> {
        let regions = Regions::new(&self.bits, self.arena.shape());
        match self.stream().write(&message.encode(), MOST, regions, || {}) {
            Ok(MESSAGE) => Ok(true),
            Ok(0) => Ok(false),
            _ => Err(SPOILED),
        }
    }

    /// Returns the machine's next message.
    pub fn receive(&self) -> Result<Option<Message>, FunctionError> {
        let (count, ended) = self.stream().available().map_err(|_| SPOILED)?;
        if ended {
            return Err(FunctionError::Protocol("it says nothing more"));
        }
        if count < MESSAGE {
            return Ok(None);
        }
        let mut bytes = [0; MESSAGE];
        let count = self.stream().read(&mut bytes, || {}).map_err(|_| SPOILED)?;
        let message = Message::decode(&bytes).filter(|message| !message.is_guests());
        let message = message.filter(|_| count == MESSAGE);
        message.map(Some).ok_or(FunctionError::Protocol("a message that cannot be"))
    }

    /// Signals an event of a stream to the machine.
    pub fn signal(&mut self, event: u64) -> Result<(), FunctionError> {
        match self.to_host.raise(event).map_err(|_| SPOILED)? {
            Ok(()) => {}
            // Release: the machine sees what was done before this store.
            Err(_) => self.word(HOST_OVERFLOW).store(1, Ordering::Release),
        }
        Ok(())
    }

    /// Takes the machine's next signal of a stream, or `None`.
    pub fn take_signal(&mut self) -> Result<Option<u64>, FunctionError> {
        self.to_guest.take().map_err(|_| SPOILED)
    }

    /// Returns whether signals were lost, so that any stream may have changed on the machine's
    /// side.
    pub fn overflowed(&self) -> bool {
        let word = self.word(GUEST_OVERFLOW);
        word.load(Ordering::Relaxed) != 0 && word.swap(0, Ordering::Acquire) != 0
    }

    /// Returns the word with the events for which the machine interrupts this side.
    pub fn asleep(&self) -> SleepWord<'_> {
        SleepWord::new(self.word(GUEST_ASLEEP))
    }

    /// Returns whether the machine's engine sleeps and wants to be woken for `work`, or for `room`
    /// for its messages.
    pub fn is_to_be_told(&self, work: bool, room: bool) -> bool {
        let word = SleepWord::new(self.word(HOST_ASLEEP));
        word.barrier_and_take(asleep::events(work, room))
    }

    fn word(&self, offset: usize) -> &AtomicU64 {
        &self.memory.words()[offset / 8]
    }
}
