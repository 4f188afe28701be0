//! Reports as JSON, with the version of their format.

use anyhow::{Context, Result, ensure};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// As JSON, ended by a newline.
///
/// # Errors
/// None in practice; serialisation reports its own.
pub(crate) fn write(report: &impl Serialize) -> Result<String> {
    Ok(serde_json::to_string(report)? + "\n")
}

/// From JSON; `kind` says what it is a report of, and its `format` must be `known`.
///
/// # Errors
/// When it is no such report, or of another format version.
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
