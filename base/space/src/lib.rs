//! The free space of a file system, and the part of it that large files leave to others.
//!
//! # Dependencies
//!
//! `rustix` (statvfs(3) without a C library).

mod allowance;

use std::io;
use std::os::fd::AsFd;
use std::path::Path;

pub use allowance::Allowance;
use rustix::fs::StatVfs;

/// The bytes of a file system that large files leave free: records and logs need them.
const RESERVE: u64 = 1 << 30;
/// The part of a small file system that large files leave free: one of so many.
const PARTS: u64 = 20;

/// The space of a file system at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Space {
    /// The bytes that the file system has for data when it is empty; `u64::MAX` if it does not
    /// tell.
    pub size: u64,
    /// The bytes that are free for users without privileges; `u64::MAX` if the file system does
    /// not tell.
    pub free: u64,
}

impl Space {
    /// Returns the space of the file system that `path` is on.
    ///
    /// # Errors
    /// The errors of statvfs(3).
    pub fn at(path: &Path) -> io::Result<Self> {
        Ok(Self::new(&rustix::fs::statvfs(path)?))
    }

    /// Returns the space of the file system that the open file `file` is on.
    ///
    /// # Errors
    /// The errors of fstatvfs(3).
    pub fn of(file: impl AsFd) -> io::Result<Self> {
        Ok(Self::new(&rustix::fs::fstatvfs(file)?))
    }

    fn new(status: &StatVfs) -> Self {
        if status.f_blocks == 0 {
            return Self { size: u64::MAX, free: u64::MAX };
        }
        let bytes = |blocks: u64| blocks.saturating_mul(status.f_frsize);
        Self { size: bytes(status.f_blocks), free: bytes(status.f_bavail) }
    }

    /// Returns the bytes that large files leave free: 1 GiB, or a twentieth of a file system of
    /// less than 20 GiB.
    pub fn reserve(&self) -> u64 {
        (self.size / PARTS).min(RESERVE)
    }

    /// Returns the bytes that can be written until no more than `reserve` bytes are free.
    pub fn beyond(&self, reserve: u64) -> u64 {
        self.free.saturating_sub(reserve)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_and_its_path_are_on_one_file_system() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let (open, named) = (Space::of(file.as_file()).unwrap(), Space::at(file.path()).unwrap());
        assert_eq!(open.size, named.size);
        assert!(open.size > 0 && open.free <= open.size);
        let missing = Space::at(&file.path().join("missing"));
        assert!(missing.is_err());
    }

    #[test]
    fn a_part_stays_free() {
        let gib = |size: u64, free: u64| Space { size: size << 30, free: free << 30 };
        assert_eq!(gib(100, 50).reserve(), 1 << 30);
        assert_eq!(gib(10, 5).reserve(), 1 << 29);
        assert_eq!(gib(100, 50).beyond(1 << 30), 49 << 30);
        assert_eq!(gib(100, 1).beyond(2 << 30), 0);
        assert_eq!(Space { size: u64::MAX, free: u64::MAX }.reserve(), 1 << 30);
    }
}
