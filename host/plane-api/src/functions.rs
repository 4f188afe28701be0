//! Functions of pools that sandboxes have: names that the sandboxes' service, the device plugin and
//! the shim must agree on.

use std::path::{Path, PathBuf};

/// The kind of owner that a pod is for a pool. The owner of each function is
/// `slipway-pod:SANDBOX.NUMBER`.
pub const POD: &str = "slipway-pod";

/// The kind of owner that a sandbox which is no pod is for a pool: `slipway-sandbox:SANDBOX`.
pub const SANDBOX: &str = "slipway-sandbox";

/// The kind of owner that a container's attachment is for a pool: `slipway-cni:ATTACHMENT`, with
/// the id of [`attachments::id`](crate::attachments::id).
pub const ATTACHMENT: &str = "slipway-cni";

/// The directory of the mounts in a container that stand for functions, each named POOL.NUMBER.
/// Other runtimes refuse mounts in /proc: a container of theirs does not run without what it asks
/// for.
pub const MOUNTS: &str = "/proc/slipway/functions/";

/// The name that socket functions have in place of a pool's. By a mount `sockets.NUMBER` a
/// container asks for that of its pod, whatever the number. A pool of this name is no resource of
/// pods.
pub const SOCKETS: &str = "sockets";

/// Returns whether the owner of a function is a pod.
pub fn is_pods(owner: &str) -> bool {
    owner.strip_prefix(POD).is_some_and(|id| id.starts_with(':'))
}

/// Returns the directory of the files that are mounted in [`MOUNTS`], in the daemon's run
/// directory. It has no symbolic links, as container runtimes name the source of a mount.
pub fn files(run_dir: &Path) -> PathBuf {
    let run_dir = std::fs::canonicalize(run_dir).unwrap_or_else(|_| run_dir.to_owned());
    run_dir.join("functions")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owners_of_another_kind_are_no_pods() {
        assert!(is_pods("slipway-pod:0123456789ab.3"));
        for other in ["", "slipway-pod", "slipway-podium:1", "sandbox:0123456789ab"] {
            assert!(!is_pods(other), "{other}");
        }
    }
}
