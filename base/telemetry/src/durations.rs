//! Counts of durations by size, for monitoring.

/// Upper bounds of the buckets of [`Durations`], rising, ns. One more bucket is above the last.
pub const BOUNDS_NS: [u64; 15] = [
    100_000,
    1_000_000,
    2_500_000,
    5_000_000,
    10_000_000,
    25_000_000,
    50_000_000,
    100_000_000,
    250_000_000,
    500_000_000,
    1_000_000_000,
    2_500_000_000,
    5_000_000_000,
    10_000_000_000,
    60_000_000_000,
];

/// How many durations were in each of a few fixed buckets, and their sum. A
/// [`Histogram`](crate::Histogram) has percentiles; this one has what monitoring asks for again and
/// again.
#[derive(Clone, Copy, Debug, Default)]
pub struct Durations {
    counts: [u64; BOUNDS_NS.len() + 1],
    sum_ns: u64,
}

impl Durations {
    /// Counts a duration in nanoseconds. A bound belongs to its bucket.
    pub fn record(&mut self, ns: u64) {
        self.counts[BOUNDS_NS.partition_point(|bound| *bound < ns)] += 1;
        self.sum_ns = self.sum_ns.saturating_add(ns);
    }

    /// Returns the number of durations in each bucket.
    pub fn counts(&self) -> &[u64] {
        &self.counts
    }

    /// Returns the sum of all durations, ns.
    pub fn sum_ns(&self) -> u64 {
        self.sum_ns
    }

    /// Returns whether no duration was counted.
    pub fn is_empty(&self) -> bool {
        self.counts.iter().all(|count| *count == 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bound_belongs_to_its_bucket() {
        let mut durations = Durations::default();
        assert!(durations.is_empty());
        [0, 100_000, 100_001, u64::MAX].into_iter().for_each(|ns| durations.record(ns));
        assert_eq!(durations.counts()[..2], [2, 1]);
        assert_eq!(durations.counts()[BOUNDS_NS.len()], 1);
        assert_eq!(durations.sum_ns(), u64::MAX);
    }
}
