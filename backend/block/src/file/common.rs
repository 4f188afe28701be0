//! What the disks on one file have in common.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use rustix::fs::FileType;

use super::job::Alignment;
use super::open::{FileOptions, capacity, failed, file_type, open, size};
use crate::{DiskError, Geometry, OpenError};

/// An open file or block device. One description for all of its disks: it holds the lock, and the
/// kernel reports a lost write to it once.
pub(crate) struct Common {
    pub fd: OwnedFd,
    /// What O_DIRECT asks of requests; None when the page cache is used.
    pub(super) direct: Option<Alignment>,
    shape: Geometry,
    /// The size to be taken over.
    blocks: AtomicU64,
    /// See [`FileOptions::witness`].
    pub(super) witness: Option<Arc<OwnedFd>>,
    /// The first flush that failed, whose disk it was.
    pub(super) lost: OnceLock<DiskError>,
    /// Disks on it.
    disks: AtomicU32,
}

/// What the disks on a file may have with the kernel at a time, each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Share {
    /// Requests.
    pub requests: usize,
    /// Bytes that they move; a single request may have more.
    pub bytes: u64,
}

impl Share {
    /// Of one that has the file alone: as many as a ring has places.
    const ALONE: Self = Self { requests: crate::uring::RING_ENTRIES as usize, bytes: u64::MAX };
    /// Of one that shares it. What comes after waits for what the medium has: few enough that
    /// somebody else's request does not stand behind hundreds, and enough for a fast drive's full
    /// speed.
    const SHARED: Self = Self { requests: 32, bytes: 1 << 20 };
}

impl Common {
    pub fn open(path: &Path, options: &FileOptions) -> Result<Self, OpenError> {
        let opened = open(path, options)?;
        let blocks = AtomicU64::new(opened.geometry.blocks);
        let (fd, direct, shape) = (opened.fd, opened.direct, opened.geometry);
        let (witness, lost) = (options.witness.clone(), OnceLock::new());
        Ok(Self { fd, direct, shape, blocks, witness, lost, disks: AtomicU32::new(0) })
    }

    /// There is one disk more on it.
    pub fn join(&self) {
        self.disks.fetch_add(1, Ordering::Relaxed);
    }

    /// There is one less.
    pub fn leave(&self) {
        self.disks.fetch_sub(1, Ordering::Relaxed);
    }

    /// What each of its disks may have with the kernel.
    pub(super) fn share(&self) -> Share {
        // Who comes or goes at this moment makes a difference to the next request.
        if self.disks.load(Ordering::Relaxed) > 1 { Share::SHARED } else { Share::ALONE }
    }

    pub fn geometry(&self) -> Geometry {
        Geometry { blocks: self.blocks.load(Ordering::Acquire), ..self.shape }
    }

    /// A flush failed: what it would have vouched for may be lost.
    pub fn lose(&self, error: DiskError) {
        // The first error stands.
        let _ = self.lost.set(error);
    }

    pub fn set_blocks(&self, blocks: u64) {
        self.blocks.store(blocks, Ordering::Release);
    }
}

/// Bytes that the file or device at `path` has now.
pub(crate) fn measure(fd: &OwnedFd, path: &Path) -> Result<u64, OpenError> {
    size(fd, path)
}

/// Gives a regular file another size.
///
/// # Errors
/// [`OpenError::Fixed`] for a device, [`OpenError::TooLarge`], [`OpenError::File`].
pub(crate) fn set_size(fd: &OwnedFd, path: &Path, bytes: u64) -> Result<(), OpenError> {
    if file_type(fd, path)? != FileType::RegularFile {
        return Err(OpenError::Fixed(path.to_owned()));
    }
    let system = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    let capacity = capacity(system.unwrap_or(Path::new(".")));
    let capacity = capacity.map_err(failed(path, "find the size of the file system of"))?;
    if bytes > capacity {
        return Err(OpenError::TooLarge { path: path.to_owned(), wanted: bytes, capacity });
    }
    rustix::fs::ftruncate(fd, bytes).map_err(failed(path, "set the size of"))
}

/// Cuts what a regular file has behind a disk of this shape, at a whole block. What is less than a
/// block, and devices, stay as they are.
pub(crate) fn cut(fd: &OwnedFd, path: &Path, geometry: &Geometry) -> Result<(), OpenError> {
    let block = u64::from(geometry.block_size);
    let beyond = measure(fd, path)?.saturating_sub(geometry.bytes()) >= block;
    if !beyond || geometry.read_only || file_type(fd, path)? != FileType::RegularFile {
        return Ok(());
    }
    set_size(fd, path, geometry.bytes())
}
