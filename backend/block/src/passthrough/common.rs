//! The state that the disks on one namespace share.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

use super::device::Device;
use crate::users::Users;
use crate::{FileOptions, Geometry, OpenError};

/// An open namespace. All of its disks share one open file description, which holds the lock.
pub(crate) struct Common {
    pub(super) device: Device,
    /// See [`FileOptions::witness`].
    pub(super) witness: Option<Arc<OwnedFd>>,
    pub users: Users,
}

impl Common {
    pub fn open(path: &Path, options: &FileOptions) -> Result<Self, OpenError> {
        let device = Device::open(path, options)?;
        let users = Users::new(device.geometry.blocks);
        Ok(Self { device, witness: options.witness.clone(), users })
    }

    pub fn geometry(&self) -> Geometry {
        Geometry { blocks: self.users.blocks(), ..self.device.geometry }
    }

    /// Returns the number of blocks that the namespace has at present.
    pub fn measure(&self, path: &Path) -> Result<u64, OpenError> {
        Ok(self.device.shape(path)?.blocks)
    }
}
