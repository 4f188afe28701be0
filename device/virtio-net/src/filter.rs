//! Chooses the frames that a driver wants (sections 5.1.6.5.1 to 5.1.6.5.3), and the receive queue
//! of each (5.1.6.5.5).

use serde::{Deserialize, Serialize};
use slipway_ethernet_spec::{EthernetFrame, Ipv4Packet, Ipv6Packet, Mac, ethertype, tci};
use slipway_switch::FilterView;

/// Most addresses of a table. A larger table lets every frame of its kind through.
pub(crate) const TABLE: usize = 64;

/// The receive filter that a driver asked for. It has bytes of addresses rather than `Mac`, since
/// it is also the saved form.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Filter {
    pub mac: [u8; 6],
    pub promiscuous: bool,
    pub all_multicast: bool,
    pub all_unicast: bool,
    pub no_multicast: bool,
    pub no_unicast: bool,
    pub no_broadcast: bool,
    /// The driver's further unicast addresses. `None` if they are more than a table holds.
    pub unicast: Option<Vec<[u8; 6]>>,
    /// The multicast groups that the driver is in. `None` if they are more than a table holds.
    pub multicast: Option<Vec<[u8; 6]>>,
    /// The VLANs that the driver is in, ascending. `None` if it did not negotiate the filter.
    pub vlans: Option<Vec<u16>>,
}

impl Filter {
    /// Returns the filter after a reset: all frames, until the driver asks for less. Drivers that
    /// use receive modes set them before they expect a frame, and other drivers expect all frames.
    pub fn new(mac: Mac) -> Self {
        Self {
            mac: mac.0,
            promiscuous: true,
            all_multicast: false,
            all_unicast: false,
            no_multicast: false,
            no_unicast: false,
            no_broadcast: false,
            unicast: Some(Vec::new()),
            multicast: Some(Vec::new()),
            vlans: None,
        }
    }

    /// Returns whether the driver wants a frame to `to`, with VLAN tag `vlan` if it has one.
    #[inline]
    pub fn wants(&self, to: Mac, vlan: Option<u16>) -> bool {
        if let (Some(vlans), Some(vlan)) = (&self.vlans, vlan)
            && vlan != 0
            && vlans.binary_search(&vlan).is_err()
        {
            return false;
        }
        self.promiscuous || self.wants_address(to)
    }

    fn wants_address(&self, to: Mac) -> bool {
        let holds =
            |table: &Option<Vec<[u8; 6]>>| table.as_ref().is_none_or(|table| table.contains(&to.0));
        if to == Mac::BROADCAST {
            return !self.no_broadcast;
        }
        if to.is_group() {
            return !self.no_multicast && (self.all_multicast || holds(&self.multicast));
        }
        !self.no_unicast && (self.all_unicast || to.0 == self.mac || holds(&self.unicast))
    }

    /// Returns a view of the filter.
    pub fn view(&self) -> FilterView {
        let len = |table: &Option<Vec<[u8; 6]>>| table.as_ref().map(Vec::len);
        FilterView {
            promiscuous: self.promiscuous,
            all_multicast: self.all_multicast,
            // Its own address passes beside those of the table.
            unicast: len(&self.unicast).filter(|_| !self.all_unicast).map(|count| count + 1),
            multicast: len(&self.multicast),
            vlans: self.vlans.as_ref().map(Vec::len),
        }
    }

    /// Returns whether a driver's commands could have made this filter.
    pub fn is_sound(&self) -> bool {
        let short =
            |table: &Option<Vec<[u8; 6]>>| table.as_ref().is_none_or(|table| table.len() <= TABLE);
        let vlans = self.vlans.as_deref().unwrap_or_default();
        let ascending = vlans.windows(2).all(|pair| pair[0] < pair[1]);
        let valid = vlans.iter().all(|vlan| *vlan <= tci::VLAN);
        short(&self.unicast) && short(&self.multicast) && ascending && valid
    }
}

/// Chooses the receive queue of a flow: the partner of the transmit queue that the driver last used
/// for the flow (section 5.1.6.5.5).
pub(crate) struct Steering(Box<[u8; 256]>);

impl Default for Steering {
    fn default() -> Self {
        Self(Box::new([0; 256]))
    }
}

impl Steering {
    /// Notes that the driver sent a frame of this flow on `queue`.
    #[inline]
    pub fn learn(&mut self, head: &[u8], queue: u8) {
        self.0[usize::from(flow(head))] = queue;
    }

