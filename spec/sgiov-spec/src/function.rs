//! A guest's socket function: a PCI function by which an engine in a guest has the machine's engine
//! carry its streams. The FIFOs' bytes lie in the guest's memory, where the machine's engine reads
//! and writes them itself.
//!
//! # The function
//! [`VENDOR`]:[`DEVICE`], class [`CLASS`]; INTA# and one MSI-X vector. BAR 0, of 64 bits, has
//! [`BAR`] bytes; registers are accessed with 4 bytes at multiples of 4, those of 8 bytes also in
//! one access at a multiple of 8.
//!
//! | offset | what | access |
//! |---|---|---|
//! | 0x00 | [`register::MAGIC`], `u64`: the bytes `slipsock` | read |
//! | 0x08 | [`register::VERSION`], `u32`: 1 | read |
//! | 0x0c | [`register::STATUS`], `u32`: bit 0 running, bit 1 broken, bits 31:16 why ([`Broken`]) | read |
//! | 0x10 | [`register::CONTROL`], `u32`: 1 starts, 0 resets | read, write |
//! | 0x18 | [`register::MEMORY`], `u64`: guest-physical address of the control memory, a multiple of [`PIECE`] | read; write while it is not running |
//! | 0x20 | [`register::CAUSE`], `u32`: bit 0, the device has asked for attention since it was read last, and reading it lowers the pin; bit 1, it is broken, as in the status | read |
//! | 0x800, 0x900 | MSI-X table and pending bits | read, write |
//! | 0x1000 | [`register::BELL`], `u32`: the device is to look, whatever is written | write |
//!
//! The function runs, or is broken, when the write of 1 has ended. A reset has ended when the
//! status reads 0; before that a write of 1 has no effect. A broken function stays broken until it
//! is reset: all its streams have ended, and it accesses no memory of the guest. Every other byte
//! of the BAR reads 0, and writes there have no effect.
//!
//! # Control memory
//! The control memory has [`PIECE`] bytes. The guest fills it with zeros before it makes the arena
//! in it and starts the function.
//!
//! | offset | what | written by |
//! |---|---|---|
//! | 0 | an arena of FIFOs (`slipway_ring::cross::Arena`) with [`CONTROL_STREAMS`] stream and [`CONTROL_PAGES`] pages an area: side [`GUEST`] is the guest's, and stream 0 carries [`Message`]s both ways | both |
//! | [`TO_HOST`] | signals of [`SIGNALS`] events (`slipway_ring::cross::Signals`) to the machine | both |
//! | [`TO_GUEST`] | the same to the guest | both |
//! | [`HOST_ASLEEP`] | `u64`: the events for which the guest rings the bell ([`asleep`]) | machine; the guest writes 0 when it rings |
//! | [`GUEST_ASLEEP`] | `u64`: the events for which the machine interrupts the guest | guest; the machine writes 0 when it interrupts |
//! | [`HOST_OVERFLOW`] | `u64`, 1: a signal to the machine found no room, so that it has to look at every stream | guest; the machine writes 0 |
//! | [`GUEST_OVERFLOW`] | `u64`, 1: a signal to the guest found no room | machine; the guest writes 0 |
//!
//! A side that is about to sleep writes its word, passes a full barrier, and looks for work once
//! more. The other side passes a full barrier between its own stores and its look at that word. If
//! the word asks for a wake-up, it writes 0, provided that the word has not changed since, and
//! wakes the sleeper (`slipway_ring::sleep`). Wishes of stream 0 are not used.
//!
//! A signal ([`event`]) names a stream of one of the guest's arenas. To the machine it means that
//! the stream was written to, read from, shut or ended, and that the machine may have asked for a
//! wake-up. To the guest it means that the eventfd of the stream's program is to be raised.
//!
//! # Arenas
//! Each arena lies at the beginning of a piece of [`PIECE`] bytes of guest-physical memory at a
//! multiple of [`PIECE`] (a huge page, which the guest's kernel does not move), and is no longer
//! than that. The guest makes the arena, as one that is used across machines, and reports its
//! address ([`Message::Arena`]). The arena stays there until the machine reports that it no longer
//! uses it ([`Message::ArenaFree`]); until then the guest uses the piece for nothing else. The
//! machine is the engine's side of every stream ([`Line::side`]), and allocates the regions that it
//! writes.
//!
//! # Messages
//! [`MESSAGE`] bytes each: operation `u32`, number `u32`, three numbers `u64`, two addresses of 24
//! bytes (as in [`crate::control`]), zeros. Four addresses without ports, of 16 bytes, stand where
//! those two begin. The guest begins with [`Message::Hello`], and the machine's first answer is
//! [`Message::Welcome`]. A message that is invalid, in order or in content, breaks the function.
//!
//! Over 500 lines: one protocol, with its registers, messages and memory.

