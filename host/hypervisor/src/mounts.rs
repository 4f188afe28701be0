//! System calls for mounts of other processes.

use std::ffi::CStr;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;

use rustix::io::Errno;
use rustix::thread::{
    ThreadNameSpaceType, UnshareFlags, move_into_thread_name_spaces, unshare_unsafe,
};
use slipway_mounts::Mounted;

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
    let mut hasher = DefaultHasher::new();
    for mounted in slipway_mounts::read()? {
        if mounted.id == id || below.is_some_and(|above| mounted.point.starts_with(above)) {
            let Mounted { id, parent, device, root, is_removed, point, flags, .. } = mounted;
            // The rest says nothing of the files.
            (id, parent, device, root, is_removed, point, flags).hash(&mut hasher);
        }
    }
    Ok(hasher.finish())
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
