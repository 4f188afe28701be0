//! userfaultfd(2): faults of one process that another one serves, in "minor" mode, where the page
//! is there and only not mapped yet, and in "missing" mode (*linux/userfaultfd.h*).
#![allow(unsafe_code)] // ioctl(2)

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use rustix::io::Errno;

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
/// `UFFD_EVENT_PAGEFAULT`.
const EVENT_PAGEFAULT: u8 = 0x12;
/// The size in bytes of a message of the kernel (`struct uffd_msg`).
const MESSAGE: usize = 32;

/// Requests of ioctl(2).
mod request {
    /// `USERFAULTFD_IOC_NEW`, of the device (Linux 6.1).
    pub const NEW: u64 = 0xaa00;
    pub const API: u64 = 0xc018_aa3f;
    pub const REGISTER: u64 = 0xc020_aa00;
    pub const UNREGISTER: u64 = 0x8010_aa01;
    pub const WAKE: u64 = 0x8010_aa02;
    pub const ZEROPAGE: u64 = 0xc020_aa04;
    pub const CONTINUE: u64 = 0xc020_aa07;
}

/// The result of [`Userfault::go_on`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Continued {
    /// This number of bytes from the start of the range is mapped, all of it or up to a page that
    /// was mapped already.
    Mapped(u64),
    /// The first page of the range is mapped already.
    Passed,
    /// The first page of the range is not in the file.
    Absent,
    /// The process has ended: none of its threads runs, and its mappings are gone or going.
    Ended,
}

/// A userfaultfd.
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

    /// Takes a descriptor that another process made. Not being a userfaultfd, it fails later calls.
    pub fn of_peer(file: OwnedFd) -> io::Result<Self> {
        rustix::io::ioctl_fionbio(&file, true)?;
        Ok(Self(file))
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

    /// Makes and maps a page of zeros for each page of the range, none of which may be in the file,
    /// and wakes who waits for them. Does nothing for a page that is there by now.
    ///
    /// # Errors
    /// The kernel refuses: the range is not registered for missing pages, the process has ended, or
    /// no memory is left.
    pub fn zero(&self, address: u64, len: u64) -> io::Result<()> {
        loop {
            let outcome = self.call(request::ZEROPAGE, &mut [address, len, 0, 0]);
            match outcome.err().map(|error| Errno::from_io_error(&error)) {
                Some(Some(Errno::AGAIN)) => {}
                None | Some(Some(Errno::EXIST)) => return Ok(()),
                Some(errno) => return Err(errno.unwrap_or(Errno::IO).into()),
            }
        }
    }

    /// Ends the registration of a range: its later faults are the kernel's.
    ///
    /// # Errors
    /// The errno of the kernel.
    pub fn unregister(&self, address: u64, len: u64) -> io::Result<()> {
        self.call(request::UNREGISTER, &mut [address, len])
    }

    /// Has the threads that wait for a page of the range touch it again.
    ///
    /// # Errors
    /// The errno of the kernel.
    pub fn wake(&self, address: u64, len: u64) -> io::Result<()> {
        self.call(request::WAKE, &mut [address, len])
    }

    /// Maps the pages of the range, whose bytes are final, and wakes who waits for them.
    ///
    /// # Errors
    /// The kernel refuses: the range is not registered.
    pub fn go_on(&self, address: u64, len: u64) -> io::Result<Continued> {
        loop {
            let mut words = [address, len, 0, 0];
            let outcome = self.call(request::CONTINUE, &mut words);
            let mapped = words[3].cast_signed();
            let errno = outcome.err().map(|error| Errno::from_io_error(&error));
            return match errno {
                None => Ok(Continued::Mapped(len)),
                Some(Some(Errno::SRCH)) => Ok(Continued::Ended),
                Some(_) if mapped > 0 => Ok(Continued::Mapped(mapped.unsigned_abs())),
                // The process is changing its address space.
                Some(Some(Errno::AGAIN)) => continue,
                Some(Some(Errno::EXIST)) => Ok(Continued::Passed),
                Some(Some(Errno::FAULT)) => Ok(Continued::Absent),
                Some(errno) => Err(errno.unwrap_or(Errno::IO).into()),
            };
        }
    }

    /// Returns the addresses of some of the faults that wait, at most 16. Never waits.
    ///
    /// # Errors
    /// Those of read(2).
    pub fn faults(&self) -> io::Result<Vec<u64>> {
        let mut messages = [0; 16 * MESSAGE];
        let read = match rustix::io::read(&self.0, &mut messages) {
            Err(Errno::AGAIN | Errno::INTR) => 0,
            other => other?,
        };
        let messages = messages[..read].chunks_exact(MESSAGE);
        let faults = messages.filter(|message| message[0] == EVENT_PAGEFAULT);
        // Flags, then the address (`struct uffd_msg`).
        let address = |message: &[u8]| message[16..24].try_into().map_or(0, u64::from_ne_bytes);
        Ok(faults.map(address).collect())
    }
}

impl AsFd for Userfault {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
