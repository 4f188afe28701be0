//! Formats a report of starts by several ways for a terminal.

use std::fmt::Write;

use super::{Arm, ArmsReport};
use crate::duration::human;
use crate::table::{table, titled};

/// The headings; the first is replaced by the number of sandboxes.
const HEADINGS: [&str; 8] =
    ["", "mean", "least, most", "p50", "p99", "functions", "CPU each", "to none: mean, p99"];

/// The ratios of FastIOV's figures to those of starts without a network (section 6.2): the mean,
/// and the 99th percentile.
const PAPER: [(&str, f64, f64); 2] =
    [("FastIOV, as published", 1.391, 1.116), ("VFIO before it", 4.052, 4.545)];

/// Formats the figures of each way, then the stages of each. Headings are bold if `colour`.
pub fn arms_table(report: &ArmsReport, colour: bool) -> String {
    let mut rows: Vec<[String; 8]> = Vec::new();
    for arm in &report.arms {
        let Some(one) = report.figures(*arm) else { continue };
        let ratios = match (one.mean_ratio, one.p99_ratio) {
            (Some(mean), Some(p99)) => format!("{mean:.2}, {p99:.2}"),
            _ => String::new(),
        };
        rows.push([
            arm.name().to_owned(),
            human(one.mean_ns),
            format!("{}, {}", human(one.mean_range_ns.0), human(one.mean_range_ns.1)),
            human(one.p50_ns),
            human(one.p99_ns),
            human(one.functions_ns),
            human(one.busy_ns),
            ratios,
        ]);
    }
    for (name, mean, p99) in PAPER {
        let empty = String::new;
        let ratios = format!("{mean:.2}, {p99:.2}");
        let [a, b, c, d, e, f] = std::array::from_fn(|_| empty());
        rows.push([name.to_owned(), a, b, c, d, e, f, ratios]);
    }
    let title = format!("{} at once", report.count);
    let mut text = titled(&title, &HEADINGS, &rows, colour);
    text.push_str(&footnote(report));
    for arm in &report.arms {
        let stages = table(&report.stages(*arm), colour);
        if !stages.is_empty() {
            let _ = write!(text, "\n{}: {}\n{stages}", arm.name(), arm.about());
        }
    }
    text
}

/// Returns the lines that say what the figures are of.
pub(super) fn footnote(report: &ArmsReport) -> String {
    let hollow = if report.is_hollow() {
        "hollow sandboxes: no guest code runs; functions are driven by Slipway's own drivers\n"
    } else {
        ""
    };
    let rounds = report.rounds.iter().map(|one| one.round + 1).max().unwrap_or(0);
    let has_none = report.arms.contains(&Arm::None);
    let ratios = if has_none { "; ratios are medians of the rounds" } else { "" };
    let network = match report.waits {
        true => "a container begins when its interface has sent a frame",
        false => "the network comes up beside the container, as in FastIOV",
    };
    format!("{hollow}{network}\n{rounds} rounds, the ways in turn{ratios}\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arms::report::tests::report;

    #[test]
    fn figures_are_beside_the_papers() {
        let none = (Arm::None, [[100, 100], [200, 200]]);
        let report = report(&[none, (Arm::Slipway, [[100, 140], [240, 280]])]);
        let text = arms_table(&report, false);
        let line = |name: &str| text.lines().find(|line| line.starts_with(name)).unwrap();
        assert!(line("slipway").ends_with("1.25, 1.40"), "{text}");
        assert!(line("FastIOV").ends_with("1.39, 1.12"), "{text}");
        assert!(line("hollow sandboxes").contains("no guest code"), "{text}");
        assert!(text.contains("2 rounds, the ways in turn"), "{text}");
        assert!(text.contains("none: no network\n"), "{text}");
        assert!(!arms_table(&report, true).contains("pool:"));
    }
}
