//! One disk for several devices: the medium, apart from the [`Disk`]s in front of it.
//!
//! Each device has a [`Disk`] of its own, on its own thread: over common memory, or with a ring of
//! its own on the common descriptor. The disks take no lock and send no message per request. They
//! share only the size, which changes in three steps, so that no request ever reaches memory or
//! blocks that are gone:
//! 1. [`SharedDisk::resize`]: a larger medium grows; the new size can be taken over;
//! 2. each device calls [`Disk::refresh`], with nothing in flight;
//! 3. [`SharedDisk::trim`]: a smaller medium is cut.
//!
//! Concurrent requests of different devices to the same blocks act as on any shared drive: a read
//! returns a mix of old and new blocks. Order is up to the file system that the guests share.

mod file;
mod lazy;
mod namespace;
mod null;
mod ram;

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::choice::is_namespace;
use crate::ram::whole_blocks;
use crate::{Disk, FileContent, FileOptions, Geometry, OpenError};

use file::FileMedium;
use lazy::LazyMedium;
use namespace::NamespaceMedium;
use null::NullMedium;
use ram::RamMedium;

/// The common part of several [`Disk`]s. Clones are the same disk. The medium is released with the
/// last clone and the last [`Disk`].
#[derive(Clone)]
pub struct SharedDisk(Arc<dyn Medium>);

/// The medium of a shared disk.
trait Medium: Send + Sync {
    fn geometry(&self) -> Geometry;
    fn open(self: Arc<Self>, read_only: bool) -> Result<Box<dyn Disk>, OpenError>;
    fn resize(&self, bytes: Option<u64>) -> Result<(), OpenError>;
    fn trim(&self) -> Result<(), OpenError>;

    /// See [`SharedDisk::memory`].
    fn memory(&self) -> Option<&OwnedFd> {
        None
    }

    /// See [`SharedDisk::content`].
    fn content(&self) -> Option<FileContent> {
        None
    }
}

impl SharedDisk {
    /// Creates a disk in memory of `bytes` bytes, a multiple of `block_size` (512 to 4096, a power
    /// of two). Its content is zeros, or that of `file`, which [`SharedDisk::memory`] gave a
    /// predecessor of this process.
    ///
    /// # Errors
    /// [`OpenError::BlockSize`], [`OpenError::Size`], [`OpenError::Memory`]; the last also if the
    /// file is no such memory or has fewer bytes.
    pub fn ram(bytes: u64, block_size: u32, file: Option<OwnedFd>) -> Result<Self, OpenError> {
        Ok(Self(Arc::new(RamMedium::new(bytes, block_size, file)?)))
    }

    /// Opens a file, a block device or an NVMe namespace's generic character device once for all
    /// disks; see [`open_file`](crate::open_file). Unless opened read-only, it is locked against
    /// every other disk.
    ///
    /// # Errors
    /// The errors of [`OpenError`].
    pub fn file(path: &Path, options: &FileOptions) -> Result<Self, OpenError> {
        Ok(match is_namespace(path) {
            true => Self(Arc::new(NamespaceMedium::open(path, options)?)),
            false => Self(Arc::new(FileMedium::open(path, options)?)),
        })
    }

    /// Opens an image whose file is still being filled, once for all disks; see
    /// [`LazyDisk::open`](crate::LazyDisk::open). Each disk has a connection of its own to the
    /// fetcher. Every disk is read-only, and the image keeps its size.
    ///
    /// # Errors
    /// The errors of [`LazyDisk::open`](crate::LazyDisk::open).
    pub fn lazy(
        path: &Path,
        digest: [u8; 32],
        socket: PathBuf,
        options: &FileOptions,
    ) -> Result<Self, OpenError> {
        Ok(Self(Arc::new(LazyMedium::open(path, digest, socket, options)?)))
    }

    /// Creates a disk that drops writes and leaves reads' spans unchanged; see
    /// [`NullDisk`](crate::NullDisk).
    ///
    /// # Errors
    /// [`OpenError::BlockSize`], [`OpenError::Size`].
    pub fn null(bytes: u64, block_size: u32) -> Result<Self, OpenError> {
        let geometry =
            Geometry { block_size, blocks: whole_blocks(bytes, block_size)?, read_only: false };
        Ok(Self(Arc::new(NullMedium::new(geometry))))
    }

    /// Returns the memfd of a disk in memory, or `None` for another medium. The content outlives
    /// this process as long as a process holds the memfd.
    pub fn memory(&self) -> Option<&OwnedFd> {
        self.0.memory()
    }

    /// Returns the content of a regular file, for copies, or `None` for another medium.
    pub fn content(&self) -> Option<FileContent> {
        self.0.content()
    }

    /// Returns the shape that a disk opened now would have.
    pub fn geometry(&self) -> Geometry {
        self.0.geometry()
    }

    /// Opens a disk for one more device; `read_only` write-protects this disk alone.
    ///
    /// # Errors
    /// [`OpenError::Ring`].
    pub fn open(&self, read_only: bool) -> Result<Box<dyn Disk>, OpenError> {
        Arc::clone(&self.0).open(read_only)
    }

    /// Changes the disk's size; `None` takes over the present size of its file or device. Open
    /// disks keep their size until [`Disk::refresh`]. First trims the medium if an earlier call
    /// left it untrimmed. Blocks the calling thread.
    ///
    /// # Errors
    /// [`OpenError::Size`] if the size is not a whole, positive number of blocks;
    /// [`OpenError::Fixed`], [`OpenError::TooLarge`], [`OpenError::Memory`], [`OpenError::File`].
    /// The size is then unchanged.
    pub fn resize(&self, bytes: Option<u64>) -> Result<(), OpenError> {
        self.0.trim()?;
        self.0.resize(bytes)
    }

    /// Cuts the medium at the disk's end, for good: a disk that grows again has zeros there. The
    /// caller makes sure that every open disk has refreshed. Blocks the calling thread.
    ///
    /// # Errors
    /// [`OpenError::File`], [`OpenError::Memory`].
    pub fn trim(&self) -> Result<(), OpenError> {
        self.0.trim()
    }
}
