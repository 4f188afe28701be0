//! A virtio console with several ports: byte streams between a guest and the program that holds the
//! device, which pumps them on its own thread.
//!
//! It follows section 5.3 of *Virtual I/O Device (VIRTIO) Version 1.2*; section numbers in this
//! crate are of that document. A Linux guest has a console port as `/dev/hvc0`, and another port as
//! `/dev/vportNpM`, with the port's name in sysfs.
//!
//! How the pieces meet. [`Console`] is the [`slipway_pci::Function`], and the host's end of all
//! ports. `stream` moves the bytes of one port; `port` is the state of a port's control messages;
//! `state` is the saved state. Registers and queues are `slipway_virtio`'s.
//!
//! # The host's loop
//! The host calls [`Console::poll`](slipway_pci::Function::poll) after register writes and after
//! eventfds of notifications ([`slipway_virtio::layout::notification`]). After each poll it pumps
//! every port:
//! - it calls [`Console::port_read`] until the call gives fewer bytes than it has room for, or as
//!   long as the reader behind it takes bytes;
//! - it offers its waiting bytes to [`Console::port_write`]. The bytes that are not taken wait for
//!   a later poll: the device has asked the driver to notify it of new buffers.
//!
//! Nothing is buffered here. A guest's buffer goes back to the guest once the host has read all of
//! its bytes, so the host's pace is the guest's pace. Linux spins in its kernel while the bytes of
//! a console wait to be read: a host should not let a console wait. The bytes of a port whose host
//! end is closed are dropped.
//!
//! A hostile driver can harm only itself: an invalid ring, descriptor, chain or address ends in
//! DEVICE_NEEDS_RESET. Everything is read once, into a private copy. A call does a bounded amount
//! of work.
//!
//! Decisions where the specification leaves room:
//! - A control message that is too short, or unknown, or of no port, changes nothing.
//! - A close of the host's end is told even if the end is open again by then, so that the guest
//!   sees two connections as two.
//! - Without MULTIPORT there is port 0 only, and the driver's end of it is open while the driver
//!   runs.
//! - Addresses are the guest's physical ones: ACCESS_PLATFORM is not offered.
//! - Indirect descriptors are not offered: a chain is as long as the queue at most.
//!
//! Not implemented: ports that come and go, a console's size, early output, reset of single queues.
//!
//! Features: `driver` is a small real driver for tests; `fuzz` has the bodies of the fuzz targets.
//!
//! Dependencies: `zerocopy` for structures from bytes, `serde` for saved state, `thiserror` for
//! [`PartsError`].

mod console;
#[cfg(any(test, feature = "driver"))]
pub mod driver;
#[cfg(any(test, feature = "fuzz"))]
pub mod fuzz;
mod parts;
mod port;
mod state;
mod stream;
#[cfg(test)]
mod tests;

pub use console::Console;
pub use parts::{MAX_NAME, MAX_PORTS, Parts, PartsError, PortSettings, QUEUE_SIZE, vectors};
pub use state::STATE_VERSION;
