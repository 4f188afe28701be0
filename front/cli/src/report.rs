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
    eprintln!("\n{}", slipway_bench::table(statistics, colour));
    eprintln!("{}", slipway_bench::bars(timelines, width(), colour));
}

/// Returns the terminal's columns, or 100 without one.
pub fn width() -> usize {
    match terminal_size() {
        (_, 0) => 100,
        (_, columns) => columns as usize,
    }
}

/// Returns the title of a picture of so many starts.
pub fn title(count: usize, image: &str) -> String {
    match count {
        1 => format!("Start of a sandbox of {image}"),
        count => format!("Start of {count} sandboxes of {image} at once"),
    }
}

/// Writes timelines as JSON if the path ends in `.json`, or else as a picture, and prints the path.
pub fn write(path: &Path, timelines: &[Timeline], image: &str) -> Result<()> {
    let json = path.extension().is_some_and(|extension| extension == "json");
    let text = match json {
        true => serde_json::to_string_pretty(timelines)? + "\n",
        false => slipway_bench::svg(timelines, &title(timelines.len(), image))?,
    };
    std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
    eprintln!("Timeline written to {}", path.display());
    Ok(())
}