use crate::Address;
use crate::words::{address, put_address, word32, word64};

/// Vendor ID of the function.
pub const VENDOR: u16 = 0x1af4;
/// Device ID: of those that QEMU's documentation (`docs/specs/pci-ids`) leaves to experiments,
/// which no driver claims.
pub const DEVICE: u16 = 0x10f5;
/// Class code: network controller, other.
pub const CLASS: u32 = 0x02_80_00;
/// Bytes of BAR 0.
pub const BAR: u64 = 0x2000;
/// [`register::MAGIC`].
pub const MAGIC: u64 = u64::from_le_bytes(*b"slipsock");
/// Version of registers, memory and messages.
pub const VERSION: u32 = 1;

/// Offsets in BAR 0.
pub mod register {
    /// The magic number. The module's head describes all registers.
    pub const MAGIC: u64 = 0x00;
    /// The version.
    pub const VERSION: u64 = 0x08;
    /// The status.
    pub const STATUS: u64 = 0x0c;
    /// Start and reset.
    pub const CONTROL: u64 = 0x10;
    /// The address of the control memory.
    pub const MEMORY: u64 = 0x18;
    /// The cause of an interrupt: bit 0 if the device asked for attention.
    pub const CAUSE: u64 = 0x20;
    /// The bell.
    pub const BELL: u64 = 0x1000;
}

/// The bit of [`register::STATUS`] of a running function.
pub const RUNNING: u32 = 1;
/// The bit of [`register::STATUS`] of a broken function; bits 31:16 are the reason.
pub const BROKEN: u32 = 2;

/// The reason for which a function is broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum Broken {
    /// The control memory or an arena is not a readable and writable piece of the guest's memory
    /// that the machine has mapped whole and that stays mapped: it is not aligned, out of range, or
    /// of a VMM that may take it away.
    Memory = 1,
    /// The memory at an address holds no arena, or one of the wrong shape.
    Arena = 2,
    /// Counters are invalid.
    Spoiled = 3,
    /// A message is invalid.
    Message = 4,
    /// The guest took memory away that the function was using.
    Unmapped = 5,
    /// The machine's engine has ended, or does not serve the function any more.
    Unserved = 6,
}

impl Broken {
    /// Returns [`register::STATUS`] of a function that is broken for this reason.
    pub const fn status(self) -> u32 {
        BROKEN | (self as u32) << 16
    }
}

