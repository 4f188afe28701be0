//! System calls for mounts of other processes.

use std::ffi::{CStr, OsStr};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::io::Errno;
use rustix::thread::{
    ThreadNameSpaceType, UnshareFlags, move_into_thread_name_spaces, unshare_unsafe,
};

/// Moves the calling thread into the mount namespace of the process behind `pidfd`, for good. It
/// stops sharing its root and its working directory with other threads, which the kernel demands.
pub(crate) fn enter(pidfd: &OwnedFd) -> Result<(), Errno> {
    // SAFETY: the thread stops sharing its root and its working directory; what its descriptors
    // stand for does not change.
    unsafe { unshare_unsafe(UnshareFlags::FS) }?;
    move_into_thread_name_spaces(pidfd.as_fd(), ThreadNameSpaceType::MOUNT)
}

/// Returns a number for the calling thread's mount `id`, and for those that are mounted below the
/// directory `below`: what they show of which file systems, where, and with which flags. It is the
/// same in all processes of one build.
///
/// # Errors
/// There is no /proc.
pub(crate) fn fingerprint(id: u64, below: Option<&Path>) -> io::Result<u64> {
    let text = std::fs::read("/proc/thread-self/mountinfo")?;
    let below = below.map(escaped);
    let mut hasher = DefaultHasher::new();
    for line in text.split(|byte| *byte == b'\n') {
        // proc_pid_mountinfo(5): the identifier, the parent's, the device, the root, the mount
        // point and the flags. Behind these is what says nothing of the files.
        let fields: Vec<_> = line.split(|byte| *byte == b' ').take(6).collect();
        let [own, _, _, _, point, _] = fields[..] else { continue };
        let is_below = |above: &Vec<u8>| path(point).starts_with(path(above));
        if own == id.to_string().as_bytes() || below.as_ref().is_some_and(is_below) {
            fields.hash(&mut hasher);
        }
    }
    Ok(hasher.finish())
}

fn path(bytes: &[u8]) -> &Path {
    Path::new(OsStr::from_bytes(bytes))
}

/// Returns a path as mountinfo has it.
fn escaped(path: &Path) -> Vec<u8> {
    let mut escaped = Vec::new();
    for byte in path.as_os_str().as_bytes() {
        match byte {
            b' ' | b'\t' | b'\n' | b'\\' => escaped.extend(format!("\\{byte:03o}").bytes()),
            _ => escaped.push(*byte),
        }
    }
    escaped
}

/// Changes of mounts' attributes: mount_setattr(2), which rustix lacks.
#[derive(Clone, Copy, Default)]
pub(crate) struct Attributes {
    /// Flags to set, `MOUNT_ATTR_*`.
    pub(crate) set: u64,
    /// Flags to clear.
    pub(crate) clear: u64,
    /// The kind of propagation, such as `MS_PRIVATE`; 0: as it is.
    pub(crate) propagation: u64,
}

impl Attributes {
    /// Makes mounts read-only.
    pub(crate) fn read_only() -> Self {
        Self { set: libc::MOUNT_ATTR_RDONLY, ..Self::default() }
    }

    /// Changes the mount that `mount` refers to; with `AT_RECURSIVE` those below it too.
    pub(crate) fn apply(self, mount: &OwnedFd, recursive: i32) -> io::Result<()> {
        let Self { set, clear, propagation } = self;
        let attributes =
            libc::mount_attr { attr_set: set, attr_clr: clear, propagation, userns_fd: 0 };
        let (path, flags): (&CStr, _) = (c"", libc::AT_EMPTY_PATH | recursive);
        // SAFETY: the path and the attributes are valid for reading during the call, which changes
        // no memory of the process; the size is that of the attributes.
        let changed = unsafe {
            libc::syscall(
                libc::SYS_mount_setattr,
                mount.as_raw_fd(),
                path.as_ptr(),
                flags,
                &raw const attributes,
                size_of::<libc::mount_attr>(),
            )
        };
        if changed == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_as_mountinfo_has_them() {
        assert_eq!(escaped(Path::new("/a b\\c\nd#")), b"/a\\040b\\134c\\012d#");
    }
}
