//! Takes the host's files away from a caged process.

use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{CWD, Mode, OFlags};
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, UnmountFlags, fsconfig_create,
    fsconfig_set_string, fsmount, fsopen, move_mount, unmount,
};

use super::PLACE;
use crate::mounts::{Attributes, enter};

/// Replaces the root of the process behind `pidfd`, whose id is `pid`, by an empty file system, and
/// unmounts everything else in its mount namespace. With `takes_functions`, the file system has the
/// file [`PLACE`]. Leaves the calling thread in that namespace.
///
/// # Errors
/// The process is not in a mount namespace of its own, or can still reach files of the host.
pub(super) fn empty(pid: i32, pidfd: &OwnedFd, takes_functions: bool) -> io::Result<()> {
    // Opened before, since the path does not exist afterwards.
    let proc = fs::File::open(format!("/proc/{pid}"))?;
    let empty = empty_file_system(takes_functions)?;
    let before = mount_namespace()?;
    enter(pidfd)?;
    if mount_namespace()? == before {
        return Err(io::Error::other("it shares its files with its launcher"));
    }
    // Mounted on top of the root, then moved into its place: `pivot_root` moves every process of
    // the namespace whose root or working directory it was.
    move_mount(&empty, c"", CWD, c"/", MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)?;
    rustix::process::fchdir(&empty)?;
    rustix::process::pivot_root(c".", c".")?;
    unmount(c".", UnmountFlags::DETACH)?;
    for place in [c"root", c"cwd"] {
        check_empty(&proc, place)?;
    }
    Ok(())
}

/// Makes a file system without files, or with one empty file, which is not mounted anywhere yet.
fn empty_file_system(takes_functions: bool) -> io::Result<OwnedFd> {
    let context = fsopen(c"tmpfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_set_string(context.as_fd(), c"mode", c"0555")?;
    let inodes = if takes_functions { c"2" } else { c"1" };
    fsconfig_set_string(context.as_fd(), c"nr_inodes", inodes)?;
    fsconfig_create(context.as_fd())?;
    let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID
        | MountAttrFlags::MOUNT_ATTR_NODEV
        | MountAttrFlags::MOUNT_ATTR_NOEXEC;
    let mount = fsmount(context.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, attributes)?;
    if takes_functions {
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::CLOEXEC;
        rustix::fs::openat(&mount, place_name(), flags, Mode::empty())?;
    }
    Attributes::read_only().apply(&mount, 0)?;
    Ok(mount)
}

/// Returns the name of [`PLACE`] in the root.
fn place_name() -> &'static [u8] {
    &PLACE.to_bytes()[1..]
}

/// Returns the identity of the calling thread's mount namespace.
fn mount_namespace() -> io::Result<(u64, u64)> {
    use std::os::unix::fs::MetadataExt;
    let found = fs::metadata("/proc/thread-self/ns/mnt")?;
    Ok((found.dev(), found.ino()))
}

/// Returns an error if a directory of the process `proc` holds any file: a launcher whose own root
/// is not that of its mount namespace would have left the VM there.
fn check_empty(proc: &fs::File, place: &std::ffi::CStr) -> io::Result<()> {
    use rustix::fs::{Dir, openat};
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let directory = openat(proc, place, flags, Mode::empty())?;
    for entry in Dir::new(directory)? {
        let entry = entry?;
        let name = entry.file_name().to_bytes();
        if ![&b"."[..], b"..", place_name()].contains(&name) {
            return Err(io::Error::other(format!(
                "its {place:?} still holds {:?}",
                entry.file_name()
            )));
        }
    }
    Ok(())
}
