//! A vfio-user client: drives a PCI function behind a socket, as a VMM does.
//!
//! - [`RemoteFunction`] is what a VMM uses: a function for all of its threads, with deadlines, that
//!   goes on when its server is replaced. It can be stopped, and its state can be saved and loaded
//!   into another function ([`RemoteFunction::save`], [`RemoteFunction::load`]). The pages of RAM
//!   that it writes to can be logged ([`RemoteFunction::log_writes`]).
//! - [`Client`] is one connection, for one thread. It blocks, with a timeout on every wait.
//! - [`IoFds`] are the registers that are written without messages.
//! - [`RegisterWindow`] is a part of a region that is accessed without messages.
//! - Feature `driver` has what programs without a VMM need, such as tests and benchmarks.
//!
//! The example `inspect` shows the function behind any vfio-user socket, and accesses it.
//!
//! Not implemented: bitmaps of pages with unmaps, the migration states PRE_COPY and RUNNING_P2P,
//! `VFIO_USER_REGION_WRITE_MULTI`.
//!
//! Dependencies, few since a static VMM links them: `slipway-vfio-user-wire` for messages,
//! `slipway-peer` for everything that a server could make wait, `slipway-ram` to map a window,
//! `slipway-pci` for the driver's contract (feature `driver` only), `rustix` for descriptors,
//! `zerocopy` for the structures, `thiserror`.
//!
//! # What a server can and cannot do
//! Every byte from the socket is hostile. Lengths are checked before anything is allocated, a
//! message has at most 1 MiB of data, and at most 16 descriptors with it; descriptors that nobody
//! asked for end the connection. Closing what a server sent never makes a thread of the VMM wait
//! ([`slipway_peer::Foreign`]), and raising its eventfds neither. Memory of a server is mapped only
//! if it is sealed against shrinking; [`RegisterWindow`] leaves that to its caller. Registers whose
//! shadow memory is not sealed are written by messages. No wait is longer than the caller's
//! deadline, whatever arrives meanwhile.

mod client;
#[cfg(feature = "driver")]
mod driver;
#[cfg(feature = "fuzz")]
mod fuzz;
mod io_fds;
#[cfg(feature = "driver")]
mod memory;
mod migration;
mod remote;
mod shape;
mod told;
mod watch;

pub use client::{Client, ClientError, IrqDescription, RegionDescription};
#[cfg(feature = "driver")]
pub use driver::{Registers, SharedRegisters, TestGuest, sealed_memory};
#[cfg(feature = "fuzz")]
pub use fuzz::fuzz;
pub use io_fds::{Bell, Event, IoFds, Notification};
pub use migration::MAX_STATE;
pub use remote::{ConnectionState, Continuity, FunctionError, RemoteFunction};
pub use shape::RegionShape;
pub use slipway_ram::RegisterWindow;
