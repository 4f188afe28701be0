//! A container's mounts: what becomes of each.
//!
//! A microVM shares no directories with its host. File systems of the kernel are the guest's own,
//! and so is the memory that a pod shares. Files of the host are copied where a copy does: files
//! that the container cannot change anyway, and those that tell it its name and the names of
//! others, which container engines mount writable. [`origin`] decides, and refuses the rest.

use std::path::{Component, Path};

use slipway_sandbox_api::copies::Copies;
use slipway_sandbox_api::v1;

use super::oci::Mount;
use crate::mount::is_bind;

/// Files that container engines make for each container, and mount writable.
const NAMES: [&str; 3] = ["/etc/hostname", "/etc/hosts", "/etc/resolv.conf"];
/// Where Kubernetes mounts the file for a container's last words, unless a pod says otherwise.
const LAST_WORDS: &str = "/dev/termination-log";
/// The memory that the containers of a pod share.
const SHARED_MEMORY: &str = "/dev/shm";
/// File systems that the agent mounts itself, where it mounts them.
const OWN_MOUNTS: [&str; 8] =
    ["/proc", "/sys", "/dev", "/dev/pts", "/dev/shm", "/dev/mqueue", "/sys/fs/cgroup", "/run"];
/// The options of a read-only mount: of its own, and of what is mounted below it too.
const READ_ONLY: [&str; 2] = ["ro", "rro"];
/// The types of file systems of the kernel.
const KERNELS: [&str; 6] = ["proc", "sysfs", "devpts", "mqueue", "cgroup", "cgroup2"];

/// The container whose mounts they are.
#[derive(Clone, Copy, Debug)]
pub struct Container<'a> {
    /// Its id.
    pub id: &'a str,
    /// Set if it runs in a pod.
    pub in_pod: bool,
    /// Set if its root is read-only.
    pub read_only: bool,
}

/// Where the content of a mount comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// The guest has it already.
    Guest,
    /// The host's files, of which the container gets copies.
    Copy,
}

/// Finds out where the content of a mount comes from. Reads nothing.
///
/// # Errors
/// One line that names the mount, and says why there is no such content in a microVM.
pub fn origin(mount: &Mount, container: Container<'_>) -> Result<Origin, String> {
    let Mount { destination, kind, options, .. } = mount;
    if !is_bind(kind, options) {
        return file_system(mount);
    }
    let destination = destination.as_str();
    if container.in_pod && [SHARED_MEMORY, LAST_WORDS].contains(&destination) {
        return Ok(Origin::Guest);
    }
    // The root has the image's files there, and is as volatile as such a volume.
    if is_volume_of_image(mount, container.id) && !container.read_only {
        return Ok(Origin::Guest);
    }
    let is_copied = NAMES.contains(&destination) || is_for_last_words(&mount.source);
    if is_copied || options.iter().any(|option| READ_ONLY.contains(&option.as_str())) {
        return Ok(Origin::Copy);
    }
    Err(refused(
        mount,
        "a microVM shares no directories with its host; files that are mounted read-only (`ro`) \
         are copied",
    ))
}

fn file_system(mount: &Mount) -> Result<Origin, String> {
    let Mount { destination, kind, .. } = mount;
    let known = KERNELS.contains(&kind.as_str()) || kind == "tmpfs";
    if known && OWN_MOUNTS.contains(&destination.as_str()) {
        return Ok(Origin::Guest);
    }
    Err(format!(
        "a file system of type {kind} cannot be mounted at {destination}: leave it out; a \
         container's root is writable and volatile unless it is read-only"
    ))
}

/// Returns whether it is a volume that the image asks for (`VOLUME`), which containerd makes in a
/// directory of the container's, and removes with the container.
fn is_volume_of_image(mount: &Mount, id: &str) -> bool {
    matches!(last_parts(&mount.source)[..], ["containers", of, "volumes", _] if of == id)
}

/// Returns whether `source` is the file that kubelet makes for a container's last words:
/// `…/pods/UID/containers/NAME/FILE`.
fn is_for_last_words(source: &str) -> bool {
    let parts = plain_parts(source);
    matches!(parts[..], [.., "pods", _, "containers", _, _])
}

/// Returns the last four parts of a path, or fewer if it has no more.
fn last_parts(path: &str) -> Vec<&str> {
    let parts = plain_parts(path);
    parts[parts.len().saturating_sub(4)..].to_vec()
}

