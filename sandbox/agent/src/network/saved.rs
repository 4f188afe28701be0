//! The network of a machine that was saved: its connections, addresses and neighbours.
//!
//! In a fork of the machine they are another sandbox's. The peers of the connections must not
//! notice, so the interface goes down before anything ends: no segment leaves it.

use anyhow::{Context, Result};
use slipway_netlink::{LinkChange, LinkInfo, Netlink, Sockets, Transport};

use crate::{log, machine};

/// The most rounds of listing and ending connections. Programs that are not stopped may open new
/// ones meanwhile.
const ROUNDS: usize = 16;

/// Sets the interface down, ends the connections of this network namespace, and takes the
/// interface's addresses and neighbours away. Waits for the kernel while it loads modules.
///
/// # Errors
/// The kernel refuses a change of the interface. Connections that it does not end are logged.
pub fn forget(link: &LinkInfo) -> Result<()> {
    let mut netlink = Netlink::open()?;
    let change = LinkChange { up: Some(false), ..LinkChange::default() };
    netlink.change(link.index, change).context("setting it down")?;
    machine::load_connections_modules();
    for transport in [Transport::Tcp, Transport::Udp] {
        if let Err(error) = end_connections(transport) {
            log!("{transport:?} connections of the saved machine stay: {error}");
        }
    }
    netlink.remove_addresses(link.index).context("removing its addresses")?;
    netlink.remove_neighbours(link.index).context("removing its neighbours")
}

