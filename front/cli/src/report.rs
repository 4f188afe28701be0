//! Shows and writes timelines of starts.

use std::io::IsTerminal;
use std::path::Path;

use anyhow::{Context, Result};
use slipway_bench::Statistics;
use slipway_telemetry::Timeline;

use crate::session::terminal_size;

/// Prints a table and the bars of several starts on standard error. Standard output belongs to the
/// containers.
pub fn show(statistics: &Statistics, timelines: &[Timeline]) {
    let colour = std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none();
    let width = match terminal_size() {
        (_, 0) => 100,
        (_, columns) => columns as usize,
    };
    eprintln!("\n{}", slipway_bench::table(statistics, colour));
    eprintln!("{}", slipway_bench::bars(timelines, width, colour));
}

/// Writes timelines as JSON if the path ends in `.json`, or else as a picture, and prints the path.
/// The picture names the conditions, a line of text, if they are known.
pub fn write(
    path: &Path,
    timelines: &[Timeline],
    image: &str,
    conditions: Option<&str>,
) -> Result<()> {
    let json = path.extension().is_some_and(|extension| extension == "json");
    let text = if json {
        serde_json::to_string_pretty(timelines)? + "\n"
    } else {
        let title = match timelines.len() {
            1 => format!("Start of a sandbox of {image}"),
            count => format!("Start of {count} sandboxes of {image} at once"),
        };
        let conditions = conditions.map_or(String::new(), |line| format!("\n{line}"));
        slipway_bench::svg(timelines, &(title + &conditions))?
    };
    std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
    eprintln!("Timeline written to {}", path.display());
    Ok(())
}
