//! Formats durations, and computes ticks of a time axis.

/// Formats `ns` nanoseconds with three significant digits and a fitting unit: `0 ns`, `12.3 µs`,
/// `145 ms`, `2.31 s`, `312 s`.
pub fn human(ns: u64) -> String {
    let (unit_ns, unit) = match ns {
        0..1_000 => return format!("{ns} ns"),
        // A value that would be rounded up to 1000 of a unit is shown as 1.00 of the next.
        1_000..999_500 => (1e3, "µs"),
        999_500..999_500_000 => (1e6, "ms"),
        _ => (1e9, "s"),
    };
    let value = ns as f64 / unit_ns;
    let decimals = match value {
        ..9.995 => 2,
        ..99.95 => 1,
        _ => 0,
    };
    format!("{value:.decimals$} {unit}")
}

/// Formats a rate with three significant digits, a decimal prefix and its unit: `1.23 Mpps`,
/// `45.6 Gbit/s`, `0 pps`.
pub fn rate(value: f64, unit: &str) -> String {
    let (scale, prefix) = match value.abs() {
        999.5e6.. => (1e9, "G"),
        999.5e3.. => (1e6, "M"),
        999.5.. => (1e3, "k"),
        _ => (1.0, ""),
    };
    let value = value / scale;
    let decimals = match value.abs() {
        0.0 => 0,
        ..9.995 => 2,
        ..99.95 => 1,
        _ => 0,
    };
    format!("{value:.decimals$} {prefix}{unit}")
}

/// Formats a number as `1.23 M`, `45.6 k`, `789`.
pub(crate) fn thousands(value: f64) -> String {
    match value {
        1e6.. => format!("{:.2} M", value / 1e6),
        1e4.. => format!("{:.1} k", value / 1e3),
        _ => format!("{value:.0}"),
    }
}

/// Returns the distance of at most `most` marks (at least one) on an axis from 0 to `end`, beside
/// the one at 0: 1, 2 or 5 times a power of ten.
pub(crate) fn round_step(end: f64, most: u32) -> f64 {
    let wanted = (end / f64::from(most.max(1))).max(f64::MIN_POSITIVE);
    let power = 10_f64.powf(wanted.log10().floor());
    let steps = [1.0, 2.0, 5.0, 10.0].map(|factor| power * factor);
    // A step that rounding made a little too small is taken, too.
    steps.into_iter().find(|step| *step >= wanted * 0.999_999).unwrap_or(power * 10.0)
}

/// The ticks of a time axis that begins at 0.
#[derive(Debug, PartialEq)]
pub(crate) struct Ticks {
    /// Distance of two ticks, in nanoseconds: 1, 2 or 5 times a power of ten.
    pub step_ns: u64,
    /// The unit of labels, in nanoseconds.
    unit_ns: u64,
    /// The unit's name.
    pub unit: &'static str,
}

impl Ticks {
    /// Returns at most `most` ticks (at least one) for an axis of `span_ns`, beside the one at 0.
    pub fn new(span_ns: u64, most: usize) -> Self {
        let wanted = span_ns.div_ceil(most.max(1) as u64).max(1);
        let power = 10u64.pow(wanted.ilog10());
        let step_ns = [1, 2, 5, 10]
            .into_iter()
            .map(|factor| power.saturating_mul(factor))
            .find(|step| *step >= wanted)
            .unwrap_or(u64::MAX);
        let (unit_ns, unit) = match step_ns {
            0..500 => (1, "ns"),
            500..500_000 => (1_000, "µs"),
            500_000..500_000_000 => (1_000_000, "ms"),
            _ => (1_000_000_000, "s"),
        };
        Self { step_ns, unit_ns, unit }
    }

    /// Returns the ticks' places up to `span_ns`, from 0.
    pub fn places(&self, span_ns: u64) -> impl Iterator<Item = u64> {
        (0..=span_ns / self.step_ns).map(|tick| tick * self.step_ns)
    }

    /// Returns the label of the tick at `ns`, without its unit.
    pub fn label(&self, ns: u64) -> String {
        // Steps below one unit are at least half a unit, so one decimal shows them all.
        let value = ns as f64 / self.unit_ns as f64;
        if self.step_ns.is_multiple_of(self.unit_ns) {
            format!("{value:.0}")
        } else {
            format!("{value:.1}")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_scale_with_their_unit() {
        let cases = [
            (0.0, "0 pps"),
            (4.0, "4.00 pps"),
            (999.4, "999 pps"),
            (999.6, "1.00 kpps"),
            (45_600.0, "45.6 kpps"),
            (4e6, "4.00 Mpps"),
            (114.7e9, "115 Gpps"),
        ];
        for (value, text) in cases {
            assert_eq!(rate(value, "pps"), text);
        }
    }

    #[test]
    fn marks_of_an_axis_are_round() {
        for (end, step) in [(100.0, 50.0), (0.13, 0.05), (7.0, 2.0), (1.0, 0.5), (4.0, 1.0)] {
            let found = round_step(end, 4);
            assert!((found - step).abs() < step * 1e-9, "{end}: {found}");
        }
        assert!(round_step(0.0, 4) > 0.0);
    }

    #[test]
    fn three_digits_and_a_unit() {
        let cases = [
            (0, "0 ns"),
            (999, "999 ns"),
            (1_000, "1.00 µs"),
            (12_345, "12.3 µs"),
            (999_499, "999 µs"),
            (999_500, "1.00 ms"),
            (9_996_000, "10.0 ms"),
            (99_960_000, "100 ms"),
            (145_400_000, "145 ms"),
            (2_310_000_000, "2.31 s"),
            (312_000_000_000, "312 s"),
        ];
        for (ns, text) in cases {
            assert_eq!(human(ns), text);
        }
    }

    #[test]
    fn ticks_are_round_and_few() {
        for span in [1, 7, 999, 4_321_000, 1_999_999_999, 3_600_000_000_000, u64::MAX] {
            for most in [0, 1, 4, 10] {
                let ticks = Ticks::new(span, most);
                let count = ticks.places(span).count();
                assert!(count <= most.max(1) + 1, "{span} {most}: {count}");
                assert!(span < 1_000 || count > most / 3, "{span} {most}: {count}");
            }
        }
    }

    #[test]
    fn labels_do_not_repeat() {
        let ticks = Ticks::new(2_000_000_000, 4);
        let labels: Vec<_> = ticks.places(2_000_000_000).map(|at| ticks.label(at)).collect();
        assert_eq!(labels, ["0.0", "0.5", "1.0", "1.5", "2.0"]);
        assert_eq!(ticks.unit, "s");
    }

    #[test]
    fn large_numbers_are_short() {
        assert_eq!([999.0, 45_600.0, 2_345_678.0].map(thousands), ["999", "45.6 k", "2.35 M"]);
    }
}
