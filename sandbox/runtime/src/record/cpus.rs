//! The virtual CPUs of a sandbox, as its record has them.

use serde::{Deserialize, Serialize};

/// The number of a sandbox's virtual CPUs, and its bounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cpus {
    /// The number that the sandbox has now.
    #[serde(rename = "cpus")]
    pub count: u32,
    /// The number at the start; these stay.
    #[serde(default, rename = "boot_cpus")]
    pub boot: u32,
    /// The most that the sandbox can be given while it runs.
    #[serde(default, rename = "max_cpus")]
    pub max: u32,
    /// The number that a user gave the sandbox while it ran; 0: none, or those that it began with.
    /// The limits of a pod's containers do not change it.
    #[serde(default, rename = "chosen_cpus")]
    pub chosen: u32,
}

impl Cpus {
    /// Returns the CPUs of a sandbox that begins with `count`, and can have `max`.
    pub fn of_new(count: u32, max: u32) -> Self {
        Self { count, boot: count, max, chosen: 0 }
    }

    /// Returns whether the sandbox can be given more than it began with.
    pub fn can_grow(&self) -> bool {
        self.max > self.boot
    }
}
