//! Reports of `slipway bench`: shown, drawn, written, and compared with earlier ones.

use std::io::IsTerminal;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use slipway_bench::{Environment, SavedReport};

use crate::args::ReportArgs;

/// How reports of one benchmark are shown.
pub(super) struct View<R> {
    /// Returns the title of the picture: what was measured, and the conditions in further lines.
    pub title: fn(&R) -> String,
    /// Draws the picture below a title, as SVG.
    pub picture: fn(&R, &str) -> Result<String>,
    /// Formats the report's tables, in colour if asked for.
    pub table: fn(&R, bool) -> String,
    /// Formats the differences of the second report from the first, in colour if asked for.
    pub differences: fn(&R, &R, bool) -> String,
}

/// Shows the report that `measure` makes, or an earlier one, and writes the files that the user
/// named. Returns the report.
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
    if let Some(path) = &args.output {
        write(path, &report.to_json()?)?;
    }
    if let Some(path) = &args.svg {
        write(path, &(view.picture)(&report, &(view.title)(&report))?)?;
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
pub(super) fn check(args: &ReportArgs) -> Result<()> {
    [&args.output, &args.svg].into_iter().flatten().try_for_each(|path| is_writable(path))
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
    anyhow::ensure!(failed == 0, "{failed} turns failed: the table names them");
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
    anyhow::ensure!(
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
    use super::*;

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
