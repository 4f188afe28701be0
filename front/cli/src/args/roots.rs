//! Arguments of `slipway bench roots`.

use std::path::PathBuf;

use clap::{Args, ValueHint};

use super::report::ReportArgs;

#[derive(Debug, Args)]
pub struct RootsArgs {
    /// Owners that ask for a root at the same time
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "200",
          value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub count: Vec<u32>,
    /// Requests that are served at once, in the order of their arrival; 0: all [default: 0, and as
    /// many as there are CPUs]
    #[arg(long, value_name = "N", value_delimiter = ',',
          value_parser = clap::value_parser!(u32).range(0..=1000))]
    pub at_once: Vec<u32>,
    /// Image and template are taken out of the page cache before the requests
    #[arg(long)]
    pub cold: bool,
    /// Folder for image, template and sockets [default: that for temporary files]
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub directory: Option<PathBuf>,
    /// Only these subjects [default: all]; --list shows them
    #[arg(long, value_name = "SUBJECT", value_delimiter = ',')]
    pub only: Vec<String>,
    /// Turns of each subject with each load
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub rounds: u32,
    /// Few owners, two turns at most: shows that everything works, in seconds
    #[arg(long)]
    pub quick: bool,
    /// List subjects and loads
    #[arg(long)]
    pub list: bool,
    #[command(flatten)]
    pub report: ReportArgs,
}
