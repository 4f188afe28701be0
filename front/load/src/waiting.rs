//! The time for which a thread waits for its processor.

use std::time::Instant;

/// The time for which the calling thread waits for a processor (its run-queue wait).
#[derive(Clone, Copy, Debug)]
pub struct Waiting {
    began: Instant,
    waited_ns: Option<u64>,
}

impl Waiting {
    /// Begins to count.
    pub fn begin() -> Self {
        Self { began: Instant::now(), waited_ns: waited_ns() }
    }

    /// Returns the time in ns that the calling thread has waited since, scaled to `elapsed_ns`.
    /// Returns `None` if the kernel does not count it.
    pub fn scaled_to(self, elapsed_ns: u64) -> Option<u64> {
        let waited = waited_ns()?.saturating_sub(self.waited_ns?) as f64;
        let passed = self.began.elapsed().as_nanos().max(1) as f64;
        Some((waited * elapsed_ns as f64 / passed) as u64)
    }
}

/// Returns the time for which the calling thread could run and waited for a processor so far, ns.
fn waited_ns() -> Option<u64> {
    // Times on a processor and waiting for one, and the number of stays on one.
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").ok()?;
    text.split_ascii_whitespace().nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_are_scaled() {
        let waiting = Waiting::begin();
        assert_eq!(waiting.scaled_to(0).unwrap_or(0), 0);
        let long = Waiting { waited_ns: waiting.waited_ns.map(|_| u64::MAX), ..waiting };
        assert_eq!(long.scaled_to(1000).unwrap_or(0), 0);
        assert_eq!(Waiting { waited_ns: None, ..waiting }.scaled_to(1), None);
    }
}
