//! Errors, each with the next step.

use std::path::PathBuf;

use crate::PciAddress;

/// The reason why a hardware function cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The kernel's driver for such functions is not there.
    #[error("this host has no driver vfio-pci: load it with `modprobe vfio-pci`")]
    NoDriver,
    /// No function has this address.
    #[error("there is no PCI function {0}; `lspci -D` lists functions")]
    Unknown(PciAddress),
    /// The host has no IOMMU, or it is off.
    #[error(
        "PCI function {0} has no IOMMU group: switch VT-d or AMD-Vi on in the firmware, and boot \
         with `intel_iommu=on` on Intel's machines"
    )]
    NoIommu(PciAddress),
    /// Another function is in the same IOMMU group.
    #[error(
        "PCI function {address} shares IOMMU group {group} with {other}, whose memory it could \
         reach: use a function that is alone in its group"
    )]
    Shared {
        /// The function.
        address: PciAddress,
        /// The number of the group.
        group: u32,
        /// The address of the other function.
        other: String,
    },
    /// The function's driver uses it.
    #[error("PCI function {address} is in use by driver {driver}, {used}")]
    InUse {
        /// The function.
        address: PciAddress,
        /// The driver.
        driver: String,
        /// The use, and how to end it.
        used: String,
    },
    /// The function was not bound to vfio-pci.
    #[error(
        "vfio-pci did not take PCI function {0}: the kernel's log says why (`dmesg | grep vfio`)"
    )]
    NotBound(PciAddress),
    /// A file of sysfs could not be read or written.
    #[error("cannot use {}: {source}", path.display())]
    Sysfs {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// Another process or another pool has the function open.
    #[error("PCI function {0} is open already: end the program that has it")]
    Busy(PciAddress),
    /// The kernel refused a step.
    #[error("cannot {step} of PCI function {address}: {source}")]
    Refused {
        /// The function.
        address: PciAddress,
        /// The step.
        step: &'static str,
        /// The cause.
        source: std::io::Error,
    },
    /// The function is not fit for owners that come one after the other.
    #[error("PCI function {address} {why}")]
    Unfit {
        /// The function.
        address: PciAddress,
        /// The reason.
        why: &'static str,
    },
}