/// The size and the alignment in bytes of the control memory, and of the piece that an arena lies
/// in.
pub const PIECE: usize = 2 << 20;
/// Streams of the arena in the control memory.
pub const CONTROL_STREAMS: u32 = 1;
/// Pages of each of its areas.
pub const CONTROL_PAGES: u32 = 96;
/// The guest's side of it.
pub const GUEST: u8 = 0;
/// The machine's side of it.
pub const HOST: u8 = 1;
/// Offset of the signals to the machine.
pub const TO_HOST: usize = 1 << 20;
/// Offset of the signals to the guest.
pub const TO_GUEST: usize = 3 << 19;
/// Events that each of them holds.
pub const SIGNALS: usize = 1 << 15;
/// Offset of the word with the events that the machine waits for.
pub const HOST_ASLEEP: usize = PIECE - 4096;
/// Offset of the word with the events that the guest waits for.
pub const GUEST_ASLEEP: usize = HOST_ASLEEP + 64;
/// Offset of the word that has the machine look at every stream.
pub const HOST_OVERFLOW: usize = HOST_ASLEEP + 128;
/// Offset of the word that has the guest look at every stream.
pub const GUEST_OVERFLOW: usize = HOST_ASLEEP + 192;

/// The events that a sleeper wants to be woken for, as bits; 0 while the side is awake.
pub mod asleep {
    /// New messages and signals.
    pub const FOR_WORK: u64 = 1;
    /// Messages that were read: the side has more messages than there was room for.
    pub const FOR_ROOM: u64 = 2;
    /// Both.
    pub const FOR_WORK_AND_ROOM: u64 = FOR_WORK | FOR_ROOM;

    /// Returns the bits for new `work`, and for `room`: what a sleeper waits for, or what the other
    /// side has just made.
    pub const fn events(work: bool, room: bool) -> u64 {
        (if work { FOR_WORK } else { 0 }) | (if room { FOR_ROOM } else { 0 })
    }
}

/// Arenas that a function can have at a time: their numbers are below this.
pub const ARENAS: u32 = 64;
/// Listeners that a function can have at a time.
pub const LISTENERS: usize = 4096;
/// Addresses that a function can be given.
pub const ADDRESSES: usize = 4;
/// Bytes of a message.
pub const MESSAGE: usize = 128;

/// The signal of a stream.
pub const fn event(arena: u32, stream: u32) -> u64 {
    (arena as u64) << 32 | stream as u64
}

/// Arena and stream of a signal.
pub const fn stream_of(event: u64) -> (u32, u32) {
    ((event >> 32) as u32, event as u32)
}

/// The engine's side of a stream in one of the guest's arenas.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Line {
    /// The arena, below [`ARENAS`].
    pub arena: u32,
    /// The stream in it, below 2^20.
    pub stream: u32,
    /// The engine's side, 0 or 1.
    pub side: u8,
}

impl Line {
    fn encode(self) -> u64 {
        event(self.arena, self.stream | (self.side as u32 & 1) << 31)
    }

    fn decode(word: u64) -> Option<Self> {
        let (arena, low) = stream_of(word);
        let (stream, side) = (low & !(1 << 31), (low >> 31) as u8);
        (arena < ARENAS && stream < 1 << 20).then_some(Self { arena, stream, side })
    }
}

/// Addresses that a function was given; the rest are [`Address::ANY`]'s.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Addresses {
    /// The number of addresses.
    pub count: u32,
    /// The addresses in network order.
    pub ips: [[u8; 16]; ADDRESSES],
}

