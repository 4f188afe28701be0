//! Names that follow from containerd's: the shim's socket and the sandbox.

use std::path::PathBuf;

use sha2::{Digest, Sha256};

use crate::args::Args;
use crate::role::Role;

/// The directory of the sockets of all shims of a host, as containerd's own shims use it.
pub const SOCKETS: &str = "/run/containerd/s";
/// The longest part of a container's id in the name of its sandbox, bytes.
const LONGEST_PART: usize = 40;

/// Returns the path of the socket of the shim of a group of containers. Two containerds of a host
/// have different addresses, so their shims have different sockets.
pub fn socket(args: &Args, group: &str) -> PathBuf {
    PathBuf::from(SOCKETS).join(hex::encode(digest(args, group)))
}

/// Returns the directory of the shim's [`store`](crate::store), beside its socket.
pub fn state(args: &Args, group: &str) -> PathBuf {
    socket(args, group).with_extension("state")
}

/// Returns the address as containerd takes it.
pub fn address(args: &Args, group: &str) -> String {
    format!("unix://{}", socket(args, group).display())
}

/// Returns the name by which the daemon knows the container `id`: that of its sandbox, or the
/// pod's and its own.
pub fn container(args: &Args, id: &str, role: &Role) -> String {
    match role {
        Role::Alone | Role::Pod => sandbox(args, id),
        Role::Member(pod) => format!("{}/{id}", sandbox(args, pod)),
    }
}

/// Returns the name of the sandbox of the container `id`. It begins with the id, and is another
/// one for each container of each namespace of each containerd.
pub fn sandbox(args: &Args, id: &str) -> String {
    let part: String = id.chars().take(LONGEST_PART).collect();
    let first = part.starts_with(|first: char| first.is_ascii_alphanumeric());
    let prefix = if first { "" } else { "c" };
    format!("{prefix}{part}-{}", &hex::encode(digest(args, id))[..10])
}

fn digest(args: &Args, id: &str) -> [u8; 32] {
    // The address as containerd gives it is an absolute path; an address that is none still gives
    // a name of its own.
    let path = PathBuf::from(&args.address).join(&args.namespace).join(id);
    Sha256::digest(path.as_os_str().as_encoded_bytes()).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(namespace: &str) -> Args {
        let address = "/run/containerd/containerd.sock".to_owned();
        Args { namespace: namespace.into(), address, ..Args::default() }
    }

    #[test]
    fn the_socket_is_the_one_that_other_shims_would_use() {
        // sha256sum of "/run/containerd/containerd.sock/default/one".
        let digest = "807c19c0f9e3589fd68d61496d6cc415b3a5bdfef35f683f88a1d6c8cd58eed9";
        let address = address(&args("default"), "one");
        assert_eq!(address, format!("unix:///run/containerd/s/{digest}"));
    }

    #[test]
    fn shims_of_one_id_in_several_namespaces_have_stores_of_their_own() {
        let other = Args { address: "/run/k3s/containerd.sock".to_owned(), ..args("default") };
        let shims = [args("default"), args("k8s.io"), other];
        let stores: std::collections::BTreeSet<_> =
            shims.iter().map(|args| state(args, "one")).collect();
        assert_eq!(stores.len(), shims.len());
        assert!(stores.iter().all(|store| store.starts_with(SOCKETS)), "{stores:?}");
    }

    #[test]
    fn sandboxes_have_legal_names_of_their_own() {
        let long = "x".repeat(76);
        let names = ["one", "two", "_", long.as_str()].map(|id| sandbox(&args("default"), id));
        for name in &names {
            assert!(name.len() <= 63 && name.as_bytes()[0].is_ascii_alphanumeric(), "{name}");
        }
        assert!(names[0].starts_with("one-"));
        assert_ne!(names[0], sandbox(&args("other"), "one"));
        assert_ne!(sandbox(&args("a"), "b.c"), sandbox(&args("a"), "b-c"));
    }

    #[test]
    fn a_container_of_a_pod_is_named_after_both() {
        let (args, member) = (args("k8s.io"), Role::Member("pod".into()));
        let pod = container(&args, "pod", &Role::Pod);
        assert_eq!(pod, sandbox(&args, "pod"));
        assert_eq!(container(&args, "one", &member), format!("{pod}/one"));
    }
}
