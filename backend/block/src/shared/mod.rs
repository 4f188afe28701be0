//! One disk for several devices: what is behind it, apart from the [`Disk`]s in front of it.
//!
//! Each device has a [`Disk`] of its own, on its own thread: over common memory, or with a ring of
//! its own on the common descriptor. They take no lock and send no message per request. What they
//! do share is the size, which changes in three steps, so that no request ever reaches what has
//! gone:
//! 1. [`SharedDisk::resize`]: a larger medium grows; the new size is there to be taken over;
//! 2. each device calls [`Disk::refresh`], with nothing in flight;
//! 3. [`SharedDisk::trim`]: a smaller medium is cut.
//!
//! Requests of different devices to the same blocks at the same time are as on any shared drive:
//! what is read is a mix of old and new blocks. To keep order is up to the file system that the
//! guests agree on.

mod file;
mod namespace;
mod null;
mod ram;

use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

use crate::file::is_namespace;
use crate::ram::whole_blocks;
use crate::{Disk, FileOptions, Geometry, OpenError};

use file::FileMedium;
use namespace::NamespaceMedium;
use null::NullMedium;
use ram::RamMedium;

/// Several [`Disk`]s' common part. Clones are the same disk; what is behind it is let go with the
/// last clone and the last [`Disk`].
#[derive(Clone)]
pub struct SharedDisk(Arc<dyn Medium>);

/// What a shared disk is made of.
trait Medium: Send + Sync {
    fn geometry(&self) -> Geometry;
    fn open(self: Arc<Self>, read_only: bool) -> Result<Box<dyn Disk>, OpenError>;
    fn resize(&self, bytes: Option<u64>) -> Result<(), OpenError>;
    fn trim(&self) -> Result<(), OpenError>;

    /// See [`SharedDisk::memory`].
    fn memory(&self) -> Option<&OwnedFd> {
        None
    }
}

impl SharedDisk {
    /// In memory: `bytes` bytes, a multiple of `block_size` (512 to 4096, a power of two). Zeros, or
    /// what is in `file`, which [`SharedDisk::memory`] gave a predecessor of this process.
    ///
    /// # Errors
    /// [`OpenError::BlockSize`], [`OpenError::Size`], [`OpenError::Memory`], also for a file that is
    /// no such memory, or of fewer bytes.
    pub fn ram(bytes: u64, block_size: u32, file: Option<OwnedFd>) -> Result<Self, OpenError> {
        Ok(Self(Arc::new(RamMedium::new(bytes, block_size, file)?)))
    }

    /// A file, a block device or an NVMe namespace's generic character device, opened once; see
    /// [`open_file`](crate::open_file). Unless it is opened read-only it is locked against every other
    /// disk.
    ///
    /// # Errors
    /// [`OpenError`].
    pub fn file(path: &Path, options: &FileOptions) -> Result<Self, OpenError> {
        Ok(match is_namespace(path) {
            true => Self(Arc::new(NamespaceMedium::open(path, options)?)),
            false => Self(Arc::new(FileMedium::open(path, options)?)),
        })
    }

    /// Takes writes, gives nothing; see [`NullDisk`](crate::NullDisk).
    ///
    /// # Errors
    /// [`OpenError::BlockSize`], [`OpenError::Size`].
    pub fn null(bytes: u64, block_size: u32) -> Result<Self, OpenError> {
        let geometry =
            Geometry { block_size, blocks: whole_blocks(bytes, block_size)?, read_only: false };
        Ok(Self(Arc::new(NullMedium::new(geometry))))
    }

    /// The file that a disk in memory lies in: its content outlives this process as long as
    /// somebody holds it.
    pub fn memory(&self) -> Option<&OwnedFd> {
        self.0.memory()
    }

    /// The shape that a disk opened now would have.
    pub fn geometry(&self) -> Geometry {
        self.0.geometry()
    }

    /// A disk for one more device; `read_only` protects this one alone.
    ///
    /// # Errors
    /// [`OpenError::Ring`], [`OpenError::Wake`].
    pub fn open(&self, read_only: bool) -> Result<Box<dyn Disk>, OpenError> {
        Arc::clone(&self.0).open(read_only)
    }

    /// Gives the disk another size; None takes over the size that its file or device has. Disks
    /// that are open keep theirs until [`Disk::refresh`]. What an earlier call left to be trimmed
    /// is trimmed. Blocks.
    ///
    /// # Errors
    /// [`OpenError::Size`] for no whole, positive number of blocks; [`OpenError::Fixed`],
    /// [`OpenError::TooLarge`], [`OpenError::Memory`], [`OpenError::File`]. The size is then as
    /// before.
    pub fn resize(&self, bytes: Option<u64>) -> Result<(), OpenError> {
        self.0.trim()?;
        self.0.resize(bytes)
    }

    /// Cuts what lies behind the end, for good: grown again, the disk has zeros there. The caller
    /// knows that every open disk has refreshed. Blocks.
    ///
    /// # Errors
    /// [`OpenError::File`], [`OpenError::Memory`].
    pub fn trim(&self) -> Result<(), OpenError> {
        self.0.trim()
    }
}
