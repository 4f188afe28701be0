//! The process gives up the host's files and most of root's rights before it serves.
//!
//! Its new root is a read-only file system in memory with the directory [`SHARES`], in which the
//! daemon mounts what the guest is to see, and `/proc/self/fd`, its own descriptors, and nothing
//! else of /proc. Files are opened again by these, and what kind of file a client has passed is
//! read there. The process cannot mount anything.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{CWD, Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MountFlags, MountPropagationFlags, MoveMountFlags,
    OpenTreeFlags, UnmountFlags, fsconfig_create, fsconfig_set_string, fsmount, fsopen,
    mount_change, mount_remount, move_mount, open_tree, unmount,
};
use rustix::process::{Resource, Rlimit};
use rustix::thread::{CapabilitySet, CapabilitySets};

/// The directory that the guest sees.
pub const SHARES: &str = "/shares";
const DESCRIPTORS: &str = "/proc/self/fd";
const ABOVE: [&str; 2] = ["/proc", "/proc/self"];

/// The rights that operations on files of any user need: to change their owner, to pass by their
/// permissions as the guest's root does, and to act as the user that the guest names.
const KEPT: CapabilitySet = CapabilitySet::CHOWN
    .union(CapabilitySet::DAC_OVERRIDE)
    .union(CapabilitySet::FOWNER)
    .union(CapabilitySet::FSETID)
    .union(CapabilitySet::SETUID)
    .union(CapabilitySet::SETGID);

/// Flags of the root's mount.
const FLAGS: MountFlags =
    MountFlags::BIND.union(MountFlags::NOSUID).union(MountFlags::NODEV).union(MountFlags::NOEXEC);

/// Sets the most descriptors of the process, or leaves it as many as it may have, and returns them.
///
/// # Errors
/// The kernel's refusal, in one line.
pub fn limit_descriptors(most: u64) -> Result<u64, String> {
    let set = |most| {
        let limit = Rlimit { current: Some(most), maximum: Some(most) };
        rustix::process::setrlimit(Resource::Nofile, limit).map(|()| most)
    };
    // In a container of the host's own even root may not have more than it began with.
    let have = rustix::process::getrlimit(Resource::Nofile).maximum.unwrap_or(most);
    set(most).or_else(|_| set(have.min(most))).map_err(|error| format!("descriptors: {error}"))
}

/// Makes the kernel end the process before its VMM if memory of their control group is short.
///
/// # Errors
/// The kernel's refusal, in one line.
pub fn end_first() -> Result<(), String> {
    const FILE: &str = "/proc/self/oom_score_adj";
    std::fs::write(FILE, "500").map_err(|error| format!("{FILE}: {error}"))
}

/// Replaces the process's root. Returns the directory of the process's own descriptors. The process
/// must be alone in its mount namespace.
///
/// # Errors
/// The kernel's refusal, in one line.
pub fn enter() -> Result<File, String> {
    build().map_err(|error| format!("cannot leave the host's files: {error}"))
}

fn build() -> Result<File, Errno> {
    let clone = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    let own = open_tree(CWD, DESCRIPTORS, clone)?;
    let root = empty_file_system()?;
    let attach = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
    // Mounted on top of the root, then moved into its place.
    move_mount(&root, c"", CWD, c"/", attach)?;
    rustix::process::fchdir(&root)?;
    rustix::process::pivot_root(c".", c".")?;
    unmount(c".", UnmountFlags::DETACH)?;
    rustix::process::chdir(c"/")?;
    // Nothing that is mounted on the host from now on appears here by itself.
    mount_change(c"/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?;
    for directory in ABOVE.iter().chain([&DESCRIPTORS, &SHARES]) {
        rustix::fs::mkdir(*directory, Mode::from_raw_mode(0o555))?;
    }
    move_mount(&own, c"", CWD, DESCRIPTORS, attach)?;
    mount_change(DESCRIPTORS, MountPropagationFlags::PRIVATE)?;
    mount_remount(c"/", FLAGS | MountFlags::RDONLY, c"")?;
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok(rustix::fs::open(DESCRIPTORS, flags, Mode::empty())?.into())
}

/// Makes a file system for directories and places of files, which is not mounted anywhere yet.
fn empty_file_system() -> Result<OwnedFd, Errno> {
    let context = fsopen(c"tmpfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_set_string(context.as_fd(), c"mode", c"0555")?;
    fsconfig_set_string(context.as_fd(), c"nr_inodes", c"2048")?;
    fsconfig_set_string(context.as_fd(), c"size", c"64k")?;
    fsconfig_create(context.as_fd())?;
    fsmount(context.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty())
}

/// Gives up all rights of root but those that files need, for this thread and those that it starts.
///
/// # Errors
/// The kernel's refusal, in one line.
pub fn give_up_rights() -> Result<(), String> {
    let refused = |error: Errno| format!("cannot give up root's rights: {error}");
    rustix::thread::set_thread_groups(&[]).map_err(refused)?;
    for right in CapabilitySet::all().difference(KEPT).iter() {
        match rustix::thread::remove_capability_from_bounding_set(right) {
            // The kernel is older than the right.
            Ok(()) | Err(Errno::INVAL) => {}
            Err(error) => return Err(refused(error)),
        }
    }
    let kept =
        CapabilitySets { effective: KEPT, permitted: KEPT, inheritable: CapabilitySet::empty() };
    rustix::thread::set_capabilities(None, kept).map_err(refused)?;
    rustix::thread::set_no_new_privs(true).map_err(refused)
}
