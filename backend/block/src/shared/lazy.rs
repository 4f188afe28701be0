//! A shared disk of an image whose file is still being filled: one descriptor, and for each device
//! a ring, a connection to the fetcher and a map of the blocks that are there.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::Medium;
use crate::lazy::ImageFile;
use crate::{Disk, FileOptions, Geometry, OpenError};

pub(super) struct LazyMedium(ImageFile);

impl LazyMedium {
    pub fn open(
        path: &Path,
        digest: [u8; 32],
        socket: PathBuf,
        options: &FileOptions,
    ) -> Result<Self, OpenError> {
        ImageFile::open(path, digest, socket, options).map(Self)
    }
}

impl Medium for LazyMedium {
    fn geometry(&self) -> Geometry {
        self.0.geometry()
    }

    fn open(self: Arc<Self>, _: bool) -> Result<Box<dyn Disk>, OpenError> {
        Ok(Box::new(self.0.disk()?))
    }

    fn resize(&self, bytes: Option<u64>) -> Result<(), OpenError> {
        if bytes.is_none_or(|bytes| bytes == self.geometry().bytes()) {
            return Ok(());
        }
        let source = std::io::Error::other("an image keeps its size");
        Err(OpenError::File { path: self.0.path().to_owned(), action: "resize", source })
    }

    fn trim(&self) -> Result<(), OpenError> {
        Ok(())
    }
}
