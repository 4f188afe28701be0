//! Compares two reports of attachments.

use super::{AttachLoad, AttachReport};
use crate::compare::{mean, rate_verdict, welch_half_width};
use crate::duration::human;
use crate::table::grid;

const HEADINGS: [&str; 6] = ["load, subject", "before", "now", "speed", "noise", ""];

/// Formats a row for each load and subject that both reports have, with the mean time until all
/// owners had their VFs. A difference counts as real if it exceeds half the 99 % confidence
/// interval of the means' difference (Welch).
pub fn compare_attaches(before: &AttachReport, now: &AttachReport) -> String {
    let mut rows = Vec::new();
    for load in &now.plan.loads {
        for subject in &now.subjects {
            rows.extend(row(before, now, load, &subject.name));
        }
    }
    if rows.is_empty() {
        return "The reports have nothing in common.\n".to_owned();
    }
    grid(&HEADINGS, &rows, |_, line| line)
}

fn row(
    before: &AttachReport,
    now: &AttachReport,
    load: &AttachLoad,
    subject: &str,
) -> Option<[String; 6]> {
    let times = |report: &AttachReport| -> Vec<f64> {
        report.turns(load, subject).map(|one| one.all_ns as f64).collect()
    };
    let (old, new) = (times(before), times(now));
    if old.is_empty() || new.is_empty() {
        return None;
    }
    let (was, is) = (mean(&old).max(1.0), mean(&new).max(1.0));
    // Relative to the later mean, as the speed is.
    let noise = welch_half_width(&old, &new).map(|half| half / is);
    let rounds = if noise.is_some() { old.len().min(new.len()) } else { 0 };
    let verdict = rate_verdict(was / is, noise.unwrap_or(0.0), rounds);
    let name = format!("{load} {subject}");
    let (before, now) = (human(was as u64), human(is as u64));
    let noise = noise.map_or("?".to_owned(), |noise| format!("±{noise:.2}"));
    Some([name, before, now, format!("{:.2}", was / is), noise, verdict.to_owned()])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attach::report::tests::report;

    #[test]
    fn differences_are_told_from_noise() {
        let before = report(&[("pool", &[100, 101, 102]), ("vf-locks", &[100, 150, 200])]);
        let now = report(&[("pool", &[50, 51, 52]), ("vf-locks", &[90, 140, 190])]);
        let ends = |text: &str, name: &str, end: &str| {
            let line = text.lines().find(|line| line.contains(name)).unwrap();
            assert!(line.ends_with(end), "{text}");
        };
        let text = compare_attaches(&before, &now);
        ends(&text, "pool", "faster");
        ends(&text, "vf-locks", "noise");
        ends(&compare_attaches(&now, &before), "pool", "slower");
        ends(&compare_attaches(&report(&[("pool", &[9])]), &now), "pool", "needs three rounds");
        assert!(compare_attaches(&report(&[]), &now).contains("nothing in common"));
    }
}
