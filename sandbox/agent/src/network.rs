//! The sandbox's network interface. The host gives its MAC address and all of its settings, so that
//! nothing must be requested on the network. In a fork of a machine that was saved with an
//! interface in use, the connections and addresses of that machine are removed first ([`saved`]).

mod saved;

use std::net::IpAddr;
use std::path::Path;
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use slipway_agent_protocol::v1::{ConfigureNetworkRequest, InterfaceRoute};
use slipway_ethernet_spec::Mac;
use slipway_netlink::{Address, LinkChange, LinkInfo, Neighbour, Netlink, Route};

use crate::{ethtool, log, machine, nvme, uevent};

/// The longest wait for the interface. A guest under emulation on a busy host takes seconds.
const PATIENCE: Duration = Duration::from_secs(60);

/// The requested settings of the interface. Indices of links are 0.
#[derive(Debug, PartialEq, Eq)]
pub struct InterfaceSettings {
    /// `None`: the interface keeps its own.
    mac: Option<[u8; 6]>,
    /// The PCI address of the function that the interface is of, if it is found by that.
    function: Option<String>,
    /// The address that the interface has until now, if that is another one.
    saved_mac: Option<[u8; 6]>,
    /// The name that it gets, if not the kernel's.
    name: Option<String>,
    /// The addresses with the lengths of their networks' prefixes.
    addresses: Vec<(IpAddr, u8)>,
    gateways: Vec<IpAddr>,
    mtu: Option<u32>,
    /// In the order in which they are added.
    routes: Vec<Route>,
    neighbours: Vec<Neighbour>,
}

impl InterfaceSettings {
    /// Parses a request.
    pub fn parse(request: &ConfigureNetworkRequest) -> Result<Self> {
        let addresses = request.addresses.iter().map(|one| network(&one.address, one.prefix));
        let gateways = request.gateways.iter().map(|text| address(text));
        let neighbours = request.neighbours.iter().map(|one| {
            Ok(Neighbour { index: 0, address: address(&one.address)?, mac: mac(&one.mac)? })
        });
        let mut routes = request.routes.iter().map(route).collect::<Result<Vec<_>>>()?;
        // The kernel takes a route by a gateway only if it has a route to the gateway.
        routes.sort_by_key(|route| route.gateway.is_some());
        let some = |text: &str| (!text.is_empty()).then(|| mac(text)).transpose();
        let function = Some(request.pci_address.clone()).filter(|text| !text.is_empty());
        let own = match function {
            Some(_) => some(&request.mac)?,
            None => Some(mac(&request.mac)?),
        };
        Ok(Self {
            mac: own,
            function,
            saved_mac: some(&request.saved_mac)?,
            name: Some(request.name.clone()).filter(|name| !name.is_empty()),
            addresses: addresses.collect::<Result<_>>()?,
            gateways: gateways.collect::<Result<_>>()?,
            mtu: (request.mtu > 0).then_some(request.mtu),
            routes,
            neighbours: neighbours.collect::<Result<_>>()?,
        })
    }

    /// Returns whether an interface is that of a machine that was saved while it was in use: it is
    /// up, or has addresses, as one that a container has set down.
    fn is_saved(&self, link: &LinkInfo, addresses: &[Address]) -> bool {
        let is_used = link.up || addresses.iter().any(|address| address.index == link.index);
        is_used && link.mac.is_some() && link.mac == self.saved_mac
    }
}

fn mac(text: &str) -> Result<[u8; 6]> {
    Ok(Mac::from_str(text).with_context(|| format!("{text:?}"))?.0)
}

fn address(text: &str) -> Result<IpAddr> {
    text.parse().with_context(|| format!("{text:?} is no IP address"))
}

fn network(text: &str, prefix: u32) -> Result<(IpAddr, u8)> {
    let ip = address(text)?;
    let length = u8::try_from(prefix).unwrap_or(u8::MAX);
    if length > if ip.is_ipv4() { 32 } else { 128 } {
        bail!("{ip} has no prefix of {prefix} bits");
    }
    Ok((ip, length))
}

