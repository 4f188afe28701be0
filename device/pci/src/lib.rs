//! PCI functions: the contract between a device model and whatever hosts it, and the parts that
//! every function has (configuration space, BARs, MSI-X).
//!
//! One device object, several hosts: a vfio-user socket, a VMM, a unit test on heap memory. So a
//! device is made of parts that a host hands it and knows nothing of sockets, eventfds or threads:
//! - guest memory: `slipway_ram::Memory`;
//! - interrupts: one [`Interrupt`] per vector, and a [`Pin`], in front of the host's
//!   [`InterruptSink`];
//! - doorbells: `slipway_doorbells`, cells that a trapped write or a shared page changes;
//! - its backend; and a clock, `slipway_telemetry::Clock`.
//!
//! A function may hand its host [`Lane`]s: parts of it, some of its queues say, that other threads
//! poll.
//!
//! A device implements [`Function`] and builds on [`ConfigSpace`] (registers with writable bits;
//! a write tells when it asks for a function-level reset) and [`Msix`] (table and pending bits as
//! memory of a BAR). Their saved states are in [`state`].
//!
//! Not here: expansion ROMs, MSI, error reporting (AER), SR-IOV, effects of
//! power states (D3hot is stored and nothing else), BAR decoding.
//!
//! Feature `plane` has what functions of the plane have and those of a VMM's own process do not:
//! the interrupt pin, lanes, turns, journals. Feature `driver` has the other side, for tests and
//! benchmarks: access to a function's registers, and a sink that keeps its interrupts.
//!
//! Dependencies: `serde` for saved states, `thiserror` for errors.

mod capability;
mod config;
#[cfg(any(test, feature = "driver"))]
pub mod driver;
mod function;
#[cfg(any(test, feature = "fuzz"))]
pub mod fuzz;
mod interrupt;
#[cfg(any(test, feature = "plane"))]
mod lane;
mod msix;
pub mod state;
mod turn;

pub use capability::Capability as VendorCapability;
pub use config::{CONFIG_SIZE, ConfigEffect, ConfigSpace, Identity};
#[cfg(any(test, feature = "driver"))]
pub use driver::FifoSink;
pub use function::{
    Access, Bar, Description, DoorbellRegisters, Function, Notifications, StateError,
};
#[cfg(any(test, feature = "plane"))]
pub use interrupt::Pin;
pub use interrupt::{Interrupt, InterruptSink};
#[cfg(any(test, feature = "plane"))]
pub use lane::Lane;
pub use msix::{Message, Msix, MsixControl, MsixLayout, Route};
pub use turn::Progress;
#[cfg(any(test, feature = "plane"))]
pub use turn::TurnLength;
