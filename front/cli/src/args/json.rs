//! The flag for JSON of commands that print nothing else.

use clap::Args;

/// The flag of commands that print JSON in any case, for those who ask for it even so.
#[derive(Clone, Copy, Debug, Args)]
pub struct AlwaysJson {
    /// As JSON, which it always is
    #[arg(long)]
    pub json: bool,
}
