//! The keeper: a process that holds descriptors while the daemon is killed, restarted or replaced.
//!
//! The keeper is a table of descriptors and a socket, nothing else. The daemon puts descriptors
//! into numbered slots ([`Keeper::put`]) and clears them; the next daemon takes copies of all
//! ([`Keeper::take`]). The meaning of a slot is the daemon's business: the memory of a memfd, a
//! client's connection and an eventfd live as long as a process holds them, and holding them is all
//! that the keeper does. So it has no reason to change with the daemon, and as little as possible
//! to fail by:
//! - a message is eight bytes, an operation and a slot; nothing else is looked at;
//! - the table has its full size from the start;
//! - its one thread closes nothing that came from elsewhere. The last close of a client's
//!   connection closes the descriptors that wait in it, and the sender of those decides how long
//!   that takes. So everything is closed through a `slipway_peer::Bin`: one for each shelf, that is
//!   for each endpoint, and one for each connection to the keeper. An empty shelf gets another bin:
//!   what a hostile client left behind costs one thread, and the next endpoint on the shelf does
//!   not wait behind it;
//! - one client at a time: the next one is served when the last one's connection has ended, which
//!   is after its last thread has left user space;
//! - only the user that runs the keeper may connect (the socket's mode, and `SO_PEERCRED`).
//!
//! A put needs no answer: the kernel has a sent descriptor in the socket's queue even if the sender
//! dies at once.
//!
//! If the keeper dies, its descriptors are lost at the next restart of the daemon. It ends by
//! itself when its clients are gone and it holds nothing.
//!
//! Why a process and not systemd's descriptor store: it works with and without systemd, replaces
//! slots in one step, and has no limit on names. The keeper does not start the daemon: the service
//! manager of a node does that, and the one process that must not fail should not fork.
//!
//! Dependencies: `rustix` for sockets and descriptors, `slipway-peer` for receiving and closing
//! descriptors, `slipway-lock` for one keeper at a socket.

mod client;
mod serve;
mod wire;

pub use client::{Keeper, Shelf};
pub use serve::serve;

/// The number of slots of a keeper.
pub const SLOTS: u32 = 1 << 20;

/// The number of slots of a shelf. Slots `n * SHELF` to `(n + 1) * SHELF - 1` belong to one
/// endpoint, so that a close that one endpoint's client delays does not delay the others'.
pub const SHELF: u32 = 1024;
