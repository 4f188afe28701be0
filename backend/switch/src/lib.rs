//! A learning Ethernet switch in user space, in the manner of VALE (*Speeding Up Packet I/O in
//! Virtual Machines*, section 3.6): frames are forwarded in batches, by one copy from the memory of
//! their source port into the memory of each destination port.
//!
//! How the pieces meet:
//! - a [`Port`] is one end of a link; its peer is a guest, a program or the host's kernel;
//! - a [`Burst`] holds frames in flight: private copies of their first 96 bytes, on which all
//!   decisions are made, and spans of the rest, in the peer's memory;
//! - a [`Switch`] owns its ports. A [`Switch::turn`] takes a burst from one port and goes over it
//!   twice: first it checks each frame against the port's [`PortConfig`] and looks up its
//!   destination ([`Lookup`], by default [`Learning`]), then it gives each destination all of its
//!   frames at once;
//! - frames whose sender left checksum or segmentation to others cross unchanged, and are completed
//!   only for a port whose peer cannot take them so ([`Abilities`]);
//! - [`spawn`] gives a switch to a reactor: ports have turns while they have frames; without frames
//!   they are armed and cost nothing. Other threads reach the switch by its [`Handle`];
//! - [`decorators`] observe a port's frames (captures, traces), or lose, delay or slow them.
//!
//! A device that has a port of the switch hands its data path to that port by an [`Exchange`]; the
//! port has an [`ExchangePort`].
//!
//! A port whose calls may last as long as its peer wants is served by a thread of its own
//! ([`ports::ThreadedPort`]).
//!
//! A frame that does not fit is dropped at the destination that has no room, before it is copied,
//! and counted by cause ([`Drop`]). No port waits for another, except while the thread sleeps in a
//! page fault on memory that a port's peer takes away; that port then stands still for a time
//! ([`Drop::Stalled`]).
//!
//! Not here: spanning trees, link aggregation, IGMP and MLD snooping (groups are flooded, except
//! that reports of group members go to routers only), 802.1ad.
//!
//! Dependencies: `rustix` for eventfds; `libc` for the ioctls of TAP interfaces and packet sockets,
//! which `rustix` lacks; `serde` for views; `thiserror` for [`BadConfig`].
#![allow(unsafe_code)] // requests of TAP interfaces, and vectored writes of pinned memory

mod burst;
mod cutter;
pub mod decorators;
mod exchange;
mod fan;
#[cfg(feature = "fuzz")]
pub mod fuzz;
mod inbox;
mod index;
mod inspect;
mod judge;
mod lookup;
mod port;
pub mod ports;
mod rules;
mod running;
mod segment;
mod stats;
mod switch;
mod table;
mod task;
pub mod vnet;
mod waker;

pub use burst::{
    BURST, Builder, Burst, Frame, HEAD, MAX_FRAME, Offload, Pick, Reader, Segmentation,
};
pub use exchange::{Exchange, ExchangePort, Exchanged, PathHolder};
pub use index::{MAX_PORTS, PortIndex};
pub use inspect::{FilterView, PortView, QueuesView, RingView, SwitchView};
pub use lookup::{Key, Lookup, Station, Target};
pub use port::{Abilities, LinkSetting, Port};
pub use rules::{AttachError, BadConfig, PortConfig, VlanMode, Vlans, link_local};
pub use running::Owner;
pub use slipway_ethernet_spec::Mac;
pub use slipway_rate::Rate;
pub use stats::{Delivered, Drop, PortStats};
pub use switch::{PortTurn, Switch};
pub use table::{Learning, LearningOptions};
pub use task::{Handle, spawn};
pub use waker::Waker;
