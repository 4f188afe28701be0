//! Chooses the frames that a driver wants (sections 5.1.6.5.1 to 5.1.6.5.3), and the receive queue
//! of each (5.1.6.5.5).

use serde::{Deserialize, Serialize};
use slipway_ethernet_spec::{HEADER, Mac, SOURCE, TAG, TYPE, ethertype, ipv4, ipv6, protocol, tci};

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

/// Returns the offset of the frame's type, behind a tag if it has one, and the tag's VLAN.
#[inline]
pub(crate) fn typed(head: &[u8]) -> (usize, Option<u16>) {
    match half(head, TYPE) {
        Some(ethertype::VLAN) => {
            let vlan = half(head, HEADER).map(|control| control & tci::VLAN);
            (TYPE + TAG, vlan)
        }
        _ => (TYPE, None),
    }
}

/// Returns the address that a frame goes to.
#[inline]
pub(crate) fn destination(head: &[u8]) -> Mac {
    head.first_chunk::<SOURCE>().map_or(Mac::default(), |bytes| Mac(*bytes))
}

#[inline]
fn half(head: &[u8], at: usize) -> Option<u16> {
    head.get(at..at + 2).map(|bytes| u16::from_be_bytes([bytes[0], bytes[1]]))
}

#[inline]
fn word(head: &[u8], at: usize) -> u32 {
    head.get(at..at + 4).map_or(0, |b| u32::from_be_bytes([b[0], b[1], b[2], b[3]]))
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
    let (at, _) = typed(head);
    let ip = at + 2;
    let (addresses, ports) = match half(head, at) {
        Some(ethertype::IPV4) => {
            let length = usize::from(head.get(ip).copied().unwrap_or(0) & 15) * 4;
            let addresses = word(head, ip + ipv4::SOURCE) ^ word(head, ip + ipv4::SOURCE + 4);
            let above = head.get(ip + ipv4::PROTOCOL).copied();
            // Fragments after the first have no ports, so no fragment's ports are used: all
            // fragments of a packet go the same way.
            let whole = half(head, ip + 6).is_some_and(|fragment| fragment & 0x3fff == 0);
            let ports = (whole && has_ports(above)).then_some(ip + length);
            (addresses, ports)
        }
        Some(ethertype::IPV6) => {
            let at = |part: usize| word(head, ip + ipv6::SOURCE + 4 * part);
            let addresses = (0..8).fold(0, |sum, part| sum ^ at(part));
            let above = head.get(ip + ipv6::NEXT_HEADER).copied();
            (addresses, has_ports(above).then_some(ip + ipv6::HEADER))
        }
        _ => (0, None),
    };
    let ports = ports.map_or(0, |at| word(head, at));
    let mixed = addresses ^ u32::from(ports as u16 ^ (ports >> 16) as u16);
    // The golden ratio spreads neighbouring numbers (Knuth, volume 3, 6.4).
    (mixed.wrapping_mul(0x9e37_79b1) >> 24) as u8
}

fn has_ports(above: Option<u8>) -> bool {
    matches!(above, Some(protocol::TCP | protocol::UDP))
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
        frame[23] = protocol::UDP;
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
