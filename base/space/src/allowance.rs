//! The space that large files may take of their file system.

use std::io;
use std::os::fd::AsFd;

use crate::Space;

/// The most bytes that are written between two looks at the free space.
const STEP: u64 = 16 << 20;

/// The space that a large file may take of its file system, which leaves a reserve to others.
///
/// Files that are written at the same time have allowances of their own: together they take up to
/// 16 MiB each of the reserve.
#[derive(Debug)]
pub struct Allowance {
    /// The bytes that stay free.
    pub reserve: u64,
    /// The bytes that can be written before the next look.
    granted: u64,
}

impl Allowance {
    /// Returns the space that a file may take of the file system that `dir`, a file or a folder, is
    /// on.
    ///
    /// # Errors
    /// The errors of fstatvfs(3).
    pub fn of(dir: impl AsFd) -> io::Result<Self> {
        Ok(Self::keeping(Space::of(dir)?.reserve()))
    }

    /// Returns the space of a file system of which `reserve` bytes stay free.
    pub fn keeping(reserve: u64) -> Self {
        Self { reserve, granted: 0 }
    }

    /// Returns the bytes that can be written now to the file system that `file` is on.
    ///
    /// # Errors
    /// The errors of fstatvfs(3).
    pub fn left(&self, file: impl AsFd) -> io::Result<u64> {
        Ok(Space::of(file)?.beyond(self.reserve))
    }

    /// Counts `bytes` bytes that are about to be written to `file`.
    ///
    /// # Errors
    /// [`io::ErrorKind::StorageFull`] if less than the reserve would be free then; those of
    /// fstatvfs(3).
    pub fn take(&mut self, file: impl AsFd, bytes: u64) -> io::Result<()> {
        if self.granted < bytes {
            self.granted = self.left(file)?.min(STEP.max(bytes));
        }
        let full = || {
            let what = format!(
                "the disk has no more than the {} MiB that stay free: free some of its space",
                self.reserve >> 20
            );
            io::Error::new(io::ErrorKind::StorageFull, what)
        };
        self.granted = self.granted.checked_sub(bytes).ok_or_else(full)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_ends_before_it_takes_the_reserve() {
        let file = tempfile::tempfile().unwrap();
        let mut space = Allowance::of(&file).unwrap();
        assert_eq!(space.reserve, Space::of(&file).unwrap().reserve());
        let all = Allowance::keeping(0).left(&file).unwrap();
        assert!(all > 0);
        assert_eq!(Allowance::keeping(u64::MAX).left(&file).unwrap(), 0);
        // Granted bytes are taken without a new look at the file system.
        (space.reserve, space.granted) = (u64::MAX, 8192);
        space.take(&file, 4096).unwrap();
        space.take(&file, 4096).unwrap();
        let full = space.take(&file, 4096).unwrap_err();
        assert_eq!(full.kind(), io::ErrorKind::StorageFull);
        assert!(full.to_string().contains("stay free"), "{full}");
    }
}
