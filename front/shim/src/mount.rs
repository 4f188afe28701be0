//! Mounts of the host.
//!
//! `import` mounts a root where nobody else sees it, and becomes the program that reads it. Its
//! mounts are in a mount namespace of that process, read-only and private, and go with it.

use std::ffi::CString;
use std::io::Read;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::mount::{MountFlags, MountPropagationFlags};
use serde::{Deserialize, Serialize};

use crate::containerd::Mount;

/// The most that is read of standard input, bytes.
const MOST_INPUT: u64 = 1 << 20;
/// The size of a page, to which the kernel cuts a mount's options, bytes.
const PAGE: usize = 4096;

/// A mount, and the program to run then.
#[derive(Debug, Deserialize, Serialize)]
pub struct Import {
    /// The directory to mount at.
    pub target: PathBuf,
    /// The layers of an overlay, the uppermost first; empty for another file system.
    pub layers: Vec<PathBuf>,
    /// The kind of the file system.
    pub kind: String,
    /// The device or another source.
    pub device: String,
    /// Options, in the words of mount(8).
    pub options: Vec<String>,
    /// The program to become.
    pub program: PathBuf,
    /// Its arguments.
    pub arguments: Vec<String>,
}

/// A program that reads a file system which was mounted.
#[derive(Debug)]
pub struct Reader {
    /// The program.
    pub program: PathBuf,
    /// Its arguments.
    pub arguments: Vec<String>,
}

impl Import {
    /// Describes an overlay of `layers`, the uppermost first, at `target`.
    pub fn overlay(
        target: PathBuf,
        layers: &[PathBuf],
        options: &[String],
        reader: Reader,
    ) -> Self {
        let Reader { program, arguments } = reader;
        let (layers, options) = (layers.to_vec(), options.to_vec());
        let (kind, device) = ("overlay".to_owned(), "overlay".to_owned());
        Self { target, layers, kind, device, options, program, arguments }
    }

    /// Describes the file system of `mount` at `target`.
    pub fn device(target: PathBuf, mount: &Mount, reader: Reader) -> Self {
        let Reader { program, arguments } = reader;
        let (kind, device) = (mount.r#type.clone(), mount.source.clone());
        let options = mount.options.clone();
        Self { target, layers: Vec::new(), kind, device, options, program, arguments }
    }
}

/// Returns whether a mount of type `kind` with `options` shows a file or a directory of the host.
pub fn is_bind(kind: &str, options: &[String]) -> bool {
    kind == "bind" || options.iter().any(|option| option == "bind" || option == "rbind")
}

/// Reads an [`Import`] from standard input, mounts, and becomes the program.
///
/// # Errors
/// One line that says what failed. On success this does not return.
pub fn import() -> Result<(), String> {
    let mut json = Vec::new();
    std::io::stdin().take(MOST_INPUT).read_to_end(&mut json).map_err(|error| error.to_string())?;
    let import: Import = serde_json::from_slice(&json).map_err(|error| error.to_string())?;
    own_namespace().map_err(|error| format!("no mount namespace of its own: {error}"))?;
    mount(&import)?;
    let error = Command::new(&import.program).args(&import.arguments).current_dir("/").exec();
    Err(format!("cannot run {}: {error}", import.program.display()))
}

#[allow(unsafe_code)]
fn own_namespace() -> rustix::io::Result<()> {
    // SAFETY: unshare(2) with CLONE_NEWNS takes no pointers and shares no memory or descriptors
    // differently; this process has one thread, and becomes another program.
    unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNS) }?;
    let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
    rustix::mount::mount_change("/", private)
}

fn mount(import: &Import) -> Result<(), String> {
    let (flags, mut data) = flags_and_data(&import.options);
    if !import.layers.is_empty() {
        let (dir, names) = relative(&import.layers);
        // The kernel takes a page of options, and names from the layers' own directory are short.
        std::env::set_current_dir(&dir).map_err(|e| format!("{}: {e}", dir.display()))?;
        data.insert(0, lower_dirs(&names)?);
    }
    let data = data.join(",");
    if data.len() >= PAGE {
        return Err("the root has too many layers to be mounted".to_owned());
    }
    let data = CString::new(data).map_err(|error| error.to_string())?;
    let flags = flags | MountFlags::RDONLY;
    let (device, target) = (&import.device, &import.target);
    rustix::mount::mount(device.as_str(), target, import.kind.as_str(), flags, data.as_c_str())
        .map_err(|error| format!("cannot mount the root ({}): {error}", import.kind))
}