/// Ends the connections whose own address is not the loopback interface's.
///
/// # Errors
/// The kernel cannot list connections, or the first connection that it did not end. All others were
/// ended.
fn end_connections(transport: Transport) -> std::io::Result<()> {
    let mut sockets = Sockets::open()?;
    for _ in 0..ROUNDS {
        let mut connected = sockets.connected(transport)?;
        connected.retain(|socket| !socket.local.ip().to_canonical().is_loopback());
        let outcomes: Vec<_> = connected.iter().map(|socket| sockets.destroy(socket)).collect();
        if outcomes.iter().all(Result::is_err) {
            return outcomes.into_iter().next().unwrap_or(Ok(()));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs::read_to_string;
    use std::io::{ErrorKind, Read, Write};
    use std::net::{IpAddr, Ipv6Addr, TcpListener, TcpStream, UdpSocket};
    use std::path::Path;
    use std::process::Command;
    use std::time::{Duration, Instant};

    use slipway_netlink::{Address, Neighbour};

    use super::super::tests::{in_namespace, request};
    use super::super::{InterfaceSettings, apply, interface};
    use super::*;

    /// Own address, the network's prefix, and a neighbour of the saved machine's interface.
    const SAVED: [(&str, u8, &str); 2] = [("10.9.8.7", 24, "10.9.8.1"), ("fd12::7", 64, "fd12::1")];

    /// Makes the interface of a machine that ran. Returns `None` without the program for it.
    fn saved_interface(netlink: &mut Netlink) -> Option<LinkInfo> {
        let made = Command::new("ip")
            .args(["link", "add", "v0", "type", "veth", "peer", "name", "v1"])
            .status();
        if !made.is_ok_and(|status| status.success()) {
            println!("SKIPPED: a_saved_network_is_forgotten_as_root: needs ip and veth");
            return None;
        }
        for name in ["lo", "v1", "v0"] {
            let link = netlink.link(name).unwrap().unwrap();
            netlink
                .change(link.index, LinkChange { up: Some(true), ..Default::default() })
                .unwrap();
        }
        let link = netlink.link("v0").unwrap().unwrap();
        let ip = |text: &str| -> IpAddr { text.parse().unwrap() };
        for (own, prefix, neighbour) in SAVED {
            let index = link.index;
            netlink.add_address(&Address { index, address: ip(own), prefix }).unwrap();
            let mac = [2, 0, 0, 0, 0, 9];
            netlink.add_neighbour(&Neighbour { index, address: ip(neighbour), mac }).unwrap();
        }
        wait_for_own_route("fd12::7");
        Some(link)
    }

    /// Waits until packets to an own IPv6 address are delivered here. The kernel's workqueue adds
    /// the route for it after netlink has answered; before, they would go out to the network.
    fn wait_for_own_route(address: &str) {
        let octets = address.parse::<Ipv6Addr>().unwrap().octets();
        let digits: String = octets.iter().map(|octet| format!("{octet:02x}")).collect();
        let own = format!("{digits} 80 ");
        let give_up = Instant::now() + Duration::from_secs(60);
        while !read_to_string("/proc/thread-self/net/ipv6_route").unwrap().contains(&own) {
            assert!(Instant::now() < give_up, "no route to {address}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Makes a connection to an address of this namespace. Returns both ends.
    fn connect(listener: &TcpListener, host: &str) -> [TcpStream; 2] {
        let port = listener.local_addr().unwrap().port();
        let client = TcpStream::connect((host, port)).unwrap();
        let ends = [client, listener.accept().unwrap().0];
        for end in &ends {
            end.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        }
        ends
    }

    /// Returns whether the kernel can list connections. Prints why a test is skipped if not.
    fn can_list() -> bool {
        match Sockets::open().and_then(|mut sockets| sockets.connected(Transport::Tcp)) {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                println!("SKIPPED: a_saved_network_is_forgotten_as_root: needs tcp_diag");
                false
            }
            listed => listed.map(|_| true).unwrap(),
        }
    }

    #[test]
    fn a_saved_network_is_forgotten_as_root() {
        in_namespace(|| {
            let mut netlink = Netlink::open().unwrap();
            let Some(link) = saved_interface(&mut netlink) else { return };
            if !can_list() {
                return;
            }
            // A listener of any address, also of IPv4, which makes IPv4-mapped addresses.
            let listener = TcpListener::bind("[::]:0").unwrap();
            let mut cut: Vec<_> =
                SAVED.iter().flat_map(|(own, ..)| connect(&listener, own)).collect();
            let kept = ["127.0.0.1", "::1"].map(|host| connect(&listener, host));
            let datagrams = SAVED.map(|(_, _, peer)| {
                let any = if peer.contains(':') { "[::]:0" } else { "0.0.0.0:0" };
                let socket = UdpSocket::bind(any).unwrap();
                socket.connect((peer, 9)).unwrap();
                socket.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
                socket
            });
            let unconnected = UdpSocket::bind("0.0.0.0:0").unwrap();

            let saved_mac = link.mac;
            let mut wanted =
                InterfaceSettings { saved_mac, ..InterfaceSettings::parse(&request()).unwrap() };
            // The interface has no neighbour in IPv6.
            wanted.gateways.pop();
            let found =
                interface(Path::new(machine::SYSFS), netlink.links().unwrap(), &wanted).unwrap();
            let addresses = netlink.addresses().unwrap();
            assert!(wanted.is_saved(&found, &addresses) && wanted.is_saved(&found, &[]));
            let down = LinkInfo { up: false, ..found.clone() };
            assert!(wanted.is_saved(&down, &addresses), "a container has set it down");
            assert!(!wanted.is_saved(&down, &[]), "it was never in use");
            for _ in 0..2 {
                forget(&found).unwrap();
                assert!(!netlink.link("v0").unwrap().unwrap().up);
            }
            apply(&found, &wanted).unwrap();

            for end in &mut cut {
                let error = end.read(&mut [0]).unwrap_err();
                let kinds = [ErrorKind::ConnectionAborted, ErrorKind::ConnectionReset];
                assert!(kinds.contains(&error.kind()), "{error}");
            }
            for socket in &datagrams {
                let error = socket.recv(&mut [0]).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::ConnectionAborted);
            }
            for [mut client, mut server] in kept {
                client.write_all(b"x").unwrap();
                server.read_exact(&mut [0]).unwrap();
            }
            connect(&listener, "127.0.0.1");
            let at = ("127.0.0.1", unconnected.local_addr().unwrap().port());
            UdpSocket::bind("127.0.0.1:0").unwrap().send_to(b"x", at).unwrap();
            assert_eq!(unconnected.recv(&mut [0; 2]).unwrap(), 1);

            let link = netlink.link("v0").unwrap().unwrap();
            assert!(link.up && link.mac == wanted.mac, "{link:?}");
            let mut addresses = netlink.addresses().unwrap();
            assert!(!wanted.is_saved(&link, &addresses), "a repetition cuts nothing");
            // The kernel makes the link-local one.
            addresses.retain(|one| one.index == link.index && !is_link_local(one.address));
            let mut there: Vec<_> = addresses.iter().map(|one| (one.address, one.prefix)).collect();
            there.sort_unstable();
            assert_eq!(there, wanted.addresses);
            assert_eq!(netlink.neighbours().unwrap(), []);
        });
    }

    fn is_link_local(address: IpAddr) -> bool {
        matches!(address, IpAddr::V6(address) if address.is_unicast_link_local())
    }
}
