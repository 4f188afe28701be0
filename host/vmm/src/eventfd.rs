//! Eventfds, and the type that KVM's interface has for them.

use std::os::fd::{FromRawFd, IntoRawFd, OwnedFd};

use rustix::event::EventfdFlags;
use vmm_sys_util::eventfd::EventFd;

use crate::{Error, Result};

/// Makes an eventfd whose reads and writes do not wait.
///
/// # Errors
/// [`Error::System`]: no descriptor is left.
pub(crate) fn new() -> Result<OwnedFd> {
    let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
    rustix::event::eventfd(0, flags).map_err(Error::system("eventfd"))
}

/// Wraps an eventfd in the type that KVM's interface takes.
pub(crate) fn of(file: OwnedFd) -> EventFd {
    // SAFETY: ownership of an open descriptor passes on.
    unsafe { EventFd::from_raw_fd(file.into_raw_fd()) }
}
