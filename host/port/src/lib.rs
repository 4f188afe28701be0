//! Sends and receives Ethernet frames at a memory port of a Slipway switch, from a program of the
//! same host: packet rings in shared memory, no system call while there is traffic.
//!
//! `slipway port create --network NET NAME` makes a port and prints the path of its socket;
//! [`Port::connect`] attaches to it. One program at a time has a port.
//!
//! ```no_run
//! use std::time::Duration;
//! use slipway_port::{Error, Port};
//!
//! /// Sends every frame back where it came from.
//! fn main() -> Result<(), Error> {
//!     let mut port = Port::connect("/run/slipway/ports/echo.sock")?;
//!     let mut replies: Vec<Vec<u8>> = Vec::new();
//!     loop {
//!         // Looks for a while, then sleeps until the switch has something.
//!         if !port.wait(Some(Duration::from_secs(1)))? {
//!             eprintln!("nothing for a second; {:?}", port.statistics());
//!             continue;
//!         }
//!         replies.clear();
//!         for frame in &port.receive(64)? {
//!             // The bytes lie in the ring, until the burst is dropped.
//!             let bytes = frame.bytes();
//!             if bytes.len() < 14 {
//!                 continue;
//!             }
//!             let mut reply = bytes.to_vec();
//!             reply[..6].copy_from_slice(&bytes[6..12]);
//!             reply[6..12].copy_from_slice(&bytes[..6]);
//!             replies.push(reply);
//!         }
//!         // What does not fit in is lost, as on any network.
//!         port.send(&replies)?;
//!     }
//! }
//! ```
//!
//! How the pieces meet: [`Port`] owns the socket and both rings; [`Port::receive`] lends a burst
//! ([`Received`]) of [`Frame`]s that lie in the ring and gives their slots back when it is dropped;
//! [`Port::send`] copies frames into slots, [`Port::send_with`] lets the caller write them there;
//! [`Port::wait`] sleeps. `include/slipway_port.h` offers the same to C, without a library.
//!
//! # When the daemon goes
//! The port and its name outlive the daemon, the rings do not: calls that look at the socket
//! ([`Port::wait`], [`Port::check`]) return [`Error::Gone`], and [`Port::reconnect`] attaches to
//! the port that the next daemon made. A program that only ever polls calls `check` now and then.
//!
//! # Trust
//! The daemon is root, or this very user ([`Port::connect`] checks), and could change this
//! process's memory in any case. So it is trusted not to write to slots that it has given away,
//! which is what lets a frame be a slice. It is trusted in nothing else: counters and lengths are
//! checked, and the memory's file cannot shrink. A program in a user namespace that does not map
//! root sees a daemon that is neither root nor this user, and is refused.
//!
//! Not implemented: offloads (frames have their checksums and are segmented), several queues,
//! notification of room in a full ring.
//!
//! Dependencies: `rustix` for the socket, eventfds and poll(2), `thiserror` for [`Error`].
#![allow(unsafe_code)] // frames are slices of memory that is shared; see above

mod attach;
mod error;
mod port;
mod received;
mod spin;

pub use error::Error;
pub use port::{Port, Statistics};
pub use received::{Frame, Frames, Received};
