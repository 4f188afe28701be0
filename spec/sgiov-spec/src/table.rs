//! A family's table: a memfd that the engine makes, sealed against shrinking, and that only the
//! processes of one family share with the engine. The engine trusts a family's words there only as
//! far as they concern the family's own streams.
//!
//! | offset | what | written by |
//! |---|---|---|
//! | 0 | magic, `u64`: the bytes `sliptabl` | engine |
//! | 8 | version, `u64`: 1 | engine |
//! | 16 | entries, `u64` | engine |
//! | 24 | links, `u64`: arenas that the family can have at a time | engine |
//! | 64 | asleep, `u64`; 1: the engine sleeps, raise its bell after a signal | engine; the process that raises the bell sets it to 0 |
//! | 128 | overflow, `u64`; 1: a signal found no room, look at every endpoint | family; engine sets it to 0 |
//! | 192 | lock of the signals, held while one is raised | family |
//! | 256 | locks and words of the family's own use, 256 bytes | family |
//! | 4,096 | entries of [`ENTRY`] bytes | family, but for `state` and the endpoint's place, see [`entry`] |
//! | [`links`] | for each link the bits of its regions, [`LINK`] bytes | family |
//! | [`signals`] | [`SIGNALS`] events from the family to the engine (`slipway_ring::cross::Signals`): numbers of entries | family |

/// First word of a table.
pub const MAGIC: u64 = u64::from_le_bytes(*b"sliptabl");
/// Version of the layout.
pub const VERSION: u64 = 1;
/// Offset of the word that says that the engine sleeps (`slipway_ring::sleep`).
pub const ASLEEP: usize = 64;
/// Offset of the word that says that a signal found no room.
pub const OVERFLOW: usize = 128;
/// Offset of the lock of the signals.
pub const SIGNAL_LOCK: usize = 192;
/// Offset of 256 bytes for the family's own use.
pub const FAMILY: usize = 256;
/// Offset of the entries.
pub const ENTRIES: usize = 4096;
/// Bytes of an entry.
pub const ENTRY: usize = 128;
/// Bytes of a link's bits.
pub const LINK: usize = 2048;
/// Events of the signal FIFO.
pub const SIGNALS: usize = 1 << 16;

/// Offset of the links' bits.
pub const fn links(entries: usize) -> usize {
    (ENTRIES + entries * ENTRY).next_multiple_of(4096)
}

/// Offset of the signals.
pub const fn signals(entries: usize, links_held: usize) -> usize {
    links(entries) + (links_held * LINK).next_multiple_of(4096)
}

/// Bytes of a table.
pub const fn bytes(entries: usize, links_held: usize) -> usize {
    // 128 bytes of counters before the events.
    (signals(entries, links_held) + 128 + SIGNALS * 8).next_multiple_of(4096)
}

/// Words of an entry, by number. The engine writes [`entry::PLACE`] when it grants the entry; all
/// others are the family's.
pub mod entry {
    /// Bits 0-19 the stream in its arena, 20 the side, 21 the other side is the engine, 22 the
    /// other side is of the same tenant, 32-47 the link, 63 in use. 0: free.
    pub const PLACE: usize = 0;
    /// The own tail (`slipway_ring::cross::Tail`).
    pub const TX_TAIL: usize = 1;
    /// The other side's head, as seen.
    pub const TX_SEEN: usize = 2;
    /// The own head.
    pub const RX_HEAD: usize = 3;
    /// The other side's tail, as seen.
    pub const RX_SEEN: usize = 4;
    /// Lock of the sending half: 0 free, else the thread id of the holder; a multiple of
    /// [`ENGINE`](super::ENGINE): the engine.
    pub const TX_LOCK: usize = 5;
    /// Lock of the receiving half.
    pub const RX_LOCK: usize = 6;
    /// Bytes sent.
    pub const SENT: usize = 7;
    /// Bytes received.
    pub const RECEIVED: usize = 8;
    /// The first of the words that the engine does not look at. The word before it is unused.
    pub const OWN: usize = 10;
    /// Words of an entry.
    pub const WORDS: usize = 16;
}

/// The holder of a lock that the engine has. The engine only tries to take locks, and releases the
/// regions of idle FIFOs under them.
pub const ENGINE: u64 = 1 << 32;

/// The word [`entry::PLACE`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Stream in its arena: below 2^20.
    pub stream: u32,
    /// Side, 0 or 1.
    pub side: u8,
    /// The other side is the engine.
    pub engine: bool,
    /// The other side is of the same tenant.
    pub same_tenant: bool,
    /// The family's link, below the table's number of links.
    pub link: u16,
}

impl Place {
    /// Returns the word as it stands in the entry.
    pub fn encode(self) -> u64 {
        u64::from(self.stream)
            | u64::from(self.side & 1) << 20
            | u64::from(self.engine) << 21
            | u64::from(self.same_tenant) << 22
            | u64::from(self.link) << 32
            | 1 << 63
    }

    /// Returns the entry, or `None` if it is free.
    pub fn decode(word: u64) -> Option<Self> {
        (word >> 63 != 0).then_some(Self {
            stream: (word & 0xf_ffff) as u32,
            side: (word >> 20 & 1) as u8,
            engine: word >> 21 & 1 != 0,
            same_tenant: word >> 22 & 1 != 0,
            link: (word >> 32) as u16,
        })
    }
}