/// A message between the two engines.
///
/// The guest chooses a connection's number. The number is unused when it is named first, and again
/// after the machine's [`Message::Refused`] or [`Message::Ended`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Message {
    /// From the guest, first.
    Hello {
        /// [`VERSION`].
        version: u32,
    },
    /// From the guest: an arena.
    Arena {
        /// Its number, not in use.
        arena: u32,
        /// The guest-physical address.
        at: u64,
    },
    /// From the guest: it wants the arena back, and puts no new streams in it.
    /// [`Message::ArenaFree`] follows when the arena's streams have ended.
    ArenaGone {
        /// Its number.
        arena: u32,
    },
    /// From the guest: a program listens. An unspecified address means each address of the
    /// function; an address that is not the function's is ignored. Listening again at the same
    /// address has no effect.
    Listen {
        /// The address.
        at: Address,
    },
    /// From the guest: no program listens there any more.
    Unlisten {
        /// The address, as in [`Message::Listen`].
        at: Address,
    },
    /// From the guest: connect. [`Message::Connected`] or [`Message::Refused`] follows.
    Connect {
        /// The connection.
        connection: u32,
        /// The engine's side of it.
        line: Line,
        /// The source address.
        from: Address,
        /// The destination address.
        to: Address,
    },
    /// From the guest: the answer to [`Message::Incoming`].
    Accepted {
        /// Its number.
        incoming: u32,
        /// The connection.
        connection: u32,
        /// The engine's side of it.
        line: Line,
    },
    /// From the guest: the refusal of [`Message::Incoming`].
    Rejected {
        /// Its number.
        incoming: u32,
        /// A number of errno(3), not 0.
        errno: u32,
    },
    /// From the guest: the program's side of the connection was closed; its last counters are in
    /// the arena. A connection that was not connected yet is given up.
    Closed {
        /// The connection.
        connection: u32,
    },
    /// From the machine, first.
    Welcome(Addresses),
    /// From the machine: the connection is made.
    Connected {
        /// The connection.
        connection: u32,
    },
    /// From the machine: the connection is refused. The machine does not access the stream any
    /// more.
    Refused {
        /// The connection.
        connection: u32,
        /// A number of errno(3), not 0.
        errno: u32,
    },
    /// From the machine: a program somewhere wants to connect.
    Incoming {
        /// The machine's number for it.
        incoming: u32,
        /// The source address.
        from: Address,
        /// The destination address, a listener's.
        to: Address,
    },
    /// From the machine: it does not access the stream any more, and both halves are finished. Sent
    /// once for each connection that was connected or accepted, after one of its sides has ended.
    Ended {
        /// The connection.
        connection: u32,
    },
    /// From the machine: nothing refers to the arena any more.
    ArenaFree {
        /// Its number.
        arena: u32,
    },
}

mod op {
    pub const HELLO: u32 = 1;
    pub const ARENA: u32 = 2;
    pub const ARENA_GONE: u32 = 3;
    pub const LISTEN: u32 = 4;
    pub const UNLISTEN: u32 = 5;
    pub const CONNECT: u32 = 6;
    pub const ACCEPTED: u32 = 7;
    pub const REJECTED: u32 = 8;
    pub const CLOSED: u32 = 9;
    pub const WELCOME: u32 = 33;
    pub const CONNECTED: u32 = 34;
    pub const REFUSED: u32 = 35;
    pub const INCOMING: u32 = 36;
    pub const ENDED: u32 = 37;
    pub const ARENA_FREE: u32 = 38;
}

const FIRST: usize = 32;
const SECOND: usize = 56;

/// The fields of a message.
#[derive(Default)]
struct Fields {
    op: u32,
    number: u32,
    words: [u64; 3],
    from: Option<Address>,
    to: Option<Address>,
    ips: [[u8; 16]; ADDRESSES],
}

impl Message {
    /// Returns whether the guest sends this message, not the machine.
    pub fn is_guests(&self) -> bool {
        self.fields().op < op::WELCOME
    }

