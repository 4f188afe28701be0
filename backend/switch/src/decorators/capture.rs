//! Captures: copies of a port's frames, for a reader on another thread.
//!
//! A packet ring (`slipway_ring`) in memory of this process connects the switch's thread with the
//! reader's. The switch wakes no reader: the reader polls every few milliseconds as long as it
//! captures. Frames without room in the ring are counted and dropped, so a slow reader slows
//! nothing.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use slipway_ring::{Consumer, Descriptor, Geometry, Link, Producer};

use super::{Direction, Directions, Observer};
use crate::{Burst, Pick};

/// The ring's geometry: room for 32,768 small frames or 5,400 of 1,514 bytes, about 10 MiB.
const RING: Geometry = Geometry { slots: 32_768, payload: PAYLOAD as u32 };
const PAYLOAD: usize = 256;
/// Bytes in front of each record: time, bytes of the frame, bytes captured, and direction.
const HEADER: usize = 16;
const OUT: u32 = 1 << 31;

/// The settings of a capture.
#[derive(Clone, Copy, Debug)]
pub struct Capturing {
    /// The largest number of bytes captured of each frame.
    pub snap: u32,
    /// The number of frames after which the capture ends, or `None` for never.
    pub count: Option<u64>,
    /// The directions to capture.
    pub ways: Directions,
    /// Returns the time since the epoch, and must not wait.
    pub clock: fn() -> Duration,
}

#[derive(Default)]
struct Shared {
    /// The number of frames for which the ring had no room.
    missed: AtomicU64,
    /// No more records come. Stored after the last record was published.
    ended: AtomicBool,
}

/// The switch's end of a capture: an [`Observer`].
pub struct Recorder {
    ring: Producer,
    shared: Arc<Shared>,
    what: Capturing,
    /// The number of slots that are filled and not published yet.
    filled: usize,
}

/// The reader's end of a capture.
pub struct Captured {
    ring: Consumer,
    shared: Arc<Shared>,
}

/// A captured frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// The time when the frame passed, in nanoseconds since the epoch.
    pub time_ns: u64,
    /// The direction.
    pub way: Direction,
    /// Bytes of the whole frame.
    pub len: u32,
    /// The frame's first bytes.
    pub bytes: Vec<u8>,
}

/// Creates both ends of a capture.
///
/// # Errors
/// If there is no memory, or no descriptors are left.
pub fn record(what: Capturing) -> std::io::Result<(Recorder, Captured)> {
    let link = Link::new(RING)?;
    let ((_, producer), (consumer, _)) = (link.server(), link.peer());
    let shared = Arc::new(Shared::default());
    let captured = Captured { ring: consumer, shared: Arc::clone(&shared) };
    Ok((Recorder { ring: producer, shared, what, filled: 0 }, captured))
}

impl Recorder {
    /// Fills slots with a frame. Returns `false` if there is no room, or the frame cannot be read.
    fn fill(&mut self, way: Direction, time: u64, burst: &Burst, pick: Pick) -> bool {
        let len = burst.len_of(pick) as u32;
        let snapped = len.min(self.what.snap);
        let total = HEADER + snapped as usize;
        let slots = total.div_ceil(PAYLOAD);
        let wanted = self.filled + slots;
        // The other side is this process, so the ring is never broken.
        if self.ring.free(wanted).unwrap_or(0) < wanted {
            return false;
        }
        let mut header = [0; HEADER];
        header[..8].copy_from_slice(&time.to_le_bytes());
        header[8..12].copy_from_slice(&len.to_le_bytes());
        let word = snapped | if way == Direction::Out { OUT } else { 0 };
        header[12..].copy_from_slice(&word.to_le_bytes());
        let mut reader = burst.read(pick);
        for number in 0..slots {
            let part = PAYLOAD.min(total - number * PAYLOAD);
            let place = self.ring.place(self.filled + number);
            let from = if number == 0 { HEADER } else { 0 };
            if number == 0 && self.ring.memory().write(place, &header).is_err() {
                return false;
            }
            if reader.copy_to(self.ring.memory(), place + from, part - from).is_err() {
                return false;
            }
            let descriptor = Descriptor::new(part as u32);
            let more = number + 1 < slots;
            let descriptor = if more { descriptor.and_more() } else { descriptor };
            self.ring.describe(self.filled + number, descriptor);
        }
        self.filled = wanted;
        true
    }
}

impl Observer for Recorder {
    fn see(&mut self, way: Direction, burst: &Burst, picks: &[Pick]) {
        if !self.what.ways.has(way) || self.what.count == Some(0) {
            return;
        }
        let time = u64::try_from((self.what.clock)().as_nanos()).unwrap_or(u64::MAX);
        let mut missed = 0;
        for pick in picks {
            if self.what.count == Some(0) {
                break;
            }
            match self.fill(way, time, burst, *pick) {
                true => self.what.count = self.what.count.map(|left| left - 1),
                false => missed += 1,
            }
        }
        self.ring.publish(std::mem::take(&mut self.filled));
        if missed > 0 {
            self.shared.missed.fetch_add(missed, Ordering::Relaxed);
        }
        if self.what.count == Some(0) {
            self.shared.ended.store(true, Ordering::Release);
        }
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        self.shared.ended.store(true, Ordering::Release);
    }
}

impl Captured {
    /// Returns the number of frames so far that were not captured for lack of room.
    pub fn missed(&self) -> u64 {
        self.shared.missed.load(Ordering::Relaxed)
    }

    /// Returns whether no more records come, besides those not read yet: the capture's number of
    /// frames is reached, or the port is gone.
    pub fn has_ended(&self) -> bool {
        self.shared.ended.load(Ordering::Acquire)
    }
}

/// Iterates over the captured records not read yet. More may come after a `None`.
impl Iterator for Captured {
    type Item = Record;

    fn next(&mut self) -> Option<Self::Item> {
        let there = self.ring.available(1).ok()?;
        let (mut bytes, mut slots) = (Vec::new(), 0);
        while slots < there {
            let descriptor = self.ring.descriptor(slots);
            let at = bytes.len();
            bytes.resize(at + descriptor.len().min(PAYLOAD), 0);
            self.ring.memory().read(self.ring.place(slots), &mut bytes[at..]).ok()?;
            slots += 1;
            if !descriptor.has_more() {
                break;
            }
        }
        self.ring.release(slots);
        let (header, _) = bytes.split_first_chunk::<HEADER>()?;
        let word = |at: usize| u32::from_le_bytes([0, 1, 2, 3].map(|byte| header[at + byte]));
        let time_ns = u64::from(word(0)) | u64::from(word(4)) << 32;
        let way = if word(12) & OUT == 0 { Direction::In } else { Direction::Out };
        let len = word(8);
        bytes.drain(..HEADER);
        Some(Record { time_ns, way, len, bytes })
    }
}
