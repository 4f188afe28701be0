//! The settings that the driver makes by the control queue.

use serde::{Deserialize, Serialize};
use slipway_switch::Mac;
use slipway_virtio_spec::net::Features;

use crate::filter::Filter;

/// The settings that the driver made by the control queue, and their bounds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Driven {
    pub filter: Filter,
    /// Queue pairs in use.
    pub pairs: u16,
    pub most_pairs: u16,
    /// The driver's offloads that are on ([`Features::GUEST_OFFLOADS`]).
    pub offloads: u64,
    /// `true` if the driver shall announce itself, and has not yet.
    pub announce: bool,
}

impl Driven {
    pub fn new(mac: Mac, most_pairs: u16) -> Self {
        Self { filter: Filter::new(mac), pairs: 1, most_pairs, offloads: 0, announce: false }
    }

    /// Sets the defaults for the features that the driver has chosen.
    pub fn negotiated(&mut self, features: Features) {
        self.offloads = (features & Features::GUEST_OFFLOADS).bits();
        self.filter.vlans = features.contains(Features::CTRL_VLAN).then(Vec::new);
    }

    /// Returns whether a driver with these features could have made these settings.
    pub fn is_sound(&self, features: Features, most_pairs: u16) -> bool {
        let allowed = (features & Features::GUEST_OFFLOADS).bits();
        self.filter.is_sound()
            && Mac(self.filter.mac).is_unicast()
            && self.most_pairs == most_pairs
            && (1..=most_pairs).contains(&self.pairs)
            && self.offloads & !allowed == 0
    }
}
