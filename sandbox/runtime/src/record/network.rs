//! A sandbox's interface: its kind, and its place in a network or network namespace.

use serde::{Deserialize, Serialize};

use super::{FunctionPool, TakenFunction};

/// A sandbox's interface in a network.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Network {
    /// The network's name.
    pub name: String,
    /// The plane's switch that connects the network.
    pub switch: String,
    /// The MAC address of the sandbox's interface on the switch.
    pub mac: String,
    /// The sandbox's IPv4 address.
    pub ipv4: String,
    /// The length of the network's IPv4 prefix.
    pub ipv4_prefix: u32,
    /// The host's IPv4 address, which is the gateway.
    pub ipv4_gateway: String,
    /// The sandbox's IPv6 address.
    pub ipv6: String,
    /// The length of the network's IPv6 prefix.
    pub ipv6_prefix: u32,
    /// The host's IPv6 address, which is the gateway.
    pub ipv6_gateway: String,
    /// The largest packet in bytes.
    pub mtu: u32,
    /// The addresses of the name servers.
    pub name_servers: Vec<String>,
    /// Published ports: ports of the host that lead to the sandbox, as in "8080:80/tcp".
    pub published: Vec<String>,
    /// Set if the guest of a fork keeps the MAC address with which its template was saved, and the
    /// port on the switch translates it.
    #[serde(default)]
    pub mac_at_port: bool,
    /// The MAC address of the interface in the guest, if the port translates it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guest_mac: Option<String>,
    /// Set if the container's process starts only once the network is configured.
    pub wait: bool,
    /// The queue pairs of the sandbox's interface; 0: one for each CPU.
    #[serde(default)]
    pub queues: u32,
    /// The kind of the sandbox's interface.
    #[serde(default)]
    pub nic: Nic,
    /// The shortest time between two interrupts of an e1000 in ns, whatever its driver asks for; 0:
    /// as the driver wants.
    #[serde(default)]
    pub interrupt_interval_ns: u64,
    /// The settings of an interface that somebody else made in a network namespace, or `None` for
    /// an interface in a network. `name` is the namespace's path then, and `ipv4` and `ipv6` are
    /// the first addresses, or empty.
    #[serde(default)]
    pub namespace: Option<NamespaceInterface>,
    /// The pool of virtual functions that the interface is taken of, or `None` if it is made when
    /// the sandbox starts.
    #[serde(default)]
    pub pool: Option<FunctionPool>,
    /// The further interfaces of the network namespace, each of which the guest has too. They are
    /// virtio network devices.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub further: Vec<FurtherInterface>,
}

impl Network {
    /// Notes the MAC address of the interface of the saved machine with which the guest begins, or
    /// `None` if it boots.
    pub fn begin_with(&mut self, saved_mac: Option<String>) {
        self.guest_mac = saved_mac.filter(|_| self.mac_at_port);
    }

    /// Returns the MAC address that the interface has in the guest once it is configured.
    pub fn mac_in_guest(&self) -> &str {
        self.guest_mac.as_deref().unwrap_or(&self.mac)
    }

    /// Returns the function of a pool that the sandbox has, or `None` if its interface is made for
    /// it.
    pub fn taken(&self) -> Option<&TakenFunction> {
        self.pool.as_ref()?.taken.as_ref()
    }

    /// Forgets the function of a pool that a sandbox had. Once the sandbox has ended, the function
    /// goes to others, by the same name and socket. The pool's name and the owner stay.
    pub(crate) fn forget_taken(&mut self) {
        if let Some(pool) = &mut self.pool {
            pool.taken = None;
        }
    }

    /// Returns whether the interface is a function that somebody else took for the sandbox.
    pub fn is_lent(&self) -> bool {
        self.pool.as_ref().is_some_and(|pool| !pool.owner.is_empty())
    }

    /// Returns all addresses of the sandbox's first interface, IPv4 before IPv6. One that leads
    /// nowhere has none.
    pub fn addresses(&self) -> Vec<String> {
        match &self.namespace {
            Some(interface) => interface.sorted_addresses(),
            None => {
                let both = [&self.ipv4, &self.ipv6].into_iter();
                both.filter(|address| !address.is_empty()).cloned().collect()
            }
        }
    }

