//! The cage: the parts of the host that a VMM's process can reach.
//!
//! A VMM is assumed to be taken over by its guest some day. Its user id, its seccomp filter and its
//! few descriptors limit what it may do with the objects that it can name; the cage leaves it no
//! object to name. A caged VMM has:
//!
//! - an empty environment;
//! - a network namespace of its own, with a loopback interface that is down: no abstract socket and
//!   no TCP listener of the host is reachable;
//! - a process namespace of its own, in which it is process 1: it can neither signal, trace nor
//!   read any other process, including processes of the same user id;
//! - IPC, UTS and control group namespaces of its own, and a session keyring of its own;
//! - a mount namespace of its own that holds one empty read-only file system, with one file for
//!   sockets of functions if it can be given some (module `place`);
//! - a system call filter ([`filter()`]) for everything that reaches beyond namespaces.
//!
//! The cage closes in two steps. The process starts as the first one of a process namespace and
//! [enters](Cage::enter) its other namespaces, where it still sees the host's files: a dynamically
//! linked VMM needs its libraries, its firmware and its kernel. Once the VMM has opened all that it
//! needs, and before its guest runs the first instruction, [`Cage::empty_root`] takes the files
//! away. The VMM does not have to co-operate, so any VMM can be caged.
//!
//! Descriptors that the VMM has open stay open: sockets, pipes and memory are no part of a mount
//! namespace. None of them is a directory, so no path starts from them.
//!
//! Not implemented: a user namespace of the VMM. The VMM has no capability that could be taken
//! away, the launcher opens `/dev/kvm` and everything else, and a process with capabilities in a
//! user namespace of its own can reach more of the kernel than one without, not less.
//!
//! A process that is the first of its process namespace ignores signals that it has no handler for,
//! unless an ancestor namespace sends SIGKILL or SIGSTOP; its own faults still end it. VMMs are
//! ended by SIGKILL through a pidfd.

mod filter;
mod place;
mod root;

use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;

use rustix::io::Errno;
use rustix::mount::MountPropagationFlags;
use rustix::thread::UnshareFlags;

pub(crate) use filter::{Holes, filter};
pub(crate) use place::PLACE;

use crate::{Error, Result};

/// The VMM's host name; the host's own would identify the host.
const HOST_NAME: &[u8] = b"slipway";

/// A cage for one VMM. Copies are the same cage.
///
/// The public part is its namespaces, so that their cost can be measured with any program.
#[derive(Clone, Copy, Debug)]
pub struct Cage(());

impl Cage {
    /// Returns the cage, or `None` if the launcher is not root, since namespaces need root. Tests
    /// and measurements run VMMs without a cage; the daemon is root.
    pub fn of_launcher() -> Option<Self> {
        rustix::process::geteuid().is_root().then_some(Self(()))
    }

    /// Has the children of the calling thread start in a new process namespace, whose first process
    /// is the next child. The namespace ends with that child, and the thread can have no other
    /// children afterwards: it should be a thread for this purpose.
    ///
    /// # Errors
    /// The kernel's refusal; also the second call on one thread.
    pub fn divert_children(self) -> io::Result<()> {
        Ok(unshare(UnshareFlags::NEWPID)?)
    }

    /// Moves the calling process into the other namespaces. Called by a child before it runs its
    /// program, as root and in its final control groups; makes system calls only.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn enter(self) -> io::Result<()> {
        unshare(
            UnshareFlags::NEWNS
                | UnshareFlags::NEWNET
                | UnshareFlags::NEWIPC
                | UnshareFlags::NEWUTS
                | UnshareFlags::NEWCGROUP,
        )?;
        // Unmounts of the host while the VMM starts are propagated here, but not the other way
        // round.
        let downstream = MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC;
        rustix::mount::mount_change(c"/", downstream)?;
        // Another working directory would outlive the root that `empty_root` takes away.
        rustix::process::chdir(c"/")?;
        rustix::system::sethostname(HOST_NAME)?;
        join_new_keyring()
    }

    /// Takes all files away from the caged process behind `pidfd`, whose id is `pid`, and checks
    /// that they are gone. With `takes_functions`, the process has a place for a socket. The
    /// process must be known to run, and its guest not to.
    pub(crate) async fn empty_root(
        self,
        pid: i32,
        pidfd: OwnedFd,
        takes_functions: bool,
    ) -> Result<()> {
        let empty = move || root::empty(pid, &pidfd, takes_functions);
        let emptied = on_a_thread_of_its_own("vmm-root", empty).await;
        emptied.map_err(|source| Error::system("taking the host's files away from the VM", source))
    }

    /// Shows the caged process behind `pidfd` a socket, at [`PLACE`], until [`Cage::hide`].
    pub(crate) async fn show(self, pidfd: OwnedFd, socket: PathBuf) -> Result<()> {
        let show = move || place::show(&pidfd, &socket);
        let shown = on_a_thread_of_its_own("vmm-socket", show).await;
        shown.map_err(|source| Error::system("showing the VM a socket", source))
    }

    /// Takes the socket of [`Cage::show`] away.
    pub(crate) async fn hide(self, pidfd: OwnedFd) -> Result<()> {
        let hidden = on_a_thread_of_its_own("vmm-socket", move || place::hide(&pidfd)).await;
        hidden.map_err(|source| Error::system("taking a socket away from the VM", source))
    }
}

/// Joins a new session keyring. Otherwise the VMM would inherit the launcher's, and a process that
/// possesses a keyring may read its keys.
fn join_new_keyring() -> io::Result<()> {
    // SAFETY: without a name nothing is read; no other memory effects.
    let joined = unsafe {
        let none = std::ptr::null::<libc::c_char>();
        libc::syscall(libc::SYS_keyctl, libc::KEYCTL_JOIN_SESSION_KEYRING, none)
    };
    match joined {
        ..0 => match io::Error::last_os_error() {
            // The kernel has no keys, or a filter denies them to this process and so to the VMM.
            error if matches!(error.raw_os_error(), Some(libc::ENOSYS | libc::EPERM)) => Ok(()),
            error => Err(error),
        },
        _ => Ok(()),
    }
}

fn unshare(flags: UnshareFlags) -> Result<(), Errno> {
    // SAFETY: none of the flags used here (CLONE_FILES is not among them) changes what a descriptor
    // of this thread stands for.
    unsafe { rustix::thread::unshare_unsafe(flags) }
}

/// Runs `work` on a thread that ends with it, so that changes of the thread's own state affect no
/// other work.
pub(crate) async fn on_a_thread_of_its_own<T: Send + 'static>(
    name: &str,
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    let (done, outcome) = tokio::sync::oneshot::channel();
    // If the caller has given up waiting, the outcome is dropped here.
    let run = move || drop(done.send(work()));
    std::thread::Builder::new().name(name.to_owned()).spawn(run)?;
    outcome.await.unwrap_or_else(|_| Err(io::Error::other("the thread for it has ended")))
}
