//! What a port may send, and what it gets: the settings that users of SR-IOV expect of a virtual
//! function, and VLANs.

use std::net::IpAddr;

use slipway_ethernet_spec::{Mac, arp, ethertype, ipv4, ipv6, protocol, tci};
use slipway_rate::Rate;

/// VLANs 1 to 4094, as a set.
#[derive(Clone, PartialEq, Eq)]
pub struct Vlans(Box<[u64; 64]>);

impl Vlans {
    /// None.
    pub fn none() -> Self {
        Self(Box::new([0; 64]))
    }

    /// All of them.
    pub fn all() -> Self {
        let mut all = Self(Box::new([u64::MAX; 64]));
        all.0[0] &= !1;
        all.0[63] &= !(1 << 63);
        all
    }

    /// Adds `vlan`. False: it is none that can be used.
    pub fn insert(&mut self, vlan: u16) -> bool {
        let usable = (1..=tci::LAST_VLAN).contains(&vlan);
        if usable {
            self.0[usize::from(vlan / 64)] |= 1 << (vlan % 64);
        }
        usable
    }

    /// Whether `vlan` is one of them.
    #[inline]
    pub fn contains(&self, vlan: u16) -> bool {
        self.0[usize::from(vlan / 64) & 63] >> (vlan % 64) & 1 != 0
    }
}

impl std::fmt::Debug for Vlans {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_set().entries((1..=tci::LAST_VLAN).filter(|vlan| self.contains(*vlan))).finish()
    }
}

/// The VLANs of a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VlanMode {
    /// Untagged frames belong to this VLAN; tagged ones are not let in.
    Access(u16),
    /// Tagged frames of these VLANs, and untagged ones of the native one if there is one.
    Trunk {
        /// The VLAN of untagged frames.
        native: Option<u16>,
        /// The VLANs that are let through, the native one aside.
        allowed: Vlans,
    },
}

impl Default for VlanMode {
    /// All VLANs, untagged frames being of VLAN 1: a switch that does not interfere.
    fn default() -> Self {
        Self::Trunk { native: Some(1), allowed: Vlans::all() }
    }
}

/// The state of a port's link, as `ip link set … vf … state` has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Link {
    /// As its peer has it; the peer sees a carrier for as long as its port is attached.
    #[default]
    Auto,
    /// The same, and the peer sees a carrier even when its switch has gone.
    Up,
    /// Down, whatever the peer says: nothing passes either way, and the peer sees no carrier.
    Down,
}

/// Settings of a port.
#[repr(C)] // what every frame to it needs first
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortConfig {
    /// VLANs.
    pub vlans: VlanMode,
    /// Largest frame that goes to it without being cut, header of 14 bytes included, tag not; 0: any.
    pub max_frame: u32,
    /// Its link.
    pub link: Link,
    /// It may send from its own addresses only: MAC, and IP (ARP and neighbour advertisements
    /// included) where any are assigned.
    pub spoof_check: bool,
    /// It is believed: it gets frames for stations that nobody knows even though it has an address of
    /// its own.
    pub trust: bool,
    /// The address assigned to it: nobody else has it in its VLANs, and frames for it go here without
    /// having to be learned.
    pub mac: Option<Mac>,
    /// The IP addresses assigned to it; what [`PortConfig::spoof_check`] goes by, link-local IPv6
    /// addresses made of the MAC aside.
    pub addresses: Vec<IpAddr>,
    /// Most bytes per second that it may send, with a burst.
    pub max_rate: Option<Rate>,
    /// A name for people: a sandbox's, an interface's.
    pub name: String,
}

impl Default for PortConfig {
    fn default() -> Self {
        Self {
            name: String::new(),
            mac: None,
            addresses: Vec::new(),
            spoof_check: false,
            trust: false,
            vlans: VlanMode::default(),
            link: Link::Auto,
            max_rate: None,
            max_frame: 0,
        }
    }
}

