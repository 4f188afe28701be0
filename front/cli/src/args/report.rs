//! Arguments that benchmarks have in common.

use std::path::{Path, PathBuf};

use clap::{Args, ValueHint};

/// Where a report comes from and goes to.
#[derive(Clone, Debug, Args)]
pub struct ReportArgs {
    /// Show an earlier report instead of measuring
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub report: Option<PathBuf>,
    /// Write the report as JSON [default with a picture: beside it, as NAME.json]
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub output: Option<PathBuf>,
    /// Write the picture: a bar for each load and what is measured with it
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub svg: Option<PathBuf>,
    /// Compare with an earlier report: which differences are more than the noise
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub compare: Option<PathBuf>,
    /// Print the report as JSON instead of tables
    #[arg(long)]
    pub json: bool,
}

impl ReportArgs {
    /// Returns the file to which a new report is written as JSON: that of `--output`, or one beside
    /// `picture`, with the ending `.json` in place of its own. Returns `None` without either, and
    /// if an earlier report is shown or this one is printed as JSON, so that nothing gets lost.
    pub fn data(&self, picture: Option<&Path>) -> Option<PathBuf> {
        let is_elsewhere = self.report.is_some() || self.json;
        let beside = picture.filter(|_| !is_elsewhere).map(|path| path.with_extension("json"));
        self.output.clone().or_else(|| beside.filter(|path| Some(path.as_path()) != picture))
    }
}

/// Reads a number of seconds, from 0.001 to 3600.
pub(super) fn seconds(text: &str) -> Result<f64, String> {
    let value = text.parse::<f64>().map_err(|_| format!("\"{text}\" is no number of seconds"))?;
    if (0.001..=3600.0).contains(&value) { Ok(value) } else { Err("0.001 to 3600 seconds".into()) }
}