fn route(wanted: &InterfaceRoute) -> Result<Route> {
    let some = |text: &str| (!text.is_empty()).then(|| address(text)).transpose();
    let destination = network(&wanted.destination, wanted.prefix)?;
    Ok(Route {
        on_link: wanted.on_link,
        source: some(&wanted.source)?,
        metric: wanted.metric,
        ..Route::new(destination, some(&wanted.gateway)?, 0)
    })
}

/// Loads the drivers of interfaces and waits until there are `count`.
pub async fn await_interfaces(sysfs: &Path, count: u32) -> Result<()> {
    tokio::task::spawn_blocking(machine::load_network_modules).await?;
    let probe = || {
        let there = std::fs::read_dir(sysfs.join("class/net"))?;
        // The loopback interface has no device.
        let real = there.flatten().filter(|entry| entry.path().join("device").exists()).count();
        Ok::<_, std::io::Error>((real >= count as usize).then_some(()))
    };
    match uevent::wait_for(PATIENCE, probe).await.context("looking for interfaces")? {
        Some(()) => Ok(()),
        None => bail!("{}", absent()),
    }
}

fn absent() -> String {
    format!(
        "the guest has no network interface after {} s: has its kernel the driver virtio_net?",
        PATIENCE.as_secs()
    )
}

fn absent_at(function: &str) -> String {
    let seconds = PATIENCE.as_secs();
    format!(
        "the function {function} has no interface after {seconds} s: has the guest's kernel its \
         driver?"
    )
}

/// Waits for the interface and configures it. Returns its name.
pub async fn configure(wanted: InterfaceSettings) -> Result<String> {
    // Drivers talk to their device while they are loaded, so this must not run on the thread that
    // serves the host.
    tokio::task::spawn_blocking(machine::load_network_modules).await?;
    if wanted.function.is_some() {
        tokio::task::spawn_blocking(machine::load_extra_modules).await?;
    }
    let sysfs = Path::new(machine::SYSFS);
    let find = || Netlink::open()?.links().map(|links| interface(sysfs, links, &wanted));
    let found = uevent::wait_for(PATIENCE, find).await.context("looking for the interface")?;
    let link = found.with_context(|| wanted.function.as_deref().map_or_else(absent, absent_at))?;
    let kernels = link.name.clone();
    // Thousands of connections take a while to end.
    let applied = tokio::task::spawn_blocking(move || {
        if wanted.is_saved(&link, &Netlink::open()?.addresses()?) {
            saved::forget(&link)?;
        }
        let link = named(link, wanted.name.as_deref())?;
        apply(&link, &wanted)?;
        Ok::<_, anyhow::Error>(link.name)
    });
    applied.await?.with_context(|| format!("configuring {kernels}"))
}

/// Gives an interface that nothing uses yet this name. Another interface that has the name makes
/// way: nothing uses it either, and it gets its own name later.
fn named(link: LinkInfo, name: Option<&str>) -> Result<LinkInfo> {
    let Some(name) = name.filter(|name| *name != link.name) else { return Ok(link) };
    let mut netlink = Netlink::open()?;
    if let Some(other) = netlink.link(name)? {
        let moved = netlink.rename(other.index, &format!("slip{}", other.index));
        moved.with_context(|| format!("another interface is called {name}"))?;
    }
    netlink.rename(link.index, name).with_context(|| format!("calling it {name}"))?;
    Ok(LinkInfo { name: name.to_owned(), ..link })
}

/// Returns the interface of the wanted function. Without one, returns the interface that has the
/// wanted MAC address, or the one that gets it.
fn interface(sysfs: &Path, links: Vec<LinkInfo>, wanted: &InterfaceSettings) -> Option<LinkInfo> {
    if let Some(function) = &wanted.function {
        let name = name_at(sysfs, function)?;
        return links.into_iter().find(|link| link.name == name);
    }
    let of = |mac: Option<[u8; 6]>| links.iter().position(|link| mac.is_some() && link.mac == mac);
    let at = of(wanted.mac).or_else(|| of(wanted.saved_mac))?;
    links.into_iter().nth(at)
}

