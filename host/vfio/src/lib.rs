//! Hardware functions: virtual functions (VFs) of SR-IOV devices, and whole PCI functions, that
//! VFIO keeps from their drivers, served to VMMs over vfio-user.
//!
//! A VMM that opened a VF itself would wait for its function-level reset (FastIOV, section 3.2.2),
//! and would need a VFIO client. Here this process keeps the VF open and reset, and a VMM has a
//! vfio-user socket, as for every other function.
//!
//! The pieces:
//! - [`Sysfs`] tells whether a function can be had, and binds it to the driver `vfio-pci`. A caller
//!   that keeps its [`DriverState`] from before in a file can give it back after a crash too.
//! - [`Host`] opens a function that is bound: by iommufd where the kernel has that, else by its
//!   IOMMU group. The result is a [`Device`], with an address space of its own in the IOMMU.
//! - [`HardwareFunction`] is the device as a [`slipway_pci::Function`]: its registers.
//! - [`Driver`] is its driver for an endpoint ([`slipway_vfio_user::Hardware`]): it maps the
//!   client's memory in the IOMMU and routes the device's interrupts to the client's eventfds.
//!
//! Function and driver belong to one endpoint, and block: the endpoint has a thread of its own
//! ([`slipway_vfio_user::Endpoint::serve_alone`]).
//!
//! # What a client can do
//! A client controls the device, as a guest controls hardware that is passed through. The device
//! reaches the memory that the client has mapped, and nothing else: the IOMMU holds to that. All
//! registers of BARs and of configuration space are accessed by pread(2) and pwrite(2), so that the
//! kernel refuses what a client must not do, and an access to a device that sleeps or is being
//! reset fails. (By a mapping of the BAR it would raise SIGBUS in this process; beside a message of
//! vfio-user the system call costs little.) The MSI-X table is kept here and never reaches the
//! device. A client's memory is pinned while it is mapped.
//!
//! A client that is gone is cut off in this order: interrupts, bus mastering, memory, reset.
//!
//! Not implemented: MSI (the capability is hidden), expansion ROMs, migration, BARs that clients
//! map, functions that share an IOMMU group.
//!
//! Dependencies: `rustix` for files, `libc` for ioctl(2), `thiserror` for [`Error`], `tracing` for
//! resets that fail with nobody waiting.
#![allow(unsafe_code)] // ioctl(2)

mod address;
mod device;
mod driver;
mod driver_state;
mod error;
mod function;
mod host;
mod interrupts;
mod ioctl;
mod msix;
mod space;
mod sysfs;

pub use address::{BadAddress, PciAddress};
pub use device::Device;
pub use driver::Driver;
pub use driver_state::{BadDriver, DriverState};
pub use error::Error;
pub use function::HardwareFunction;
pub use host::Host;
pub use sysfs::{Binding, Sysfs};
