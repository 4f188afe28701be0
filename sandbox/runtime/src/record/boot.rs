//! The files that a guest booted.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// The files that a guest booted, and its machine: those of its template if it is a fork.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BootRecord {
    /// The kernel.
    pub kernel: PathBuf,
    /// The initramfs, whose name tells its content.
    pub initramfs: PathBuf,
    /// The name of the CPU template.
    pub cpu_template: String,
    /// Set if the machine has the device that free pages are reported to.
    #[serde(default)]
    pub reporting: bool,
}
