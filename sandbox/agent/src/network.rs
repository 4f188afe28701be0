//! The sandbox's network interface. The host gives its MAC address and all of its settings, so that
//! nothing must be requested on the network.

use std::net::IpAddr;
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use slipway_agent_protocol::v1::ConfigureNetworkRequest;
use slipway_ethernet_spec::Mac;
use slipway_netlink::{Address, Link, LinkChange, Netlink, Route};

use crate::{log, machine, uevent};

/// The longest wait for the interface. A guest under emulation on a busy host takes seconds.
const PATIENCE: Duration = Duration::from_secs(60);

/// The requested settings of the interface.
#[derive(Debug, PartialEq, Eq)]
pub struct Wanted {
    mac: [u8; 6],
    /// The addresses with the lengths of their networks' prefixes.
    addresses: Vec<(IpAddr, u8)>,
    gateways: Vec<IpAddr>,
    mtu: Option<u32>,
}

impl Wanted {
    /// Parses a request.
    pub fn parse(request: &ConfigureNetworkRequest) -> Result<Self> {
        let address = |text: &str| -> Result<IpAddr> {
            text.parse().with_context(|| format!("{text:?} is no IP address"))
        };
        let mut addresses = Vec::new();
        for one in &request.addresses {
            let ip = address(&one.address)?;
            let prefix = u8::try_from(one.prefix).unwrap_or(u8::MAX);
            if prefix > if ip.is_ipv4() { 32 } else { 128 } {
                bail!("{ip} has no prefix of {} bits", one.prefix);
            }
            addresses.push((ip, prefix));
        }
        let gateways = request.gateways.iter().map(|text| address(text));
        Ok(Self {
            mac: Mac::from_str(&request.mac).with_context(|| format!("{:?}", request.mac))?.0,
            addresses,
            gateways: gateways.collect::<Result<_>>()?,
            mtu: (request.mtu > 0).then_some(request.mtu),
        })
    }
}

/// Waits for the interface and configures it. Returns its name.
pub async fn configure(wanted: Wanted) -> Result<String> {
    // Drivers talk to their device while they are loaded, so this must not run on the thread that
    // serves the host.
    tokio::task::spawn_blocking(machine::load_network_modules).await?;
    let find = || Netlink::open()?.links().map(|links| with_mac(links, wanted.mac));
    let found = uevent::wait_for(PATIENCE, find).await.context("looking for the interface")?;
    let link = found.with_context(|| {
        format!(
            "the guest has no network interface after {} s: has its kernel the driver virtio_net?",
            PATIENCE.as_secs()
        )
    })?;
    apply(&link, &wanted).with_context(|| format!("configuring {}", link.name))?;
    Ok(link.name)
}

fn with_mac(links: Vec<Link>, mac: [u8; 6]) -> Option<Link> {
    links.into_iter().find(|link| link.mac == Some(mac))
}

/// Applies the settings. A repetition changes nothing.
fn apply(link: &Link, wanted: &Wanted) -> Result<()> {
    let mut netlink = Netlink::open()?;
    // The host gives all settings, so router advertisements are ignored.
    let setting = format!("/proc/sys/net/ipv6/conf/{}/accept_ra", link.name);
    if let Err(error) = std::fs::write(&setting, "0") {
        log!("{setting}: {error}");
    }
    let change = LinkChange { mtu: wanted.mtu, up: Some(true), mac: None };
    netlink.change(link.index, change).context("setting it up")?;
    for (address, prefix) in &wanted.addresses {
        let (index, address, prefix) = (link.index, *address, *prefix);
        let added = netlink.add_address(&Address { index, address, prefix });
        added.with_context(|| format!("address {address}/{prefix}"))?;
    }
    for gateway in &wanted.gateways {
        let any: IpAddr = if gateway.is_ipv4() { [0; 4].into() } else { [0; 16].into() };
        let route = Route { destination: (any, 0), gateway: Some(*gateway), index: link.index };
        netlink.add_route(&route).with_context(|| format!("route by {gateway}"))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use slipway_agent_protocol::v1::InterfaceAddress;

    use super::*;

    fn request() -> ConfigureNetworkRequest {
        let address = |address: &str, prefix| InterfaceAddress { address: address.into(), prefix };
        ConfigureNetworkRequest {
            mac: "5a:11:0a:d5:00:02".into(),
            addresses: vec![address("10.213.0.2", 24), address("fd00:1::2", 64)],
            gateways: vec!["10.213.0.1".into(), "fd00:1::1".into()],
            mtu: 1400,
        }
    }

    #[test]
    fn requests_are_understood_or_refused() {
        let wanted = Wanted::parse(&request()).unwrap();
        assert_eq!(wanted.mac, [0x5a, 0x11, 0x0a, 0xd5, 0, 2]);
        assert_eq!((wanted.addresses.len(), wanted.gateways.len(), wanted.mtu), (2, 2, Some(1400)));
        let bad = |change: fn(&mut ConfigureNetworkRequest)| {
            let mut request = request();
            change(&mut request);
            format!("{:#}", Wanted::parse(&request).unwrap_err())
        };
        assert!(bad(|r| r.mac = "5a:11:0a:d5:00".into()).contains("a MAC address is"));
        assert!(bad(|r| r.mac = "5a:11:0a:d5:00:02:03".into()).contains("a MAC address is"));
        assert!(bad(|r| r.addresses[0].prefix = 33).contains("33 bits"));
        assert!(bad(|r| r.addresses[1].prefix = 300).contains("300 bits"));
        assert!(bad(|r| r.gateways[0] = "x".into()).contains("no IP address"));
    }

    /// Uses the loopback interface of a network namespace of its own, which has a MAC address of
    /// zeros.
    #[test]
    fn an_interface_is_configured_as_root() {
        let done = std::thread::spawn(|| {
            // SAFETY: unshare(2) takes no pointers; it concerns this thread, which ends here.
            if unsafe { libc::unshare(libc::CLONE_NEWNET) } != 0 {
                println!("SKIPPED: an_interface_is_configured_as_root: needs root");
                return;
            }
            let mut netlink = Netlink::open().unwrap();
            let mut wanted = Wanted { mac: [0; 6], ..Wanted::parse(&request()).unwrap() };
            // The interface has no neighbour in IPv6.
            wanted.gateways.pop();
            let link = with_mac(netlink.links().unwrap(), wanted.mac).unwrap();
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
        done.join().unwrap();
    }
}
