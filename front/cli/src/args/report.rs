//! Arguments that benchmarks have in common.

use std::path::PathBuf;

use clap::{Args, ValueHint};

/// Where a report comes from and goes to.
#[derive(Debug, Args)]
pub struct ReportArgs {
    /// Show an earlier report instead of measuring
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub report: Option<PathBuf>,
    /// Write the report as JSON
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

/// Reads a number of seconds, from 0.001 to 3600.
pub(super) fn seconds(text: &str) -> Result<f64, String> {
    let value = text.parse::<f64>().map_err(|_| format!("\"{text}\" is no number of seconds"))?;
    if (0.001..=3600.0).contains(&value) { Ok(value) } else { Err("0.001 to 3600 seconds".into()) }
}
