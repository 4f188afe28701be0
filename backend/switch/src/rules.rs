//! The settings of a port: what it may send and what it gets, as users of SR-IOV expect them of a
//! virtual function, and VLANs.

use std::net::{IpAddr, Ipv4Addr};

use slipway_ethernet_spec::{
    ArpPacket, Icmpv6Message, Ipv4Packet, Ipv6Packet, Mac, ethertype, message_type, protocol, tci,
};
use slipway_rate::Rate;

use crate::port::LinkSetting;

/// A set of VLANs from 1 to 4094.
#[derive(Clone, PartialEq, Eq)]
pub struct Vlans(Box<[u64; 64]>);

impl Vlans {
    /// Returns the empty set.
    pub fn none() -> Self {
        Self(Box::new([0; 64]))
    }

    /// Returns the set of all VLANs.
    pub fn all() -> Self {
        let mut all = Self(Box::new([u64::MAX; 64]));
        all.0[0] &= !1;
        all.0[63] &= !(1 << 63);
        all
    }

    /// Adds `vlan`. Returns `false` if the number is not usable.
    pub fn insert(&mut self, vlan: u16) -> bool {
        let usable = (1..=tci::LAST_VLAN).contains(&vlan);
        if usable {
            self.0[usize::from(vlan / 64)] |= 1 << (vlan % 64);
        }
        usable
    }

    /// Returns whether `vlan` is in the set.
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
    /// Untagged frames belong to this VLAN; tagged frames are dropped.
    Access(u16),
    /// Tagged frames of these VLANs, and untagged frames of the native VLAN if there is one.
    Trunk {
        /// The VLAN of untagged frames.
        native: Option<u16>,
        /// The VLANs that are let through, besides the native one.
        allowed: Vlans,
    },
}

impl Default for VlanMode {
    /// All VLANs, with untagged frames in VLAN 1: a switch that does not interfere.
    fn default() -> Self {
        Self::Trunk { native: Some(1), allowed: Vlans::all() }
    }
}

/// Settings of a port. `vlans` and `max_frame` come first, since every frame to the port needs
/// them.
#[repr(C)] // keeps the order of the fields
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PortConfig {
    /// The port's VLANs.
    pub vlans: VlanMode,
    /// The largest frame in bytes that the port gets, with the header of 14 bytes and without a
    /// tag; 0 for no limit. Longer frames are refused. A frame that its sender wants cut goes
    /// whole to a peer that can cut it; for other peers the switch cuts it, and each piece must
    /// keep to the limit.
    pub max_frame: u32,
    /// The state of the port's link.
    pub link: LinkSetting,
    /// The port may send only from its own addresses: the MAC, and the IP addresses (in ARP and
    /// neighbour advertisements, too) if any are assigned.
    pub spoof_check: bool,
    /// The port is trusted: it gets frames for unknown stations although it has an address of its
    /// own, and may send router advertisements and redirects.
    pub trust: bool,
    /// The assigned address. No other port has it in this port's access or native VLAN, and frames
    /// for it come here without learning.
    pub mac: Option<Mac>,
    /// The address that the port's peer takes for its own where that is another one than `mac`, as
    /// a guest that began with the machine of another one. The port translates it: in Ethernet
    /// headers, ARP packets, and options of neighbour discovery within the first 96 bytes. Nobody
    /// else on the switch sees it, and another port may have it as its `mac`. `None`, also without
    /// `mac`: nothing is translated.
    pub peer_mac: Option<Mac>,
    /// The assigned IP addresses, which [`PortConfig::spoof_check`] uses. The link-local IPv6
    /// address made of the MAC is always allowed.
    pub addresses: Vec<IpAddr>,
    /// The largest rate in bytes per second at which the port may send, with a burst.
    pub max_rate: Option<Rate>,
    /// The largest rate in bytes per second at which the port's peer receives, with a burst. Frames
    /// above it wait in a short queue of the port, and are dropped ([`Drop`](crate::Drop::Rate))
    /// if that has no room.
    pub receive_rate: Option<Rate>,
    /// A name for display: a sandbox's, an interface's.
    pub name: String,
}

