//! The part of vfio-user that a server and a client have in common: messages on a stream socket,
//! and the version data.
//!
//! The protocol's structures are those of `slipway_vfio_user_spec`, which does no I/O.
//! - [`Wire`] is one end of a connection: whole messages with their descriptors, and a bounded
//!   queue of output. No call waits.
//! - [`Capabilities`] are the limits that one side announces in its version message.
//!
//! Not here: the meaning of any message.
//!
//! Dependencies: `slipway-peer` for everything that a peer could make wait; `rustix` for sockets;
//! `serde` and `serde_json` for the version data; `zerocopy` for the structures; `thiserror`.

mod version;
mod wire;

pub use version::{Capabilities, encode, parse};
pub use wire::{
    End, MAX_DATA_XFER_SIZE, MAX_MESSAGE, MAX_MSG_FDS, Message, Wire, payload_len, read,
};
