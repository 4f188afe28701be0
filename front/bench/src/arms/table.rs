//! Formats a report of starts by several ways for a terminal.

use super::arm::published;
use super::plot::growing;
use super::report::{MEAN, P99, SINGLES};
use super::{Arm, ArmsReport, Point};
use crate::curves::Over;
use crate::figure::time;
use crate::line::Line;
use crate::table::{table, titled};

/// Times of whole starts with 200 at once, on the papers' machines.
const PAPERS: &str = "\
200 at once, as published:
  FastIOV: 16.2 s on average with VFIO before it (section 5), 4.0 s without a network (computed)
  FastIOV's stages with VFIO, of the average (table 1): cgroup 2.9 %, dma-ram 13.0 %,
    virtiofs 13.3 %, dma-image 5.6 %, vfio-dev 48.1 %, vf-driver 3.4 %
  RunD-V, until all run (figure 13a): 1 s; Kata with templates 2.98 s, with QEMU 6.85 s, with
    Firecracker 47.6 s
";

/// Formats for each load the figures of each way, their ratios to starts without a network beside
/// the paper's, and those of single starts; then the stages of each way, or with several loads how
/// times grow. Headings are bold if `colour`.
pub fn arms_table(report: &ArmsReport, colour: bool) -> String {
    let below = |load: &Point| {
        let title = format!("{load}, and singly");
        let is_single = report.runs.iter().any(|run| run.measured.singles.is_some());
        let singles: &[_] = if is_single { &SINGLES } else { &[] };
        ratios(report, load, colour) + &report.medians(&title, load, singles, colour)
    };
    let text = report.figure_tables(colour, below) + &footnote(report) + &report.foot() + PAPERS;
    match report.plan.loads.as_slice() {
        [load] => text + &stages(report, load, colour),
        _ => text + &growth(report, colour),
    }
}

/// Formats the ratios of figures to those of starts without a network, with the paper's below.
fn ratios(report: &ArmsReport, load: &Point, colour: bool) -> String {
    let show = |ratio: f64| format!("{ratio:.2}");
    let own = |name: &String| {
        let ratio = |figure| Some(show(report.to_none(load, name, figure)?.median));
        Some([name.clone(), ratio(&MEAN)?, ratio(&P99)?])
    };
    let mut rows = report.rows(own);
    for one in published(&report.arms()) {
        let p99 = one.p99.map_or_else(|| "-".to_owned(), show);
        rows.push([one.name.to_owned(), show(one.mean), p99]);
    }
    titled("to none", &["", "mean", "p99"], &rows, colour)
}

/// Formats the stages of each way.
fn stages(report: &ArmsReport, load: &Point, colour: bool) -> String {
    let stages = |name: &String| {
        let stages = table(&report.stages(load, name), colour);
        (!stages.is_empty()).then(|| format!("\nstages of {name}:\n{stages}"))
    };
    report.rows(stages).concat()
}

/// Formats how the mean time of each way grows with the number of sandboxes, and with their memory,
/// as far as there are several. The text is empty if there is one of both.
fn growth(report: &ArmsReport, colour: bool) -> String {
    let table = |over: &Over<Point>| {
        let row = |name: &String| {
            let points = report.medians_over(over, name, &MEAN);
            let points: Vec<_> = points.iter().map(|point| (point.at, point.value)).collect();
            let (first, last) = (points.first()?, points.last()?);
            let line = Line::through(&points)?;
            let slope = if line.slope < 0.0 { "less".to_owned() } else { time(line.slope) };
            let ratio = format!("{:.2}", last.1 / first.1.max(1.0));
            let [from, to] = [first, last].map(|point| format!("{}: {}", point.0, time(point.1)));
            Some([name.clone(), from, to, ratio, slope])
        };
        let title = format!("mean time over {}{}", over.name, over.with);
        let headings = ["", "from", "to", "ratio", "for each more"];
        format!("\n{}", titled(&title, &headings, &report.rows(row), colour))
    };
    growing(report).iter().map(table).collect()
}

