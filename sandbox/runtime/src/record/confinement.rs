//! The part of the host that a sandbox's VMM has, as the sandbox's record has it.

use serde::{Deserialize, Serialize};
use slipway_cgroup::Counters;

use super::Placement;

/// The control group of a sandbox's VMM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ControlGroup {
    /// The path in each hierarchy, as proc_pid_cgroup(5) shows it.
    pub path: String,
    /// The group's counters when the sandbox got it.
    #[serde(default)]
    pub before: Counters,
}

/// The control group of a sandbox's VMM, and the CPUs and the memory nodes to which it is confined.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Confinement {
    /// The path of the control group that the VMM is asked to be in; empty: one of the node's.
    pub control_group: String,
    /// The least memory of the guest if the VMM gets one of the node's groups instead, bytes.
    pub least_memory_bytes: u64,
    /// The control group of the VMM, from before the start until the group is given back. `None`:
    /// the group, if there is one, has the sandbox's id as its name.
    pub cgroup: Option<ControlGroup>,
    /// The CPUs and the memory nodes of the host to which the VMM is confined now.
    pub confined: Placement,
    /// The list of the CPUs on which the VMM was launched, once its threads were told others.
    /// Empty: not known.
    pub launch_cpus: String,
}

impl Confinement {
    /// Returns whether the VMM is asked to be in a control group that is none of the node's.
    pub fn asks_for_group(&self) -> bool {
        !self.control_group.is_empty()
    }

    /// Returns whether the VMM has the control group at `path`.
    pub fn has_group(&self, path: &str) -> bool {
        self.cgroup.as_ref().is_some_and(|group| group.path == path)
    }

    /// Notes that no VMM is confined any more, since the sandbox has none.
    pub fn lift(&mut self) {
        self.confined = Placement::default();
        self.launch_cpus.clear();
    }
}
