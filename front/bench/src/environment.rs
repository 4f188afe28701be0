//! The machine and the programs of a measurement, which every report names.

use serde::{Deserialize, Serialize};

/// The machine and the versions of programs with which something was measured.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Environment {
    /// The machine: processor, cores, memory, as one line.
    pub machine: String,
    /// The host kernel's release.
    pub kernel: String,
    /// How guests run: `kvm` or `tcg` (software emulation).
    pub accelerator: String,
    /// Version of Slipway.
    pub version: String,
    /// Commit that it was built from, if that is known.
    pub commit: Option<String>,
}

impl Environment {
    /// Returns the versions, the machine and the accelerator as one line for pictures.
    pub fn line(&self) -> String {
        let commit = self.commit.as_ref().map_or(String::new(), |commit| format!(" ({commit})"));
        let Self { version, machine, kernel, accelerator, .. } = self;
        let guests = match accelerator.as_str() {
            "none" | "" => "no guests".to_owned(),
            name => format!("guests by {name}"),
        };
        format!("Slipway {version}{commit}, {machine}, Linux {kernel}, {guests}")
    }
}
