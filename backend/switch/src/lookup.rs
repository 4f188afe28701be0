//! The lookup of frames' destinations, which is the exchangeable part of the switch.

use slipway_ethernet_spec::Mac;

use crate::PortIndex;

/// An interface in a VLAN: the address in the low 48 bits, the VLAN above.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct Station(pub u64);

impl Station {
    /// No station: a VLAN is never 0.
    pub const NONE: Self = Self(0);

    /// Returns the station of interface `mac` in `vlan`.
    pub const fn new(mac: Mac, vlan: u16) -> Self {
        Self(mac.to_bits() | (vlan as u64) << 48)
    }

    /// Returns the station's address.
    pub const fn mac(self) -> Mac {
        Mac::from_bits(self.0)
    }

    /// Returns the station's VLAN.
    pub const fn vlan(self) -> u16 {
        (self.0 >> 48) as u16
    }

    /// Returns whether the address is that of all multicast routers which listen to reports of
    /// group members: of IGMPv3 (RFC 3376, section 4.2.14) or of MLDv2 (RFC 3810, section 5.2.14).
    #[inline]
    pub const fn is_of_reports(self) -> bool {
        const IGMP: u64 = Mac([0x01, 0x00, 0x5e, 0x00, 0x00, 0x16]).to_bits();
        const MLD: u64 = Mac([0x33, 0x33, 0x00, 0x00, 0x00, 0x16]).to_bits();
        let mac = self.mac().to_bits();
        mac == IGMP || mac == MLD
    }

    /// Returns whether the address is a group's.
    #[inline]
    pub const fn is_group(self) -> bool {
        self.0 & 1 != 0
    }
}

/// The source and the destination of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Key {
    /// The sender; never a group.
    pub source: Station,
    /// The receiver, which may be a group.
    pub destination: Station,
}

/// The destination ports of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Target {
    /// No port.
    #[default]
    Drop,
    /// One port. If it is the frame's source port, the frame is dropped.
    Port(PortIndex),
    /// All ports of the VLAN except the source port: the destination is a group.
    Flood,
    /// An unknown station: all ports that may have unknown stations behind them. Reports of group
    /// members go there, too: routers want them, and other members must not (RFC 4541, section
    /// 2.1.1).
    Unknown,
}

/// Decides the destinations of frames. The switch has applied the settings of the source port, and
/// applies those of the destination ports afterwards.
pub trait Lookup: Send {
    /// Writes the target of each key of a burst from port `from`. `targets` is as long as `keys`.
    /// `now` is a time in seconds.
    fn look_up(&mut self, from: PortIndex, keys: &[Key], targets: &mut [Target], now: u32);

    /// Fixes `station` behind `port`, whatever frames say. Returns `false` if the station is fixed
    /// behind another port, or there is no room.
    fn fix(&mut self, station: Station, port: PortIndex) -> bool;

    /// Forgets all stations behind `port`.
    fn remove(&mut self, port: PortIndex);

    /// Forgets old stations, now and then.
    fn age(&mut self, now: u32);

    /// Returns the known stations, each with its port and the second in which it was last seen, or
    /// `None` if it is fixed.
    fn stations(&self) -> Vec<(Station, PortIndex, Option<u32>)>;
}
