//! Helpers for tests that play hostile peers.

#![allow(unsafe_code)] // userfaultfd(2) and its ioctls

use std::io::{Error, ErrorKind, Result, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use rustix::net::sockopt::set_socket_linger;

/// Longer than any test.
const HOUR: Duration = Duration::from_secs(3600);

/// Returns a TCP socket and its other end. The last close of the first lasts an hour, in whichever
/// thread it happens, because the socket holds bytes that the other end never reads. Keep the other
/// end: without it, the close ends earlier.
///
/// # Errors
/// The kernel's error: there is no loopback interface, or no descriptor left.
pub fn lingering() -> Result<(TcpStream, TcpStream)> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let mut socket = TcpStream::connect(listener.local_addr()?)?;
    let (other, _) = listener.accept()?;
    socket.set_nonblocking(true)?;
    let full = loop {
        if let Err(error) = socket.write(&[0; 65536]) {
            break error;
        }
    };
    socket.set_nonblocking(false)?;
    set_socket_linger(&socket, Some(HOUR))?;
    if full.kind() == ErrorKind::WouldBlock { Ok((socket, other)) } else { Err(full) }
}

/// Makes each thread that touches a missing page of `memory` sleep for `pause`, and then have a
/// page of zeros, as a peer does that punches a hole there. `memory` begins at a page, is of a
/// memfd, and stays mapped. Returns the number of such sleeps so far.
///
/// # Errors
/// The kernel's error: it has no userfaultfd(2) for faults of programs (Linux 5.11), or a filter of
/// system calls refuses it.
pub fn slow(memory: &[AtomicU64], pause: Duration) -> Result<Arc<AtomicUsize>> {
    const API: libc::c_ulong = 0xc018_aa3f;
    const REGISTER: libc::c_ulong = 0xc020_aa00;
    const USER_MODE_ONLY: libc::c_int = 1;
    const PAGE: usize = 4096;
    let range =
        [memory.as_ptr().expose_provenance() as u64, (memory.len() * 8 / PAGE * PAGE) as u64];
    // SAFETY: a new descriptor, and structures of the ioctls' sizes (linux/userfaultfd.h). Pages of
    // the range are zeros when they are there, as without the descriptor.
    let faults = unsafe {
        let faults = libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | USER_MODE_ONLY);
        if faults < 0 {
            return Err(Error::last_os_error());
        }
        let faults = OwnedFd::from_raw_fd(faults as i32);
        let mut api = [0xaa_u64, 0, 0];
        let mut register = [range[0], range[1], 1, 0];
        if libc::ioctl(faults.as_raw_fd(), API, api.as_mut_ptr()) != 0
            || libc::ioctl(faults.as_raw_fd(), REGISTER, register.as_mut_ptr()) != 0
        {
            return Err(Error::last_os_error());
        }
        faults
    };
    let sleeps = Arc::<AtomicUsize>::default();
    let counted = sleeps.clone();
    std::thread::spawn(move || serve_faults(&faults, pause, &counted));
    Ok(sleeps)
}

/// Gives a page of zeros to each fault, after a pause. Ends with the process.
fn serve_faults(faults: &OwnedFd, pause: Duration, sleeps: &AtomicUsize) {
    const WAKE: libc::c_ulong = 0x8010_aa02;
    const ZEROPAGE: libc::c_ulong = 0xc020_aa04;
    let mut message = [0_u8; 32];
    while let Ok(32) = rustix::io::read(faults, &mut message) {
        // The address of a page fault (linux/userfaultfd.h).
        let bytes = message[16..24].iter().rev();
        let address = bytes.fold(0_u64, |sum, byte| (sum << 8) | u64::from(*byte));
        sleeps.fetch_add(1, Ordering::Relaxed);
        std::thread::sleep(pause);
        let mut zeros = [address & !0xfff, 0x1000, 0, 0];
        // SAFETY: structures of the ioctls' sizes; the page is missing, or the call fails.
        unsafe {
            if libc::ioctl(faults.as_raw_fd(), ZEROPAGE, zeros.as_mut_ptr()) != 0 {
                libc::ioctl(faults.as_raw_fd(), WAKE, zeros.as_mut_ptr());
            }
        }
    }
}
