//! Traces: counts of a port's frames by kind, and headers of some of them, for a reader on another
//! thread.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Duration;

use slipway_ethernet_spec::{EthernetFrame, FrameKind, TAG};
use slipway_rate::{Bucket, Rate};

use super::{Direction, Directions, Observer};
use crate::{Burst, HEAD, Pick};

/// The largest number of headers that wait for a reader; more are only counted.
const WAITING: usize = 1024;
/// The burst of headers, in seconds of their rate.
const BURST_SECONDS: u64 = 1;

/// The header of a frame, as far as it lies in the frame's first 96 bytes. It prints as one line of
/// text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Summary {
    /// The time when the frame passed, since the epoch.
    pub time: Duration,
    /// The direction.
    pub way: Direction,
    /// Bytes of the whole frame.
    pub len: u32,
    /// The frame's first bytes, with its tag. Bytes that are not known, at the end, are 0.
    pub head: [u8; HEAD],
}

impl Summary {
    /// Returns the first bytes, without those behind the frame's end.
    fn head(&self) -> &[u8] {
        &self.head[..HEAD.min(self.len as usize)]
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let way = if self.way == Direction::In { "sent" } else { "received" };
        let frame = EthernetFrame::new_unchecked(self.head());
        write!(f, "{way} {frame}, {} bytes", self.len)
    }
}

/// Counters of one kind of frame in one direction.
#[derive(Default)]
struct Cell {
    frames: AtomicU64,
    bytes: AtomicU64,
}

#[derive(Default)]
struct Shared {
    /// The counters, by direction: inward, outward.
    cells: [[Cell; FrameKind::ALL.len()]; 2],
    untold: AtomicU64,
}

/// The number of frames of one kind in one direction, and their bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counts {
    /// The kind of the frames.
    pub kind: FrameKind,
    /// The direction.
    pub way: Direction,
    /// The number of frames.
    pub frames: u64,
    /// The number of bytes.
    pub bytes: u64,
}

/// The switch's end of a trace: an [`Observer`].
pub struct Trace {
    shared: Arc<Shared>,
    ways: Directions,
    clock: fn() -> Duration,
    bucket: Bucket,
    told: SyncSender<Summary>,
}

/// The reader's end of a trace. Its channel ends when the observer is dropped.
pub struct Tracing {
    shared: Arc<Shared>,
    /// The headers.
    pub headers: Receiver<Summary>,
}

impl Trace {
    /// Creates both ends of a trace, which counts all frames and reports the headers of at most
    /// `headers` a second. `clock` returns the time since the epoch, and must not wait.
    pub fn new(headers: u32, ways: Directions, clock: fn() -> Duration) -> (Self, Tracing) {
        let per_second = u64::from(headers.max(1));
        let bucket = Bucket::new(Rate { per_second, burst: per_second * BURST_SECONDS });
        let shared = Arc::new(Shared::default());
        let (told, headers) = sync_channel(WAITING);
        let tracing = Tracing { shared: Arc::clone(&shared), headers };
        (Self { shared, ways, clock, bucket, told }, tracing)
    }
}

impl Observer for Trace {
    fn see(&mut self, way: Direction, burst: &Burst, picks: &[Pick]) {
        if !self.ways.has(way) {
            return;
        }
        let time = (self.clock)();
        let mut untold = 0;
        for pick in picks {
            let summary = summarise(time, way, burst, *pick);
            let kind = EthernetFrame::new_unchecked(summary.head()).kind();
            let cell = &self.shared.cells[way as usize][kind as usize];
            // Only one thread writes.
            let add = |to: &AtomicU64, count: u64| {
                to.store(to.load(Ordering::Relaxed) + count, Ordering::Relaxed);
            };
            add(&cell.frames, 1);
            add(&cell.bytes, summary.len.into());
            if self.bucket.opens_at() <= time && self.told.try_send(summary).is_ok() {
                self.bucket.take(1, time);
            } else {
                untold += 1;
            }
        }
        self.shared.untold.fetch_add(untold, Ordering::Relaxed);
    }
}

impl Tracing {
    /// Returns the counts so far, without kinds that had no frame.
    pub fn counts(&self) -> Vec<Counts> {
        let ways = [Direction::In, Direction::Out].into_iter();
        let all = ways.flat_map(|way| {
            FrameKind::ALL.map(|(kind, _)| {
                let cell = &self.shared.cells[way as usize][kind as usize];
                let frames = cell.frames.load(Ordering::Relaxed);
                Counts { kind, way, frames, bytes: cell.bytes.load(Ordering::Relaxed) }
            })
        });
        all.filter(|count| count.frames > 0).collect()
    }

    /// Returns the number of frames that were counted but whose headers were not reported.
    pub fn untold(&self) -> u64 {
        self.shared.untold.load(Ordering::Relaxed)
    }
}

/// Summarises a frame. The head is a private copy with whatever content the peer wrote.
fn summarise(time: Duration, way: Direction, burst: &Burst, pick: Pick) -> Summary {
    let mut head = [0; HEAD];
    let tag = if pick.tci == 0 { 0 } else { TAG };
    let known = HEAD.min(burst.head(pick.frame.into()).len() + tag);
    // Only bytes of the private copy are read, which cannot fail.
    let _ = burst.read(pick).read(&mut head[..known]);
    Summary { time, way, len: burst.len_of(pick) as u32, head }
}
