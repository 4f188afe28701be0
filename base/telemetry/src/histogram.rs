//! Counts of values, by size.

use serde::{Deserialize, Serialize};

/// Values below this have a bucket each.
const EXACT: u64 = 128;
/// Buckets of each power of two above.
const PER_OCTAVE: usize = 64;
/// Buckets for all of a `u64`.
const BUCKETS: usize = EXACT as usize + 57 * PER_OCTAVE;

/// How often which value occurred, for percentiles. Values below 128 are kept exactly, larger ones
/// to within 0.8 %; sum, least and greatest are exact. About 30 KiB; recording does not allocate.
///
/// One thread records. Several threads have a histogram each, and whoever reads
/// [merges](Self::merge) them.
#[derive(Clone, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Sparse", into = "Sparse")]
pub struct Histogram {
    buckets: Box<[u64]>,
    count: u64,
    sum: u128,
    least: u64,
    greatest: u64,
}

impl Default for Histogram {
    fn default() -> Self {
        let buckets = vec![0; BUCKETS].into_boxed_slice();
        Self { buckets, count: 0, sum: 0, least: u64::MAX, greatest: 0 }
    }
}

impl std::fmt::Debug for Histogram {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Histogram({} values, mean {:.1})", self.count, self.mean())
    }
}

/// The bucket of `value`.
fn bucket(value: u64) -> usize {
    if value < EXACT {
        return value as usize;
    }
    let octave = value.ilog2() as usize; // 7 to 63
    let within = (value >> (octave - 6)) as usize & (PER_OCTAVE - 1);
    EXACT as usize + (octave - 7) * PER_OCTAVE + within
}

/// The middle of what bucket `index` holds.
fn middle(index: usize) -> u64 {
    if index < EXACT as usize {
        return index as u64;
    }
    let (octave, within) = ((index - EXACT as usize) / PER_OCTAVE, index % PER_OCTAVE);
    let width = 1_u64 << (octave + 1);
    (PER_OCTAVE + within) as u64 * width + width / 2
}

impl Histogram {
    /// An empty one.
    pub fn new() -> Self {
        Self::default()
    }

    /// Counts `value`.
    #[inline]
    pub fn record(&mut self, value: u64) {
        self.record_many(value, 1);
    }

    /// Counts `value` `times` times.
    #[inline]
    pub fn record_many(&mut self, value: u64, times: u64) {
        self.buckets[bucket(value)] += times;
        self.count += times;
        self.sum += u128::from(value) * u128::from(times);
        if times > 0 {
            self.least = self.least.min(value);
            self.greatest = self.greatest.max(value);
        }
    }

    /// From what [`counts`](Self::counts), [`sum`](Self::sum), [`least`](Self::least) and
    /// [`greatest`](Self::greatest) gave of another, perhaps a hostile one: counts saturate, and
    /// least and greatest change places when they are the wrong way round.
    pub fn of_counts(
        counts: impl IntoIterator<Item = (u64, u64)>,
        sum: u64,
        least: u64,
        greatest: u64,
    ) -> Self {
        let mut histogram = Self::new();
        for (value, times) in counts {
            let times = times.min(u64::MAX - histogram.count);
            histogram.buckets[bucket(value)] += times;
            histogram.count += times;
        }
        if histogram.count > 0 {
            histogram.sum = sum.into();
            (histogram.least, histogram.greatest) = (least.min(greatest), least.max(greatest));
        }
        histogram
    }

    /// Adds all that `other` counted. Counts and sum saturate: `other` may be a guest's word.
    pub fn merge(&mut self, other: &Self) {
        for (own, others) in self.buckets.iter_mut().zip(&other.buckets) {
            let times = (*others).min(u64::MAX - self.count);
            *own += times;
            self.count += times;
        }
        self.sum = self.sum.saturating_add(other.sum);
        self.least = self.least.min(other.least);
        self.greatest = self.greatest.max(other.greatest);
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        self.buckets.fill(0);
        (self.count, self.sum, self.least, self.greatest) = (0, 0, u64::MAX, 0);
    }

    /// How many values were counted.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// The sum of all values, exact.
    pub fn sum(&self) -> u128 {
        self.sum
    }

    /// The mean, exact; 0 of nothing.
    pub fn mean(&self) -> f64 {
        if self.count == 0 { 0.0 } else { self.sum as f64 / self.count as f64 }
    }

    /// The least value, exact; 0 of nothing.
    pub fn least(&self) -> u64 {
        if self.count == 0 { 0 } else { self.least }
    }

    /// The greatest value, exact; 0 of nothing.
    pub fn greatest(&self) -> u64 {
        self.greatest
    }

    /// The smallest value such that `percent` % (0 to 100, as 99.9) of all are not above it
    /// (*nearest rank*), to within 0.8 %; 0 of nothing.
    pub fn percentile(&self, percent: f64) -> u64 {
        let rank = (self.count as f64 * percent.clamp(0.0, 100.0) / 100.0).ceil().max(1.0) as u64;
        let mut seen = 0;
        for (index, count) in self.buckets.iter().enumerate() {
            seen += count;
            if seen >= rank {
                return middle(index).clamp(self.least, self.greatest);
            }
        }
        self.greatest
    }