    /// Returns the message as it stands in the FIFO.
    pub fn encode(&self) -> [u8; MESSAGE] {
        let fields = self.fields();
        let mut bytes = [0; MESSAGE];
        bytes[..4].copy_from_slice(&fields.op.to_le_bytes());
        bytes[4..8].copy_from_slice(&fields.number.to_le_bytes());
        for (place, word) in bytes[8..FIRST].chunks_mut(8).zip(fields.words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        for (place, ip) in bytes[FIRST..].chunks_mut(16).zip(fields.ips) {
            place.copy_from_slice(&ip);
        }
        for (at, given) in [(FIRST, fields.from), (SECOND, fields.to)] {
            if let Some(given) = given {
                put_address(&mut bytes[at..at + 24], given);
            }
        }
        bytes
    }

    fn fields(&self) -> Fields {
        let plain = |op, number| Fields { op, number, ..Fields::default() };
        match *self {
            Self::Hello { version } => plain(op::HELLO, version),
            Self::Arena { arena, at } => Fields { words: [at, 0, 0], ..plain(op::ARENA, arena) },
            Self::ArenaGone { arena } => plain(op::ARENA_GONE, arena),
            Self::Listen { at } => Fields { from: Some(at), ..plain(op::LISTEN, 0) },
            Self::Unlisten { at } => Fields { from: Some(at), ..plain(op::UNLISTEN, 0) },
            Self::Connect { connection, line, from, to } => Fields {
                words: [line.encode(), 0, 0],
                from: Some(from),
                to: Some(to),
                ..plain(op::CONNECT, connection)
            },
            Self::Accepted { incoming, connection, line } => Fields {
                words: [line.encode(), connection.into(), 0],
                ..plain(op::ACCEPTED, incoming)
            },
            Self::Rejected { incoming, errno } => {
                Fields { words: [errno.into(), 0, 0], ..plain(op::REJECTED, incoming) }
            }
            Self::Closed { connection } => plain(op::CLOSED, connection),
            Self::Welcome(Addresses { count, ips }) => Fields { ips, ..plain(op::WELCOME, count) },
            Self::Connected { connection } => plain(op::CONNECTED, connection),
            Self::Refused { connection, errno } => {
                Fields { words: [errno.into(), 0, 0], ..plain(op::REFUSED, connection) }
            }
            Self::Incoming { incoming, from, to } => {
                Fields { from: Some(from), to: Some(to), ..plain(op::INCOMING, incoming) }
            }
            Self::Ended { connection } => plain(op::ENDED, connection),
            Self::ArenaFree { arena } => plain(op::ARENA_FREE, arena),
        }
    }

    /// Returns the message in `bytes`, or `None` if they hold no message of this version.
    pub fn decode(bytes: &[u8; MESSAGE]) -> Option<Self> {
        let (op, number) = (word32(bytes, 0)?, word32(bytes, 4)?);
        let word = |at: usize| word64(bytes, 8 + at * 8);
        let small = |at: usize| word(at).and_then(|word| u32::try_from(word).ok());
        let errno = || small(0).filter(|errno| *errno != 0);
        let arena = || (number < ARENAS).then_some(number);
        let (first, second) = (address(bytes, FIRST)?, address(bytes, SECOND)?);
        let message = match op {
            op::HELLO => Self::Hello { version: number },
            op::ARENA => Self::Arena { arena: arena()?, at: word(0)? },
            op::ARENA_GONE => Self::ArenaGone { arena: arena()? },
            op::LISTEN => Self::Listen { at: first },
            op::UNLISTEN => Self::Unlisten { at: first },
            op::CONNECT => Self::Connect {
                connection: number,
                line: Line::decode(word(0)?)?,
                from: first,
                to: second,
            },
            op::ACCEPTED => Self::Accepted {
                incoming: number,
                connection: small(1)?,
                line: Line::decode(word(0)?)?,
            },
            op::REJECTED => Self::Rejected { incoming: number, errno: errno()? },
            op::CLOSED => Self::Closed { connection: number },
            op::WELCOME => Self::Welcome(addresses(number, bytes)?),
            op::CONNECTED => Self::Connected { connection: number },
            op::REFUSED => Self::Refused { connection: number, errno: errno()? },
            op::INCOMING => Self::Incoming { incoming: number, from: first, to: second },
            op::ENDED => Self::Ended { connection: number },
            op::ARENA_FREE => Self::ArenaFree { arena: arena()? },
            _ => return None,
        };
        // Unused fields are zero.
        (message.encode() == *bytes).then_some(message)
    }
}

fn addresses(count: u32, bytes: &[u8; MESSAGE]) -> Option<Addresses> {
    let held = usize::try_from(count).ok().filter(|count| *count <= ADDRESSES)?;
    let mut ips = [[0; 16]; ADDRESSES];
    for (ip, place) in ips.iter_mut().zip(bytes[FIRST..].chunks_exact(16)).take(held) {
        ip.copy_from_slice(place);
    }
    Some(Addresses { count, ips })
}

#[cfg(test)]
mod tests {
    use super::*;