/// Returns the name of the interface of the PCI function at `address`: an entry of `net` in the
/// function's directory, or in that of its virtio device.
fn name_at(sysfs: &Path, address: &str) -> Option<String> {
    let function = nvme::function(sysfs, address).ok()?;
    let devices = nvme::entries(&function).into_iter().filter(|path| {
        path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"virtio"))
    });
    let mut all = std::iter::once(function).chain(devices);
    let interface = all.find_map(|device| nvme::entries(&device.join("net")).into_iter().next())?;
    interface.file_name()?.to_str().map(str::to_owned)
}

/// Has the driver of the interface with this MAC address start its device anew.
pub fn restart(text: &str) -> Result<()> {
    let wanted = mac(text)?;
    let links = Netlink::open()?.links()?;
    let link = links.into_iter().find(|link| link.mac == Some(wanted));
    let link = link.with_context(|| format!("no interface has the address {text}"))?;
    ethtool::renegotiate(&link.name).with_context(|| format!("restarting {}", link.name))
}

/// Applies the settings. A repetition changes nothing.
fn apply(link: &LinkInfo, wanted: &InterfaceSettings) -> Result<()> {
    let mut netlink = Netlink::open()?;
    // The host gives all settings, so router advertisements are ignored.
    let setting = format!("/proc/sys/net/ipv6/conf/{}/accept_ra", link.name);
    if let Err(error) = std::fs::write(&setting, "0") {
        log!("{setting}: {error}");
    }
    if wanted.mac.is_some() && link.mac != wanted.mac {
        // Linux changes the address of an interface that is down; its drivers need not do more.
        let change = LinkChange { mac: wanted.mac, up: None, mtu: None };
        netlink.change(link.index, change).context("setting its MAC address")?;
    }
    let change = LinkChange { mtu: wanted.mtu, up: Some(true), mac: None };
    netlink.change(link.index, change).context("setting it up")?;
    for (address, prefix) in &wanted.addresses {
        let (index, address, prefix) = (link.index, *address, *prefix);
        let own = Address { index, address, prefix };
        let added = match wanted.routes.is_empty() {
            true => netlink.add_address(&own),
            false => netlink.add_address_only(&own),
        };
        added.with_context(|| format!("address {address}/{prefix}"))?;
    }
    for neighbour in &wanted.neighbours {
        let added = netlink.add_neighbour(&Neighbour { index: link.index, ..*neighbour });
        added.with_context(|| format!("neighbour {}", neighbour.address))?;
    }
    for gateway in &wanted.gateways {
        let any: IpAddr = if gateway.is_ipv4() { [0; 4].into() } else { [0; 16].into() };
        let route = Route::new((any, 0), Some(*gateway), link.index);
        netlink.add_route(&route).with_context(|| format!("route by {gateway}"))?;
    }
    for route in &wanted.routes {
        let added = netlink.add_route(&Route { index: link.index, ..*route });
        let (to, prefix) = route.destination;
        added.with_context(|| format!("route to {to}/{prefix}"))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use slipway_agent_protocol::v1::{InterfaceAddress, InterfaceNeighbour};

    use super::*;

    /// Runs `body` in a network namespace of its own, with a loopback interface that is down.
    pub fn in_namespace(body: impl FnOnce() + Send + 'static) {
        let done = std::thread::spawn(|| {
            // SAFETY: unshare(2) takes no pointers; it concerns this thread, which ends here.
            if unsafe { libc::unshare(libc::CLONE_NEWNET) } != 0 {
                println!("SKIPPED: a test in a network namespace as root: needs root");
                return;
            }
            body();
        });
        done.join().unwrap();
    }

    pub fn request() -> ConfigureNetworkRequest {
        let address = |address: &str, prefix| InterfaceAddress { address: address.into(), prefix };
        ConfigureNetworkRequest {
            mac: "5a:11:0a:d5:00:02".into(),
            addresses: vec![address("10.213.0.2", 24), address("fd00:1::2", 64)],
            gateways: vec!["10.213.0.1".into(), "fd00:1::1".into()],
            mtu: 1400,
            ..Default::default()
        }
    }

    /// As the plugin ptp has it: the gateway is on the link, and everything else behind it.
    fn point_to_point() -> ConfigureNetworkRequest {
        let route = |destination: &str, prefix, gateway: &str| InterfaceRoute {
            destination: destination.into(),
            prefix,
            gateway: gateway.into(),
            ..Default::default()
        };
        let neighbour =
            InterfaceNeighbour { address: "10.213.0.1".into(), mac: "ee:ee:ee:ee:ee:ee".into() };
        ConfigureNetworkRequest {
            gateways: Vec::new(),
            routes: vec![
                route("0.0.0.0", 0, "10.213.0.1"),
                route("10.213.0.0", 24, "10.213.0.1"),
                InterfaceRoute { source: "10.213.0.2".into(), ..route("10.213.0.1", 32, "") },
                InterfaceRoute { on_link: true, ..route("10.9.0.0", 16, "192.168.3.1") },
            ],
            neighbours: vec![neighbour],
            ..request()
        }
    }

    #[test]
    fn requests_are_understood_or_refused() {
        let wanted = InterfaceSettings::parse(&request()).unwrap();
        assert_eq!(wanted.mac, Some([0x5a, 0x11, 0x0a, 0xd5, 0, 2]));
        assert_eq!((wanted.addresses.len(), wanted.gateways.len(), wanted.mtu), (2, 2, Some(1400)));
        let bad = |change: fn(&mut ConfigureNetworkRequest)| {
            let mut request = request();
            change(&mut request);
            format!("{:#}", InterfaceSettings::parse(&request).unwrap_err())
        };
        assert!(bad(|r| r.mac = "5a:11:0a:d5:00".into()).contains("a MAC address is"));
        assert!(bad(|r| r.mac = "5a:11:0a:d5:00:02:03".into()).contains("a MAC address is"));
        assert!(bad(|r| r.addresses[0].prefix = 33).contains("33 bits"));
        assert!(bad(|r| r.addresses[1].prefix = 300).contains("300 bits"));
        assert!(bad(|r| r.gateways[0] = "x".into()).contains("no IP address"));
        let route = |route: InterfaceRoute| {
            let request = ConfigureNetworkRequest { routes: vec![route], ..request() };
            format!("{:#}", InterfaceSettings::parse(&request).unwrap_err())
        };
        let destination = "10.0.0.0".to_owned();
        let whole = InterfaceRoute { destination, prefix: 8, ..Default::default() };
        assert!(route(InterfaceRoute::default()).contains("no IP address"));
        assert!(route(InterfaceRoute { prefix: 33, ..whole.clone() }).contains("33 bits"));
        assert!(route(InterfaceRoute { gateway: "x".into(), ..whole.clone() }).contains("\"x\""));
        assert!(route(InterfaceRoute { source: "y".into(), ..whole }).contains("\"y\""));
        let routes = InterfaceSettings::parse(&point_to_point()).unwrap().routes;
        assert_eq!(routes[0].destination.0.to_string(), "10.213.0.1");
    }

    #[test]
    fn an_interface_of_hardware_is_found_by_its_function() {
        let parse = |mac: &str, pci_address: &str| {
            let (mac, pci_address) = (mac.to_owned(), pci_address.to_owned());
            InterfaceSettings::parse(&ConfigureNetworkRequest { mac, pci_address, ..request() })
        };
        assert!(parse("", "").is_err() && parse("x", "0000:00:06.0").is_err());
        let wanted = parse("", "0000:00:06.0").unwrap();
        let root = tempfile::tempdir().unwrap();
        let link = |index, name: &str| {
            let (name, kind) = (name.to_owned(), String::new());
            LinkInfo { index, name, mac: Some([2; 6]), mtu: 1500, up: false, kind, lower: None }
        };
        let found = || {
            let links = vec![link(1, "eth0"), link(2, "eth1")];
            interface(root.path(), links, &wanted).map(|link| link.index)
        };
        let function = root.path().join("bus/pci/devices/0000:00:06.0");
        std::fs::create_dir_all(function.join("msi_irqs/net/eth0")).unwrap();
        assert_eq!((wanted.mac, found()), (None, None));
        std::fs::create_dir_all(function.join("virtio3/net/eth1")).unwrap();
        assert_eq!(found(), Some(2));
        std::fs::create_dir_all(function.join("net/eth0")).unwrap();
        assert_eq!(found(), Some(1));
    }

    /// Uses the loopback interface of a network namespace of its own, which has a MAC address of
    /// zeros.
    #[test]
    fn an_interface_is_configured_as_root() {
        in_namespace(|| {
            let mut netlink = Netlink::open().unwrap();
            let mac = Some([0; 6]);
            let mut wanted =
                InterfaceSettings { mac, ..InterfaceSettings::parse(&request()).unwrap() };
            // The interface has no neighbour in IPv6.
            wanted.gateways.pop();
            let sysfs = Path::new(machine::SYSFS);
            let link = interface(sysfs, netlink.links().unwrap(), &wanted).unwrap();
            for _ in 0..2 {
                apply(&link, &wanted).unwrap();
            }
            let link = netlink.link("lo").unwrap().unwrap();
            assert!(link.up && link.mtu == 1400, "{link:?}");
            let addresses = netlink.addresses().unwrap();
            for (address, prefix) in &wanted.addresses {
                let (index, address, prefix) = (link.index, *address, *prefix);
                assert!(addresses.contains(&Address { index, address, prefix }), "{addresses:?}");
            }
            let routes = netlink.routes().unwrap();
            for gateway in wanted.gateways {
                assert!(routes.iter().any(|route| route.gateway == Some(gateway)), "{routes:?}");
            }
        });
    }

    /// In a network namespace of its own, as above.
    #[test]
    fn an_interface_gets_a_name_and_keeps_it_as_root() {
        in_namespace(|| {
            let mut netlink = Netlink::open().unwrap();
            let wanted = ConfigureNetworkRequest { name: "net1".into(), ..request() };
            let name = InterfaceSettings::parse(&wanted).unwrap().name;
            for _ in 0..2 {
                let link = netlink.links().unwrap().remove(0);
                let link = named(link, name.as_deref()).unwrap();
                assert_eq!(netlink.link("net1").unwrap(), Some(link));
            }
            let link = netlink.link("net1").unwrap().unwrap();
            assert_eq!(named(link.clone(), None).unwrap(), link);
            assert!(named(link, Some("a-name-of-17-bytes")).is_err());
        });
    }

    /// In a network namespace of its own, as above.
    #[test]
    fn an_interface_has_the_requested_routes_and_no_others_as_root() {
        in_namespace(|| {
            let mut netlink = Netlink::open().unwrap();
            let mac = Some([0; 6]);
            let wanted =
                InterfaceSettings { mac, ..InterfaceSettings::parse(&point_to_point()).unwrap() };
            let sysfs = Path::new(machine::SYSFS);
            let link = interface(sysfs, netlink.links().unwrap(), &wanted).unwrap();
            for _ in 0..2 {
                apply(&link, &wanted).unwrap();
            }
            let routes = netlink.routes().unwrap();
            assert_eq!(routes.len(), wanted.routes.len(), "{routes:?}");
            for route in wanted.routes {
                let route = Route { index: link.index, ..route };
                assert!(routes.contains(&route), "{route:?} of {routes:?}");
            }
            assert_eq!(netlink.neighbours().unwrap().len(), 1);
        });
    }
}