fn lower_dirs(names: &[PathBuf]) -> Result<String, String> {
    let mut list = Vec::new();
    for name in names {
        let name = name.to_str().filter(|name| !name.contains([':', ',', '\\']));
        list.push(name.ok_or("the path of a layer has a character that mount options lack")?);
    }
    Ok(format!("lowerdir={}", list.join(":")))
}

/// Returns the deepest directory that has all of `paths` below it, and their names from there.
fn relative(paths: &[PathBuf]) -> (PathBuf, Vec<PathBuf>) {
    let mut dir = paths.first().and_then(|path| path.parent()).unwrap_or(Path::new("/")).to_owned();
    while !paths.iter().all(|path| path.starts_with(&dir) && *path != dir) {
        if !dir.pop() {
            break;
        }
    }
    let names = paths.iter().map(|path| path.strip_prefix(&dir).unwrap_or(path).to_owned());
    let names = names.collect();
    (dir, names)
}

/// Parts mount(8)'s words from a file system's own.
fn flags_and_data(options: &[String]) -> (MountFlags, Vec<String>) {
    let mut flags = MountFlags::empty();
    let mut data = Vec::new();
    for option in options {
        match option.as_str() {
            "ro" | "rw" | "loop" | "defaults" | "rbind" | "bind" => {}
            "nodev" => flags |= MountFlags::NODEV,
            "nosuid" => flags |= MountFlags::NOSUID,
            "noexec" => flags |= MountFlags::NOEXEC,
            "noatime" => flags |= MountFlags::NOATIME,
            "relatime" => flags |= MountFlags::RELATIME,
            other => data.push(other.to_owned()),
        }
    }
    (flags, data)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_are_named_from_their_common_directory() {
        let paths = ["/s/snapshots/3/fs", "/s/snapshots/12/fs"].map(PathBuf::from);
        let (dir, names) = relative(&paths);
        assert_eq!(dir, Path::new("/s/snapshots"));
        assert_eq!(lower_dirs(&names).unwrap(), "lowerdir=3/fs:12/fs");
        let (dir, names) = relative(&["/a/b".into(), "/c".into()]);
        assert_eq!((dir, lower_dirs(&names).unwrap()), ("/".into(), "lowerdir=a/b:c".to_owned()));
        let (dir, names) = relative(&["/a/b".into(), "/a/b/c".into()]);
        assert_eq!((dir, lower_dirs(&names).unwrap()), ("/a".into(), "lowerdir=b:b/c".to_owned()));
        assert!(lower_dirs(&["a:b".into()]).is_err());
    }

    #[test]
    fn what_is_mounted_is_described_by_its_kind() {
        let reader = || Reader { program: "/bin/slipway".into(), arguments: vec!["x".into()] };
        let layers = ["/s/1", "/s/2"].map(PathBuf::from);
        let options = ["userxattr".to_owned()];
        let overlay = Import::overlay("/b/rootfs".into(), &layers, &options, reader());
        assert_eq!((overlay.kind.as_str(), overlay.device.as_str()), ("overlay", "overlay"));
        assert_eq!((overlay.layers, overlay.options), (layers.to_vec(), options.to_vec()));
        let mount = Mount {
            r#type: "ext4".into(),
            source: "/dev/sdb".into(),
            options: vec!["ro".into()],
            ..Mount::default()
        };
        let device = Import::device("/b/rootfs".into(), &mount, reader());
        assert_eq!(
            (device.kind, device.device, device.options),
            (mount.r#type, mount.source, mount.options)
        );
        assert!(device.layers.is_empty());
        assert_eq!((device.target, device.arguments), ("/b/rootfs".into(), vec!["x".to_owned()]));
    }

    #[test]
    fn words_of_mount_are_flags() {
        let options = ["rw", "nodev", "index=off"].map(str::to_owned);
        let (flags, data) = flags_and_data(&options);
        assert_eq!((flags, data), (MountFlags::NODEV, vec!["index=off".to_owned()]));
    }
}
