//! The memory policy of a container's processes (set_mempolicy(2)).

use std::path::Path;

use anyhow::{Context, Result, anyhow};

use crate::group;

/// Has this process, and those that it starts, take memory of the container's own NUMA node as long
/// as that has some: the last node of the cpuset of the container's cgroup, or of the one above it.
/// A container that is kept to node 0, or to none, has no such node.
///
/// # Errors
/// The kernel refuses the policy.
pub fn prefer_own_node(cgroup: &Path) -> Result<()> {
    let nodes = |group: &Path| group::last_node(&group::read(&group.join("cpuset.mems")));
    match cgroup.ancestors().take(2).find_map(nodes) {
        None | Some(0) => Ok(()),
        Some(node) => prefer(node),
    }
}

fn prefer(node: u32) -> Result<()> {
    /// MPOL_PREFERRED of linux/mempolicy.h.
    const PREFERRED: libc::c_long = 1;
    let nodes = 1u64.checked_shl(node).with_context(|| format!("no NUMA node {node}"))?;
    let count = libc::c_ulong::from(u64::BITS);
    // SAFETY: the kernel reads the 64 bits of `nodes`, which outlives the call, and changes the
    // policy of this thread alone.
    let set = unsafe { libc::syscall(libc::SYS_set_mempolicy, PREFERRED, &raw const nodes, count) };
    match set {
        0 => Ok(()),
        _ => {
            let error = anyhow!(std::io::Error::last_os_error());
            Err(error.context(format!("preferring memory of NUMA node {node}")))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_container_without_a_node_of_its_own_has_no_policy() {
        let dir = tempfile::tempdir().unwrap();
        let part = dir.path().join("part");
        std::fs::create_dir(&part).unwrap();
        prefer_own_node(&part).unwrap();
        for nodes in ["", "\n", "0\n"] {
            std::fs::write(dir.path().join("cpuset.mems"), nodes).unwrap();
            prefer_own_node(&part).unwrap();
        }
        // A node that no kernel has.
        std::fs::write(dir.path().join("cpuset.mems"), "0,99\n").unwrap();
        let error = format!("{:#}", prefer_own_node(&part).unwrap_err());
        assert!(error.contains("NUMA node 99"), "{error}");
    }
}
