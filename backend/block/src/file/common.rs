//! The state that the disks on one file share.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

use rustix::fs::FileType;

use super::job::Alignment;
use super::open::{FileOptions, capacity, failed, file_type, open, size};
use super::thin::Thin;
use crate::users::Users;
use crate::{Geometry, OpenError};

/// An open file or block device. All of its disks share one descriptor, whose open file description
/// holds the lock, and to which the kernel reports a lost write once.
pub(crate) struct Common {
    pub fd: Arc<OwnedFd>,
    /// The alignment that O_DIRECT requires, or `None` if the page cache is used.
    pub(super) direct: Option<Alignment>,
    shape: Geometry,
    /// See [`FileOptions::pin`].
    pub(super) pin: bool,
    /// See [`FileOptions::witness`].
    pub(super) witness: Option<Arc<OwnedFd>>,
    pub users: Users,
    /// The state of a file that keeps a reserve.
    pub(super) thin: Option<Arc<Thin>>,
}

impl Common {
    pub fn open(path: &Path, options: &FileOptions) -> Result<Self, OpenError> {
        let opened = open(path, options)?;
        let users = Users::new(opened.geometry.blocks);
        let (fd, direct, shape) = (Arc::new(opened.fd), opened.direct, opened.geometry);
        // Through the page cache the processor copies, so nothing is pinned.
        let pin = options.pin && direct.is_some();
        let thin = thin(&fd, path, options, shape.bytes())?;
        Ok(Self { fd, direct, shape, pin, witness: options.witness.clone(), users, thin })
    }

    pub fn geometry(&self) -> Geometry {
        Geometry { blocks: self.users.blocks(), ..self.shape }
    }
}

/// Returns the state of a regular file that is to keep a reserve, or `None` for others.
fn thin(
    fd: &OwnedFd,
    path: &Path,
    options: &FileOptions,
    bytes: u64,
) -> Result<Option<Arc<Thin>>, OpenError> {
    let reserve = options.reserve.as_ref().filter(|_| !options.read_only);
    let Some(reserve) = reserve else { return Ok(None) };
    if file_type(fd, path)? != FileType::RegularFile {
        return Ok(None);
    }
    let thin = Thin::new(fd, bytes, reserve).map_err(failed(path, "look for the data of"))?;
    Ok(Some(Arc::new(thin)))
}

/// Returns the present size in bytes of the file or device at `path`.
pub(crate) fn measure(fd: &OwnedFd, path: &Path) -> Result<u64, OpenError> {
    size(fd, path)
}

/// Changes the size of a regular file.
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

/// Truncates a regular file to the size of a disk of this shape, if it is longer by at least a
/// block. A shorter excess, and devices, stay as they are.
pub(crate) fn cut(fd: &OwnedFd, path: &Path, geometry: &Geometry) -> Result<(), OpenError> {
    let block = u64::from(geometry.block_size);
    let beyond = measure(fd, path)?.saturating_sub(geometry.bytes()) >= block;
    if !beyond || geometry.read_only || file_type(fd, path)? != FileType::RegularFile {
        return Ok(());
    }
    set_size(fd, path, geometry.bytes())
}
