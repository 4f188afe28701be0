//! Pages that guests share: a file in the host's memory, such as an image's file system, which
//! every guest that is given it finds behind its RAM and can only read.
//!
//! The guest is told of the range by a virtio persistent memory device ([`crate::own::pmem`]), and
//! a file system in it is mounted with `dax`: what a program of the guest reads or maps are the
//! pages of the file themselves. So the host has them once, however many guests use them, and no
//! guest has a copy in its page cache.
//!
//! The file is a memfd that is sealed against shrinking and writing (`F_SEAL_SHRINK`,
//! `F_SEAL_WRITE`). Nobody can take a page away, so no access by this process or the guest ends in
//! SIGBUS; and nobody can change a byte, neither a guest nor a VMM that was taken over, so tenants
//! may share it. A file on a disk would have devices, and the VMM's other threads, wait for that
//! disk.
//!
//! A write of the guest's to the range leaves the guest as an access to memory that is not there
//! (`KVM_MEM_READONLY`), and is dropped, as on a ROM. An instruction that the kernel cannot emulate
//! ends the machine, as it does at any address that is no RAM.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::SealFlags;
use slipway_ram::{DmaMap, Permissions};

use crate::layout::{GIB, MAX_SHARED_PAGES, MIB, SHARED_PAGES_UNIT};
use crate::part::Part;
use crate::{Error, Result};

/// The seals of a file that guests may share.
pub const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::WRITE);

/// Pages that a guest reads and shares with others.
pub struct SharedPages {
    file: OwnedFd,
    /// The place of the pages.
    pub part: Part,
}

impl SharedPages {
    /// Maps `file` and adds it to `map` at the guest-physical address `start`.
    ///
    /// # Errors
    /// [`Error::SharedPages`]: the file has a size that the machine does not support, is not
    /// sealed, or cannot be mapped.
    pub(crate) fn new(map: &mut DmaMap, file: OwnedFd, start: u64) -> Result<Self> {
        let failed = |error: io::Error| Error::SharedPages(explain(&error));
        let seals = rustix::fs::fcntl_get_seals(&file);
        if !seals.is_ok_and(|seals| seals.contains(SEALS)) {
            let what = "their file is not a memfd that is sealed against shrinking and writing";
            return Err(Error::SharedPages(what.into()));
        }
        let found = rustix::fs::fstat(&file).map_err(|errno| failed(errno.into()))?;
        let len = u64::try_from(found.st_size).unwrap_or(0);
        let possible = SHARED_PAGES_UNIT..=MAX_SHARED_PAGES;
        if !possible.contains(&len) || !len.is_multiple_of(SHARED_PAGES_UNIT) {
            let (unit, most) = (SHARED_PAGES_UNIT / MIB, MAX_SHARED_PAGES / GIB);
            let what = format!("{len} bytes; their file has {unit} MiB to {most} GiB, in whole");
            return Err(Error::SharedPages(format!("{what} {unit} MiB")));
        }
        let part = Part::new(map, file.as_fd(), (start, 0, len), Permissions::READ_ONLY);
        Ok(Self { part: part.map_err(failed)?, file })
    }

    /// Returns the file.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// Returns the text of an error of mapping a sealed file.
fn explain(error: &io::Error) -> String {
    match error.kind() {
        // A kernel before 6.7 refuses every shared mapping by a descriptor that could write.
        io::ErrorKind::PermissionDenied => {
            format!("{error}: their file has to be opened for reading only")
        }
        _ => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use rustix::fs::MemfdFlags;

    use super::*;

    /// Makes a file of `bytes` bytes that begins with `content`.
    fn file(bytes: u64, content: &[u8], seals: SealFlags) -> OwnedFd {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create(c"shared", flags).unwrap();
        rustix::fs::ftruncate(&file, bytes).unwrap();
        rustix::io::write(&file, content).unwrap();
        rustix::fs::fcntl_add_seals(&file, seals).unwrap();
        // Opened again: for reading only.
        let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file));
        std::fs::File::open(path).unwrap().into()
    }

    #[test]
    fn devices_read_the_pages_and_cannot_write_them() {
        let mut map = DmaMap::new();
        let start = 4 * GIB;
        let shared = SharedPages::new(&mut map, file(2 * MIB, b"image", SEALS), start).unwrap();
        assert_eq!((shared.part.start, shared.part.len), (start, 2 * MIB));
        let mut bytes = [0; 5];
        map.memory().read(start, &mut bytes).unwrap();
        assert_eq!(&bytes, b"image");
        assert!(map.memory().write(start, b"other").is_err());
        map.memory().read(start, &mut bytes).unwrap();
        assert_eq!(&bytes, b"image");
    }

    #[test]
    fn a_file_that_could_change_or_has_an_impossible_size_is_refused() {
        let refused = |file| {
            let made = SharedPages::new(&mut DmaMap::new(), file, 4 * GIB);
            made.err().unwrap().to_string()
        };
        for seals in [SealFlags::empty(), SealFlags::SHRINK, SealFlags::WRITE] {
            assert!(refused(file(2 * MIB, b"", seals)).contains("sealed against shrinking and"));
        }
        assert!(refused(std::fs::File::open("/proc/self/exe").unwrap().into()).contains("sealed"));
        for bytes in [0, MIB, 3 * MIB, 2 * MIB + 4096, MAX_SHARED_PAGES + 2 * MIB] {
            let text = refused(file(bytes, b"", SEALS));
            assert!(text.contains("2 MiB to 64 GiB, in whole 2 MiB"), "{text}");
        }
    }
}
