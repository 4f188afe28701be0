//! A shared disk in a file or on a block device: one descriptor, and a ring for each device.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::Medium;
use crate::file::{Common, cut, measure, set_size};
use crate::ram::whole_blocks;
use crate::{Disk, FileContent, FileDisk, FileOptions, Geometry, OpenError};

pub(super) struct FileMedium {
    path: PathBuf,
    common: Arc<Common>,
    /// The disk has shrunk and the file has not yet. The file is cut in no other case: bytes that
    /// another program appended to the file are not this disk's to remove.
    shrunk: AtomicBool,
}

impl FileMedium {
    pub fn open(path: &Path, options: &FileOptions) -> Result<Self, OpenError> {
        let common = Arc::new(Common::open(path, options)?);
        Ok(Self { path: path.to_owned(), common, shrunk: AtomicBool::new(false) })
    }
}

impl Medium for FileMedium {
    fn geometry(&self) -> Geometry {
        self.common.geometry()
    }

    fn open(self: Arc<Self>, read_only: bool) -> Result<Box<dyn Disk>, OpenError> {
        Ok(Box::new(FileDisk::over(Arc::clone(&self.common), read_only)?))
    }

    fn content(&self) -> Option<FileContent> {
        FileContent::of(&self.common, &self.path)
    }

    fn resize(&self, bytes: Option<u64>) -> Result<(), OpenError> {
        let block_size = self.common.geometry().block_size;
        let has = measure(&self.common.fd, &self.path)?;
        let blocks = match bytes {
            None if has < u64::from(block_size) => {
                return Err(OpenError::Size { bytes: has, block_size });
            }
            None => has / u64::from(block_size),
            Some(bytes) => {
                let blocks = whole_blocks(bytes, block_size)?;
                if bytes > has {
                    set_size(&self.common.fd, &self.path, bytes)?;
                }
                self.shrunk.store(bytes < has, Ordering::Release);
                blocks
            }
        };
        self.common.users.set_blocks(blocks);
        Ok(())
    }

    fn trim(&self) -> Result<(), OpenError> {
        if !self.shrunk.load(Ordering::Acquire) {
            return Ok(());
        }
        cut(&self.common.fd, &self.path, &self.common.geometry())?;
        self.shrunk.store(false, Ordering::Release);
        Ok(())
    }
}
