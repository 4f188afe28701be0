//! Formats a report of functions as tables for a terminal.

use super::FunctionReport;

/// The words of RunD-V about its figures 16 and 17 (sections IX.E and F).
const PAPER: &str = "\
RunD-V, as published, beside horizontal scaling alone:
  24 requests wait 57.9 % less where few sandboxes are there (figure 16a)
  memory is at least 40 % lower where fewer than 4 sandboxes are there (figure 16b)
  24 and 32 requests take about as long as 8 and 16 do (figure 17a)
  a function has about 1/8 of the memory, with 8 replicas in a sandbox (figure 17b)
";

/// Formats one table for each load of `report`: medians over rounds, a row for each subject, a
/// newline at the end. Headings are bold if `colour`.
pub fn function_table(report: &FunctionReport, colour: bool) -> String {
    let mut text = report.figure_tables(colour, |_| String::new());
    text.push_str(
        "p50, p99: of a request; all: until the last answer; of the first: p50 in relation to the \
         first row; VMMs: PSS with guests, after the burst; host: decrease of MemAvailable\n",
    );
    text.push_str(PAPER);
    text + &report.foot()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::function::report::tests::report;
    use crate::table::BOLD;

    #[test]
    fn rows_are_subjects_beside_the_papers_words() {
        let report = report(&["s4-q24"], &[("horizontal", &[10]), ("both", &[5])]);
        let text = function_table(&report, false);
        let line = |name: &str| text.lines().find(|line| line.starts_with(name)).unwrap();
        for part in ["5.00 ms", "10.0 ms", "15.0 ms", "0.500", " 7 ", " 2 ", " 100 ", "120"] {
            assert!(line("both ").contains(part), "{part}: {text}");
        }
        assert!(line("horizontal ").contains("1.000"), "{text}");
        assert!(text.contains("57.9 %") && text.contains("both: <&>"), "{text}");
        assert!(function_table(&report, true).contains(BOLD));
    }
}
