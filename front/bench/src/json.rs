//! Reports as JSON, with the version of their format.

use anyhow::{Context, Result, ensure};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::turns::Fault;

/// The part of a report that all formats have. It is read first: a report of another format lacks
/// fields of this one.
#[derive(Deserialize)]
struct Versioned {
    format: u32,
}

/// A report that is saved as JSON.
pub trait SavedReport: Serialize + DeserializeOwned {
    /// The version of the format that is written, and the only one that is read.
    const FORMAT: u32 = 1;
    /// The kind of report, for errors.
    const KIND: &'static str;

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
        let (kind, known) = (Self::KIND, Self::FORMAT);
        let no_report = || format!("not a report of {kind}");
        let Versioned { format } = serde_json::from_str(text).with_context(no_report)?;
        ensure!(format == known, "its format is {format}; reports of {kind} have format {known}");
        let report: Self = serde_json::from_str(text).with_context(no_report)?;
        report.check()?;
        Ok(report)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arms::ArmsReport;

    #[test]
    fn a_report_of_another_format_is_refused_by_it() {
        let refused = |text: &str| format!("{:#}", ArmsReport::from_json(text).unwrap_err());
        let earlier = refused(r#"{"format": 2, "points": [], "rounds": []}"#);
        assert_eq!(earlier, "its format is 2; reports of start-up have format 3");
        for text in ["{}", "[]", r#"{"format": 3}"#] {
            assert!(refused(text).starts_with("not a report of start-up: "), "{text}");
        }
    }
}