/// Settings that cannot be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadConfig {
    /// A group's address, or all zeros.
    #[error("{0} is no address that an interface can have: it must be unicast and not all zeros")]
    Mac(Mac),
    /// Another port has it.
    #[error("{0} belongs to another port of this switch")]
    MacTaken(Mac),
    /// Out of range.
    #[error("VLAN {0} cannot be used: choose one of 1 to 4094")]
    Vlan(u16),
    /// Nothing would ever be sent.
    #[error("a rate of 0 would let nothing pass: leave it out for no limit, or set the link down")]
    Rate,
    /// A check without anything to check.
    #[error("a spoof check needs the MAC address that the port may use")]
    NothingToCheck,
    /// As many ports as there can be.
    #[error("a switch has at most {} ports", crate::MAX_PORTS)]
    Full,
    /// It has gone, or never was.
    #[error("the switch has no such port")]
    NoSuchPort,
    /// An impairment that cannot be.
    #[error(transparent)]
    Impairment(#[from] crate::decorators::BadImpairment),
}

impl PortConfig {
    /// Whether a port can have these settings.
    ///
    /// # Errors
    /// [`BadConfig`].
    pub fn check(&self) -> Result<(), BadConfig> {
        if let Some(mac) = self.mac.filter(|mac| !mac.is_unicast()) {
            return Err(BadConfig::Mac(mac));
        }
        let vlan = match &self.vlans {
            VlanMode::Access(vlan) => Some(*vlan),
            VlanMode::Trunk { native, .. } => *native,
        };
        if let Some(vlan) = vlan.filter(|vlan| !(1..=tci::LAST_VLAN).contains(vlan)) {
            return Err(BadConfig::Vlan(vlan));
        }
        if self.max_rate.is_some_and(|rate| rate.per_second == 0) {
            return Err(BadConfig::Rate);
        }
        if self.spoof_check && self.mac.is_none() {
            return Err(BadConfig::NothingToCheck);
        }
        Ok(())
    }

    /// The VLAN of a frame that came with the tag `tci`, or without one.
    #[inline]
    pub(crate) fn vlan_in(&self, tci: Option<u16>) -> Option<u16> {
        // A tag of VLAN 0 says a priority and nothing of VLANs (802.1Q, table 9-2).
        let tagged = tci.map(|tci| tci & tci::VLAN).filter(|vlan| *vlan != 0);
        match (&self.vlans, tagged) {
            (VlanMode::Access(vlan), None) => Some(*vlan),
            (VlanMode::Access(_), Some(_)) => None,
            (VlanMode::Trunk { native, .. }, None) => *native,
            (VlanMode::Trunk { allowed, .. }, Some(vlan)) => allowed.contains(vlan).then_some(vlan),
        }
    }

    /// Which tag a frame of the VLAN in `tci` leaves with: 0 for none. None: it does not leave here.
    #[inline]
    pub(crate) fn tag_out(&self, tci: u16) -> Option<u16> {
        let vlan = tci & tci::VLAN;
        match &self.vlans {
            VlanMode::Access(own) => (*own == vlan).then_some(0),
            VlanMode::Trunk { native, .. } if *native == Some(vlan) => Some(0),
            VlanMode::Trunk { allowed, .. } => allowed.contains(vlan).then_some(tci),
        }
    }

    /// The VLANs that its address is fixed in.
    pub(crate) fn own_vlan(&self) -> Option<u16> {
        match &self.vlans {
            VlanMode::Access(vlan) => Some(*vlan),
            VlanMode::Trunk { native, .. } => *native,
        }
    }

    /// Whether frames for a station that nobody knows, with the address `mac`, go here as well: its own
    /// address is known in its own VLAN only, and it may have interfaces in others.
    pub(crate) fn takes_unknown(&self, mac: Mac) -> bool {
        self.mac.is_none_or(|own| own == mac) || self.trust
    }

