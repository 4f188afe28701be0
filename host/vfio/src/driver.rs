//! The driver of a device for an endpoint: memory and interrupts of the endpoint's client.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::io::Errno;
use slipway_vfio_user::{Hardware, MappedRange};

use crate::Device;
use crate::interrupts::Interrupts;

/// The driver of a device, which maps its client's memory in the IOMMU and has the kernel raise its
/// client's eventfds. Dropping it cuts the device off the client.
pub struct Driver {
    device: Arc<Device>,
    interrupts: Interrupts,
}

impl Driver {
    /// Makes the driver of a device, whose client has mapped no memory yet.
    pub fn new(device: Arc<Device>) -> Self {
        Self { interrupts: Interrupts::new(device.clone()), device }
    }
}

impl Hardware for Driver {
    fn map(&mut self, range: &MappedRange<'_>) -> Result<(), Errno> {
        self.device.space().map(range)
    }

    fn unmap(&mut self, iova: u64, len: u64) -> Result<(), Errno> {
        self.device.space().unmap(iova, len)
    }

    fn route_vectors(&mut self, routes: &[Option<Arc<OwnedFd>>]) -> Result<(), Errno> {
        self.interrupts.route_vectors(routes)
    }

    fn route_pin(&mut self, route: Option<&Arc<OwnedFd>>) -> Result<(), Errno> {
        self.interrupts.route_pin(route)
    }

    fn mask_pin(&mut self, masked: bool) -> Result<(), Errno> {
        self.interrupts.mask_pin(masked)
    }

    /// Cuts the device off the client: interrupts, bus mastering, memory. Each is tried whatever
    /// came of the one before.
    fn release(&mut self) -> Result<(), Errno> {
        let interrupts = self.interrupts.clear();
        // An error: the device does not answer. It reaches no memory in a moment, and its reset,
        // which begins the same way, fails.
        let _ = self.device.stop();
        interrupts.and(self.device.space().clear())
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        // An error: the device's last user closes it, which ends all three.
        let _ = self.release();
    }
}
