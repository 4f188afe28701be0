//! Copies of disks to files.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use slipway_plane_api::v1;

use crate::{Error, Plane};

impl Plane {
    /// Copies what an overlay or a regular file has at present to a new file; blocks as long as
    /// that takes, or until the new file is removed. The guest must not write meanwhile. A regular
    /// file is read from the descriptor that the disk has, whatever its path leads to by now.
    ///
    /// # Errors
    /// [`Error::Unknown`], [`Error::UnknownNamespace`], [`Error::Network`]; [`Error::NotCopied`];
    /// [`Error::Invalid`] if the path is not absolute; [`Error::ExistingFile`]; [`Error::File`] if
    /// the file cannot be made; [`Error::Disk`] if it cannot be written, or the base has changed.
    /// No new file is left then.
    pub fn copy_disk(&self, request: &v1::CopyDiskRequest) -> Result<v1::CopyDiskReply, Error> {
        let path = Path::new(&request.path);
        if !path.is_absolute() {
            let text = format!("\"{}\" is no path for a copy: it must be absolute", request.path);
            return Err(Error::Invalid(text));
        }
        let source =
            self.with_endpoint(&request.endpoint_id, |served| served.source(request.nsid))??;
        let file = create(path)?;
        let copied = source.copy_to(&file, path).inspect_err(|_| remove(&file, path));
        let (size_bytes, data_bytes) = copied?;
        Ok(v1::CopyDiskReply { size_bytes, data_bytes })
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
