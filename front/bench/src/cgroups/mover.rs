//! A process that moves itself into control groups, as Slipway's VMMs do before they run.
//!
//! The kernel moves a thread that moves itself alone without waiting for other processes. A process
//! that another one moves waits for a grace period of RCU, if none was moved for as long, and all
//! other moves wait with it (`cgroup_procs_write_start` in the kernel's *cgroup.c*).

use std::ffi::CStr;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, WaitOptions};

/// The longest order to a process, in bytes.
const LONGEST: usize = 4096;
/// The number of the process's end of the socket.
const SOCKET: RawFd = 3;

/// A process that sleeps until it is told to move, and ends when this value is dropped or with the
/// thread that has made it.
///
/// It is a fork of this process, with one thread and no program of its own: thousands of them cost
/// less than as many programs.
#[derive(Debug)]
pub(super) struct Mover {
    pid: Pid,
    /// An order is paths, each ended by a zero byte, and another zero byte. The answer is four
    /// bytes: the number of the error, 0 for none.
    socket: UnixStream,
}

impl Mover {
    /// Starts a process. Takes a descriptor.
    ///
    /// # Errors
    /// If the process cannot be made.
    pub fn start() -> io::Result<Self> {
        let (socket, its) = UnixStream::pair()?;
        #[allow(unsafe_code)] // a process without a program of its own
        // SAFETY: the child makes system calls only, on its own copy of this stack, and never
        // returns: other threads may have had any lock.
        let pid = match unsafe { libc::fork() } {
            0 => run(its.as_raw_fd()),
            pid => pid,
        };
        // -1, an error, is no process id.
        let made = u32::try_from(pid).ok().and_then(|_| Pid::from_raw(pid));
        let pid = made.ok_or_else(io::Error::last_os_error)?;
        Ok(Self { pid, socket })
    }

    /// Returns the process id.
    pub fn id(&self) -> u32 {
        self.pid.as_raw_nonzero().get().unsigned_abs()
    }

    /// Has the process write "0", which stands for the writer, to each of the files. Waits until it
    /// has.
    ///
    /// # Errors
    /// If a file cannot be written to, or the process has ended.
    pub fn enter(&self, files: &[PathBuf]) -> Result<()> {
        let mut order = Vec::with_capacity(LONGEST);
        for file in files {
            order.extend_from_slice(file.as_os_str().as_bytes());
            order.push(0);
        }
        order.push(0);
        ensure!(order.len() <= LONGEST, "the paths of a control group are too long");
        let ended = "a process that moves itself has ended";
        (&self.socket).write_all(&order).context(ended)?;
        let mut answer = [0; 4];
        (&self.socket).read_exact(&mut answer).context(ended)?;
        match i32::from_ne_bytes(answer) {
            0 => Ok(()),
            errno => Err(io::Error::from_raw_os_error(errno))
                .with_context(|| format!("a process cannot move itself by {files:?}")),
        }
    }
}

impl Drop for Mover {
    fn drop(&mut self) {
        let _ = rustix::process::kill_process(self.pid, Signal::KILL);
        let _ = rustix::process::waitpid(Some(self.pid), WaitOptions::empty());
    }
}

/// Runs the forked process with its end of the socket. Makes system calls only.
#[allow(unsafe_code)] // a process without a program of its own, its descriptors and its end
fn run(socket: RawFd) -> ! {
    // SAFETY: nothing else of this process uses its descriptors, and the calls have no memory
    // effects. `SOCKET` stays open from here on.
    let socket = unsafe {
        if socket != SOCKET {
            libc::dup2(socket, SOCKET);
        }
        // Above all, the parent's ends of other sockets.
        libc::syscall(libc::SYS_close_range, SOCKET.unsigned_abs() + 1, u32::MAX, 0u32);
        BorrowedFd::borrow_raw(SOCKET)
    };
    let _ = rustix::process::set_parent_process_death_signal(Some(Signal::KILL));
    while let Some(errno) = obey(socket) {
        if rustix::io::write(socket, &errno.to_ne_bytes()).is_err() {
            break;
        }
    }
    // SAFETY: ends this process, without what its parent does at its own end; no memory effects.
    unsafe { libc::_exit(0) }
}

/// Waits for the next order, and carries it out. Returns the number of the error, 0 for none.
/// Returns `None` if no order comes any more. Makes system calls only.
fn obey(socket: BorrowedFd<'_>) -> Option<i32> {
    let mut order = [0_u8; LONGEST];
    let mut len = 0;
    while !order[..len].ends_with(b"\0\0") {
        match rustix::io::read(socket, &mut order[len..]) {
            Ok(0) | Err(_) => return None,
            Ok(more) => len += more,
        }
    }
    let mut paths = order[..len - 1].split_inclusive(|byte| *byte == 0);
    let moved = paths.try_for_each(|path| {
        let path = CStr::from_bytes_with_nul(path).map_err(|_| Errno::INVAL)?;
        let file = rustix::fs::open(path, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())?;
        rustix::io::write(&file, b"0").map(drop)
    });
    Some(moved.map_or_else(Errno::raw_os_error, |()| 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_writes_to_its_files_until_it_is_dropped() {
        let dir = tempfile::tempdir().unwrap();
        let files = ["one", "two"].map(|name| dir.path().join(name));
        files.iter().for_each(|file| std::fs::write(file, "1").unwrap());
        let (first, second) = (Mover::start().unwrap(), Mover::start().unwrap());
        first.enter(&files[..1]).unwrap();
        let texts = || files.clone().map(|file| std::fs::read_to_string(file).unwrap());
        assert_eq!(texts(), ["0", "1"]);
        second.enter(&files).unwrap();
        assert_eq!(texts(), ["0", "0"]);
        let error = first.enter(&[dir.path().join("none")]).unwrap_err();
        let errno = error.downcast_ref::<io::Error>().and_then(io::Error::raw_os_error);
        assert_eq!(errno, Some(Errno::NOENT.raw_os_error()));
        assert!(first.enter(&[PathBuf::from("x".repeat(LONGEST))]).is_err());
        // The end of one leaves the other.
        let id = second.id();
        drop(second);
        assert!(!std::path::Path::new(&format!("/proc/{id}")).exists());
        first.enter(&files).unwrap();
        rustix::process::kill_process(first.pid, Signal::KILL).unwrap();
        let error = loop {
            // It may carry out an order before it ends.
            if let Err(error) = first.enter(&files) {
                break error;
            }
        };
        assert!(format!("{error:#}").starts_with("a process that moves itself has ended"));
    }
}
