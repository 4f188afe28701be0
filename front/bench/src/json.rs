//! Reports as JSON, with the version of their format.

use anyhow::{Context, Result, ensure};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::turns::Fault;

/// A report that is saved as JSON.
pub trait SavedReport: Serialize + DeserializeOwned {
    /// The version of the format that is written, and the only one that is read.
    const FORMAT: u32 = 1;
    /// The kind of report, for errors.
    const KIND: &'static str;

    /// Returns the version of the format that this report was written in.
    fn format(&self) -> u32;

    /// Returns the turns that failed or are void.
    fn faults(&self) -> &[Fault] {
        &[]
    }

    /// Checks what the types of a parsed report do not.
    ///
    /// # Errors
    /// The report contradicts itself.
    fn check(&self) -> Result<()> {
        Ok(())
    }

    /// Formats the report as JSON with a newline at the end.
    ///
    /// # Errors
    /// None in practice; errors of serialisation are passed on.
    fn to_json(&self) -> Result<String> {
        Ok(serde_json::to_string(self)? + "\n")
    }

    /// Parses a report from JSON.
    ///
    /// # Errors
    /// If `text` is no such report, or of another format version, or contradicts itself.
    fn from_json(text: &str) -> Result<Self> {
        let report: Self = serde_json::from_str(text)
            .with_context(|| format!("not a report of {}", Self::KIND))?;
        let (format, known) = (report.format(), Self::FORMAT);
        ensure!(format == known, "a report of format {format}; this slipway reads format {known}");
        report.check()?;
        Ok(report)
    }
}
