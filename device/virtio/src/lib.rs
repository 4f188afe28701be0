//! The virtio transport over PCI, and split queues: the parts that all virtio functions have.
//!
//! It follows *Virtual I/O Device (VIRTIO) Version 1.2*; section numbers in this crate are of that
//! document. A device is modern: no legacy interface, interrupts by MSI-X only.
//!
//! How the pieces meet:
//! - [`Transport`]: configuration space with virtio's capabilities ([`layout`]), MSI-X, and the
//!   common configuration ([`registers`]). It knows the device's [`layout::DeviceKind`] and
//!   [`registers::Offer`], and tells the function what a register write asks for;
//! - [`queue`]: the device's side of a split queue; [`Virtqueue`] is a queue with its interrupt.
//!   Nothing here is dynamic per buffer;
//! - [`Local`]: a transport with its queues, for a function that serves all of them in `poll`;
//!   [`function_on_local`] writes most of such a function. A device with a data path of its own
//!   thread builds on [`Transport`] and [`Virtqueue`] instead;
//! - [`state`]: saved state.
//!
//! A host may have its kernel turn notifications into eventfds: [`layout::notification`].
//!
//! Not implemented: packed queues, the legacy interface, the interrupt pin, notification data,
//! memory-mapped notifications, shared memory regions.
//!
//! Features: `driver` is the side of the driver, for the drivers in device crates; `fuzz` has the
//! parts that their fuzz targets share.
//!
//! Dependencies: `zerocopy` for structures from bytes, `serde` and `serde_json` for saved state
//! (rare, small, and readable when it is refused), `thiserror` for errors. `queue` says why
//! `virtio-queue` is not used.

mod chain;
#[cfg(any(test, feature = "driver"))]
pub mod driver;
#[cfg(any(test, feature = "fuzz"))]
pub mod fuzz;
pub mod layout;
mod local;
mod notify;
pub mod queue;
pub mod registers;
pub mod state;
mod transport;
mod virtqueue;

pub use local::{InterruptCount, Local};
pub use transport::{Configured, MAX_VECTORS, Transport, Written};
pub use virtqueue::Virtqueue;
/// The bytes of a device configuration, for [`function_on_local`].
pub use zerocopy::IntoBytes;