/// The reason why settings are invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadConfig {
    /// The address is a group's or all zeros.
    #[error("{0} is no address that an interface can have: it must be unicast and not all zeros")]
    Mac(Mac),
    /// Another port has the address.
    #[error("{0} belongs to another port of this switch")]
    MacTaken(Mac),
    /// The VLAN is out of range.
    #[error("VLAN {0} cannot be used: choose one of 1 to 4094")]
    Vlan(u16),
    /// A rate is 0, so the port could never send, or never receive.
    #[error("a rate of 0 would let nothing pass: leave it out for no limit, or set the link down")]
    Rate,
    /// The spoof check has no address to check.
    #[error("a spoof check needs the MAC address that the port may use")]
    NothingToCheck,
    /// The switch has as many ports as it can have.
    #[error("a switch has at most {} ports", crate::MAX_PORTS)]
    Full,
    /// The port does not exist, or no longer.
    #[error("the switch has no such port")]
    NoSuchPort,
    /// The impairment is invalid.
    #[error(transparent)]
    Impairment(#[from] crate::decorators::BadImpairment),
}

/// The reason why a port cannot be attached to a switch on a reactor.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// The settings are invalid.
    #[error(transparent)]
    Config(#[from] BadConfig),
    /// The port's descriptor cannot be watched, so that nothing would wake the switch for it.
    #[error("the port's descriptor cannot be watched: {0}")]
    Watch(std::io::Error),
}

impl PortConfig {
    /// Checks whether a port can have these settings.
    ///
    /// # Errors
    /// The first problem found.
    pub fn check(&self) -> Result<(), BadConfig> {
        let mut macs = [self.mac, self.peer_mac].into_iter().flatten();
        if let Some(mac) = macs.find(|mac| !mac.is_unicast()) {
            return Err(BadConfig::Mac(mac));
        }
        let vlan = match &self.vlans {
            VlanMode::Access(vlan) => Some(*vlan),
            VlanMode::Trunk { native, .. } => *native,
        };
        if let Some(vlan) = vlan.filter(|vlan| !(1..=tci::LAST_VLAN).contains(vlan)) {
            return Err(BadConfig::Vlan(vlan));
        }
        let rates = [self.max_rate, self.receive_rate];
        if rates.into_iter().flatten().any(|rate| rate.per_second == 0) {
            return Err(BadConfig::Rate);
        }
        if self.spoof_check && self.mac.is_none() {
            return Err(BadConfig::NothingToCheck);
        }
        Ok(())
    }

    /// Returns the VLAN of a frame that came with the tag `tci`, or without a tag, or `None` if the
    /// port may not send it.
    #[inline]
    pub(crate) fn vlan_in(&self, tci: Option<u16>) -> Option<u16> {
        // A tag with VLAN 0 only carries a priority (802.1Q, table 9-2).
        let tagged = tci.map(|tci| tci & tci::VLAN).filter(|vlan| *vlan != 0);
        match (&self.vlans, tagged) {
            (VlanMode::Access(vlan), None) => Some(*vlan),
            (VlanMode::Access(_), Some(_)) => None,
            (VlanMode::Trunk { native, .. }, None) => *native,
            (VlanMode::Trunk { allowed, .. }, Some(vlan)) => allowed.contains(vlan).then_some(vlan),
        }
    }

    /// Returns the tag with which a frame of the VLAN in `tci` leaves, 0 for no tag. Returns `None`
    /// if the frame does not leave here.
    #[inline]
    pub(crate) fn tag_out(&self, tci: u16) -> Option<u16> {
        let vlan = tci & tci::VLAN;
        match &self.vlans {
            VlanMode::Access(own) => (*own == vlan).then_some(0),
            VlanMode::Trunk { native, .. } if *native == Some(vlan) => Some(0),
            VlanMode::Trunk { allowed, .. } => allowed.contains(vlan).then_some(tci),
        }
    }

