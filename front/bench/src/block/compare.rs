//! Compares two reports of disks.

use super::measure::{BlockFigure, IOPS, P99};
use super::{BlockReport, RocksJob, Run, Workload};
use crate::compare::{LEAST_ROUNDS, Verdict, mean, welch_half_width};
use crate::duration::{human, thousands};
use crate::table::{BOLD, PLAIN, grid};

/// The subject whose speed depends on the machine alone.
const FLOOR: &str = "bare";

/// One figure of one subject with one load, in both reports.
#[derive(Clone, Debug, PartialEq)]
pub struct FigureComparison {
    /// The load's name.
    pub workload: String,
    /// The subject's name.
    pub subject: String,
    /// `IOPS`, `p99` or, for RocksDB, `ops/s`.
    pub figure: &'static str,
    /// Mean over the rounds of the first report.
    pub before: f64,
    /// Mean over the rounds of the second report.
    pub after: f64,
    /// The relative difference of the second mean from the first: 0.1 is 10 % more. The machine's
    /// own drift is taken out where both reports have a floor.
    pub change: f64,
    /// The largest change that chance alone explains: half the 99 % confidence interval (Welch).
    pub noise: Option<f64>,
    /// The conclusion.
    pub verdict: Verdict,
}

/// The comparison of two reports.
#[derive(Clone, Debug, PartialEq)]
pub struct BlockComparison {
    /// The comparisons, figure by figure.
    pub figures: Vec<FigureComparison>,
    /// Reasons why the reports may not be comparable, as sentences.
    pub warnings: Vec<String>,
}

/// Compares `before` with `after`, for each subject and load that both have.
///
/// Machines drift by more between two runs than programs differ. So if both reports measured the
/// bare queue pair, too, each turn counts as a multiple of the floor's turn in the same round, and
/// drift that both share cancels out. A change is real if it is larger than the noise.
pub fn compare_blocks(before: &BlockReport, after: &BlockReport) -> BlockComparison {
    let mut figures = Vec::new();
    for workload in &after.plan.loads {
        for subject in &after.subjects {
            for figure in [&IOPS, &P99] {
                figures.extend(compared(before, after, workload, &subject.name, figure));
            }
        }
    }
    for job in after.extra.rocksdb.iter().flat_map(|rocksdb| rocksdb.plan.jobs()) {
        for subject in &after.subjects {
            figures.extend(compared_rocksdb(before, after, job, &subject.name));
        }
    }
    BlockComparison { figures, warnings: warnings(before, after) }
}

fn compared_rocksdb(
    before: &BlockReport,
    after: &BlockReport,
    job: RocksJob,
    subject: &str,
) -> Option<FigureComparison> {
    let rates = |report: &BlockReport| -> Option<Vec<f64>> {
        let turns = report.extra.rocksdb.as_ref()?.turns(job, subject);
        Some(turns.map(|run| run.measured.rate()).collect())
    };
    let (a, b) = (rates(before)?, rates(after)?);
    if a.is_empty() || b.is_empty() {
        return None;
    }
    let (change, noise, verdict) = judged(&a, &b, true);
    Some(FigureComparison {
        workload: job.to_string(),
        subject: subject.to_owned(),
        figure: "ops/s",
        before: mean(&a),
        after: mean(&b),
        change,
        noise,
        verdict,
    })
}

/// Returns the relative difference of `b` from `a`, the noise, and the conclusion.
fn judged(a: &[f64], b: &[f64], more_is_better: bool) -> (f64, Option<f64>, Verdict) {
    let scale = mean(a);
    let change = if scale > 0.0 { mean(b) / scale - 1.0 } else { 0.0 };
    let enough = a.len().min(b.len()) >= LEAST_ROUNDS && scale > 0.0;
    let noise = welch_half_width(a, b).filter(|_| enough).map(|noise| noise / scale);
    let better = (change > 0.0) == more_is_better;
    let verdict = match noise {
        None => Verdict::Unknown,
        Some(noise) if change.abs() <= noise => Verdict::WithinNoise,
        Some(_) if better => Verdict::Faster,
        Some(_) => Verdict::Slower,
    };
    (change, noise, verdict)
}