/// Returns the parts of an absolute path, or none if it leads upwards.
fn plain_parts(path: &str) -> Vec<&str> {
    let parts = Path::new(path).components().skip(1);
    let plain = parts.map(|part| match part {
        Component::Normal(part) => part.to_str(),
        _ => None,
    });
    plain.collect::<Option<_>>().unwrap_or_default()
}

/// Reads the files of all mounts that are copied. A later mount takes the place of an earlier one.
///
/// # Errors
/// One line: a file cannot be read, or they are too large.
pub fn read(mounts: &[Mount], container: Container<'_>) -> Result<Vec<v1::File>, String> {
    let mut copies = Copies::default();
    for mount in mounts {
        if origin(mount, container)? == Origin::Copy {
            let added = copies.add(Path::new(&mount.source), &mount.destination);
            added.map_err(|error| refused(mount, &error.to_string()))?;
        }
    }
    Ok(copies.into_files())
}

fn refused(mount: &Mount, reason: &str) -> String {
    let Mount { source, destination, .. } = mount;
    format!("the host's {source} cannot be mounted at {destination}: {reason}")
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALONE: Container<'static> = Container { id: "one", in_pod: false, read_only: false };
    const MEMBER: Container<'static> = Container { in_pod: true, ..ALONE };

    fn mount(source: impl AsRef<Path>, destination: &str, options: &[&str]) -> Mount {
        let (source, destination) = (source.as_ref().display().to_string(), destination.to_owned());
        let options = options.iter().map(|&one| one.to_owned()).collect();
        Mount { source, destination, options, kind: "bind".to_owned() }
    }

    #[test]
    fn read_only_files_and_those_of_names_are_copied() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        for name in ["a", "b"] {
            std::fs::write(path(name), name).unwrap();
        }
        let mounts = [
            mount(path("a"), "/etc/hosts", &["rbind", "rw"]),
            mount(dir.path(), "/etc/app", &["rbind", "rro"]),
            mount(path("b"), "/etc/hosts", &["bind", "ro"]),
        ];
        let files = read(&mounts, ALONE).unwrap();
        let files: Vec<_> = files.iter().map(|f| (f.path.as_str(), &f.content[..])).collect();
        let expected: [(&str, &[u8]); 3] =
            [("/etc/app/a", b"a"), ("/etc/app/b", b"b"), ("/etc/hosts", b"b")];
        assert_eq!(files, expected);
    }

    #[test]
    fn a_writable_directory_is_refused_with_the_reason() {
        for container in [ALONE, MEMBER] {
            let refused = origin(&mount("/srv", "/data", &["rbind"]), container).unwrap_err();
            assert!(
                refused.starts_with("the host's /srv cannot be mounted at /data: "),
                "{refused}"
            );
        }
        let missing = read(&[mount("/no/such", "/etc/hosts", &["ro"])], ALONE).unwrap_err();
        assert!(missing.contains("cannot read /no/such"), "{missing}");
    }

    #[test]
    fn a_pods_shared_memory_and_a_place_for_last_words_are_the_guests() {
        let shared = mount("/run/containerd/x/sandboxes/pod/shm", "/dev/shm", &["rbind", "rw"]);
        assert_eq!(origin(&shared, MEMBER), Ok(Origin::Guest));
        assert!(origin(&shared, ALONE).is_err());
        let file = "/var/lib/kubelet/pods/0-1/containers/web/8f2a";
        let words = |destination| mount(file, destination, &["rbind", "rprivate", "rw"]);
        assert_eq!(origin(&words(LAST_WORDS), MEMBER), Ok(Origin::Guest));
        assert_eq!(origin(&words("/tmp/message"), MEMBER), Ok(Origin::Copy));
        for other in ["/var/lib/kubelet/pods/0-1/containers/../x", "/containers/web/8f2a"] {
            assert!(origin(&mount(other, "/tmp/message", &["rw"]), MEMBER).is_err(), "{other}");
        }
    }

    #[test]
    fn a_volume_of_the_image_is_in_the_root_if_that_is_writable() {
        let volume = |id: &str| {
            let dir = "/var/lib/containerd/io.containerd.grpc.v1.cri/containers";
            mount(format!("{dir}/{id}/volumes/0a1b"), "/data", &["rbind", "rw"])
        };
        assert_eq!(origin(&volume("one"), MEMBER), Ok(Origin::Guest));
        assert!(origin(&volume("other"), MEMBER).is_err());
        assert!(origin(&volume("one"), Container { read_only: true, ..MEMBER }).is_err());
    }
}
