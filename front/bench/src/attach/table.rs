//! Formats a report of attachments as tables for a terminal.

use super::report::ALL;
use super::{AttachLoad, AttachReport};
use crate::duration::human;

/// FastIOV's figures (figure 11 with section 6.2, table 1).
const PAPER: &str = "\
FastIOV, as published: 200 whole starts at once, on average
  with one lock 21.8 %, with a lock for each VF 65.7 % below those of VFIO (figure 11): 2.28 to 1
  the opening of VFs by VFIO has 48.1 % of the time of a start, and 59.0 % at p99 (table 1)
";

/// Formats one table for each load of `report`: medians over rounds, a row for each subject, then
/// how the subjects compare. Headings are bold if `colour`.
pub fn attach_table(report: &AttachReport, colour: bool) -> String {
    let below = |load: &AttachLoad| {
        let AttachLoad { owners, reset_ms, .. } = load;
        let said = format!(
            "{owners} owners at once; a wait of {reset_ms} ms stands for a function-level reset.\n"
        );
        said + &compared(report, load)
    };
    report.figure_tables(colour, below) + PAPER + &report.foot()
}

/// Formats the two comparisons that matter, of those subjects that were measured.
fn compared(report: &AttachReport, load: &AttachLoad) -> String {
    let all = |subject| report.over_rounds(load, subject, &ALL).map(|one| one.median);
    let (one, each, pool) = (all("one-lock"), all("vf-locks"), all("pool"));
    let mut text = String::new();
    if let (Some(one), Some(each)) = (one, each) {
        let part = one / each.max(1.0);
        text.push_str(&format!(
            "A lock for each VF takes 1/{part:.1} of the time with one lock.\n"
        ));
    }
    if let (Some(each), Some(pool)) = (each, pool) {
        let (word, less) = if pool <= each { ("less", each - pool) } else { ("more", pool - each) };
        let less = human(less as u64);
        text.push_str(&format!("The pool takes {less} {word} than a lock for each VF.\n"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attach::report::tests::report;
    use crate::table::BOLD;

    #[test]
    fn rows_are_subjects_and_the_comparisons_are_said() {
        let all = [("one-lock", &[20_000][..]), ("vf-locks", &[200]), ("pool", &[10])];
        let text = attach_table(&report(&all), false);
        let line = |name: &str| text.lines().find(|line| line.starts_with(name)).unwrap();
        assert!(line("one-lock").contains("20.0 s"), "{text}");
        assert!(line("pool").contains("10.0 ms") && line("pool").ends_with("50.0 ms"), "{text}");
        assert!(text.contains("takes 1/100.0 of the time"), "{text}");
        assert!(text.contains("The pool takes 190 ms less"), "{text}");
        assert!(line("FastIOV").contains("200 whole starts"), "{text}");
        assert!(text.contains("pool: <&>") && text.contains("200 owners at once"), "{text}");
        let slow = attach_table(&report(&[("vf-locks", &[10]), ("pool", &[200])]), true);
        assert!(slow.contains("190 ms more") && slow.contains(BOLD), "{slow}");
    }
}
