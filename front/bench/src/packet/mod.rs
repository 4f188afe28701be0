//! Measurements of packets: the same loads on several subjects, in turn (ABAB, never AABB).
//!
//! - [`PacketLoad`]: the length of frames, the number of ports that they go to, the number of
//!   consecutive frames to one port, and the offered rate;
//! - [`PacketSubject`]: a subject. [`native`] has a link of packet rings without any switch, which
//!   is the floor, and the switch with memory ports; [`Memif`], [`OvsDpdk`] and [`Bridge`] are
//!   peers, where they are installed; [`Devices`] are two virtio-net functions in another process,
//!   with our own driver on both, and [`E1000`] two e1000 functions;
//! - [`PacketReport`] is everything measured by a [`PacketPlan`]; [`packet_table`] and
//!   [`packet_plot`] show it.
//!
//! A source and the code that forwards its frames share a processor. The sink has another one and
//! reads headers only. VALE was measured in this way (*Speeding Up Packet I/O in Virtual Machines*,
//! section 4.4).

mod devices;
mod e1000;
mod kernel;
mod load;
mod memif;
pub mod native;
mod ovs;
mod plot;
pub(crate) mod process;
mod report;
mod served;
mod source;
mod table;
mod work;

pub use devices::Devices;
pub use e1000::{E1000, Mode};
pub use kernel::{Bridge, Ends};
pub use load::PacketLoad;
pub use memif::Memif;
pub use ovs::OvsDpdk;
pub use plot::packet_plot;
pub use process::run as run_command;
pub use report::{Neighbour, PacketMeasured, PacketPlan, PacketReport, PacketSubject, Work};
pub use served::{FunctionCounts, Model, Serve, Served, TargetCounts, Wanted};
pub use slipway_load::Times;
pub use source::Source;
pub use table::packet_table;
