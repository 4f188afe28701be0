//! The number of a network namespace that no other one gets until the machine restarts.

#![allow(unsafe_code)] // the one getsockopt(2)

use std::io;
use std::os::fd::AsRawFd;

use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

/// Returns the cookie of the calling thread's network namespace (`SO_NETNS_COOKIE`, Linux 5.14).
/// The inode number of a namespace is another's soon after it ends.
///
/// # Errors
/// No socket can be made, or the kernel is older.
pub fn cookie() -> io::Result<u64> {
    let socket = socket_with(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    let mut cookie = 0_u64;
    let mut len = size_of::<u64>() as libc::socklen_t;
    // SAFETY: the socket is open during the call, and the kernel writes at most `len` bytes to a
    // number of that size.
    let outcome = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_NETNS_COOKIE,
            std::ptr::from_mut(&mut cookie).cast(),
            &mut len,
        )
    };
    if outcome == 0 { Ok(cookie) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use rustix::thread::{UnshareFlags, unshare_unsafe};

    use super::*;

    #[test]
    fn each_namespace_has_a_cookie_of_its_own() {
        let own = cookie().unwrap();
        assert_eq!(cookie().unwrap(), own);
        if !rustix::process::geteuid().is_root() {
            println!("SKIPPED: each_namespace_has_a_cookie_of_its_own: needs root");
            return;
        }
        let other = || {
            // SAFETY: only the network namespace changes, and the thread ends with the closure.
            unsafe { unshare_unsafe(UnshareFlags::NEWNET) }.unwrap();
            cookie().unwrap()
        };
        // The second namespace may get the inode number of the first, and not its cookie.
        let others = [(); 2].map(|()| std::thread::spawn(other).join().unwrap());
        assert!(others[0] != others[1] && !others.contains(&own), "{own} {others:?}");
    }
}
