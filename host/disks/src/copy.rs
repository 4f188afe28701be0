//! Copies of disks to files.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use slipway_block::{FileContent, OpenError, OverlayContent};

use crate::Error;
use crate::open::Content;

/// The content of a disk that can be copied.
#[derive(Clone)]
pub enum Source {
    /// The content of an overlay.
    Overlay(Arc<OverlayContent>),
    /// The content of a regular file.
    File(FileContent),
}

impl Source {
    /// Returns what can be copied of a disk with `content` in memory or in `file`, or `None` if it
    /// is neither an overlay nor a regular file.
    pub fn of(content: Option<Content>, file: Option<FileContent>) -> Option<Self> {
        let overlay = content.and_then(Content::into_overlay);
        let overlay = overlay.map(|content| Self::Overlay(Arc::new(content)));
        overlay.or(file.map(Self::File))
    }

    /// Returns the number of writes to a file that were refused, because they would have taken of
    /// the reserve of its file system. Returns 0 for an overlay, whose budget counts its own.
    pub fn refused_writes(&self) -> u64 {
        match self {
            Self::File(file) => file.refused_writes(),
            Self::Overlay(_) => 0,
        }
    }

    /// Copies what the disk has at present to a new file at `path`; blocks as long as that takes,
    /// or until the new file is removed. The guest must not write meanwhile. Returns the size of
    /// the disk in bytes, and the bytes of data that the file has.
    ///
    /// # Errors
    /// [`Error::ExistingFile`]; [`Error::File`] if the file cannot be made; [`Error::Open`] if it
    /// cannot be written, or the base has changed. No new file is left then.
    pub fn copy_to(&self, path: &Path) -> Result<(u64, u64), Error> {
        let file = create(path)?;
        let copied = self.fill(&file, path).inspect_err(|_| remove(&file, path));
        Ok(copied?)
    }

    /// Copies the content to the new file `to` with this path.
    fn fill(&self, to: &File, path: &Path) -> Result<(u64, u64), OpenError> {
        match self {
            Self::Overlay(overlay) => Ok((overlay.bytes(), overlay.copy_to(to, path)?)),
            Self::File(file) => file.copy_to(to, path),
        }
    }
}

/// Removes a file that this process made. If it was removed already, another file may have its
/// path by now.
fn remove(file: &File, path: &Path) {
    if file.metadata().is_ok_and(|metadata| metadata.nlink() > 0) {
        let _ = std::fs::remove_file(path);
    }
}

fn create(path: &Path) -> Result<File, Error> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let created = rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR);
    created.map(File::from).map_err(|errno| match errno {
        Errno::EXIST => Error::ExistingFile(path.to_owned()),
        errno => Error::File { path: path.to_owned(), source: errno.into() },
    })
}