    /// Returns the counts as pairs of a value (to within 0.8 %) and its number, in ascending order.
    pub fn counts(&self) -> impl Iterator<Item = (u64, u64)> {
        let used = self.buckets.iter().enumerate().filter(|(_, count)| **count > 0);
        used.map(|(index, count)| (middle(index), *count))
    }
}

/// A histogram as it is written: the buckets that are not empty.
#[derive(Serialize, Deserialize)]
struct Sparse {
    sum: u128,
    least: u64,
    greatest: u64,
    /// Bucket, count.
    buckets: Vec<(usize, u64)>,
}

impl From<Histogram> for Sparse {
    fn from(histogram: Histogram) -> Self {
        let used = histogram.buckets.iter().copied().enumerate().filter(|(_, count)| *count > 0);
        Self {
            sum: histogram.sum,
            least: histogram.least(),
            greatest: histogram.greatest,
            buckets: used.collect(),
        }
    }
}

impl TryFrom<Sparse> for Histogram {
    type Error = &'static str;

    fn try_from(sparse: Sparse) -> Result<Self, Self::Error> {
        let mut histogram = Self::new();
        for (index, count) in sparse.buckets {
            let bucket =
                histogram.buckets.get_mut(index).ok_or("a histogram has no such bucket")?;
            *bucket = bucket.checked_add(count).ok_or("a histogram counts too much")?;
            let sum = histogram.count.checked_add(count);
            histogram.count = sum.ok_or("a histogram counts too much")?;
        }
        (histogram.sum, histogram.greatest) = (sparse.sum, sparse.greatest);
        if histogram.count > 0 {
            histogram.least = sparse.least;
        }
        if histogram.least > histogram.greatest && histogram.count > 0 {
            return Err("a histogram's least value is above its greatest");
        }
        Ok(histogram)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_is_near_the_middle_of_its_bucket() {
        let mut values: Vec<u64> = (0..64).flat_map(|bit| [1 << bit, (1 << bit) - 1]).collect();
        values.extend([u64::MAX, 129, 1_000, 999_999, 123_456_789_012]);
        for value in values {
            let near = middle(bucket(value));
            let error = near.abs_diff(value) as f64 / value.max(1) as f64;
            assert!(error <= 0.008, "{value} is taken for {near}");
            assert!(value >= EXACT || near == value);
        }
        assert_eq!(bucket(u64::MAX), BUCKETS - 1);
    }

    #[test]
    fn buckets_ascend_without_a_gap() {
        assert!((0..BUCKETS).all(|index| bucket(middle(index)) == index));
        assert!((1..BUCKETS).all(|index| middle(index - 1) < middle(index)));
    }

    #[test]
    fn percentiles_by_nearest_rank() {
        let mut histogram = Histogram::new();
        (1..=100).for_each(|value| histogram.record(value));
        let at = |percent| histogram.percentile(percent);
        assert_eq!([at(0.0), at(50.0), at(99.0), at(99.9), at(100.0)], [1, 50, 99, 100, 100]);
        assert_eq!((histogram.mean(), histogram.least(), histogram.greatest()), (50.5, 1, 100));
        let nothing = Histogram::new();
        assert_eq!((nothing.percentile(50.0), nothing.mean(), nothing.least()), (0, 0.0, 0));
    }

    #[test]
    fn merged_is_as_if_one_had_counted_all() {
        let (mut one, mut two, mut all) = (Histogram::new(), Histogram::new(), Histogram::new());
        for value in (0..10_000_u64).map(|value| value * value) {
            let half = if value % 3 == 0 { &mut one } else { &mut two };
            half.record(value);
            all.record(value);
        }
        one.merge(&two);
        assert_eq!(one, all);
        one.clear();
        assert_eq!(one, Histogram::new());
    }

    #[test]
    fn hostile_counts_are_merged_as_far_as_they_fit() {
        let sparse = Sparse { sum: u128::MAX, least: 1, greatest: 9, buckets: vec![(1, u64::MAX)] };
        let hostile = Histogram::try_from(sparse).unwrap();
        let mut all = Histogram::new();
        all.record(7);
        for _ in 0..2 {
            all.merge(&hostile);
            assert_eq!((all.count(), all.sum(), all.percentile(50.0)), (u64::MAX, u128::MAX, 1));
        }
        assert_eq!((all.least(), all.greatest()), (1, 9));
    }

    #[test]
    fn survives_being_written() {
        let mut histogram = Histogram::new();
        [0, 7, 7, 1 << 40, u64::MAX].into_iter().for_each(|value| histogram.record(value));
        for histogram in [histogram, Histogram::new()] {
            let again = Histogram::try_from(Sparse::from(histogram.clone()));
            assert_eq!(again, Ok(histogram));
        }
        let sparse = |buckets| Sparse { sum: 0, least: 0, greatest: 0, buckets };
        assert!(Histogram::try_from(sparse(vec![(BUCKETS, 1)])).is_err());
        assert!(Histogram::try_from(sparse(vec![(0, u64::MAX), (1, 1)])).is_err());
        assert!(Histogram::try_from(Sparse { least: 2, ..sparse(vec![(1, 1)]) }).is_err());
    }
}
