//! Copies of disks to files.

use std::path::Path;

use slipway_plane_api::v1;

use crate::{Error, Plane};

impl Plane {
    /// Copies what an overlay or a regular file has at present to a new file; blocks as long as
    /// that takes, or until the new file is removed. The guest must not write meanwhile. A regular
    /// file is read from the descriptor that the disk has, whatever its path leads to by now.
    ///
    /// # Errors
    /// [`Error::Unknown`], [`Error::UnknownNamespace`], [`Error::Network`]; [`Error::NotCopied`];
    /// [`Error::Invalid`] if the path is not absolute; [`Error::Disk`] if the file exists already,
    /// or cannot be made or written, or the base has changed. No new file is left then.
    pub fn copy_disk(&self, request: &v1::CopyDiskRequest) -> Result<v1::CopyDiskReply, Error> {
        let path = Path::new(&request.path);
        if !path.is_absolute() {
            let text = format!("\"{}\" is no path for a copy: it must be absolute", request.path);
            return Err(Error::Invalid(text));
        }
        let source =
            self.with_endpoint(&request.endpoint_id, |served| served.source(request.nsid))??;
        let (size_bytes, data_bytes) = source.copy_to(path)?;
        Ok(v1::CopyDiskReply { size_bytes, data_bytes })
    }
}
