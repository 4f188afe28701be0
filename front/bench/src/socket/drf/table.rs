//! Formats a report of shares as tables for a terminal.

use super::report::{change, error, percent};
use super::{DrfCase, DrfLoad, DrfMeasured, DrfReport};
use crate::measurement::Measured;
use crate::table::titled;

/// Bytes per second of one unit of the slides.
const UNIT: f64 = super::mix::UNIT;

/// Formats the slides' example tenant by tenant, then the errors of mixes and floods, the greatest
/// first, and the greatest of each kind. Headings are bold if `colour`.
pub fn drf_table(report: &DrfReport, colour: bool) -> String {
    let mut text = String::new();
    for case in report.cases().filter(|case| case.name == "talk") {
        let names = ["", "executors", "measured", "formula", "script", "off"];
        text += &titled("the slides' example (MB/s)", &names, &tenants(case), colour);
        text.push('\n');
    }
    let mut mixes: Vec<&DrfCase> =
        report.cases().filter(|case| case.name.starts_with("mix")).collect();
    mixes.sort_by(|a, b| error(b).total_cmp(&error(a)));
    let rows: Vec<[String; 4]> = mixes.iter().take(5).map(|case| row(case, error(case))).collect();
    if !rows.is_empty() {
        let title = format!(
            "{} random mixes, the five farthest from {}",
            mixes.len(),
            if mixes[0].script.is_some() { "the script" } else { "the formula (no python3)" }
        );
        text += &titled(&title, &["", "tenants", "executors", "at most off"], &rows, colour);
        text.push('\n');
    }
    let floods = report.cases().filter(|case| case.quiet.is_some());
    let rows: Vec<[String; 4]> = floods.map(|case| row(case, change(case))).collect();
    if !rows.is_empty() {
        let title = "one floods: 64 streams in place of one";
        let names = ["", "tenants", "executors", "others' change, at most"];
        text += &titled(title, &names, &rows, colour);
        text.push('\n');
    }
    // There is one round of one subject: no spread, and nothing to be a ratio to.
    let greatest = |load: &DrfLoad| {
        report.medians(&format!("at most, of {load}"), load, DrfMeasured::figures(load), colour)
    };
    text + &report.plan.loads.iter().map(greatest).collect::<String>() + "\n" + &report.foot()
}

fn tenants(case: &DrfCase) -> Vec<[String; 6]> {
    let mega = |rate: f64| format!("{:.2}", rate / UNIT);
    let tenants = case.mix.tenants.iter().enumerate();
    let row = |(at, tenant): (usize, &super::DrfTenant)| {
        let names = tenant.executors.iter().map(|one| case.mix.executors[*one].name.as_str());
        [
            char::from(b'A' + (at % 26) as u8).to_string(),
            names.collect::<Vec<_>>().join(" + "),
            mega(case.measured[at]),
            mega(case.formula[at]),
            case.script.as_ref().map_or("-".into(), |script| mega(script[at])),
            format!("{:+.2} %", (case.measured[at] / case.expected()[at] - 1.0) * 100.0),
        ]
    };
    tenants.map(row).collect()
}

fn row(case: &DrfCase, off: f64) -> [String; 4] {
    let (tenants, executors) = (case.mix.tenants.len(), case.mix.executors.len());
    [case.name.clone(), tenants.to_string(), executors.to_string(), percent(off)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn measured_formula_and_error_are_there() {
        let text = drf_table(&super::super::report::tests::report(), false);
        for word in
            ["37.88", "37.50", "62.50", "+1.00 %", "-1.00 %", "crypto + transport", "3.12 %"]
        {
            assert!(text.contains(word), "{word}: {text}");
        }
        let greatest = text.lines().skip_while(|line| !line.starts_with("at most, of 6 mixes"));
        let words: Vec<_> = greatest.skip(1).take(1).flat_map(str::split_whitespace).collect();
        assert_eq!(words, ["executors", "1.00", "%", "1.00", "%", "3.12", "%"], "{text}");
        assert!(!text.contains("VOID"), "{text}");
    }

    #[test]
    fn a_busy_machine_makes_shares_void() {
        let mut report = super::super::report::tests::report();
        report.faults.push(crate::Fault {
            subject: "executors".into(),
            load: "6 mixes, 2 floods".into(),
            round: 0,
            reason: "others used 50 % of the processors meanwhile".into(),
            failed: false,
        });
        let text = drf_table(&report, false);
        assert!(text.contains("VOID: 1 turn on a busy machine, first executors with 6"), "{text}");
    }
}
