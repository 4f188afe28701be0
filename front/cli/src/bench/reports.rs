//! Reports of `slipway bench`: shown, drawn, written, and compared with earlier ones.

use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use slipway_bench::{Environment, Measured, Measurement, SavedReport, void_note};

use crate::args::ReportArgs;

/// Draws the picture of a report below a title, as SVG.
type Picture<R> = fn(&R, &str) -> Result<String>;
/// Formats the tables of a report, in colour if asked for.
type Table<R> = fn(&R, bool) -> String;

/// How reports of one benchmark are shown.
pub(super) struct View<R> {
    /// Returns the title of the picture: what was measured, and the conditions in further lines.
    pub title: fn(&R) -> String,
    /// Draws the report's picture.
    pub picture: Picture<R>,
    /// Formats the report's tables.
    pub table: Table<R>,
    /// Formats the differences of the second report from the first, in colour if asked for.
    pub differences: fn(&R, &R, bool) -> String,
}

impl<R: SavedReport> View<R> {
    /// Returns the title of a picture, with the number of turns on a busy machine behind it.
    pub(super) fn title_of(&self, report: &R) -> String {
        (self.title)(report) + &void_note(report.faults())
    }
}

impl<M: Measured, E> View<Measurement<M::Load, M, E>> {
    /// Makes the view of reports whose titles are of [`Measured::SHOWS`] and [`Measured::TURN`],
    /// and which are compared by their figures.
    pub(super) const fn of(
        picture: Picture<Measurement<M::Load, M, E>>,
        table: Table<Measurement<M::Load, M, E>>,
    ) -> Self {
        Self {
            title: title::<M, E>,
            picture,
            table,
            differences: |before, now, _| now.compare(before),
        }
    }
}

/// Returns the title of a report's picture: what it shows, and the conditions.
fn title<M: Measured, E>(report: &Measurement<M::Load, M, E>) -> String {
    let (rounds, times) = (report.plan.rounds, report.plan.times);
    let length = times.map_or_else(String::new, |times| format!(" of {:?}", times.time));
    titled(M::SHOWS, &report.environment, rounds, M::TURN, &length)
}

/// Shows the report that `measure` makes, or an earlier one, and writes the files that the user
/// named: the picture, and beside it the report as JSON unless that goes elsewhere
/// ([`ReportArgs::data`]). Returns the report.
pub(super) fn show<R: SavedReport>(
    view: &View<R>,
    args: &ReportArgs,
    measure: impl FnOnce() -> Result<R>,
) -> Result<R> {
    let before = args.compare.as_deref().map(read::<R>).transpose()?;
    check(args)?;
    let report = match &args.report {
        Some(path) => read(path)?,
        None => measure()?,
    };
    if let Some(path) = &args.data(args.svg.as_deref()) {
        write(path, &report.to_json()?)?;
    }
    if let Some(path) = &args.svg {
        write(path, &(view.picture)(&report, &view.title_of(&report))?)?;
    }
    let colour = std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none();
    if args.json {
        crate::out::print(format_args!("{}", report.to_json()?));
    } else {
        crate::out::draw(format_args!("{}", (view.table)(&report, colour)));
    }
    if let Some(before) = before {
        let table = (view.differences)(&before, &report, colour && !args.json);
        // With `--json`, standard output is the report's.
        if args.json { eprint!("{table}") } else { crate::out::draw(format_args!("\n{table}\n")) }
    }
    Ok(report)
}

/// Checks, before a measurement, that the files which the user named can be written.
///
/// # Errors
/// A file cannot be written; the errors of [`data`].
pub(super) fn check(args: &ReportArgs) -> Result<()> {
    let data = data(args, args.svg.as_deref())?;
    [&data, &args.svg].into_iter().flatten().try_for_each(|path| is_writable(path))
}

/// Returns the file for the report as JSON, given a picture of it ([`ReportArgs::data`]).
///
/// # Errors
/// The report with which the new one is compared has that file, and the user did not name it.
pub(super) fn data(args: &ReportArgs, picture: Option<&Path>) -> Result<Option<PathBuf>> {
    let data = args.data(picture);
    let is_lost = args.output.is_none() && data.is_some() && data == args.compare;
    ensure!(!is_lost, "the report would take the place of that of --compare: name it by --output");
    Ok(data)
}

/// The end of the title of a picture whose bars have ranges.
const RANGES: &str = "; thin lines: from the least to the greatest round";

/// Returns the title of a picture: what it shows, and the conditions.
pub(super) fn heading(
    what: &str,
    environment: &Environment,
    rounds: u32,
    time: Duration,
) -> String {
    titled(what, environment, rounds, "round", &format!(" of {time:?}"))
}

