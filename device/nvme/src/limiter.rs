//! Limits of a controller: I/O commands and bytes per second, each with a burst.
//!
//! Commands that may not start stay in the guest's queues. A limited controller starts one command
//! of each queue in turn, so its queues share the limit. Lanes take from the same buckets, so the
//! limit holds for the whole controller, however many threads it has.
//!
//! A command may start if all buckets are open, which is decided before the command is fetched:
//! neither its opcode nor its size is known then. So a limit of one kind of commands would have to
//! hold back all of them.
//!
//! Other limits are a new [`Limiter`], whose buckets are full (`Home::limit`): what commands had
//! taken beyond the former limits is forgotten, and a whole burst may start at once. Commands that
//! have started go on.

use std::sync::Arc;
use std::time::Duration;

pub use slipway_rate::Rate;
use slipway_rate::SharedBucket;

/// The limits of a controller. `None` stands for no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rates {
    /// I/O commands.
    pub commands: Option<Rate>,
    /// Bytes that I/O commands read, write or compare.
    pub bytes: Option<Rate>,
}

/// The limits of a controller and how much of them is used up.
#[derive(Clone, Default)]
pub(crate) struct Limiter {
    commands: Option<Arc<SharedBucket>>,
    bytes: Option<Arc<SharedBucket>>,
    /// The first queue that had a command held back since [`Limiter::begin`].
    held: Option<u16>,
    now: Duration,
}

impl Limiter {
    pub fn new(rates: Rates) -> Self {
        let bucket = |rate| Arc::new(SharedBucket::new(rate));
        let (commands, bytes) = (rates.commands.map(bucket), rates.bytes.map(bucket));
        Self { commands, bytes, ..Self::default() }
    }

    pub fn is_on(&self) -> bool {
        self.commands.is_some() || self.bytes.is_some()
    }

    /// Begins a look at the queues at time `now`. Returns the queue to begin with: the first that
    /// had a command held back last time.
    pub fn begin(&mut self, now: Duration) -> Option<u16> {
        self.now = now;
        self.held.take()
    }

    /// Returns whether a command may start.
    pub fn is_open(&self) -> bool {
        self.opens_at() <= self.now
    }

    fn opens_at(&self) -> Duration {
        let buckets = [&self.commands, &self.bytes].into_iter().flatten();
        buckets.map(|bucket| bucket.opens_at()).max().unwrap_or_default()
    }

    /// Returns how long, from `now` on, the limits hold the next command back. Returns `None` if
    /// there are no limits.
    pub fn wait(&self, now: Duration) -> Option<Duration> {
        self.is_on().then(|| self.opens_at().saturating_sub(now))
    }

    /// Notes that a command of `queue` was held back.
    pub fn hold(&mut self, queue: u16) {
        self.held.get_or_insert(queue);
    }

    /// Counts a command that starts and moves `bytes` bytes.
    pub fn start(&mut self, bytes: u64) {
        let now = self.now;
        if let Some(commands) = &self.commands {
            commands.take(1, now);
        }
        self.move_bytes(bytes);
    }

    /// Counts `bytes` more bytes of a command that has started.
    pub fn move_bytes(&mut self, bytes: u64) {
        if let Some(bucket) = &self.bytes {
            bucket.take(bytes, self.now);
        }
    }

    /// Returns when a command that was held back may start. Returns `None` if none was held back.
    pub fn deadline(&self) -> Option<Duration> {
        self.held.map(|_| self.opens_at())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rate(per_second: u64, burst: u64) -> Option<Rate> {
        Some(Rate { per_second, burst })
    }

    /// Starts commands of `bytes` bytes for `millis` ms, each as soon as it may. Returns how many.
    fn run(limiter: &mut Limiter, from: u64, millis: u64, bytes: u64) -> u64 {
        let (mut now, end) = (Duration::from_millis(from), Duration::from_millis(from + millis));
        let mut count = 0;
        while now < end {
            limiter.begin(now);
            if limiter.is_open() {
                limiter.start(bytes);
                count += 1;
            } else {
                limiter.hold(1);
                let next = limiter.deadline().unwrap();
                assert!(next > now, "it would not sleep");
                now = next;
            }
        }
        count
    }

    #[test]
    fn a_burst_and_then_the_rate() {
        let mut limiter = Limiter::new(Rates { commands: rate(1000, 50), bytes: None });
        // 50 at once, one each ms from then on, the first a ms after.
        assert_eq!(run(&mut limiter, 0, 1000, 1 << 20), 50 + 999);
        assert_eq!(run(&mut limiter, 1000, 1000, 1 << 20), 1000);
        // After a pause of 20 ms: 20 more.
        assert_eq!(run(&mut limiter, 2020, 1000, 1 << 20), 1020);
        // No pause saves more than the burst.
        assert_eq!(run(&mut limiter, 100_000, 1000, 1 << 20), 50 + 999);
    }

    #[test]
    fn bytes_are_counted_in_the_long_run() {
        for (per_second, bytes) in [(100 << 20, 4096), (10_000_000_000, 512), (1_000_003, 4096)] {
            let mut limiter =
                Limiter::new(Rates { commands: None, bytes: rate(per_second, bytes) });
            let millis = if per_second > 1 << 30 { 10 } else { 1000 };
            let moved = run(&mut limiter, 0, millis, bytes) * bytes;
            let due = per_second * millis / 1000;
            // A command's time is rounded up to a 32nd of a nanosecond.
            let least = due - due / 1000;
            assert!((least..=due + 2 * bytes).contains(&moved), "{moved} of {due}");
        }
    }

    #[test]
    fn what_is_larger_than_the_burst_starts_and_is_paid_for() {
        let mut limiter = Limiter::new(Rates { commands: None, bytes: rate(1 << 20, 1) });
        assert_eq!(run(&mut limiter, 0, 4000, 1 << 20), 4);
    }

    #[test]
    fn the_wait_is_the_time_until_the_next_command_may_start() {
        assert_eq!(Limiter::default().wait(Duration::ZERO), None);
        let mut limiter = Limiter::new(Rates { commands: rate(1000, 1), bytes: None });
        let (begin, ms) = (Duration::from_secs(1), Duration::from_millis(1));
        limiter.begin(begin);
        assert_eq!(limiter.wait(begin), Some(Duration::ZERO));
        limiter.start(512);
        assert!(limiter.wait(begin).is_some_and(|wait| wait > ms / 2 && wait <= 2 * ms));
        assert_eq!(limiter.wait(begin + 2 * ms), Some(Duration::ZERO));
    }

    #[test]
    fn the_stricter_limit_holds() {
        let rates = Rates { commands: rate(100, 1), bytes: rate(1 << 20, 1) };
        assert_eq!(run(&mut Limiter::new(rates), 0, 1000, 512), 100);
        assert!((15..=17).contains(&run(&mut Limiter::new(rates), 0, 1000, 64 << 10)));
    }

    #[test]
    fn impossible_numbers_do_no_harm() {
        for (per_second, burst) in [(0, 0), (u64::MAX, u64::MAX), (1, u64::MAX), (u64::MAX, 0)] {
            let rates = Rates { commands: rate(per_second, burst), bytes: rate(per_second, burst) };
            let mut limiter = Limiter::new(rates);
            limiter.begin(Duration::from_secs(1 << 32));
            for _ in 0..1000 {
                limiter.start(u64::from(u32::MAX) * 4096);
                let _ = (limiter.is_open(), limiter.deadline());
            }
        }
    }
}
