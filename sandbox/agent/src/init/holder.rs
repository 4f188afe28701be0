//! The holder of a PID namespace that containers of a pod share: process 1 of that namespace.
//!
//! Orphans become its children, and it runs no program. Its root is empty and it has no rights,
//! since containers see it in /proc, and one that may trace processes could enter its root.

use std::path::Path;

use anyhow::{Context, Result};
use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_change};
use slipway_agent_protocol::v1::{Capabilities, Security};

use super::channel::Channel;
use super::{credentials, root, user};

/// The ids of the user "nobody" and its group.
const NOBODY: u32 = 65534;

/// Holds the namespace until this process is killed. `base` is an existing directory, which is
/// covered by the empty root.
///
/// # Errors
/// The root cannot be made, or the agent is gone.
pub fn hold(channel: &Channel, base: &Path) -> Result<()> {
    mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)
        .context("making mounts private")?;
    let flags = MountFlags::RDONLY | MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    mount("tmpfs", base, "tmpfs", flags, c"size=0,nr_inodes=1")
        .context("mounting an empty root")?;
    root::pivot(base)?;
    let nobody = user::User { uid: NOBODY, gid: NOBODY, groups: Vec::new(), home: String::new() };
    let none = Security {
        capabilities: Some(Capabilities::default()),
        no_new_privileges: true,
        ..Security::default()
    };
    credentials::drop_to(&nobody, &credentials::Rights::new(Some(&none), false, true)?)?;
    channel.ready(None)?;
    if !channel.wait_for_go()? {
        std::process::exit(1);
    }
    channel.leave()?;
    // SAFETY: the action touches no memory of ours. With it the kernel reaps children by itself.
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_IGN) };
    loop {
        // SAFETY: pause(2) has no arguments and returns after a signal's handler.
        unsafe { libc::pause() };
    }
}