/// Returns the title of a picture of medians: what it shows, and of how many `turns` (their name in
/// the singular), each of which is as long as `length` says.
pub(super) fn titled(
    what: &str,
    environment: &Environment,
    rounds: u32,
    turns: &str,
    length: &str,
) -> String {
    let plural = if rounds == 1 { "" } else { "s" };
    let medians = format!("medians of {rounds} {turns}{plural}{length}{RANGES}");
    format!("{what}\n{}\n{medians}", environment.line())
}

/// Returns the exit status for a report, or an error if turns of it failed, so that a script
/// notices: the report and its picture show the other turns.
pub(super) fn complete<R: SavedReport>(report: &R) -> Result<i32> {
    let failed = report.faults().iter().filter(|fault| fault.failed).count();
    ensure!(failed == 0, "turns that failed: {failed}; the report names them");
    Ok(0)
}

fn read<R: SavedReport>(path: &Path) -> Result<R> {
    let text = std::fs::read_to_string(path);
    let text = text.with_context(|| format!("cannot read {}", path.display()))?;
    R::from_json(&text).with_context(|| format!("{} is no report", path.display()))
}

/// Checks that a file can be created at `path`.
fn is_writable(path: &Path) -> Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let is_there = folder.is_none_or(Path::is_dir);
    ensure!(
        is_there && !path.is_dir(),
        "cannot write {}: no such folder, or one itself",
        path.display()
    );
    Ok(())
}

/// Writes a file and prints its path.
pub(super) fn write(path: &Path, text: &str) -> Result<()> {
    std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
    eprintln!("Written: {}", path.display());
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde::{Deserialize, Serialize};
    use slipway_bench::Fault;

    use super::*;

    /// The smallest report.
    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Small {
        format: u32,
        faults: Vec<Fault>,
    }

    impl SavedReport for Small {
        const KIND: &'static str = "nothing";

        fn faults(&self) -> &[Fault] {
            &self.faults
        }
    }

    const SMALL: View<Small> = View {
        title: |_| "title".to_owned(),
        picture: |_, title| Ok(title.to_owned()),
        table: |_, _| String::new(),
        differences: |_, _, _| String::new(),
    };

    #[test]
    fn a_picture_has_its_report_beside_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let plain =
            ReportArgs { report: None, output: None, svg: None, compare: None, json: false };
        let small = || Small { format: 1, faults: Vec::new() };
        let shown = |args: &ReportArgs| show(&SMALL, args, || Ok(small()));
        let drawn = ReportArgs { svg: Some(path("a.svg")), ..plain.clone() };
        shown(&drawn).unwrap();
        assert!(path("a.svg").exists());
        assert_eq!(read::<Small>(&path("a.json")).unwrap(), small());
        // A report that goes elsewhere, or that is there already, is not written beside a picture.
        let named = ReportArgs { output: Some(path("named")), ..drawn.clone() };
        assert_eq!(named.data(named.svg.as_deref()), Some(path("named")));
        let again = ReportArgs { svg: Some(path("b.svg")), report: Some(path("a.json")), ..plain };
        shown(&again).unwrap();
        let printed = ReportArgs { report: None, json: true, ..again };
        assert_eq!(printed.data(printed.svg.as_deref()), None);
        assert!(path("b.svg").exists() && !path("b.json").exists());
        assert_eq!(named.data(Some(&path("c.json"))), Some(path("named")));
        assert_eq!(drawn.data(Some(&path("c.json"))), None);
        // The earlier report of a comparison stays.
        let lost = ReportArgs { compare: Some(path("a.json")), ..drawn };
        assert!(check(&lost).unwrap_err().to_string().contains("--output"));
    }

    #[test]
    fn pictures_say_that_turns_are_void() {
        let (subject, load, reason) = ("a".to_owned(), "b".to_owned(), "stolen".to_owned());
        let fault = Fault { subject, load, round: 0, reason, failed: false };
        let mut report = Small { format: 1, faults: vec![fault] };
        assert_eq!(SMALL.title_of(&report), "title; VOID: 1 turn on a busy machine");
        report.faults.clear();
        assert_eq!(SMALL.title_of(&report), "title");
    }

    #[test]
    fn titles_say_where_and_how_often_was_measured() {
        let environment = Environment {
            machine: "two cores".into(),
            kernel: "6.1.0".into(),
            accelerator: "kvm".into(),
            version: "1.2.3".into(),
            commit: Some("0123abc".into()),
        };
        let time = Duration::from_secs(2);
        let title = heading("Frames through switches", &environment, 5, time);
        let parts = [
            "Frames",
            "1.2.3",
            "0123abc",
            "two cores",
            "6.1.0",
            "by kvm",
            "5 rounds of 2s",
            "thin lines",
        ];
        for part in parts {
            assert!(title.contains(part), "{part}: {title}");
        }
        assert_eq!(title.lines().count(), 3);
        assert!(titled("x", &environment, 1, "turn", "").contains("medians of 1 turn;"));
    }
}
