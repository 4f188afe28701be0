//! Views of a switch's ports, for people who look for what the switch waits for.
//!
//! A view is a copy that the switch's thread makes in a job ([`crate::Owner::inspect`]). Its size
//! is bounded, however many ports and rings there are.

use serde::{Deserialize, Serialize};

/// The number of ports that a view of a switch lists. The rest is counted.
pub(crate) const PORTS: usize = 256;
/// The number of rings that a view of a port lists. The rest is counted.
const RINGS: usize = 128;

/// A switch.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SwitchView {
    /// The ports by number, up to 256 of them.
    pub ports: Vec<PortView>,
    /// The number of ports that are not listed.
    pub more_ports: usize,
}

/// A port of a switch.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PortView {
    /// The port's number.
    pub index: u16,
    /// The port's name.
    pub name: String,
    /// The port's peer is there and takes frames.
    pub up: bool,
    /// When the switch looks for the peer's frames: `awake` (soon), `armed` (when the port wakes
    /// it), `held` (when the port's rate lets it send again), or `stalled` (the port stands still
    /// for a time, since its peer's memory made the switch's thread sleep).
    pub turn: String,
    /// Frames taken from the peer, those dropped included.
    pub frames_in: u64,
    /// Frames delivered to the peer.
    pub frames_out: u64,
    /// Frames from the peer that reached no other port.
    pub dropped_in: u64,
    /// Frames for the peer that were not delivered.
    pub dropped_out: u64,
    /// The rings of the port, and what else frames wait in.
    pub queues: QueuesView,
}

/// The queues of a port: its rings, its peer's filter, and frames that wait in front of it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueuesView {
    /// The rings of a network function that its driver has enabled, up to 128 of them.
    pub rings: Vec<RingView>,
    /// The number of rings that are not listed.
    pub more_rings: usize,
    /// The driver's receive filter; `None` if there is no driver.
    pub filter: Option<FilterView>,
    /// Frames from the peer that wait for a delay or a rate.
    pub waiting_in: usize,
    /// Frames for the peer that wait for a delay or a rate.
    pub waiting_out: usize,
}

/// A ring of a network function.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RingView {
    /// `rx` or `tx`, and the number of the pair from 0.
    pub name: String,
    /// The number of entries.
    pub size: u32,
    /// The next buffer to take. A virtio queue counts on beyond its size, up to 65,535.
    pub next: u32,
    /// Buffers that wait, as of the last look: of a receive ring empty ones, of a transmit ring
    /// those with frames.
    pub waiting: u32,
}

/// A receive filter.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FilterView {
    /// All frames pass.
    pub promiscuous: bool,
    /// Frames to all groups pass.
    pub all_multicast: bool,
    /// The number of unicast addresses that pass; `None`: all.
    pub unicast: Option<usize>,
    /// The number of groups, or of entries of a table of their hashes, that pass; `None`: all.
    pub multicast: Option<usize>,
    /// The number of VLANs that pass; `None`: all.
    pub vlans: Option<usize>,
}

impl QueuesView {
    /// Adds a ring.
    pub fn add_ring(&mut self, name: String, [size, next, waiting]: [u32; 3]) {
        match self.rings.len() {
            RINGS.. => self.more_rings += 1,
            _ => self.rings.push(RingView { name, size, next, waiting }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rings_beyond_the_bound_are_counted() {
        let mut view = QueuesView::default();
        (0..RINGS + 3).for_each(|number| view.add_ring(format!("rx{number}"), [256, 1, 2]));
        assert_eq!((view.rings.len(), view.more_rings), (RINGS, 3));
        let first = RingView { name: "rx0".into(), size: 256, next: 1, waiting: 2 };
        assert_eq!(view.rings[0], first);
    }
}
