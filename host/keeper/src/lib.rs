//! The keeper: a process that holds descriptors while the daemon is killed, restarted or replaced.
//!
//! It is a table of descriptors and a socket, nothing else. The daemon puts descriptors into
//! numbered slots ([`Keeper::put`]) and clears them; the next daemon takes copies of all
//! ([`Keeper::take`]). What a slot means is the daemon's business: memory that lies in a memfd, a
//! client's connection, an eventfd live as long as somebody holds them, and that is all the keeper
//! does. So it has no reason to change with the daemon, and as little as possible to fail by:
//! - a message is eight bytes, an operation and a slot; nothing else is looked at;
//! - the table has its full size from the start;
//! - its one thread closes nothing that came from elsewhere. The last close of a client's connection
//!   closes the descriptors that wait in it, and whoever sent those decides how long that takes. So
//!   everything is closed through a `slipway_peer::Bin`: one for each shelf, that is for each endpoint,
//!   and one for each connection to the keeper. A shelf that is empty gets another bin: what a hostile
//!   client left behind costs one thread, and the next endpoint on the shelf does not wait behind it;
//! - one client at a time: the next one is served when the last one's connection has ended, which
//!   is after its last thread has left user space;
//! - only the user that runs the keeper may connect (the socket's mode, and `SO_PEERCRED`).
//!
//! A descriptor that was sent is the keeper's: the kernel has it in the socket's queue even when
//! the sender dies at once, so a put needs no answer.
//!
//! The keeper's own death is the loss of what it held, at the next restart of the daemon. It ends
//! by itself when whoever was connected is gone and it holds nothing.
//!
//! Why a process and not systemd's descriptor store: the same with and without systemd, slots that
//! are replaced in one step, and no limit of names. It does not start the daemon: what restarts
//! services on a node does that, and forking is not a thing for the one process that must not fail.
//!
//! Dependencies: `rustix` for sockets and descriptors, `slipway-peer` for what comes with them.

mod client;
mod serve;
mod wire;

pub use client::{Keeper, Shelf};
pub use serve::serve;

/// Slots of a keeper.
pub const SLOTS: u32 = 1 << 20;

/// Slots of a shelf. What lies in slots `n * SHELF` to `(n + 1) * SHELF - 1` belongs to one endpoint, so
/// that what one endpoint's client makes the keeper wait for is of no concern to the others.
pub const SHELF: u32 = 1024;
