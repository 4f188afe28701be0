//! Attachments of containers: interfaces that were made for them in network namespaces.
//!
//! `store` has the files that remember them.

mod store;

use std::net::IpAddr;
use std::path::PathBuf;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use slipway_netns::Identity;
use slipway_plane_api::attachments;
use slipway_plane_api::network_v1 as v1;
use slipway_telemetry::trace::TraceContext;

use crate::ledger::{Lease, Uplink};
use crate::{Error, Result};

pub use store::Store;

/// A container's interface that was made in a network namespace.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attachment {
    /// The identity that CNI gives it.
    pub key: AttachmentKey,
    /// The network.
    pub network: String,
    /// The path of the namespace.
    pub namespace: PathBuf,
    /// The device number of the namespace's file.
    pub device: u64,
    /// The inode number of the namespace's file.
    pub inode: u64,
    /// The addresses and published ports.
    pub lease: Lease,
    /// Routes beside those to the network's own addresses: destination and next hop.
    pub routes: Vec<(IpNet, Option<IpAddr>)>,
    /// The interface carries settings only, for a sandbox that has a port of the switch.
    #[serde(default)]
    pub function: bool,
    /// The pool of which the attachment has a function for that sandbox; empty: none.
    #[serde(default)]
    pub pool: String,
    /// The settings of that function if it is hardware, which no sandbox in the namespace has.
    #[serde(default)]
    pub hardware: Option<HardwareSettings>,
    /// The rates of the container's port.
    #[serde(default)]
    pub rates: Rates,
    /// The place in a trace to which the attachment belongs, and with it a sandbox in the
    /// namespace. It is lost with the daemon.
    #[serde(skip)]
    pub trace: Option<TraceContext>,
}

/// The settings of a function of hardware, beside its MAC address and its rate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HardwareSettings {
    /// The VLAN whose frames it has, without their tag; 0 for that of its pool.
    pub vlan: u32,
    /// It may send frames that do not have its MAC address.
    pub no_spoof_check: bool,
}

/// The rates of a port in bytes per second, and their bursts in bytes. Zeros stand for any rate and
/// for the default burst.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rates {
    /// The rate at which the port may send.
    pub max_rate: u64,
    /// The burst of `max_rate`.
    pub max_burst: u64,
    /// The rate at which the port receives.
    pub receive_rate: u64,
    /// The burst of `receive_rate`.
    pub receive_burst: u64,
}

impl Rates {
    /// Checks rates from outside; absent ones are none.
    ///
    /// # Errors
    /// [`Error::Invalid`]: a burst without a rate.
    pub fn of(rates: Option<&v1::PortRates>) -> Result<Self> {
        let v1::PortRates { max_rate, max_burst, receive_rate, receive_burst } =
            rates.copied().unwrap_or_default();
        for (rate, burst) in [(max_rate, max_burst), (receive_rate, receive_burst)] {
            if rate == 0 && burst > 0 {
                return Err(Error::Invalid(format!(
                    "a burst of {burst} bytes has no rate: give a rate above 0, or no burst"
                )));
            }
        }
        Ok(Self { max_rate, max_burst, receive_rate, receive_burst })
    }

    /// Returns the rates as a message of `network.proto`, or `None` if there are none.
    pub fn describe(&self) -> Option<v1::PortRates> {
        let Self { max_rate, max_burst, receive_rate, receive_burst } = *self;
        let rates = v1::PortRates { max_rate, max_burst, receive_rate, receive_burst };
        (*self != Self::default()).then_some(rates)
    }
}

impl Attachment {
    /// Returns the path of the namespace as text.
    pub fn path(&self) -> String {
        self.namespace.to_string_lossy().into_owned()
    }

    /// Returns the identity of the namespace.
    pub fn identity(&self) -> Identity {
        Identity { device: self.device, inode: self.inode }
    }

    /// Returns whether a sandbox's interface is this one, which was made for the sandbox's port.
    pub fn is_of(&self, uplink: &Uplink) -> bool {
        let own = (self.device, self.inode, self.lease.mac, &self.key.interface);
        self.function && own == (uplink.device, uplink.inode, uplink.mac, &uplink.interface)
    }
}

/// The identity of an attachment, as CNI defines it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AttachmentKey {
    /// The name of the network configuration.
    pub configuration: String,
    /// The container's id.
    pub container: String,
    /// The interface's name in the namespace.
    pub interface: String,
}

impl std::fmt::Display for AttachmentKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { configuration, container, interface } = self;
        write!(f, "interface {interface} of container {container} in \"{configuration}\"")
    }
}

impl AttachmentKey {
    /// Checks and takes an identity from outside.
    ///
    /// # Errors
    /// [`Error::Invalid`].
    pub fn new(configuration: &str, container: &str, interface: &str) -> Result<Self> {
        attachments::check(configuration, container, interface).map_err(Error::Invalid)?;
        Ok(Self {
            configuration: configuration.to_owned(),
            container: container.to_owned(),
            interface: interface.to_owned(),
        })
    }

    /// Returns the identity as a message of `network.proto`.
    pub fn describe(&self) -> v1::ContainerInterface {
        v1::ContainerInterface {
            configuration: self.configuration.clone(),
            container_id: self.container.clone(),
            interface: self.interface.clone(),
        }
    }

    /// Returns the name of the attachment's file, without its extension, and of its lease.
    pub fn id(&self) -> String {
        attachments::id(&self.configuration, &self.container, &self.interface)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_kept_as_they_came_and_a_burst_needs_one() {
        let wanted = v1::PortRates { max_rate: 8, receive_rate: 9, receive_burst: 1, max_burst: 0 };
        assert_eq!(Rates::of(Some(&wanted)).unwrap().describe(), Some(wanted));
        assert_eq!(Rates::of(None).unwrap().describe(), None);
        let burst = v1::PortRates { max_burst: 7, ..Default::default() };
        let error = Rates::of(Some(&burst)).unwrap_err().to_string();
        assert!(error.contains("7 bytes has no rate") && !error.contains('\n'), "{error}");
    }
}