    const HERE: Address = Address::v4([10, 1, 2, 3], 80);
    const LINE: Line = Line { arena: 63, stream: 0xf_ffff, side: 1 };

    fn all() -> [Message; 15] {
        let mut ips = [[0; 16]; ADDRESSES];
        ips[0] = HERE.ip;
        [
            Message::Hello { version: 1 },
            Message::Arena { arena: 63, at: u64::MAX },
            Message::ArenaGone { arena: 1 },
            Message::Listen { at: HERE },
            Message::Unlisten { at: HERE },
            Message::Connect { connection: u32::MAX, line: LINE, from: HERE, to: Address::ANY },
            Message::Accepted { incoming: 7, connection: u32::MAX, line: LINE },
            Message::Rejected { incoming: 7, errno: 111 },
            Message::Closed { connection: 3 },
            Message::Welcome(Addresses { count: 1, ips }),
            Message::Connected { connection: 3 },
            Message::Refused { connection: 3, errno: 111 },
            Message::Incoming { incoming: 9, from: HERE, to: HERE },
            Message::Ended { connection: 3 },
            Message::ArenaFree { arena: 0 },
        ]
    }

    #[test]
    fn messages_are_understood_and_nothing_else_is() {
        for (number, message) in all().into_iter().enumerate() {
            let bytes = message.encode();
            assert_eq!(Message::decode(&bytes), Some(message));
            assert_eq!(message.is_guests(), number < 9);
            for at in [0, 3, 31, 50, 74, 90, 127] {
                let mut spoiled = bytes;
                spoiled[at] ^= 0x40;
                assert_ne!(Message::decode(&spoiled), Some(message), "{message:?} at {at}");
            }
            let mut rubbish = bytes;
            rubbish[127] = 1;
            assert_eq!(Message::decode(&rubbish), None);
        }
        assert_eq!(Message::decode(&[0; MESSAGE]), None);
    }

    #[test]
    fn numbers_out_of_range_are_refused() {
        let mut bytes = Message::ArenaGone { arena: 63 }.encode();
        bytes[4] = 64;
        assert_eq!(Message::decode(&bytes), None);
        let mut bytes = Message::Welcome(Addresses { count: 4, ips: [HERE.ip; 4] }).encode();
        assert!(Message::decode(&bytes).is_some());
        bytes[4] = 5;
        assert_eq!(Message::decode(&bytes), None);
        bytes[4] = 3;
        assert_eq!(Message::decode(&bytes), None, "an address that is not counted");
        let mut bytes = Message::Refused { connection: 1, errno: 1 }.encode();
        bytes[8] = 0;
        assert_eq!(Message::decode(&bytes), None, "refused for nothing");
        assert_eq!(Line::decode(1 << 20), None);
        assert_eq!(Line::decode(64 << 32), None);
    }

    #[test]
    fn what_the_control_memory_holds_fits_and_does_not_overlap() {
        // A header, inboxes, two areas; 128 bytes of counters before events.
        const {
            assert!(4096 + 4096 + 2 * CONTROL_PAGES as usize * 4096 <= TO_HOST);
            assert!(TO_HOST + 128 + SIGNALS * 8 <= TO_GUEST);
            assert!(TO_GUEST + 128 + SIGNALS * 8 <= HOST_ASLEEP);
            assert!(GUEST_OVERFLOW + 64 <= PIECE);
        }
        assert_eq!(stream_of(event(63, 31)), (63, 31));
        assert_eq!(Broken::Spoiled.status(), 0x3_0002);
    }
}
