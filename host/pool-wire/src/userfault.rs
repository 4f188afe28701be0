//! userfaultfd(2): faults of this process that another one serves, in "minor" mode, where the page
//! is there and only not mapped yet, and in "missing" mode (*linux/userfaultfd.h*).
#![allow(unsafe_code)] // ioctl(2)

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// `UFFD_API`.
const API: u64 = 0xaa;
/// `UFFD_FEATURE_MINOR_HUGETLBFS` and `UFFD_FEATURE_MINOR_SHMEM` (Linux 5.13 and 5.14).
const MINOR: u64 = 1 << 9 | 1 << 10;
/// `UFFD_FEATURE_MISSING_SHMEM` (Linux 4.11).
const MISSING: u64 = 1 << 5;
/// `UFFDIO_REGISTER_MODE_MISSING`.
const MODE_MISSING: u64 = 1;
/// `UFFDIO_REGISTER_MODE_MINOR`.
const MODE_MINOR: u64 = 1 << 2;

/// Requests of ioctl(2).
mod request {
    /// `USERFAULTFD_IOC_NEW`, of the device (Linux 6.1).
    pub const NEW: u64 = 0xaa00;
    pub const API: u64 = 0xc018_aa3f;
    pub const REGISTER: u64 = 0xc020_aa00;
}

/// A userfaultfd of this process.
#[derive(Debug)]
pub struct Userfault(OwnedFd);

impl Userfault {
    /// Makes a userfaultfd of the calling process, with `device`, an open `/dev/userfaultfd`.
    ///
    /// # Errors
    /// The kernel refuses: Linux before 5.14 serves no minor faults.
    pub fn new(device: BorrowedFd<'_>) -> io::Result<Self> {
        let flags = u64::from((libc::O_CLOEXEC | libc::O_NONBLOCK).unsigned_abs());
        // SAFETY: the request takes flags, no address.
        let made = unsafe { libc::ioctl(device.as_raw_fd(), request::NEW, flags) };
        if made < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel has just made this descriptor for the caller.
        let this = Self(unsafe { OwnedFd::from_raw_fd(made) });
        this.call(request::API, &mut [API, MINOR | MISSING, 0])?;
        Ok(this)
    }

    /// Makes a request whose argument is these words.
    fn call<const WORDS: usize>(&self, request: u64, words: &mut [u64; WORDS]) -> io::Result<()> {
        // SAFETY: the kernel reads and writes the words, as many as the request has, or fewer: the
        // callers' arrays are the structures of linux/userfaultfd.h.
        let result = unsafe { libc::ioctl(self.0.as_raw_fd(), request, words.as_mut_ptr()) };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Registers a mapping of the calling process: pages of its file that are not mapped, and
    /// with `missing` those that are not in the file either, which the kernel makes otherwise.
    ///
    /// # Errors
    /// The kernel refuses: the range is no shared mapping of a file in memory.
    pub fn register(&self, address: u64, len: u64, missing: bool) -> io::Result<()> {
        let mode = if missing { MODE_MINOR | MODE_MISSING } else { MODE_MINOR };
        self.call(request::REGISTER, &mut [address, len, mode, 0])
    }
}

impl AsFd for Userfault {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
