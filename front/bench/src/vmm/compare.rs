//! Compares two reports of VMMs.

use super::{VmmLoad, VmmReport};
use crate::compare::{mean, rate_verdict, welch_half_width};
use crate::duration::human;
use crate::table::grid;

const HEADINGS: [&str; 6] = ["memory, subject", "before", "now", "speed", "noise", ""];

/// Formats a row for each load and subject that both reports have, with the mean time to the
/// guest's byte. A difference counts as real if it exceeds half the 99 % confidence interval of the
/// means' difference (Welch).
pub fn compare_vmms(before: &VmmReport, now: &VmmReport) -> String {
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

fn row(before: &VmmReport, now: &VmmReport, load: &VmmLoad, subject: &str) -> Option<[String; 6]> {
    let times = |report: &VmmReport| -> Vec<f64> {
        report.turns(load, subject).map(|one| one.byte_ns as f64).collect()
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
    let noise = noise.map_or("?".to_owned(), |noise| format!("±{:.2}", noise));
    Some([name, before, now, format!("{:.2}", was / is), noise, verdict.to_owned()])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vmm::report::tests::report;

    #[test]
    fn differences_are_told_from_noise() {
        let before = report(&[("native", &[100, 101, 102]), ("bare", &[100, 150, 200])]);
        let now = report(&[("native", &[50, 51, 52]), ("bare", &[90, 140, 190])]);
        let line = |text: &str, name: &str| {
            text.lines().find(|line| line.contains(name)).unwrap().to_owned()
        };
        let text = compare_vmms(&before, &now);
        assert!(line(&text, "native").ends_with("faster"), "{text}");
        assert!(line(&text, "bare").ends_with("noise"), "{text}");
        let back = compare_vmms(&now, &before);
        assert!(line(&back, "native").ends_with("slower"), "{back}");
        let few = compare_vmms(&report(&[("native", &[9])]), &now);
        assert!(line(&few, "native").ends_with("needs three rounds"), "{few}");
        assert!(compare_vmms(&report(&[]), &now).contains("nothing in common"));
    }
}
