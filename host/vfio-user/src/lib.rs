//! vfio-user: a server that presents a PCI function on a Unix socket.
//!
//! The protocol is that of `slipway_vfio_user_spec`, the function any `slipway_pci::Function`, the
//! thread a `slipway_reactor::Reactor`.
//!
//! The pieces:
//! - [`EndpointParts`] are made first: guest memory, interrupt sink, doorbells and clock, from
//!   which the host then builds the function.
//! - An [`Endpoint`] is a task. It owns the function, the socket and at most one client at a time.
//! - A function with lanes ([`slipway_pci::Lane`]) may be spread over reactors
//!   ([`Endpoint::spread`]): each lane is a task of its own, without a socket. All of them end
//!   together.
//! - A [`Control`] is the handle for other threads: it closes the endpoint and reads its [`Stats`].
//!
//! The other end of the socket is `slipway_vfio_user_client`, and what both have in common
//! `slipway_vfio_user_wire`.
//!
//! ```no_run
//! # use std::{sync::Arc, time::Duration};
//! # use slipway_reactor::{Reactor, Settings};
//! # use slipway_vfio_user::{Config, Endpoint, EndpointParts, testing::{DOORBELLS, Scratch}};
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let reactor = Reactor::spawn(Settings::default())?;
//! let config = Config::at("/run/slipway/x.sock");
//! let mut parts = EndpointParts::new(&config);
//! let doorbells = parts.doorbells(DOORBELLS)?;
//! let function = Scratch::new(parts.memory(), &parts.interrupts(), doorbells, Arc::default());
//! let wakes = Vec::new(); // duplicates of the backends' wake descriptors
//! let endpoint =
//!     Endpoint::new(config, parts, Box::new(function), wakes, &reactor.handle())?;
//! let control = endpoint.control();
//! reactor.handle().add(Box::new(endpoint))?;
//! println!("{:?}", control.stats());
//! control.close(); // asks
//! control.wait_closed(Duration::from_secs(10)); // socket, client and function are gone
//! # Ok(()) }
//! ```
//!
//! `examples/ramdisk.rs` serves an NVMe controller with a RAM disk this way, in 40 lines; its test
//! drives it with `slipway_nvme::driver` over `slipway_vfio_user_client::Client`.
//!
//! # What a client can and cannot do
//! Every byte of the socket is hostile. Lengths are checked before anything is allocated, and a
//! payload's buffer grows with what arrives. At most 16 descriptors are accepted with a message.
//! Replies that the client does not read are queued up to [`Config::max_queued_bytes`], then the
//! client is disconnected. A refused request gets an errno, never zero. An error after which the
//! stream has no next message (an impossible size, an unexpected reply) ends the connection. A
//! request that waits for the function (an unmap, a reset) is answered within
//! [`Config::reply_deadline`], with an errno if need be; later requests wait behind it.
//!
//! Descriptors for guest memory must be memory (memfd, shared memory, huge pages): an access to a
//! file of another kind could wait for the process or device behind it. Descriptors for interrupts
//! must be eventfds, which are raised without ever waiting; a client for which that fails is
//! disconnected.
//!
//! Everything that a client leaves is closed and unmapped on a thread that may sleep for ever
//! ([`slipway_peer::Bin`]): descriptors of any kind, its connection, its memory. If a client makes
//! an endpoint hold more than [`MAX_HELD`] of these, or more memory than it may map, the endpoint
//! reads no further messages from it, and disconnects it if nothing was closed for
//! [`Config::reply_deadline`]. No client is accepted until fewer than that are left, with at most
//! [`MAX_HELD_BYTES`] of memory ([`Stats::held`]).
//!
//! # Restart
//! An endpoint with a keeper ([`EndpointParts::kept`]) leaves its descriptors and its state where
//! the next process finds them and continues: its client sees a pause, and no error, whenever the
//! process is killed. The head of `kept` describes how, and the limits. A client that can connect
//! again by itself agrees on that when it negotiates: then only the function's state is left, and
//! the next process holds the function until this client resumes it (the head of
//! `server/resume.rs`).
//!
//! # Message-only memory
//! A writable region without a descriptor that is larger than [`Config::remote_threshold`] moves
//! the client, with its endpoint, to a thread of its own before the map is acknowledged. There, an
//! access to such memory waits for the client, up to [`Config::remote_deadline`], while commands
//! that arrive are kept (64 of them). When the client disconnects, the endpoint returns to its
//! home. On a shared reactor, accesses to message-only regions fault: read-only ones are firmware
//! (QEMU's ROMs), small ones the mappable pages of other devices, and neither is meant for DMA.
//!
//! # Hardware
//! A function may be that of hardware ([`EndpointParts::set_hardware`]), which reaches the client's
//! memory through an IOMMU and raises the client's eventfds itself. [`Hardware`] is told of both.
//! An unmap is answered when the hardware no longer reaches the range. Those calls block, so the
//! endpoint has a thread of its own for good ([`Endpoint::serve_alone`]). Its clients have no
//! message-only memory that is meant for DMA, and mask no MSI-X vectors with the server; the
//! endpoint does not outlive the process.
//!
//! # Migration
//! A client may stop the function, read its state, and write the state into an endpoint with a
//! function of the same kind (the head of `server/migration.rs`). A state is never longer than the
//! function says ([`slipway_pci::Function::max_state`]), and is checked like every other byte of a
//! client. An endpoint whose client disconnects in whatever state serves the next one.
//!
//! The pages that such a function writes to can be logged for its client, which copies the memory
//! of a guest that runs (the head of `server/log.rs`).
//!
//! Not implemented: bitmaps of such pages with unmaps, the migration states PRE_COPY and
//! RUNNING_P2P, twin sockets, MSI (a function has MSI-X and may have a pin, INTx), the VGA and ROM
//! regions, message-only memory from more than one thread at a time.
//!
//! Dependencies: `slipway-peer` for everything that a client could make wait; `rustix` for sockets,
//! descriptors, memfds; `libc` for recvmmsg and sendmmsg; `serde` and `serde_json` for the version
//! data and for views; `zerocopy` for the structures; `arc-swap` so that signalling an interrupt
//! and reading figures take no lock; `thiserror`.
// Unsafe code: a page mapped from a file that the client may store to; requests that raise
// eventfds.
#![allow(unsafe_code)]

mod channel;
mod config;
mod control;
mod device;
mod doorbells;
mod endpoint;
mod fault;
mod hardware;
mod inspect;
mod interrupts;
mod keeping;
mod kept;
mod lane;
mod listener;
mod mask;
mod pace;
mod parts;
mod peek;
mod run_state;
mod server;
mod slots;
mod stats;
mod version;

/// Imports of `mask` from other crates: its test puts loom's atomics in their place.
mod outside {
    pub(crate) use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
}

pub use config::{Admission, Config, DoorbellMode, Location, MemoryFile};
pub use control::Control;
pub use endpoint::Endpoint;
#[cfg(feature = "fuzz")]
pub use fuzz::fuzz;
pub use hardware::{Hardware, MappedRange};
pub use inspect::{ServerView, Stage};
pub use kept::{KEPT_LEN, KEPT_VERSION, Kept};
pub use lane::LaneHome;
pub use parts::EndpointParts;
pub use server::{MAX_HELD, MAX_HELD_BYTES};
pub use slots::{HOST_SLOTS, KEPT_SLOTS};
pub use stats::{ClientInfo, RegionKind, RegionStats, Stats};

#[cfg(feature = "fuzz")]
mod fuzz;
#[cfg(feature = "testing")]
pub mod testing;
