//! The parts of a sandbox that its guest's kernel must have modules for.

use super::Record;

/// The parts of a sandbox that need more of its guest's kernel than all sandboxes do.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    serde::Serialize,
    serde::Deserialize,
)]
pub struct Needs {
    /// Set if the sandbox has a socket function, or may get one.
    pub sockets: bool,
    /// Set if the sandbox's root is in shared pages.
    pub shared_root: bool,
    /// Set if the sandbox has directories or files of the host.
    pub shares: bool,
    /// Set if the sandbox's containers may make bridges.
    pub bridge: bool,
    /// Set if the sandbox has room for more memory.
    #[serde(default)]
    pub memory: bool,
    /// Set if the guest reports pages that it does not use.
    #[serde(default)]
    pub reporting: bool,
    /// Set if the sandbox has a function of hardware, or may get one.
    #[serde(default)]
    pub hardware: bool,
}

impl Needs {
    /// Returns the needs of a template, which is a pod without containers. `sockets` is set if it
    /// has room for socket functions of its forks.
    pub(crate) fn of_template(sockets: bool) -> Self {
        Self { sockets, shares: true, bridge: true, ..Self::default() }
    }

    /// Returns the needs of a sandbox whose root is a disk.
    pub fn of(record: &Record) -> Self {
        Self {
            sockets: record.may_have_sockets(),
            shared_root: false,
            shares: record.may_share(),
            bridge: record.pod || record.settings.privileged,
            memory: record.hot_bytes() > 0,
            reporting: record.reporting.is_on,
            hardware: record.function_room() > 0,
        }
    }
}