/// Returns the turns of a subject with a load, in the order of their rounds.
fn turns<'a>(
    report: &'a BlockReport,
    load: &'a Workload,
    subject: &'a str,
) -> impl Iterator<Item = &'a Run> {
    report.runs.iter().filter(move |run| run.subject == subject && run.load == *load)
}

fn compared(
    before: &BlockReport,
    after: &BlockReport,
    workload: &Workload,
    subject: &str,
    figure: &BlockFigure,
) -> Option<FigureComparison> {
    let plain = [before, after].map(|report| values(report, workload, subject, figure, false));
    if plain.iter().any(Vec::is_empty) {
        return None;
    }
    let floored = subject != FLOOR
        && [before, after].iter().all(|report| turns(report, workload, FLOOR).next().is_some());
    let [a, b] = [before, after].map(|report| values(report, workload, subject, figure, floored));
    let (change, noise, verdict) = judged(&a, &b, figure.more_is_better);
    let [before, after] = plain.map(|values| mean(&values));
    let (workload, subject) = (workload.to_string(), subject.to_owned());
    Some(FigureComparison {
        workload,
        subject,
        figure: figure.name,
        before,
        after,
        change,
        noise,
        verdict,
    })
}

/// Returns one value for each turn. With `floored`, the value is a multiple of the floor's in the
/// same round.
fn values(
    report: &BlockReport,
    workload: &Workload,
    subject: &str,
    figure: &BlockFigure,
    floored: bool,
) -> Vec<f64> {
    let of = |run: &Run| (figure.of)(workload, &run.measured);
    let value = |run: &Run| {
        let own = of(run)?;
        if !floored {
            return Some(own);
        }
        let floor = turns(report, workload, FLOOR).find(|floor| floor.round == run.round)?;
        Some(own / of(floor)?.max(f64::MIN_POSITIVE))
    };
    turns(report, workload, subject).filter_map(value).collect()
}

fn warnings(before: &BlockReport, after: &BlockReport) -> Vec<String> {
    let (a, b) = (&before.environment, &after.environment);
    let differ = |what: &str, before: &str, after: &str| {
        (before != after).then(|| format!("{what} differs: {before:?} against {after:?}"))
    };
    let found = [
        differ("the machine", &a.machine, &b.machine),
        differ("the host's kernel", &a.kernel, &b.kernel),
        differ("the accelerator", &a.accelerator, &b.accelerator),
        differ("the disk", &before.extra.disk, &after.extra.disk),
        (before.plan.time() != after.plan.time()).then(|| "turns were not equally long".to_owned()),
        (rocks_plan(before) != rocks_plan(after))
            .then(|| "RocksDB's keys, values or times differ".to_owned()),
        (before.plan.rounds.min(after.plan.rounds) < LEAST_ROUNDS as u32)
            .then(|| format!("fewer than {LEAST_ROUNDS} rounds: nobody knows the noise")),
    ];
    found.into_iter().flatten().collect()
}

/// Returns the settings that two reports on RocksDB must share to be comparable.
fn rocks_plan(report: &BlockReport) -> Option<(u64, u32, std::time::Duration)> {
    report.extra.rocksdb.as_ref().map(|rocksdb| {
        let plan = &rocksdb.plan;
        (plan.keys, plan.value_bytes, plan.time)
    })
}

impl BlockComparison {
    /// Formats the comparison as aligned text with the warnings below. Real differences are bold if
    /// `colour`.
    pub fn table(&self, colour: bool) -> String {
        let headings =
            ["workload", "subject", "figure", "before", "after", "change", "noise", "verdict"];
        let rows: Vec<[String; 8]> = self.figures.iter().map(FigureComparison::cells).collect();
        let mut text = grid(&headings, &rows, |row, line| {
            let real = row.is_some_and(|row| self.figures[row].is_real());
            if colour && real { format!("{BOLD}{line}{PLAIN}") } else { line }
        });
        text.push_str(&self.verdict());
        for warning in &self.warnings {
            text.push_str(&format!("note: {warning}\n"));
        }
        text
    }
}

impl BlockComparison {
    /// Returns a line that summarizes all figures. It claims nothing about figures without a known
    /// noise.
    fn verdict(&self) -> String {
        let known = self.figures.iter().filter(|figure| figure.noise.is_some()).count();
        let real = self.figures.iter().filter(|figure| figure.is_real()).count();
        match (real, known) {
            (0, 0) => "no difference can be told from noise\n".to_owned(),
            (0, _) => "no difference exceeds the noise\n".to_owned(),
            (real, known) => format!("{real} of {known} differences exceed the noise\n"),
        }
    }
}

