//! Draws a report of VMMs.

use anyhow::Result;

use super::table::memory;
use super::{VmmFigures, VmmLoad, VmmReport};
use crate::duration::human;
use crate::groups::{self, Group, Shown};

/// Draws `report`: for each load the time to the guest's first byte, the processor time until then
/// and the private memory of the process, with a bar for each subject.
///
/// # Errors
/// If nothing was measured.
pub fn vmm_plot(report: &VmmReport, title: &str) -> Result<String> {
    let of_load = |load: &VmmLoad| {
        let figures = |one: &str| report.figures(load, one);
        Group::of_load(
            load,
            &report.subjects,
            figures,
            [
                ("from start to the guest's first byte", time),
                ("processor time until then", processor),
                ("private memory of the process, guest memory left out", private),
            ],
        )
    };
    groups::groups(title, report.plan.loads.iter().flat_map(of_load))
}

fn time(figures: &VmmFigures) -> Option<Shown> {
    let VmmFigures { p50_ns, p90_ns, range_ns, .. } = *figures;
    let (length, range, text) = groups::time(p50_ns, range_ns);
    Some((length, range, format!("{text}, p90 {}", human(p90_ns))))
}

fn processor(figures: &VmmFigures) -> Option<Shown> {
    Some(groups::time(figures.cpu_ns?, figures.cpu_range_ns))
}

fn private(figures: &VmmFigures) -> Option<Shown> {
    let bytes = figures.private_bytes? as f64;
    let (least, most) = figures.private_range;
    Some((bytes, (least as f64, most as f64), memory(figures)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pictures::fair;
    use crate::vmm::report::tests::report;

    #[test]
    fn every_subject_is_drawn() {
        let text = vmm_plot(&report(&[("bare", &[4]), ("<native>", &[8])]), "a & b").unwrap();
        fair(&text).unwrap();
        for part in ["bare", "&lt;native&gt;", "a &amp; b", "128M", "8.00 ms", "1.50 MiB"] {
            assert!(text.contains(part), "{part}");
        }
        assert_eq!(text.matches("less is better").count(), 3);
        assert!(vmm_plot(&report(&[]), "x").is_err());
    }
}
