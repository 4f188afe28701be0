//! userfaultfd(2): faults of a VMM that this process serves (*linux/userfaultfd.h*).
#![allow(unsafe_code)] // ioctl(2)

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;

/// `UFFD_EVENT_PAGEFAULT`.
const EVENT_PAGEFAULT: u8 = 0x12;
/// The size in bytes of a message of the kernel (`struct uffd_msg`).
const MESSAGE: usize = 32;
/// The most attempts at a request of a process that is changing its address space. A change ends by
/// itself, but one of which the process wants an event (`UFFD_FEATURE_EVENT_REMOVE` and others)
/// lasts until that event is read, for which the caller must come back.
const ATTEMPTS: u32 = 16;

/// Requests of ioctl(2).
mod request {
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
    /// The process is changing its address space, and nothing was mapped. Its threads that wait
    /// must be woken: their faults come again.
    Changing,
    /// The process has ended: none of its threads runs, and its mappings are gone or going.
    Ended,
}

/// A userfaultfd that a VMM made.
#[derive(Debug)]
pub struct Userfault(OwnedFd);

impl Userfault {
    /// Takes a descriptor that another process made. Not being a userfaultfd, it fails later calls.
    pub fn of_peer(file: OwnedFd) -> io::Result<Self> {
        let this = Self(file);
        this.never_wait()?;
        Ok(this)
    }

    /// Has [`Userfault::faults`] never wait, and poll(2) tell of faults. Another process with the
    /// descriptor can undo that.
    ///
    /// # Errors
    /// The errno of the kernel.
    pub fn never_wait(&self) -> io::Result<()> {
        Ok(rustix::io::ioctl_fionbio(&self.0, true)?)
    }

    /// Makes a request whose argument is these words.
    fn call<const WORDS: usize>(&self, request: u64, words: &mut [u64; WORDS]) -> io::Result<()> {
        // SAFETY: the kernel reads and writes the words, as many as the request has, or fewer: the
        // callers' arrays are the structures of linux/userfaultfd.h.
        let result = unsafe { libc::ioctl(self.0.as_raw_fd(), request, words.as_mut_ptr()) };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Makes and maps a page of zeros for each page of the range, none of which may be in the file,
    /// and wakes who waits for them. Does nothing for a page that is there by now.
    ///
    /// # Errors
    /// The kernel refuses: the range is not registered for missing pages, the process has ended or
    /// goes on changing its address space, or no memory is left.
    pub fn zero(&self, address: u64, len: u64) -> io::Result<()> {
        for _ in 0..ATTEMPTS {
            let outcome = self.call(request::ZEROPAGE, &mut [address, len, 0, 0]);
            match outcome.err().map(|error| Errno::from_io_error(&error)) {
                Some(Some(Errno::AGAIN)) => {}
                None | Some(Some(Errno::EXIST)) => return Ok(()),
                Some(errno) => return Err(errno.unwrap_or(Errno::IO).into()),
            }
        }
        Err(Errno::AGAIN.into())
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
        for _ in 0..ATTEMPTS {
            let mut words = [address, len, 0, 0];
            let outcome = self.call(request::CONTINUE, &mut words);
            let mapped = words[3].cast_signed();
            let errno = outcome.err().map(|error| Errno::from_io_error(&error));
            return match errno {
                None => Ok(Continued::Mapped(len)),
                Some(Some(Errno::SRCH)) => Ok(Continued::Ended),
                Some(_) if mapped > 0 => Ok(Continued::Mapped(mapped.unsigned_abs())),
                Some(Some(Errno::AGAIN)) => continue,
                Some(Some(Errno::EXIST)) => Ok(Continued::Passed),
                Some(Some(Errno::FAULT)) => Ok(Continued::Absent),
                Some(errno) => Err(errno.unwrap_or(Errno::IO).into()),
            };
        }
        Ok(Continued::Changing)
    }

    /// Returns the addresses of some of the faults that wait, at most 16. Never waits.
    ///
    /// # Errors
    /// The errors of read(2). [`io::ErrorKind::InvalidData`] if what was read has no fault: the
    /// descriptor is no userfaultfd, and may be readable for ever.
    pub fn faults(&self) -> io::Result<Vec<u64>> {
        let mut messages = [0; 16 * MESSAGE];
        let read = match rustix::io::read(&self.0, &mut messages) {
            Err(Errno::AGAIN | Errno::INTR) => return Ok(Vec::new()),
            other => other?,
        };
        let messages = messages[..read].chunks_exact(MESSAGE);
        let faults = messages.filter(|message| message[0] == EVENT_PAGEFAULT);
        // Flags, then the address (`struct uffd_msg`).
        let address = |message: &[u8]| message[16..24].try_into().map_or(0, u64::from_ne_bytes);
        let faults: Vec<u64> = faults.map(address).collect();
        if faults.is_empty() { Err(io::ErrorKind::InvalidData.into()) } else { Ok(faults) }
    }
}

impl AsFd for Userfault {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    /// `UFFDIO_API` and `UFFDIO_REGISTER`.
    const API: u64 = 0xc018_aa3f;
    const REGISTER: u64 = 0xc020_aa00;
    /// The version of the interface, `UFFD_FEATURE_EVENT_REMOVE`, `UFFDIO_REGISTER_MODE_MISSING`.
    const VERSION: u64 = 0xaa;
    const EVENT_REMOVE: u64 = 1 << 3;
    const MISSING: u64 = 1;
    const PAGE: usize = 4096;