    /// Returns the queue for a frame of this flow.
    #[inline]
    pub fn pick(&self, head: &[u8]) -> u8 {
        self.0[usize::from(flow(head))]
    }
}

/// Returns a number for a frame's flow, the same in both directions.
fn flow(head: &[u8]) -> u8 {
    let frame = EthernetFrame::new_checked(head);
    let found = frame.ok().and_then(|frame| addresses(frame.ethertype(), frame.payload()));
    let (addresses, ports) = found.unwrap_or((0, None));
    let mixed =
        addresses ^ ports.map_or(0, |(source, destination)| u32::from(source ^ destination));
    // The golden ratio spreads neighbouring numbers (Knuth, volume 3, 6.4).
    (mixed.wrapping_mul(0x9e37_79b1) >> 24) as u8
}

/// Returns the mixed addresses of a packet, and its ports. Returns `None` if it is no IP packet.
#[inline]
fn addresses(kind: u16, packet: &[u8]) -> Option<(u32, Option<(u16, u16)>)> {
    match kind {
        ethertype::IPV4 => {
            let packet = Ipv4Packet::new_checked(packet).ok()?;
            // Fragments after the first have no ports, so no fragment's ports are used: all
            // fragments of a packet go the same way.
            let ports = packet.ports().filter(|_| !packet.is_fragment());
            Some((packet.source().to_bits() ^ packet.destination().to_bits(), ports))
        }
        ethertype::IPV6 => {
            let packet = Ipv6Packet::new_checked(packet).ok()?;
            let mixed = packet.source().to_bits() ^ packet.destination().to_bits();
            let half = (mixed >> 64) as u64 ^ mixed as u64;
            Some(((half >> 32) as u32 ^ half as u32, packet.ports()))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: Mac = Mac([2, 0, 0, 0, 0, 1]);
    const OTHER: Mac = Mac([2, 0, 0, 0, 0, 2]);
    const GROUP: Mac = Mac([0x33, 0x33, 0, 0, 0, 1]);

    #[test]
    fn receive_modes_do_as_they_say() {
        let mut filter = Filter::new(OWN);
        assert!(filter.wants(OTHER, None));
        filter.promiscuous = false;
        let wanted =
            |filter: &Filter| [OWN, OTHER, GROUP, Mac::BROADCAST].map(|to| filter.wants(to, None));
        assert_eq!(wanted(&filter), [true, false, false, true]);
        filter.multicast = Some(vec![GROUP.0]);
        assert_eq!(wanted(&filter), [true, false, true, true]);
        filter.unicast = None;
        assert_eq!(wanted(&filter), [true, true, true, true]);
        (filter.no_unicast, filter.no_multicast, filter.no_broadcast) = (true, true, true);
        assert_eq!(wanted(&filter), [false; 4]);
    }

    #[test]
    fn vlans_are_filtered_once_that_is_negotiated() {
        let mut filter = Filter::new(OWN);
        assert!(filter.wants(OWN, Some(7)));
        filter.vlans = Some(vec![9]);
        assert!(!filter.wants(OWN, Some(7)) && filter.wants(OWN, Some(9)));
        assert!(filter.wants(OWN, None) && filter.wants(OWN, Some(0)), "no VLAN");
    }

    fn ip4(from: u8, to: u8, ports: (u16, u16)) -> Vec<u8> {
        let mut frame = vec![0; 60];
        frame[12..14].copy_from_slice(&[8, 0]);
        frame[14] = 0x45;
        frame[23] = slipway_ethernet_spec::protocol::UDP;
        (frame[29], frame[33]) = (from, to);
        frame[34..36].copy_from_slice(&ports.0.to_be_bytes());
        frame[36..38].copy_from_slice(&ports.1.to_be_bytes());
        frame
    }

    #[test]
    fn answers_come_to_the_queue_that_asked() {
        let mut steering = Steering::default();
        steering.learn(&ip4(1, 2, (4000, 53)), 3);
        assert_eq!(steering.pick(&ip4(2, 1, (53, 4000))), 3);
        let flows: std::collections::BTreeSet<u8> =
            (0..64).map(|port| flow(&ip4(1, 2, (4000 + port, 53)))).collect();
        assert!(flows.len() > 40, "{} of 64 flows are told apart", flows.len());
        for cut in 0..60 {
            steering.pick(&ip4(1, 2, (1, 2))[..cut]);
        }
    }
}