impl FigureComparison {
    /// Returns whether the difference is more than noise.
    pub fn is_real(&self) -> bool {
        matches!(self.verdict, Verdict::Faster | Verdict::Slower)
    }

    fn cells(&self) -> [String; 8] {
        let value = |value: f64| match self.figure {
            "p99" => human(value.round() as u64),
            _ => thousands(value),
        };
        let verdict = match self.verdict {
            Verdict::Faster => "better",
            Verdict::Slower => "worse",
            Verdict::WithinNoise => "within noise",
            _ => "unknown",
        };
        [
            self.workload.clone(),
            self.subject.clone(),
            self.figure.to_owned(),
            value(self.before),
            value(self.after),
            format!("{:+.1} %", self.change * 100.0),
            self.noise.map_or_else(|| "?".to_owned(), |noise| format!("{:.1} %", noise * 100.0)),
            verdict.to_owned(),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::block::report::tests::report;

    fn verdicts(before: &BlockReport, after: &BlockReport, subject: &str) -> Vec<Verdict> {
        let compared = compare_blocks(before, after).figures;
        compared.iter().filter(|f| f.subject == subject).map(|f| f.verdict).collect()
    }

    #[test]
    fn a_report_does_not_differ_from_itself() {
        let one = report(&[("bare", &[100, 102, 101]), ("mapped", &[200, 210, 205])]);
        let compared = compare_blocks(&one, &one);
        assert_eq!(compared.figures.len(), 4);
        assert!(compared.figures.iter().all(|f| f.verdict == Verdict::WithinNoise));
        assert!(compared.table(false).contains("no difference exceeds the noise"));
    }

    #[test]
    fn without_a_noise_nobody_says_that_nothing_exceeds_it() {
        let one = report(&[("bare", &[100, 102]), ("mapped", &[200, 210])]);
        let compared = compare_blocks(&one, &one);
        assert!(compared.figures.iter().all(|f| f.verdict == Verdict::Unknown));
        let table = compared.table(false);
        assert!(table.contains("no difference can be told from noise"), "{table}");
        assert!(!table.contains("exceed"), "{table}");
    }

    #[test]
    fn more_than_the_noise_is_said() {
        let before = report(&[("mapped", &[200, 202, 201])]);
        let after = report(&[("mapped", &[150, 152, 151])]);
        assert_eq!(verdicts(&before, &after, "mapped"), [Verdict::Faster; 2]);
        assert_eq!(verdicts(&after, &before, "mapped"), [Verdict::Slower; 2]);
        assert!(compare_blocks(&before, &after).table(false).contains("better"));
    }

    #[test]
    fn what_the_machine_did_to_all_is_nobodys_merit() {
        let before = report(&[("bare", &[100, 102, 104]), ("mapped", &[200, 210, 208])]);
        let after = report(&[("bare", &[150, 153, 156]), ("mapped", &[300, 315, 312])]);
        assert_eq!(verdicts(&before, &after, "mapped"), [Verdict::WithinNoise; 2]);
        assert_eq!(verdicts(&before, &after, "bare"), [Verdict::Slower; 2]);
    }

    #[test]
    fn rocksdb_is_compared_as_well() {
        let one = crate::block::report::tests::with_rocksdb();
        let compared = compare_blocks(&one, &one);
        assert_eq!(compared.figures.len(), 2);
        assert!(compared.figures.iter().all(|f| f.figure == "ops/s" && f.change == 0.0));
        let mut other = one.clone();
        other.extra.rocksdb.as_mut().unwrap().plan.keys = 2;
        let warnings = compare_blocks(&one, &other).warnings;
        assert!(warnings.iter().any(|warning| warning.contains("RocksDB's keys")), "{warnings:?}");
    }

    #[test]
    fn too_few_rounds_say_nothing() {
        let (before, after) = (report(&[("mapped", &[200, 201])]), report(&[("mapped", &[100])]));
        assert_eq!(verdicts(&before, &after, "mapped"), [Verdict::Unknown; 2]);
        assert_eq!(verdicts(&before, &report(&[("other", &[1])]), "mapped"), []);
    }
}
