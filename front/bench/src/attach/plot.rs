//! Draws a report of attachments.

use anyhow::Result;

use super::AttachReport;
use crate::groups::{Group, groups};

/// The mean times of 200 whole starts with one lock and with a lock for each VF, over the latter:
/// 21.8 % and 65.7 % less than before (FastIOV, figure 11 with section 6.2).
static PAPER: [(&str, f64); 2] = [("one-lock", (1.0 - 0.218) / (1.0 - 0.657)), ("vf-locks", 1.0)];

/// Draws `report`: for each load the time until all owners had their VFs and the time of one owner,
/// with a bar for each subject, and below them FastIOV's whole starts.
///
/// # Errors
/// If nothing was measured.
pub fn attach_plot(report: &AttachReport, title: &str) -> Result<String> {
    let bars = report.plan.loads.iter().flat_map(|load| report.groups(load));
    groups(title, bars.chain([of_paper(report)]))
}

/// Returns bars for the subjects that were measured and are in the paper.
fn of_paper(report: &AttachReport) -> Group {
    let name = "FastIOV's paper (figure 11): 200 whole starts, over those with a lock for each VF";
    Group::of(name.to_owned(), false, &report.subjects, |one| {
        report.runs.iter().find(|run| run.subject == one)?;
        let (_, ratio) = PAPER.iter().find(|(name, _)| *name == one)?;
        Some((*ratio, (*ratio, *ratio), format!("{ratio:.2}")))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attach::report::tests::report;
    use crate::pictures::fair;

    #[test]
    fn every_subject_is_drawn() {
        let text = attach_plot(&report(&[("pool", &[4]), ("<one>", &[8])]), "a & b").unwrap();
        fair(&text).unwrap();
        for part in ["pool", "&lt;one&gt;", "a &amp; b", "n200-1024k-100ms", "8.00 ms"] {
            assert!(text.contains(part), "{part}");
        }
        assert_eq!(text.matches("less is better").count(), 2);
        let locks = attach_plot(&report(&[("one-lock", &[4]), ("vf-locks", &[1])]), "x").unwrap();
        assert!(locks.contains("FastIOV&apos;s paper") && locks.contains("2.28"), "{locks}");
        assert!(attach_plot(&report(&[]), "x").is_err());
    }
}
