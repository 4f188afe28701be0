//! A vfio-user client: drives a PCI function behind a socket, as a VMM does.
//!
//! - [`Client`] is a connection for one thread. It blocks, with a timeout on every wait.
//! - [`Window`] is a part of a region that is accessed without messages.
//! - `Registers` (feature `driver`) is a driver's access to BAR 0, for tests and benchmarks.
//!
//! Not implemented: migration, dirty-page bitmaps, `VFIO_USER_REGION_WRITE_MULTI`.
//!
//! Dependencies, few since a static VMM links them: `slipway-vfio-user-wire` for messages,
//! `slipway-peer` for everything that a server could make wait, `slipway-ram` to unmap a window,
//! `slipway-pci` for the driver's contract (feature `driver` only), `rustix` for descriptors,
//! `zerocopy` for the structures, `thiserror`.
// Unsafe code: a window is mapped from a file of the server.
#![allow(unsafe_code)]

mod client;
#[cfg(feature = "driver")]
mod registers;
mod window;

pub use client::{Client, ClientError, IrqDescription, RegionDescription};
#[cfg(feature = "driver")]
pub use registers::Registers;
pub use window::Window;
