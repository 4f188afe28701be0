//! The guest's side of the function: a small real driver, for tests of this and other crates.
//! [`start`] uses the registers, [`Driver`] the control memory.

use std::sync::atomic::{AtomicU64, Ordering};

use slipway_ram::Lasting;
use slipway_ring::cross::{Arena, Own, Regions, Shape, Side, Signals, Stream};
use slipway_ring::sleep::{self, SleepWord};
use slipway_sgiov_spec::function::{
    CONTROL_PAGES, CONTROL_STREAMS, GUEST_ASLEEP, GUEST_OVERFLOW, HOST_ASLEEP, MESSAGE, Message,
    SIGNALS, TO_GUEST, TO_HOST, asleep, event, register, stream_of,
};

pub use slipway_pci::driver::{AccessError, Direct, RegisterAccess};

/// Starts the function with the control memory at address `at`. Returns the function's status.
///
/// # Errors
/// [`AccessError`].
pub fn start(registers: &mut impl RegisterAccess, at: u64) -> Result<u32, AccessError> {
    registers.write(register::MEMORY, &at.to_le_bytes())?;
    registers.write32(register::CONTROL, 1)?;
    registers.idle()?;
    registers.read32(register::STATUS)
}

/// The control memory, as the guest has it.
pub struct Driver {
    /// The whole control memory.
    pub words: Lasting,
    /// The arena of the messages.
    pub arena: Arena,
    own: [AtomicU64; 4],
    regions: Box<[AtomicU64]>,
    to_host: Signals,
    to_guest: Signals,
}

impl Driver {
    /// Lays out the control memory in `words`, which are zeros. Returns `None` if there are too few
    /// words.
    pub fn new(words: Lasting) -> Option<Self> {
        let shape = Shape { streams: CONTROL_STREAMS, pages: CONTROL_PAGES };
        let (arena, rest) = words.split(TO_HOST)?;
        let (to_host, to_guest) = rest.split(TO_GUEST - TO_HOST)?;
        Some(Self {
            arena: Arena::within(arena, shape).ok()?,
            own: Default::default(),
            regions: (0..Regions::WORDS).map(|_| AtomicU64::new(0)).collect(),
            to_host: Signals::new(to_host, SIGNALS)?,
            to_guest: Signals::new(to_guest, SIGNALS)?,
            words,
        })
    }

    /// Returns the guest's end of the message stream.
    pub fn stream(&self) -> Stream<'_> {
        let [tail, head_seen, head, tail_seen] = &self.own;
        let (out, into) = (Own { own: tail, seen: head_seen }, Own { own: head, seen: tail_seen });
        Stream::new(&self.arena, 0, Side::Zero, out, into)
    }

    /// Writes bytes to the message stream. Returns how many there was room for; also 0 if the
    /// stream is spoiled.
    pub fn write(&self, bytes: &[u8]) -> usize {
        let regions = Regions::new(&self.regions, self.arena.shape());
        self.stream().write(bytes, 64 << 10, regions, || ()).unwrap_or(0)
    }

    /// Writes a message. Returns `false` if there was no room for all of it.
    pub fn say(&self, message: &Message) -> bool {
        self.write(&message.encode()) == MESSAGE
    }

    /// Takes the next message if all of it has come.
    pub fn hear(&self) -> Option<Message> {
        let mut bytes = [0; MESSAGE];
        let stream = self.stream();
        let whole = stream.peek(0, &mut bytes) == Ok(MESSAGE);
        if whole {
            stream.into.release(MESSAGE as u64);
        }
        whole.then(|| Message::decode(&bytes)).flatten()
    }

    /// Signals a stream. Returns `false` if there is no room.
    pub fn raise(&mut self, arena: u32, stream: u32) -> bool {
        self.to_host.raise(event(arena, stream)) == Ok(Ok(()))
    }

    /// Takes the next signal.
    pub fn signal(&mut self) -> Option<(u32, u32)> {
        self.to_guest.take().ok().flatten().map(stream_of)
    }

    /// Returns whether a signal found no room since the last call.
    pub fn overflowed(&self) -> bool {
        self.word(GUEST_OVERFLOW).swap(0, Ordering::Acquire) != 0
    }

    /// Returns whether the bell is to be rung after a write.
    pub fn is_to_ring(&self) -> bool {
        SleepWord::new(self.word(HOST_ASLEEP)).barrier_and_take(asleep::FOR_WORK_AND_ROOM)
    }

    /// Asks to be interrupted.
    pub fn sleep(&self) {
        SleepWord::new(self.word(GUEST_ASLEEP)).announce(asleep::FOR_WORK);
        sleep::barrier();
    }

    /// A word of the control memory, by its offset.
    pub fn word(&self, offset: usize) -> &AtomicU64 {
        &self.words.words()[offset / 8]
    }
}