    /// Makes a userfaultfd that serves missing pages of `PAGE` bytes at `address`, and tells of
    /// pages that are given back. Returns `None` if this user may not have one.
    fn telling(address: u64) -> Option<Userfault> {
        use std::os::fd::FromRawFd;
        // UFFD_USER_MODE_ONLY: faults of the kernel itself are not served.
        let flags = libc::O_CLOEXEC | libc::O_NONBLOCK | 1;
        // SAFETY: the call takes no pointer.
        let made = unsafe { libc::syscall(libc::SYS_userfaultfd, flags) };
        let made = i32::try_from(made).ok().filter(|made| *made >= 0)?;
        // SAFETY: the descriptor was made by the call, and nobody else has it.
        let this = Userfault::of_peer(unsafe { OwnedFd::from_raw_fd(made) }).ok()?;
        this.call(API, &mut [VERSION, EVENT_REMOVE, 0]).ok()?;
        this.call(REGISTER, &mut [address, PAGE as u64, MISSING, 0]).ok()?;
        Some(this)
    }

    /// A VMM can have each change of its address space last for as long as nobody reads the event.
    #[test]
    fn a_process_that_goes_on_changing_its_memory_is_not_waited_for() {
        use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous};
        let both = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the kernel chooses the place of a mapping that nothing else uses. The page is the
        // process's to the end.
        let place = unsafe { mmap_anonymous(std::ptr::null_mut(), PAGE, both, MapFlags::PRIVATE) };
        let place = place.unwrap();
        let number = place.expose_provenance();
        let address = number as u64;
        let Some(faults) = telling(address) else {
            println!("SKIPPED: a userfaultfd with events: needs the right to make one");
            return;
        };
        let giver = std::thread::spawn(move || {
            let at = std::ptr::with_exposed_provenance_mut(number);
            // SAFETY: the page is this test's mapping, and holds nothing.
            unsafe { madvise(at, PAGE, Advice::LinuxDontNeed) }.unwrap();
        });
        // Waits until the other thread waits in its call.
        while !matches!(faults.go_on(address, PAGE as u64), Ok(Continued::Changing)) {
            std::thread::yield_now();
        }
        let error = faults.zero(address, PAGE as u64).unwrap_err();
        assert_eq!(Errno::from_io_error(&error), Some(Errno::AGAIN));
        while faults.faults().is_ok() {
            std::thread::yield_now();
        }
        giver.join().unwrap();
        faults.zero(address, PAGE as u64).unwrap();
    }

    #[test]
    fn a_descriptor_without_faults_is_an_error_unless_it_has_nothing_yet() {
        let (silent, _writer) = io::pipe().unwrap();
        assert!(Userfault::of_peer(silent.into()).unwrap().faults().unwrap().is_empty());
        for endless in ["/dev/null", "/dev/zero"] {
            let file = File::open(endless).unwrap();
            let error = Userfault::of_peer(file.into()).unwrap().faults().unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{endless}");
        }
    }
}
