//! How kept memory is laid out: its first words say so, and a daemon that does not know them takes
//! nothing over and changes nothing, so that the build that left it can go on.

use std::sync::atomic::Ordering;

use slipway_nvme::{JOURNAL_VERSION, Limits, journal_len};
use slipway_ram::Lasting;
use slipway_vfio_user::{KEPT_LEN, KEPT_VERSION};
use slipway_virtio_net::{MAX_PAIRS, STATE_VERSION};

/// Bytes before everything else.
pub const HEAD: usize = 64;
/// First word: "SLIPKEEP".
const MAGIC: u64 = u64::from_be_bytes(*b"SLIPKEEP");
/// Version of what this crate itself keeps: the head, descriptions, the order of the parts, the
/// meaning of slots.
pub const VERSION: u32 = 2;

/// Most threads that one kept controller is spread over: there is room for the commands of so many.
pub const MOST_LANES: u16 = 16;

/// What an endpoint's journal is made for; most of it is never touched.
pub fn journal_limits() -> Limits {
    Limits { lanes: MOST_LANES, ..Limits::default() }
}

/// The words after the first: what an endpoint's memory consists of, versions and lengths.
///
/// A network function has its journal where a controller would have its own, which is longer.
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

/// The same of a named disk's memory.
pub fn disk() -> [u64; 4] {
    [part(VERSION, HEAD), 0, 0, 0]
}

fn part(version: u32, len: usize) -> u64 {
    u64::from(version) << 32 | len as u64
}

/// Why memory is of no use.
#[derive(Debug)]
pub enum Unknown {
    /// It was left by a build with another layout.
    Layout(String),
    /// It is nothing that a daemon leaves.
    Damaged,
}

/// Notes the layout in fresh `memory` and gives the rest of it.
pub fn begin(memory: &Lasting, layout: [u64; 4]) -> Option<Lasting> {
    let (head, rest) = memory.split(HEAD)?;
    for (word, value) in head.words()[1..].iter().zip(layout) {
        word.store(value, Ordering::Relaxed);
    }
    head.words()[0].store(MAGIC, Ordering::Release);
    Some(rest)
}

/// What follows the head of memory that a predecessor left.
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

/// The versions, and the lengths where they say anything.
fn show(layout: [u64; 4]) -> String {
    let parts = layout.map(|part| format!("{}/{}", part >> 32, part as u32));
    format!("layout {}", parts.join(" "))
}
