//! Compares two reports of density.

use super::table::mib;
use super::{Burst, DensityReport, Quantity, Series};
use crate::compare::{time_row, time_table};
use crate::duration::human;

/// Formats what one sandbox more takes in both reports, and a row for each kind of start that both
/// have, with the mean time of one. A difference of times counts as real if it exceeds half the
/// 99 % confidence interval of the means' difference (Welch).
pub fn compare_density(before: &DensityReport, now: &DensityReport) -> String {
    let mut text = String::new();
    let mut rows = Vec::new();
    let both = [
        ("sandbox", &before.sandboxes, &now.sandboxes),
        ("replica", &before.replicas, &now.replicas),
    ];
    for (name, before, now) in both {
        text.push_str(&lines(name, before, now));
        for point in &now.points {
            for burst in &point.bursts {
                let was = found(before, point.count, burst.at_once).map(times).unwrap_or_default();
                let title = format!("{name}: {} there, {} more", point.count, burst.at_once);
                rows.extend(time_row(title, &was, &times(burst), |ns| human(ns as u64)));
            }
        }
    }
    text + &time_table(&rows)
}

/// Formats what one more takes in both series, if both have a line.
fn lines(name: &str, before: &Series, now: &Series) -> String {
    let mut text = String::new();
    for quantity in [Quantity::Pss, Quantity::Private, Quantity::Host] {
        let (Some(was), Some(is)) = (before.line(quantity), now.line(quantity)) else { continue };
        let (was, is) = (mib(was.slope), mib(is.slope));
        let what = quantity.name();
        text.push_str(&format!("one {name} more, {what}: {was} MiB before, {is} MiB now\n"));
    }
    text
}

fn found(series: &Series, count: u32, at_once: u32) -> Option<&Burst> {
    let point = series.points.iter().find(|point| point.count == count)?;
    point.bursts.iter().find(|burst| burst.at_once == at_once)
}

fn times(burst: &Burst) -> Vec<f64> {
    burst.times().into_iter().map(|ns| ns as f64).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::density::report::tests::report;

    #[test]
    fn memory_and_starts_of_both_reports_are_compared() {
        let before = report(&[1, 2, 4], &[]);
        let mut now = report(&[1, 2], &[0, 1]);
        now.sandboxes.points[1].taken.vmms.private *= 2;
        let text = compare_density(&before, &now);
        assert!(text.contains("one sandbox more, PSS: 11.00 MiB before, 11.00 MiB now"), "{text}");
        assert!(text.contains("private: 10.00 MiB before, 28.00 MiB now"), "{text}");
        let starts = text.lines().filter(|line| line.contains(" there, ")).count();
        assert_eq!(starts, 4, "{text}");
        assert!(!text.contains("replica"), "{text}");
        assert!(compare_density(&report(&[8], &[]), &now).contains("nothing in common"));
    }
}
