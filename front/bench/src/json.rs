//! Reports as JSON, with the version of their format.

use anyhow::{Context, Result, ensure};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Formats a report as JSON with a newline at the end.
///
/// # Errors
/// None in practice; errors of serialisation are passed on.
pub(crate) fn write(report: &impl Serialize) -> Result<String> {
    Ok(serde_json::to_string(report)? + "\n")
}

/// Parses a report from JSON. `kind` is the kind of report for errors; the report's `format` must
/// be `known`.
///
/// # Errors
/// If `text` is no such report, or of another format version.
pub(crate) fn read<R: DeserializeOwned>(
    text: &str,
    kind: &str,
    known: u32,
    format: impl Fn(&R) -> u32,
) -> Result<R> {
    let report: R =
        serde_json::from_str(text).with_context(|| format!("not a report of {kind}"))?;
    let format = format(&report);
    ensure!(format == known, "a report of format {format}; this slipway reads format {known}");
    Ok(report)
}