    /// Whether the IP addresses that the frame claims to be from are its own. `packet` is what of the
    /// frame lies in its head from the end of the Ethernet header on. What is cut short claims nothing
    /// that its receiver would believe, except where addresses lie beyond the head: that is refused.
    /// With `summed_later` a checksum will be put somewhere above the IP header.
    pub(crate) fn owns_sender(&self, kind: u16, packet: &[u8], summed_later: bool) -> bool {
        match kind {
            ethertype::IPV4 => field(packet, ipv4::SOURCE).is_some_and(|from: [u8; 4]| {
                // All zeros: it asks for an address (RFC 2131).
                from == [0; 4] || self.has(IpAddr::from(from))
            }),
            ethertype::ARP => field(packet, arp::SENDER_MAC).is_some_and(|mac: [u8; 6]| {
                let from = field::<4>(packet, arp::SENDER_IP);
                self.mac == Some(Mac(mac))
                    // All zeros: it asks whether an address is free (RFC 5227).
                    && from.is_some_and(|from| from == [0; 4] || self.has(IpAddr::from(from)))
            }),
            ethertype::IPV6 => field(packet, ipv6::SOURCE).is_some_and(|from: [u8; 16]| {
                let from = IpAddr::from(from);
                // Anything but TCP and UDP is summed by who sends it; a sum that is put in later could make
                // another message of it.
                let next = packet.get(ipv6::NEXT_HEADER).copied();
                let fixed = !summed_later || matches!(next, Some(protocol::TCP | protocol::UDP));
                fixed && (from.is_unspecified() || self.has(from)) && self.owns_advertised(packet)
            }),
            // Who has addresses of IP speaks IP: nothing else is known well enough to be believed.
            _ => false,
        }
    }

    /// Whether the packet says nothing of the network that is not the port's to say: neighbour
    /// advertisements are for its own addresses, and router advertisements and redirects are for
    /// routers, of whom the switch knows none but those it trusts.
    fn owns_advertised(&self, packet: &[u8]) -> bool {
        let Some(message) = icmpv6(packet) else { return false };
        match message.first() {
            Some(&ipv6::NEIGHBOR_ADVERTISEMENT) => field(message, ipv6::ADVERTISED_TARGET)
                .is_some_and(|target: [u8; 16]| self.has(IpAddr::from(target))),
            Some(&(ipv6::ROUTER_ADVERTISEMENT | ipv6::REDIRECT)) => self.trust,
            _ => true,
        }
    }

    fn has(&self, address: IpAddr) -> bool {
        match address {
            IpAddr::V4(_) => self.addresses.contains(&address),
            IpAddr::V6(address) => self.own_ipv6().any(|own| own == address.octets()),
        }
    }

    fn own_ipv6(&self) -> impl Iterator<Item = [u8; 16]> {
        let assigned = self.addresses.iter().filter_map(|address| match address {
            IpAddr::V6(address) => Some(address.octets()),
            IpAddr::V4(_) => None,
        });
        assigned.chain(self.mac.map(link_local))
    }
}

/// The link-local address that an interface makes of its MAC (RFC 4291, appendix A).
pub fn link_local(mac: Mac) -> [u8; 16] {
    let [a, b, c, d, e, f] = mac.0;
    [0xfe, 0x80, 0, 0, 0, 0, 0, 0, a ^ 2, b, c, 0xff, 0xfe, d, e, f]
}

/// The ICMPv6 message in an IPv6 packet, empty when there is another protocol in it. None: extension
/// headers reach beyond what is known of the packet, so it cannot be told. (Neighbour discovery in
/// fragments is refused by its receivers: RFC 6980.)
fn icmpv6(packet: &[u8]) -> Option<&[u8]> {
    let mut next = *packet.get(ipv6::NEXT_HEADER)?;
    let mut at = ipv6::HEADER;
    loop {
        let unit = match next {
            protocol::ICMPV6 => return packet.get(at..).filter(|message| !message.is_empty()),
            protocol::HOP_BY_HOP | protocol::ROUTING | protocol::DESTINATION => 8,
            protocol::AUTHENTICATION => 4,
            _ => return Some(&[]),
        };
        let [following, length] = field(packet, at)?;
        // In units, of which the first does not count, or, for authentication, the first two.
        at += unit * (usize::from(length) + if unit == 8 { 1 } else { 2 });
        next = following;
    }
}

fn field<const N: usize>(packet: &[u8], at: usize) -> Option<[u8; N]> {
    packet.get(at..at + N)?.try_into().ok()
}