    /// Returns the address that the peer takes for its own and that which it has on the switch.
    /// Returns `None` if they are the same.
    pub(crate) fn translation(&self) -> Option<(Mac, Mac)> {
        self.peer_mac.zip(self.mac).filter(|(peer, network)| peer != network)
    }

    /// Returns the VLAN in which the port's address is fixed, or `None` if untagged frames have no
    /// VLAN.
    pub(crate) fn own_vlan(&self) -> Option<u16> {
        match &self.vlans {
            VlanMode::Access(vlan) => Some(*vlan),
            VlanMode::Trunk { native, .. } => *native,
        }
    }

    /// Returns whether frames for the unknown station `mac` go here as well. The port's own address
    /// is fixed in its own VLAN only, and it may have interfaces in other VLANs.
    pub(crate) fn takes_unknown(&self, mac: Mac) -> bool {
        self.mac.is_none_or(|own| own == mac) || self.trust
    }

    /// Returns whether the IP addresses that the frame claims as its sender's are the port's.
    /// `packet` is the part of the frame's head after the Ethernet header. A packet whose header is
    /// malformed, or reaches beyond the head, is refused. `summed_later` says that a checksum will
    /// be filled in above the IP header.
    pub(crate) fn owns_sender(&self, kind: u16, packet: &[u8], summed_later: bool) -> bool {
        match kind {
            ethertype::IPV4 => {
                Ipv4Packet::new_checked(packet).is_ok_and(|packet| self.has_ipv4(packet.source()))
            }
            ethertype::ARP => ArpPacket::new_checked(packet).is_ok_and(|packet| {
                self.mac == Some(packet.sender_mac()) && self.has_ipv4(packet.sender())
            }),
            ethertype::IPV6 => Ipv6Packet::new_checked(packet).is_ok_and(|packet| {
                let from = packet.source();
                // Protocols other than TCP and UDP are summed by their sender. A checksum that is
                // filled in later could make another message of the packet.
                let next = packet.next_header();
                let fixed = !summed_later || matches!(next, protocol::TCP | protocol::UDP);
                fixed
                    && (from.is_unspecified() || self.has(from.into()))
                    && self.owns_advertised(&packet)
            }),
            // A port with assigned IP addresses uses IP; other protocols are not known well enough
            // to be trusted.
            _ => false,
        }
    }

    /// Returns whether the port may make the packet's claims about the network. Neighbour
    /// advertisements must be for the port's own addresses. Router advertisements and redirects are
    /// for routers, and only a trusted port counts as one.
    fn owns_advertised(&self, packet: &Ipv6Packet<&[u8]>) -> bool {
        let Some(message) = packet.icmpv6() else { return false };
        if message.is_empty() {
            return true;
        }
        Icmpv6Message::new_checked(message).is_ok_and(|message| match message.message_type() {
            message_type::NEIGHBOR_ADVERTISEMENT => {
                message.target().is_some_and(|target| self.has(target.into()))
            }
            message_type::ROUTER_ADVERTISEMENT | message_type::REDIRECT => self.trust,
            _ => true,
        })
    }

    /// Returns whether the port may claim the IPv4 address: its own, or all zeros, by which a
    /// sender asks for an address (RFC 2131) or whether an address is free (RFC 5227).
    fn has_ipv4(&self, address: Ipv4Addr) -> bool {
        address.is_unspecified() || self.has(address.into())
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

/// Returns the link-local address that an interface makes of its MAC (RFC 4291, appendix A).
pub fn link_local(mac: Mac) -> [u8; 16] {
    let [a, b, c, d, e, f] = mac.0;
    [0xfe, 0x80, 0, 0, 0, 0, 0, 0, a ^ 2, b, c, 0xff, 0xfe, d, e, f]
}