    /// Returns the rates of the port of the sandbox's first interface.
    pub fn rates(&self) -> PortRates {
        self.namespace.as_ref().map(|interface| interface.rates).unwrap_or_default()
    }
}

/// An interface of a network namespace that a sandbox has beside its first one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FurtherInterface {
    /// The plane's switch that connects it.
    pub switch: String,
    /// Its MAC address.
    pub mac: String,
    /// The largest packet in bytes.
    pub mtu: u32,
    /// Its other settings.
    pub settings: NamespaceInterface,
}

/// The settings of an interface that somebody else made in a network namespace.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NamespaceInterface {
    /// The interface's name in the namespace.
    pub interface: String,
    /// The addresses, with the lengths of their networks' prefixes.
    pub addresses: Vec<(String, u32)>,
    /// The routes, those to the addresses' networks included.
    pub routes: Vec<Route>,
    /// Permanent neighbours: IP address and MAC address.
    pub neighbours: Vec<(String, String)>,
    /// The rates of the sandbox's port, if the interface was made for a port of a network.
    #[serde(default)]
    pub rates: PortRates,
    /// The place in a trace to which the interface belongs, as a `traceparent`; empty: none. Of use
    /// until the sandbox starts only.
    #[serde(skip)]
    pub traceparent: String,
}

impl NamespaceInterface {
    /// Returns the addresses, IPv4 before IPv6.
    pub fn sorted_addresses(&self) -> Vec<String> {
        let mut all: Vec<_> = self.addresses.iter().map(|(one, _)| one.clone()).collect();
        all.sort_by_key(|address| address.contains(':'));
        all
    }
}

/// The rates of a port in bytes per second, and their bursts in bytes. Zeros stand for any rate and
/// for the default burst.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PortRates {
    /// The rate at which the sandbox may send.
    pub max_rate: u64,
    /// The burst of `max_rate`.
    pub max_burst: u64,
    /// The rate at which the sandbox receives.
    pub receive_rate: u64,
    /// The burst of `receive_rate`.
    pub receive_burst: u64,
}

/// A route of a sandbox's interface.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Route {
    /// The destination's address; with `prefix` 0 the default route.
    pub destination: String,
    /// The length of the destination's prefix.
    pub prefix: u32,
    /// The next hop; empty: the destination is on the link.
    pub gateway: String,
    /// Set if the gateway is on the link, whatever other routes say.
    pub on_link: bool,
    /// The address to send from; empty: any.
    pub source: String,
    /// The metric; 0: the kernel's default.
    pub metric: u32,
}

/// The kind of a sandbox's interface: the device that its guest finds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Nic {
    /// A virtio network device.
    #[default]
    Virtio,
    /// Intel's 82540EM.
    E1000,
    /// The same with a communication status block.
    E1000Csb,
}

impl Nic {
    /// Returns the word of the command line for the kind.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Virtio => "virtio",
            Self::E1000 => "e1000",
            Self::E1000Csb => "e1000-csb",
        }
    }
}

impl std::str::FromStr for Nic {
    type Err = String;

    /// Parses a kind; the empty text is the default.
    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "" | "virtio" => Ok(Self::Virtio),
            "e1000" => Ok(Self::E1000),
            "e1000-csb" => Ok(Self::E1000Csb),
            other => Err(format!(
                "\"{other}\" is no kind of network interface: choose virtio, e1000 or e1000-csb"
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fork_keeps_the_address_of_its_template_if_its_port_translates_it() {
        let (own, saved) = ("5a:11:0a:d5:00:02", "5a:11:0a:00:00:01");
        let mut network = Network { mac: own.to_owned(), ..Network::default() };
        network.begin_with(Some(saved.to_owned()));
        assert_eq!((network.mac_in_guest(), &network.guest_mac), (own, &None));
        network.mac_at_port = true;
        network.begin_with(Some(saved.to_owned()));
        assert_eq!((network.mac_in_guest(), network.mac.as_str()), (saved, own));
        // It boots, since there is no such template yet.
        network.begin_with(None);
        assert_eq!(network.mac_in_guest(), own);
        let mut earlier = serde_json::to_value(&network).unwrap();
        earlier.as_object_mut().unwrap().remove("mac_at_port");
        assert!(!serde_json::from_value::<Network>(earlier).unwrap().mac_at_port);
    }
}
