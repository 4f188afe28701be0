//! A page that a measurement shares with the two processes of its load.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context, Result};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use super::memory_file;

/// Bytes of the page.
const BYTES: usize = 4096;

/// The phase of a load, set by the measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Load that does not count, before the measured time and after it.
    WarmUp,
    /// Load that counts.
    Measured,
    /// The load is over.
    Over,
}

/// The shared page. Each number has one writer, and no memory ordering relies on it.
pub struct Board {
    cells: *mut Cells,
    file: File,
}

/// The numbers, each in a cache line of its own, since their writers run on different processors.
#[repr(C)]
struct Cells {
    phase: Cell,
    bytes: Cell,
    accepted: Cell,
}

#[repr(align(64))]
struct Cell(AtomicU64);

impl Board {
    /// Makes an empty page in memory that has no name in any file system.
    ///
    /// # Errors
    /// If there is no memory.
    pub fn create() -> Result<Self> {
        let file = memory_file("load")?;
        file.set_len(BYTES as u64)?;
        Self::map(file)
    }

    /// Maps the page that another process made.
    ///
    /// # Errors
    /// If `path` is no such page.
    pub fn open(path: &Path) -> Result<Self> {
        let file = File::options().read(true).write(true).open(path);
        let file = file.with_context(|| format!("cannot open {}", path.display()))?;
        anyhow::ensure!(file.metadata()?.len() == BYTES as u64, "{} is no page", path.display());
        Self::map(file)
    }

    /// Returns the path by which other processes can open the page, as long as this one lives.
    pub fn path(&self) -> PathBuf {
        super::path_of(&self.file)
    }

    fn map(file: File) -> Result<Self> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        #[allow(unsafe_code)] // a shared mapping has no safe form
        // SAFETY: a new mapping at a place of the kernel's choice.
        let start = unsafe {
            mmap(std::ptr::null_mut(), BYTES, access, MapFlags::SHARED, &file, 0)
                .context("mapping the page of a load")?
        };
        Ok(Self { cells: start.cast(), file })
    }

    fn cells(&self) -> &Cells {
        #[allow(unsafe_code)] // the pointer is to a shared mapping
        // SAFETY: the mapping is a page, aligned and long enough, of which only atomics are used;
        // any bytes are a valid value of theirs.
        unsafe {
            &*self.cells
        }
    }

    /// Returns the phase.
    #[inline]
    pub fn phase(&self) -> Phase {
        match self.cells().phase.0.load(Ordering::Relaxed) {
            0 => Phase::WarmUp,
            1 => Phase::Measured,
            _ => Phase::Over,
        }
    }

    /// Sets the phase.
    pub fn ask(&self, phase: Phase) {
        self.cells().phase.0.store(phase as u64, Ordering::Relaxed);
    }

    /// Counts bytes that arrived. Only one side of a load counts.
    #[inline]
    pub fn count(&self, bytes: u64) {
        let cell = &self.cells().bytes.0;
        cell.store(cell.load(Ordering::Relaxed) + bytes, Ordering::Relaxed);
    }

    /// Counts a connection that the server accepted.
    pub fn accept(&self) {
        self.cells().accepted.0.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the number of connections that the server accepted.
    pub fn accepted(&self) -> u64 {
        self.cells().accepted.0.load(Ordering::Relaxed)
    }

    /// Returns the number of bytes that arrived.
    pub fn counted(&self) -> u64 {
        self.cells().bytes.0.load(Ordering::Relaxed)
    }
}

impl Drop for Board {
    fn drop(&mut self) {
        #[allow(unsafe_code)] // unmapping a shared mapping has no safe form
        #[allow(clippy::disallowed_methods, reason = "a few pages of the program's own")]
        // SAFETY: the mapping is ours, and nothing refers to it any more.
        let _ = unsafe { munmap(self.cells.cast(), BYTES) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_sides_see_the_same_page() {
        let ours = Board::create().unwrap();
        let theirs = Board::open(&ours.path()).unwrap();
        assert_eq!((theirs.phase(), ours.counted()), (Phase::WarmUp, 0));
        for phase in [Phase::Measured, Phase::Over] {
            ours.ask(phase);
            assert_eq!(theirs.phase(), phase);
        }
        theirs.count(64);
        theirs.count(64);
        theirs.accept();
        assert_eq!((ours.counted(), ours.accepted()), (128, 1));
        assert!(Board::open(Path::new("/proc/self/status")).is_err());
    }
}
