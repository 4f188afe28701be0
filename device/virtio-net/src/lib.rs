//! A virtio network device: a PCI function that connects a guest to a port of a switch.
//!
//! It follows *Virtual I/O Device (VIRTIO) Version 1.2*; section numbers in this crate are of that
//! document. It serves the drivers that slim guest kernels have: split queues with indirect
//! descriptors and event index, up to 64 queue pairs with automatic steering, mergeable receive
//! buffers, checksum, TSO and USO both ways, receive modes and filters, MSI-X, reset of single
//! queues.
//!
//! How the pieces meet. [`Device::new`] makes two objects of [`Parts`]:
//! - [`Device`], the [`slipway_pci::Function`], belongs to the code that serves the guest's
//!   register accesses: `registers`, `control` (the control queue), `state`, on top of
//!   [`slipway_virtio::Transport`];
//! - [`DevicePort`], the [`slipway_switch::Port`], belongs to the switch, on the switch's thread.
//!   It moves frames with the `path`: `transmit` and `receive` on top of [`slipway_virtio::queue`],
//!   with `header` and `filter`.
//!
//! The path has one owner at a time ([`slipway_switch::Exchange`]). When the driver is ready, the
//! function hands it to the port. The function asks for it back, without waiting, when the device
//! or a queue is reset, or when the function is quiesced because memory is about to be taken away.
//! Only the switch's thread touches a frame: no lock, no allocation, no system call per packet. A
//! notification of the driver is a register write. It reaches the function as a trapped write or,
//! under `slipway-vmm`, by an eventfd that KVM raises, and the function wakes the switch. While the
//! switch polls, it asks the driver for no notifications (`slipway_virtio` argues in `notify` why
//! none is lost while the switch sleeps).
//!
//! A hostile driver can harm only itself: an invalid frame is dropped and counted by cause
//! ([`Counters`]); an invalid ring, descriptor or chain ends in DEVICE_NEEDS_RESET. Everything is
//! read once, into a private copy; lengths are bounded before they are used.
//!
//! Decisions where the specification leaves room:
//! - Buffers are used in the order in which they were made available, although the feature for that
//!   is not offered: a successor finds its place from the used index in guest memory.
//! - ACCESS_PLATFORM is offered, since addresses are I/O virtual addresses of the client.
//! - The device is promiscuous until the driver says otherwise, so a driver that sets no mode
//!   receives.
//! - A frame that a filter rejects counts as delivered for the switch.
//! - Transmit queues of pairs that are no longer in use are still served (section 5.1.6.5.5 has the
//!   driver put nothing into them): Linux still has segments in them, and waits for these.
//! - A receive buffer that is not in memory, or has nothing to write to, needs a reset; so does a
//!   command of the control queue that cannot be acknowledged.
//! - A frame takes at most 65 receive buffers, so mergeable buffers of a kilobyte suffice for 64
//!   KiB.
//! - Each ring lies in one region of memory that the client passed a descriptor for. Frames may lie
//!   in several regions, which must have descriptors as well. Memory that is reached by messages
//!   could stall the switch.
//! - A reset of the device waits until the port lets go of the queues. Requests of the driver in
//!   the meantime are not answered: the status reads as before until the reset is over, then 0.
//!
//! Not implemented: packed queues, the legacy interface, interrupts without MSI-X (the ISR status
//! tells of configuration changes only), RSS and hash reports, receive coalescing, notification
//! data, interrupt moderation, memory-mapped notifications.
//!
//! Features: `driver` is a small real driver for tests and benches; `fuzz` has the bodies of the
//! fuzz targets.
//!
//! Dependencies: `zerocopy` for structures from bytes, `serde` and `serde_json` for saved state
//! (rare, small, and readable when it is refused), `thiserror` for [`PartsError`].

mod common;
mod control;
mod counters;
mod device;
mod driven;
#[cfg(any(test, feature = "driver"))]
pub mod driver;
mod equip;
mod filter;
#[cfg(any(test, feature = "fuzz"))]
pub mod fuzz;
mod header;
mod parts;
mod path;
mod port;
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
pub use slipway_virtio::layout;
pub use state::STATE_VERSION;
