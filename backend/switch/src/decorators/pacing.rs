//! The receive rate of a port: a short queue in front of its peer.
//!
//! A frame waits for the port's token bucket in memory of the port itself, so it holds back neither
//! its sender nor frames for other ports. The queue is bounded by the time that its last frame
//! waits: long enough that the windows of TCP keep the link busy, and short enough that they do not
//! fill it with seconds of delay. A frame passes as soon as the bucket has one byte. So a segment
//! of 64 KiB passes a bucket of any size, and the frames behind it pay for it.

use std::time::Duration;

use super::{ByRate, Directions, Layer, Queued};
use crate::{Port, Rate};

/// The longest time in the queue, at rates at which it is enough for [`LEAST`] bytes.
const WAIT: Duration = Duration::from_millis(50);
/// Bytes for which there is room at lower rates: TCP needs some full frames to notice a loss by the
/// frames behind it, and not by a timeout.
const LEAST: u64 = 16 << 10;
/// The longest time in the queue at any rate.
const LONGEST: Duration = Duration::from_secs(1);
/// The largest number of frames in the queue, of 2,048 bytes on average: 2 MiB of memory for a
/// port.
const FRAMES: usize = 1024;

/// Returns `port` behind a queue that lets frames for its peer pass at `rate`.
pub(super) fn paced(port: Box<dyn Port>, rate: Rate) -> Box<dyn Port> {
    let outward = Directions { inward: false, outward: true };
    let schedule = || ByRate::within(rate, patience(rate));
    Box::new(Queued::new(port, outward, FRAMES, schedule).in_layer(Layer::Pacing))
}

/// Returns the longest time in the queue.
fn patience(rate: Rate) -> Duration {
    let least = LEAST * 1_000_000_000 / rate.per_second.max(1);
    Duration::from_nanos(least).clamp(WAIT, LONGEST)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_queue_is_short_and_has_room_for_some_frames() {
        let millis = |per_second| patience(Rate { per_second, burst: 0 }).as_millis();
        assert_eq!([millis(u64::MAX), millis(12_500_000), millis(1_250_000)], [50, 50, 50]);
        assert_eq!(millis(125_000), 131, "16 KiB at 1 Mbit/s");
        assert_eq!([millis(1000), millis(1), millis(0)], [1000, 1000, 1000]);
    }
}
