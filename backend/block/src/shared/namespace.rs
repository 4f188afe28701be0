//! A shared disk on an NVMe namespace, by passthrough: one descriptor, and a ring for each device.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::Medium;
use crate::passthrough::Common;
use crate::ram::whole_blocks;
use crate::{Disk, FileOptions, Geometry, OpenError, PassthroughDisk};

pub(super) struct NamespaceMedium {
    path: PathBuf,
    common: Arc<Common>,
}

impl NamespaceMedium {
    pub fn open(path: &Path, options: &FileOptions) -> Result<Self, OpenError> {
        let common = Arc::new(Common::open(path, options)?);
        Ok(Self { path: path.to_owned(), common })
    }
}

impl Medium for NamespaceMedium {
    fn geometry(&self) -> Geometry {
        self.common.geometry()
    }

    fn open(self: Arc<Self>, read_only: bool) -> Result<Box<dyn Disk>, OpenError> {
        Ok(Box::new(PassthroughDisk::over(Arc::clone(&self.common), read_only)?))
    }

    /// Uses a part of the namespace, or all of it: the namespace's own size cannot be changed.
    fn resize(&self, bytes: Option<u64>) -> Result<(), OpenError> {
        let has = self.common.measure(&self.path)?;
        let blocks = match bytes {
            None => has,
            Some(bytes) => whole_blocks(bytes, self.common.geometry().block_size)?,
        };
        if blocks > has {
            return Err(OpenError::Fixed(self.path.clone()));
        }
        self.common.users.set_blocks(blocks);
        Ok(())
    }

    fn trim(&self) -> Result<(), OpenError> {
        Ok(())
    }
}
