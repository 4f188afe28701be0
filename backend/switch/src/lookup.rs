//! Where a frame goes: the part of the switch that can be exchanged.

use slipway_ethernet_spec::Mac;

use crate::PortIndex;

/// An interface in a VLAN: its address in the low 48 bits, the VLAN above.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct Station(pub u64);

impl Station {
    /// No station: a VLAN is never 0.
    pub const NONE: Self = Self(0);

    /// The interface `mac` in `vlan`.
    pub const fn new(mac: Mac, vlan: u16) -> Self {
        Self(mac.to_bits() | (vlan as u64) << 48)
    }

    /// Its address.
    pub const fn mac(self) -> Mac {
        Mac::from_bits(self.0)
    }

    /// Its VLAN.
    pub const fn vlan(self) -> u16 {
        (self.0 >> 48) as u16
    }

    /// Stands for several interfaces.
    #[inline]
    pub const fn is_group(self) -> bool {
        self.0 & 1 != 0
    }
}

/// What a frame says of where it came from and where it goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Key {
    /// Who sent it; never a group.
    pub source: Station,
    /// Whom to.
    pub destination: Station,
}

/// Where a frame goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Target {
    /// Nowhere.
    #[default]
    Drop,
    /// One port. To the one that it came from: nowhere.
    Port(PortIndex),
    /// All ports of the VLAN but its own: its destination is a group.
    Flood,
    /// One station that nobody knows: all ports that may have unknown ones behind them.
    Unknown,
}

/// Decides where frames go. The switch has applied the rules of the port that they came from, and
/// applies those of the ports that they go to.
pub trait Lookup: Send {
    /// Says for each key of a burst of port `from` where it goes. `targets` is as long as `keys`.
    /// `now` is a time in seconds.
    fn look_up(&mut self, from: PortIndex, keys: &[Key], targets: &mut [Target], now: u32);

    /// `station` is behind `port`, whatever frames say. False: it is fixed behind another one, or there
    /// is no room.
    fn fix(&mut self, station: Station, port: PortIndex) -> bool;

    /// Forgets everything behind `port`.
    fn remove(&mut self, port: PortIndex);

    /// Forgets what is old, now and then.
    fn age(&mut self, now: u32);

    /// What is known: station, port, and the second in which it was seen last unless it is fixed.
    fn stations(&self) -> Vec<(Station, PortIndex, Option<u32>)>;
}
