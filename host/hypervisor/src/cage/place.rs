//! A socket in the empty root of a caged VMM, for as long as the VMM connects to it.
//!
//! QEMU takes the server of a function that is added as the path of a socket, and not as a
//! descriptor. A VMM that can be given functions has one empty file in its root, on which the
//! socket is mounted while QEMU connects.

use std::ffi::CStr;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::CWD;
use rustix::io::Errno;
use rustix::mount::{MoveMountFlags, OpenTreeFlags, UnmountFlags, move_mount, open_tree, unmount};

use crate::mounts::enter;

/// The path of the file in the VMM's root.
pub(crate) const PLACE: &CStr = c"/function";

/// Mounts `socket` at [`PLACE`]. For a thread of its own, which stays in the VMM's namespace.
///
/// # Errors
/// The socket is not there, or the VMM was started without a place for it.
pub(super) fn show(pidfd: &OwnedFd, socket: &Path) -> io::Result<()> {
    let clone = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    let tree = open_tree(CWD, socket, clone)?;
    hide(pidfd)?;
    Ok(move_mount(&tree, c"", CWD, PLACE, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)?)
}

/// Unmounts what is at [`PLACE`]. For a thread of its own, which stays in the VMM's namespace.
///
/// # Errors
/// The kernel's refusal.
pub(super) fn hide(pidfd: &OwnedFd) -> io::Result<()> {
    enter(pidfd)?;
    match unmount(PLACE, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW) {
        // Nothing is mounted there.
        Ok(()) | Err(Errno::INVAL) => Ok(()),
        Err(error) => Err(error.into()),
    }
}
