//! The host's VFIO: opens functions.

use std::ffi::CString;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use crate::ioctl::{self, AttachTable, BindIommufd, GroupStatus, call};
use crate::space::Space;
use crate::{Device, Error, PciAddress, Sysfs};

/// `VFIO_GROUP_FLAGS_VIABLE`.
const VIABLE: u32 = 1;

/// A host with hardware functions.
#[derive(Clone, Debug)]
pub struct Host {
    sysfs: Sysfs,
    dev: PathBuf,
}

impl Default for Host {
    fn default() -> Self {
        Self::new(Sysfs::default(), "/dev")
    }
}

impl Host {
    /// Returns a host with this sysfs, and its devices in `dev`.
    pub fn new(sysfs: Sysfs, dev: impl Into<PathBuf>) -> Self {
        Self { sysfs, dev: dev.into() }
    }

    /// Returns the host's sysfs.
    pub fn sysfs(&self) -> &Sysfs {
        &self.sysfs
    }

    /// Opens a function that is bound to vfio-pci, in an address space of its own that is empty.
    /// May wait: the kernel resets the function.
    ///
    /// # Errors
    /// [`Error::Busy`], [`Error::Refused`], [`Error::Unfit`], [`Error::NoIommu`].
    pub fn open(&self, address: PciAddress) -> Result<Device, Error> {
        let group = self.dev.join("vfio").join(self.sysfs.group(address)?.to_string());
        let iommufd = self.dev.join("iommu");
        let cdev = self.sysfs.cdev(address).map(|name| self.dev.join("vfio/devices").join(name));
        match cdev.filter(|cdev| cdev.exists() && iommufd.exists()) {
            Some(cdev) => match open_cdev(address, &cdev, &iommufd) {
                Err(error) if group.exists() => {
                    tracing::info!(%error, "hardware functions are opened by their groups");
                    self.open_group(address, &group)
                }
                outcome => outcome,
            },
            None => self.open_group(address, &group),
        }
    }

    /// Opens a function by its IOMMU group.
    fn open_group(&self, address: PciAddress, group: &Path) -> Result<Device, Error> {
        let step = StepErrors(address);
        let container = open(&self.dev.join("vfio/vfio"));
        let container = container.map_err(step.refused("open the container"))?;
        if !ioctl::has_type1(&container) {
            let why = "cannot be had: load the IOMMU's interface with `modprobe vfio_iommu_type1`";
            return Err(Error::Unfit { address, why });
        }
        let group = open(group).map_err(step.refused("open the IOMMU group"))?;
        let mut status = GroupStatus::default();
        call(&group, &mut status).map_err(step.refused("use the IOMMU group"))?;
        if status.flags & VIABLE == 0 {
            let why = "has an IOMMU group in which another function has a driver of the host";
            return Err(Error::Unfit { address, why });
        }
        let joined = ioctl::set_container(&group, &container);
        joined
            .and_then(|()| ioctl::set_type1(&container))
            .map_err(step.exposed("use the IOMMU"))?;
        let name = CString::new(address.to_string()).map_err(|_| Error::Unknown(address))?;
        let device = ioctl::device_of(&group, &name).map_err(step.refused("open the device"))?;
        Device::new(address, (device, Some(group)), Space::Container(container))
    }
}

/// Opens a function by its own device and iommufd.
fn open_cdev(address: PciAddress, cdev: &Path, iommufd: &Path) -> Result<Device, Error> {
    let step = StepErrors(address);
    let device = open(cdev).map_err(step.refused("open the device"))?;
    let iommufd = open(iommufd).map_err(step.refused("open iommufd for the device"))?;
    let mut bind = BindIommufd { iommufd: iommufd.as_raw_fd(), ..Default::default() };
    call(&device, &mut bind).map_err(step.refused("bind the device to iommufd"))?;
    let space = Space::of_iommufd(iommufd).map_err(step.refused("make the address space"))?;
    let Space::Iommufd(_, table) = space else { return Err(Error::NoIommu(address)) };
    let mut attach = AttachTable { table, ..Default::default() };
    call(&device, &mut attach).map_err(step.exposed("attach the address space"))?;
    Device::new(address, (device, None), space)
}

/// Makes errors of the steps to a function.
struct StepErrors(PciAddress);

impl StepErrors {
    fn refused(&self, step: &'static str) -> impl Fn(Errno) -> Error + use<> {
        let address = self.0;
        move |errno| match errno {
            Errno::BUSY => Error::Busy(address),
            errno => Error::Refused { address, step, source: errno.into() },
        }
    }

    /// Makes errors of the step that puts the function behind its IOMMU.
    fn exposed(&self, step: &'static str) -> impl Fn(Errno) -> Error + use<> {
        let (address, refused) = (self.0, self.refused(step));
        move |errno| match errno {
            Errno::PERM => {
                let why = "could forge interrupts: the host's IOMMU does not remap them; switch \
                           that on in the firmware";
                Error::Unfit { address, why }
            }
            errno => refused(errno),
        }
    }
}

fn open(path: &Path) -> Result<OwnedFd, Errno> {
    rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_without_vfio_says_so() {
        let folder = tempfile::tempdir().unwrap();
        let host = Host::new(Sysfs::at(folder.path()), folder.path());
        let address = "0000:01:10.0".parse().unwrap();
        assert!(matches!(host.sysfs().check(address), Err(Error::NoDriver)));
        let device = folder.path().join("bus/pci/devices/0000:01:10.0");
        std::fs::create_dir_all(&device).unwrap();
        assert!(matches!(host.open(address), Err(Error::NoIommu(_))));
        std::os::unix::fs::symlink("../7", device.join("iommu_group")).unwrap();
        let refused = host.open(address).map(drop).unwrap_err().to_string();
        assert!(refused.starts_with("cannot open the container of PCI function"), "{refused}");
    }
}
