//! The container's `/dev`: the nodes that the OCI runtime specification lists for Linux, and in a
//! privileged container all nodes of the sandbox.

use std::os::unix::fs::{FileTypeExt, MetadataExt, symlink};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use rustix::fs::{CWD, FileType, Mode, chown, makedev, mknodat};

/// The standard nodes: name, major, minor (Linux's devices.txt).
const STANDARD: &[(&str, u32, u32)] = &[
    ("null", 1, 3),
    ("zero", 1, 5),
    ("full", 1, 7),
    ("random", 1, 8),
    ("urandom", 1, 9),
    ("tty", 5, 0),
];

const LINKS: &[(&str, &str)] = &[
    ("pts/ptmx", "/dev/ptmx"),
    ("/proc/self/fd", "/dev/fd"),
    ("/proc/self/fd/0", "/dev/stdin"),
    ("/proc/self/fd/1", "/dev/stdout"),
    ("/proc/self/fd/2", "/dev/stderr"),
];

/// A device node to be created again elsewhere.
#[derive(Debug, PartialEq, Eq)]
pub struct Node {
    /// The path, relative to the listed directory.
    path: PathBuf,
    kind: FileType,
    mode: u32,
    owner: (u32, u32),
    number: u64,
}

/// Returns all device nodes below `directory` on its own file system.
pub fn list(directory: &Path) -> Result<Vec<Node>> {
    let mut nodes = Vec::new();
    let device = std::fs::metadata(directory).context("listing devices")?.dev();
    walk(directory, Path::new(""), device, &mut nodes)?;
    Ok(nodes)
}

/// Returns `nodes` without those whose places in the container's /dev are `taken` by its own
/// devices, as an OCI runtime does.
pub fn without(nodes: Vec<Node>, taken: &[PathBuf]) -> Vec<Node> {
    nodes.into_iter().filter(|node| !taken.contains(&node.place())).collect()
}

impl Node {
    /// Returns the node's path in the container.
    fn place(&self) -> PathBuf {
        Path::new("/dev").join(&self.path)
    }
}

fn walk(base: &Path, below: &Path, device: u64, nodes: &mut Vec<Node>) -> Result<()> {
    for entry in std::fs::read_dir(base.join(below)).context("listing devices")? {
        let entry = entry?;
        let path = below.join(entry.file_name());
        // The device may have disappeared meanwhile.
        let Ok(metadata) = entry.metadata() else { continue };
        let kind = metadata.file_type();
        if kind.is_dir() && metadata.dev() == device {
            walk(base, &path, device, nodes)?;
        } else if kind.is_block_device() || kind.is_char_device() {
            nodes.push(Node {
                path,
                kind: FileType::from_raw_mode(metadata.mode()),
                mode: metadata.mode() & 0o777,
                owner: (metadata.uid(), metadata.gid()),
                number: metadata.rdev(),
            });
        }
    }
    Ok(())
}

/// Fills `/dev` (an empty tmpfs with its mounts) with the standard nodes, the links and `extra`.
pub fn populate(extra: &[Node]) -> Result<()> {
    for (name, major, minor) in STANDARD {
        let path = Path::new("/dev").join(name);
        make(&path, FileType::CharacterDevice, 0o666, makedev(*major, *minor))?;
    }
    for (target, link) in LINKS {
        symlink(target, link).with_context(|| format!("linking {link}"))?;
    }
    for node in extra {
        let path = node.place();
        if path.symlink_metadata().is_ok() {
            continue;
        }
        if let Some(parent) = path.parent() {
            std::fs::create_dir_all(parent).with_context(|| parent.display().to_string())?;
        }
        make(&path, node.kind, node.mode, node.number)?;
        let (uid, gid) = node.owner;
        chown(&path, Some(rustix::fs::Uid::from_raw(uid)), Some(rustix::fs::Gid::from_raw(gid)))?;
    }
    Ok(())
}

/// Creates one device node.
pub fn make(path: &Path, kind: FileType, mode: u32, number: u64) -> Result<()> {
    mknodat(CWD, path, kind, Mode::from_raw_mode(mode), number)
        .with_context(|| format!("making {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_has_devices_only() {
        let nodes = list(Path::new("/dev")).unwrap();
        let null = nodes.iter().find(|node| node.path == Path::new("null")).unwrap();
        assert_eq!(null.number, makedev(1, 3));
        assert_eq!(null.kind, FileType::CharacterDevice);
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("file"), "").unwrap();
        assert_eq!(list(dir.path()).unwrap(), vec![]);
    }

    #[test]
    fn the_containers_own_device_takes_the_place_of_the_guests() {
        let nodes = list(Path::new("/dev")).unwrap();
        let count = nodes.len();
        let taken = ["/dev/null", "/dev/of-no-guest"].map(PathBuf::from);
        let left = without(nodes, &taken);
        assert_eq!(left.len(), count - 1);
        assert!(left.iter().all(|node| node.path != Path::new("null")));
    }
}