/// Returns the lines that say what the figures are of.
fn footnote(report: &ArmsReport) -> String {
    let hollow = if report.is_hollow() {
        "hollow sandboxes: no guest code runs; functions are driven by Slipway's own drivers\n"
    } else {
        ""
    };
    let has_none = report.arms().contains(&Arm::None);
    let ratios = if has_none { "; ratios are medians of the rounds" } else { "" };
    let network = match report.extra.waits {
        true => "a container begins when its interface has sent a frame",
        false => "the network comes up beside the container, as in FastIOV",
    };
    let volumes = match report.extra.volumes {
        0 => String::new(),
        1 => "each with a volume\n".to_owned(),
        more => format!("each with {more} volumes\n"),
    };
    let rounds = report.plan.rounds;
    format!("{hollow}{network}\n{volumes}{rounds} rounds, the ways in turn{ratios}\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arms::Singles;
    use crate::arms::report::tests::{POINT, report, report_of};
    use crate::turns::Fault;

    #[test]
    fn figures_are_beside_the_papers() {
        let none = (Arm::None, &[[100, 100], [200, 200]][..]);
        let report = report(&[none, (Arm::Slipway, &[[100, 140], [240, 280]])]);
        let text = arms_table(&report, false);
        let line = |name: &str| text.lines().find(|line| line.starts_with(name)).unwrap();
        let ends = |end: [&str; 2]| {
            let has_end = |line: &str| line.split_whitespace().rev().take(2).eq(end);
            text.lines().any(has_end)
        };
        assert!(ends(["1.40", "1.25"]) && ends(["1.12", "1.39"]), "{text}");
        assert!(line("slipway ").contains("190 ns"), "{text}");
        assert!(line("hollow sandboxes").contains("no guest code"), "{text}");
        assert!(text.contains("rounds, the ways in turn; ratios"), "{text}");
        assert!(text.contains("none: no network\n"), "{text}");
        assert!(text.contains("stages of slipway:\nstage"), "{text}");
        assert!(text.contains("(table 1): cgroup 2.9 %"), "{text}");
        assert!(!text.contains("singly"), "{text}");
        assert!(!arms_table(&report, true).contains("pool:"));
    }

    #[test]
    fn several_numbers_of_sandboxes_have_a_table_each_and_their_growth() {
        let none = (Arm::None, &[[100, 100], [100, 100]][..]);
        let arms = [none, (Arm::Macvtap, &[[200, 200], [200, 200]][..])];
        let both = report_of(&[POINT, Point { count: 4, ..POINT }], &arms);
        let text = arms_table(&both, false);
        let lines = |start: &str| text.lines().filter(|line| line.starts_with(start)).count();
        assert_eq!((lines("2 at once"), lines("4 at once")), (1, 1), "{text}");
        // Figures and ratios of both loads, and the growth.
        assert_eq!((lines("IPvtap, as published"), lines("macvtap ")), (2, 5), "{text}");
        let growth = text.lines().find(|line| line.contains("for each more")).unwrap();
        assert!(growth.starts_with("mean time over sandboxes at once"), "{text}");
        let last = text.lines().last().unwrap();
        assert!(last.contains("2: 200 ns") && last.contains("4: 400 ns"), "{text}");
        assert!(last.contains("2.00") && last.ends_with("100 ns"), "{text}");
    }

    #[test]
    fn volumes_single_starts_and_void_turns_are_told() {
        let mut report = report(&[(Arm::Pool, &[[100, 100], [200, 200]])]);
        assert!(!arms_table(&report, false).contains("volume"));
        report.extra.volumes = 2;
        report.runs[0].measured.singles = Some(Singles { times_ns: vec![50], busy_ns: 100 });
        report.faults.push(Fault {
            subject: "pool".into(),
            load: POINT.to_string(),
            round: 0,
            reason: "stolen".into(),
            failed: false,
        });
        let text = arms_table(&report, false);
        assert!(text.contains("each with 2 volumes\n"), "{text}");
        assert!(text.contains("2 at once, and singly"), "{text}");
        assert!(text.contains("VOID: 1 turn on a busy machine, first pool with 2 at"), "{text}");
    }
}
