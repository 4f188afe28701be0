//! Chooses the kind of disk for a path.

use std::path::Path;

use crate::file::{FileContent, FileDisk, FileOptions};
use crate::passthrough::PassthroughDisk;
use crate::{Disk, OpenError};

/// Opens the disk at `path`: a [`PassthroughDisk`] for an NVMe namespace's generic character
/// device, else a [`FileDisk`]. Returns it with the content of a regular file, for copies.
///
/// # Errors
/// The errors of [`FileDisk::open`] and [`PassthroughDisk::open`].
pub fn open_file(
    path: &Path,
    options: &FileOptions,
) -> Result<(Box<dyn Disk>, Option<FileContent>), OpenError> {
    if is_namespace(path) {
        return Ok((Box::new(PassthroughDisk::open(path, options)?), None));
    }
    let disk = FileDisk::open(path, options)?;
    let content = disk.content(path);
    Ok((Box::new(disk), content))
}

/// Returns whether `path` is a character device: no disk but a [`PassthroughDisk`] accepts one.
pub(crate) fn is_namespace(path: &Path) -> bool {
    use std::os::unix::fs::FileTypeExt;
    std::fs::metadata(path).is_ok_and(|file| file.file_type().is_char_device())
}
