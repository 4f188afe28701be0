//! A virtio network device: a PCI function that connects a guest to a port of a switch.
//!
//! It follows *Virtual I/O Device (VIRTIO) Version 1.2*; section numbers in this crate are of that
//! document. It serves the drivers that slim guest kernels have: split queues with indirect descriptors
//! and event index, up to 64 queue pairs with automatic steering, mergeable receive buffers, checksum,
//! TSO and USO both ways, receive modes and filters, MSI-X, reset of single queues.
//!
//! How the pieces meet. [`Device::new`] makes two objects of [`Parts`]:
//! - [`Device`], the [`slipway_pci::Function`], belongs to whoever serves the guest's register accesses:
//!   `registers`, `layout`, `control` (the control queue), `state`;
//! - [`DevicePort`], the [`slipway_switch::Port`], belongs to the switch, on its thread. It moves frames
//!   with the `path`: `transmit` and `receive` on top of `queue`, with `header` and `filter`.
//!
//! The path has one owner at a time. When the driver is ready the function hands it to the port
//! (`exchange`), and asks for it back, without waiting, when the device or a queue is reset, or the
//! function is quiesced since memory shall go. A frame is touched by the switch's thread only: no lock,
//! no allocation, no system call for a packet. A notification of the driver is a trapped register write,
//! by which the function wakes the switch; while the switch polls, the driver is asked for none
//! (`notify` argues that none is slept over).
//!
//! What a hostile driver can do to itself: a frame that is wrong is dropped and counted by cause
//! ([`Counters`]); a ring, a descriptor or a chain that is wrong ends in DEVICE_NEEDS_RESET. Everything
//! is read once, into a private copy; lengths are bounded before they are used.
//!
//! Decisions where the specification leaves room:
//! - Buffers are used in the order in which they were made available, without the feature for it: a
//!   successor finds its place from the used index in guest memory.
//! - ACCESS_PLATFORM is offered, since addresses are the client's I/O virtual ones.
//! - Promiscuous until the driver says otherwise, so that one that says nothing receives.
//! - A frame that a filter does not want counts as delivered to the switch.
//! - Transmit queues of pairs that are not in use any more are served all the same (section 5.1.6.5.5 has
//!   the driver put nothing into them): Linux has segments in them still, and waits for these.
//! - A receive buffer that is not in memory, or has nothing to write to, needs a reset; so does a command
//!   of the control queue that cannot be acknowledged.
//! - A frame takes at most 65 receive buffers, so with mergeable ones a kilobyte each does for 64 KiB.
//! - Rings lie in one region each of memory that the client passed a descriptor for; frames in several
//!   regions, but likewise. Memory that is reached by messages could stall the switch.
//! - Whatever the driver asks of the device while it waits for the port to let go of a reset device is
//!   not answered before: the status reads as it was until the reset is over, then 0.
//!
//! Not implemented: packed queues, the legacy interface, interrupts without MSI-X (the ISR status tells
//! of configuration changes only), RSS and hash reports, receive coalescing, notification data,
//! interrupt moderation, memory-mapped notifications.
//!
//! Features: `driver` is a small real driver, for tests and benches; `fuzz` the fuzz targets' bodies.
//!
//! Dependencies: `zerocopy` for structures from bytes, `serde` and `serde_json` for saved state (rare,
//! small, and readable when it is refused), `thiserror` for [`PartsError`]. Why not `virtio-queue`: see
//! `queue`.

mod control;
mod counters;
mod device;
mod driven;
#[cfg(any(test, feature = "driver"))]
pub mod driver;
mod equip;
mod exchange;
mod filter;
#[cfg(any(test, feature = "fuzz"))]
pub mod fuzz;
mod header;
pub mod layout;
mod notify;
mod parts;
mod path;
mod port;
mod queue;
mod receive;
mod registers;
mod slots;
mod state;
#[cfg(test)]
mod tests;
mod transmit;

pub use counters::Counters;
pub use device::{Control, Device};
pub use parts::{MAX_PAIRS, MAX_QUEUE, Parts, PartsError, Settings, journal_len, vectors};
pub use port::DevicePort;
pub use state::STATE_VERSION;
