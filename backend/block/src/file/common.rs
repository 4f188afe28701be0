//! What the disks on one file have in common.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

use rustix::fs::FileType;

use super::job::Alignment;
use super::open::{FileOptions, capacity, failed, file_type, open, size};
use crate::users::Users;
use crate::{Geometry, OpenError};

/// An open file or block device. One description for all of its disks: it holds the lock, and the
/// kernel reports a lost write to it once.
pub(crate) struct Common {
    pub fd: OwnedFd,
    /// What O_DIRECT asks of requests; None when the page cache is used.
    pub(super) direct: Option<Alignment>,
    shape: Geometry,
    /// See [`FileOptions::pin`].
    pub(super) pin: bool,
    /// See [`FileOptions::witness`].
    pub(super) witness: Option<Arc<OwnedFd>>,
    pub users: Users,
}

impl Common {
    pub fn open(path: &Path, options: &FileOptions) -> Result<Self, OpenError> {
        let opened = open(path, options)?;
        let users = Users::new(opened.geometry.blocks);
        let (fd, direct, shape) = (opened.fd, opened.direct, opened.geometry);
        // Through the page cache the processor copies, and pins nothing.
        let pin = options.pin && direct.is_some();
        Ok(Self { fd, direct, shape, pin, witness: options.witness.clone(), users })
    }

    pub fn geometry(&self) -> Geometry {
        Geometry { blocks: self.users.blocks(), ..self.shape }
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
