//! Histograms as messages.

use slipway_telemetry::Histogram;

use crate::v1;

/// Converts `histogram` to a message.
pub fn to_wire(histogram: &Histogram) -> v1::LatencyHistogram {
    let (values_ns, counts) = histogram.counts().unzip();
    v1::LatencyHistogram {
        sum_ns: u64::try_from(histogram.sum()).unwrap_or(u64::MAX),
        least_ns: histogram.least(),
        greatest_ns: histogram.greatest(),
        values_ns,
        counts,
    }
}

/// Returns the histogram that a message describes; values without a count are left out.
pub fn from_wire(message: &v1::LatencyHistogram) -> Histogram {
    let counts = message.values_ns.iter().copied().zip(message.counts.iter().copied());
    Histogram::of_counts(counts, message.sum_ns, message.least_ns, message.greatest_ns)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_lost_on_the_way() {
        let mut histogram = Histogram::new();
        for value in [0, 3, 3, 777, 123_456_789] {
            histogram.record(value);
        }
        for histogram in [histogram, Histogram::new()] {
            assert_eq!(from_wire(&to_wire(&histogram)), histogram);
        }
    }

    #[test]
    fn a_message_that_makes_no_sense_gives_something_that_does() {
        let message = v1::LatencyHistogram {
            sum_ns: u64::MAX,
            least_ns: 9,
            greatest_ns: 2,
            values_ns: vec![5, 5, 6],
            counts: vec![u64::MAX, 1],
        };
        let histogram = from_wire(&message);
        assert_eq!(histogram.count(), u64::MAX);
        assert!(histogram.least() <= histogram.greatest());
        assert!(histogram.percentile(50.0) <= 9);
    }
}
