//! A learning Ethernet switch in user space, in the manner of VALE (*Speeding Up Packet I/O in Virtual
//! Machines*, section 3.6): frames are forwarded in batches, by one copy from the memory of the port
//! that they came from into the memory of each port that they go to.
//!
//! How the pieces meet:
//! - a [`Port`] is one end of a link; its peer is a guest, a program or the host's kernel;
//! - a [`Burst`] holds frames on their way: private copies of their first 64 bytes, which all decisions
//!   are made on, and spans of the rest.
mod burst;
mod port;

pub use burst::{
    BURST, Builder, Burst, Frame, HEAD, MAX_FRAME, Offload, Pick, Reader, Segmentation,
};
pub use port::{Abilities, Delivered, Port};
