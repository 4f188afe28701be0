//! The layout of kept memory. Its first words identify it. A daemon that does not know them takes
//! nothing over and changes nothing, so that the build that left the memory can continue.

use std::sync::atomic::Ordering;

use slipway_nvme::{JOURNAL_VERSION, Limits, journal_len};
use slipway_ram::Lasting;
use slipway_vfio_user::{KEPT_LEN, KEPT_VERSION};
use slipway_virtio_net::{MAX_PAIRS, STATE_VERSION};

/// The size of the head in bytes.
pub const HEAD: usize = 64;
/// The first word: "SLIPKEEP".
const MAGIC: u64 = u64::from_be_bytes(*b"SLIPKEEP");
/// The version of the parts that this crate itself keeps: the head, descriptions, the order of the
/// parts, the meaning of slots.
pub const VERSION: u32 = 2;

/// The largest number of threads that one kept controller is spread over: its journal has room for
/// the commands of this many lanes.
pub const MOST_LANES: u16 = 16;

/// Returns the limits that an endpoint's journal is made for; most of the journal is never touched.
pub fn journal_limits() -> Limits {
    Limits { lanes: MOST_LANES, ..Limits::default() }
}

/// Returns the words after the first one of an endpoint's memory: the version and length of each
/// part.
///
/// A network function has its journal in the place of a controller's, which is longer.
pub fn endpoint() -> [u64; 4] {
    let journal = journal_len(&journal_limits());
    let network = slipway_virtio_net::journal_len(MAX_PAIRS);
    debug_assert!(network <= journal, "the journal of a network function has no room");
    [
        part(VERSION, HEAD),
        part(KEPT_VERSION, KEPT_LEN),
        part(JOURNAL_VERSION, journal),
        part(STATE_VERSION, network),
    ]
}

/// Returns the words after the first one of a named disk's memory: the version and length of each
/// part.
pub fn disk() -> [u64; 4] {
    [part(VERSION, HEAD), 0, 0, 0]
}

fn part(version: u32, len: usize) -> u64 {
    u64::from(version) << 32 | len as u64
}

/// The reason for which memory cannot be used.
#[derive(Debug)]
pub enum Unknown {
    /// The memory was left by a build with another layout.
    Layout(String),
    /// The memory was not left by a daemon.
    Damaged,
}

/// Writes the layout to the head of fresh `memory` and returns the rest. Returns `None` if the
/// memory is too short.
pub fn begin(memory: &Lasting, layout: [u64; 4]) -> Option<Lasting> {
    let (head, rest) = memory.split(HEAD)?;
    for (word, value) in head.words()[1..].iter().zip(layout) {
        word.store(value, Ordering::Relaxed);
    }
    head.words()[0].store(MAGIC, Ordering::Release);
    Some(rest)
}

/// Checks the layout in the head of memory that a predecessor left, and returns the rest.
pub fn check(memory: &Lasting, layout: [u64; 4]) -> Result<Lasting, Unknown> {
    let (head, rest) = memory.split(HEAD).ok_or(Unknown::Damaged)?;
    let word = |at: usize| head.words()[at].load(Ordering::Acquire);
    if word(0) != MAGIC {
        return Err(Unknown::Layout("none that has a version".to_owned()));
    }
    let found = [word(1), word(2), word(3), word(4)];
    if found != layout {
        return Err(Unknown::Layout(format!("{}; this build knows {}", show(found), show(layout))));
    }
    Ok(rest)
}

/// Formats the versions and lengths.
fn show(layout: [u64; 4]) -> String {
    let parts = layout.map(|part| format!("{}/{}", part >> 32, part as u32));
    format!("layout {}", parts.join(" "))
}
