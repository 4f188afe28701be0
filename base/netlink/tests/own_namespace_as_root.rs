//! Against the kernel, in a network namespace of the test's own.
#![allow(clippy::unwrap_used, unsafe_code)]

use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, TcpListener, TcpStream, UdpSocket};
use std::time::Duration;

use slipway_netlink::{
    Address, Batch, InterfaceSettings, LinkChange, Neighbour, Netlink, Route, Sockets, Transport,
};

/// Runs `body` in a namespace that has a loopback link only; false where that is not allowed.
fn in_namespace(body: impl FnOnce() + Send + 'static) -> bool {
    std::thread::spawn(|| {
        // SAFETY: unshare(2) takes no pointers; it concerns this thread, which ends after `body`.
        if unsafe { libc::unshare(libc::CLONE_NEWNET) } != 0 {
            println!("SKIPPED: own_namespace_as_root: needs root");
            return false;
        }
        body();
        true
    })
    .join()
    .unwrap()
}

#[test]
fn links_addresses_and_routes_as_root() {
    in_namespace(|| {
        let mut netlink = Netlink::open().unwrap();
        let lo = netlink.link("lo").unwrap().unwrap();
        assert!(!lo.up);
        for name in ["eth0", "", "l\0o", "a-name-of-17-bytes"] {
            assert_eq!(netlink.link(name).unwrap(), None);
        }
        netlink.change(lo.index, LinkChange { up: Some(true), ..Default::default() }).unwrap();
        netlink.change(lo.index, LinkChange { mtu: Some(9000), ..Default::default() }).unwrap();
        let lo = netlink.link("lo").unwrap().unwrap();
        assert!(lo.up);
        assert_eq!((lo.mtu, lo.kind.as_str()), (9000, ""));

        let four: IpAddr = "10.9.8.7".parse().unwrap();
        let six: IpAddr = "fd12::7".parse().unwrap();
        for (address, prefix) in [(four, 24), (six, 64)] {
            let address = Address { index: lo.index, address, prefix };
            netlink.add_address(&address).unwrap();
            netlink.add_address(&address).unwrap();
            let there = netlink.addresses().unwrap();
            assert_eq!(there.iter().filter(|one| **one == address).count(), 1, "{there:?}");
        }
        let count = netlink.addresses().unwrap().len();
        assert_eq!(netlink.addresses_within(count).unwrap().map(|all| all.len()), Some(count));
        let mut other = Netlink::open().unwrap();
        assert_eq!(other.addresses_within(count - 1).unwrap(), None);
        let ip = |text: &str| -> IpAddr { text.parse().unwrap() };
        let route = Route::new((ip("0.0.0.0"), 0), Some(ip("10.9.8.1")), lo.index);
        netlink.add_route(&route).unwrap();
        netlink.add_route(&route).unwrap();
        let link = Route::new((ip("10.77.0.0"), 16), None, lo.index);
        netlink.add_route(&link).unwrap();
        let routes = netlink.routes().unwrap();
        assert_eq!(routes.iter().filter(|one| **one == route).count(), 1, "{routes:?}");
        assert!(routes.contains(&link), "{routes:?}");

        netlink.remove_addresses(lo.index).unwrap();
        let there = netlink.addresses().unwrap();
        assert!(there.iter().all(|one| one.address != four), "{there:?}");
    });
}

/// Makes an Ethernet interface and returns its number, or `None` without the program for it.
fn station(netlink: &mut Netlink) -> Option<u32> {
    let made = std::process::Command::new("ip")
        .args(["link", "add", "v0", "type", "veth", "peer", "name", "v1"])
        .status();
    if !made.is_ok_and(|status| status.success()) {
        println!("SKIPPED: own_namespace_as_root: needs ip and veth");
        return None;
    }
    for name in ["v1", "v0"] {
        let link = netlink.link(name).unwrap().unwrap();
        netlink.change(link.index, LinkChange { up: Some(true), ..Default::default() }).unwrap();
    }
    let link = netlink.link("v0").unwrap().unwrap();
    assert_eq!(link.kind, "veth");
    Some(link.index)
}

/// Adds what CNI plugins make: an address without its network, routes to a gateway that no other
/// route leads to, a source, metrics.
#[test]
fn routes_and_neighbours_of_any_kind_as_root() {
    in_namespace(|| {
        let mut netlink = Netlink::open().unwrap();
        let Some(index) = station(&mut netlink) else { return };
        let ip = |text: &str| -> IpAddr { text.parse().unwrap() };
        for (text, prefix) in [("10.9.8.7", 24), ("fd12::7", 64)] {
            netlink.add_address_only(&Address { index, address: ip(text), prefix }).unwrap();
        }
        // Link-local routes of IPv6 are the kernel's.
        let routes = |netlink: &mut Netlink| {
            let mut routes = netlink.routes().unwrap();
            routes.retain(|route| route.destination.0 != ip("fe80::"));
            routes
        };
        assert_eq!(routes(&mut netlink), []);
        let gateway = Some(ip("169.254.1.1"));
        let wanted = [
            Route::new((ip("169.254.1.1"), 32), None, index),
            Route::new((ip("0.0.0.0"), 0), gateway, index),
            Route { metric: 7, ..Route::new((ip("0.0.0.0"), 0), gateway, index) },
            Route {
                on_link: true,
                source: Some(ip("10.9.8.7")),
                ..Route::new((ip("10.1.0.0"), 16), Some(ip("172.16.0.1")), index)
            },
            Route::new((ip("10.2.0.0"), 16), Some(ip("fe80::1")), index),
            Route { metric: 256, ..Route::new((ip("fd12::"), 64), None, index) },
            Route { metric: 1024, ..Route::new((ip("fd13::"), 64), Some(ip("fd12::1")), index) },
        ];
        for _ in 0..2 {
            wanted.iter().for_each(|route| netlink.add_route(route).unwrap());
        }
        let routes = routes(&mut netlink);
        for route in &wanted {
            assert!(routes.contains(route), "{route:?} of {routes:?}");
        }
        assert_eq!(routes.len(), wanted.len(), "{routes:?}");
    });
}

#[test]
fn permanent_neighbours_as_root() {
    in_namespace(|| {
        let mut netlink = Netlink::open().unwrap();
        let Some(index) = station(&mut netlink) else { return };
        for (text, last) in [("169.254.1.1", 1), ("fd12::1", 2), ("169.254.1.1", 3)] {
            let address: IpAddr = text.parse().unwrap();
            let mac = [0xee, 0, 0, 0, 0, last];
            let neighbour = Neighbour { index, address, mac };
            netlink.add_neighbour(&neighbour).unwrap();
            assert!(netlink.neighbours().unwrap().contains(&neighbour));
        }
        assert_eq!(netlink.neighbours().unwrap().len(), 2);
        let lo = netlink.link("lo").unwrap().unwrap();
        netlink.remove_neighbours(lo.index).unwrap();
        assert_eq!(netlink.neighbours().unwrap().len(), 2, "those of another link");
        for _ in 0..2 {
            netlink.remove_neighbours(index).unwrap();
            assert_eq!(netlink.neighbours().unwrap(), []);
        }
    });
}

#[test]
fn all_addresses_of_a_link_go_and_no_others_as_root() {
    in_namespace(|| {
        let mut netlink = Netlink::open().unwrap();
        let Some(index) = station(&mut netlink) else { return };
        let other = netlink.link("v1").unwrap().unwrap().index;
        let texts = [("10.9.8.7", 24), ("10.9.8.8", 24), ("10.9.9.7", 32), ("fd12::7", 64)];
        for (text, prefix) in texts {
            let address = Address { index, address: text.parse().unwrap(), prefix };
            netlink.add_address(&address).unwrap();
        }
        let theirs = Address { index: other, address: "10.1.1.1".parse().unwrap(), prefix: 24 };
        netlink.add_address(&theirs).unwrap();
        for _ in 0..2 {
            netlink.remove_addresses(index).unwrap();
            let mut there = netlink.addresses().unwrap();
            assert!(there.contains(&theirs), "{there:?}");
            there.retain(|one| one.index == index);
            assert_eq!(there, []);
        }
    });
}

/// A connection of the loopback link, and its listener.
fn connection(host: &str) -> (TcpListener, TcpStream, TcpStream) {
    let listener = TcpListener::bind((host, 0)).unwrap();
    let address = listener.local_addr().unwrap();
    let client = loop {
        match TcpStream::connect(address) {
            // The kernel adds the route to a new IPv6 address in a task of its own.
            Err(error) if error.kind() == ErrorKind::NetworkUnreachable => std::thread::yield_now(),
            connected => break connected.unwrap(),
        }
    };
    let server = listener.accept().unwrap().0;
    for stream in [&client, &server] {
        stream.set_read_timeout(Some(Duration::from_secs(100))).unwrap();
    }
    (listener, client, server)
}

#[test]
fn connections_are_listed_and_ended_one_by_one_as_root() {
    in_namespace(|| {
        let mut netlink = Netlink::open().unwrap();
        let index = netlink.link("lo").unwrap().unwrap().index;
        netlink.change(index, LinkChange { up: Some(true), ..Default::default() }).unwrap();
        for (text, prefix) in [("10.9.8.7", 32), ("fd12::7", 128)] {
            let address = Address { index, address: text.parse().unwrap(), prefix };
            netlink.add_address(&address).unwrap();
        }
        let mut sockets = Sockets::open().unwrap();
        match sockets.connected(Transport::Tcp) {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                println!("SKIPPED: connections_are_listed_and_ended_as_root: needs tcp_diag");
                return;
            }
            listed => assert_eq!(listed.unwrap(), [], "nothing is connected"),
        }
        for host in ["10.9.8.7", "fd12::7"] {
            let (listener, mut client, _server) = connection(host);
            let (_, mut other, mut others_server) = connection(host);
            let mut listed = sockets.connected(Transport::Tcp).unwrap();
            listed.retain(|one| one.local.ip() == host.parse::<IpAddr>().unwrap());
            assert_eq!(listed.len(), 4, "without listeners: {listed:?}");
            let own = (client.local_addr().unwrap(), client.peer_addr().unwrap());
            let found = listed.iter().find(|one| (one.local, one.remote) == own).unwrap();
            sockets.destroy(found).unwrap();
            let error = client.read(&mut [0]).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::ConnectionAborted);
            sockets.destroy(found).unwrap();
            other.write_all(b"x").unwrap();
            others_server.read_exact(&mut [0]).unwrap();
            TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        }
        for host in ["10.9.8.7", "fd12::7"] {
            let socket = UdpSocket::bind((host, 0)).unwrap();
            socket.set_read_timeout(Some(Duration::from_secs(100))).unwrap();
            assert_eq!(sockets.connected(Transport::Udp).unwrap(), [], "it has no peer");
            socket.connect((host, 9)).unwrap();
            let listed = sockets.connected(Transport::Udp).unwrap();
            assert_eq!(listed.len(), 1, "{listed:?}");
            assert_eq!(listed[0].local, socket.local_addr().unwrap());
            sockets.destroy(&listed[0]).unwrap();
            let error = socket.recv(&mut [0]).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::ConnectionAborted);
        }
    });
}

/// Asks for more than one message of requests.
#[test]
fn each_request_of_a_batch_has_an_outcome_as_root() {
    in_namespace(|| {
        let mut netlink = Netlink::open().unwrap();
        let index = netlink.link("lo").unwrap().unwrap().index;
        assert!(netlink.send_batch(Batch::default()).unwrap().is_empty());
        let mut batch = Batch::default();
        batch.change(index, LinkChange { up: Some(true), mtu: Some(9000), mac: None });
        // Every third address has an interface that does not exist.
        let is_bad = |number: u8| number.is_multiple_of(3);
        let address = |number: u8| Address {
            index: if is_bad(number) { 77 } else { index },
            address: [10, 9, 8, number].into(),
            prefix: 32,
        };
        (1..=200).for_each(|number| batch.add_address(&address(number)));
        let ip = |text: &str| -> IpAddr { text.parse().unwrap() };
        let route = Route::new((ip("10.77.0.0"), 16), None, index);
        batch.add_route(&route);
        batch.add_route(&Route::new((ip("10.78.0.0"), 16), Some(ip("192.0.2.1")), index));
        let outcomes = netlink.send_batch(batch).unwrap();
        let errnos: Vec<i32> = outcomes
            .into_iter()
            .map(|one| one.map_or_else(|error| error.raw_os_error().unwrap(), |()| 0))
            .collect();
        let addresses = (1..=200).map(|number| if is_bad(number) { libc::ENODEV } else { 0 });
        let wanted: Vec<i32> =
            [0].into_iter().chain(addresses).chain([0, libc::ENETUNREACH]).collect();
        assert_eq!(errnos, wanted);
        // The socket is still in step.
        let link = netlink.link("lo").unwrap().unwrap();
        assert_eq!((link.up, link.mtu), (true, 9000));
        let there = netlink.addresses().unwrap();
        for number in (1..=200).filter(|number| !is_bad(*number)) {
            assert!(there.contains(&address(number)), "{number}");
        }
        assert!(netlink.routes().unwrap().contains(&route));
    });
}

#[test]
fn an_interface_has_all_its_settings_or_names_one_that_fails_as_root() {
    in_namespace(|| {
        let mut netlink = Netlink::open().unwrap();
        let Some(index) = station(&mut netlink) else { return };
        let down = LinkChange { up: Some(false), ..Default::default() };
        netlink.change(index, down).unwrap();
        let ip = |text: &str| -> IpAddr { text.parse().unwrap() };
        let mut wanted = InterfaceSettings {
            name: "v0".into(),
            mac: netlink.link("v0").unwrap().unwrap().mac.unwrap(),
            mtu: 1400,
            addresses: vec![(ip("10.9.8.7"), 24), (ip("fd12::7"), 64)],
            routes: vec![
                ((ip("0.0.0.0"), 0), Some(ip("10.9.8.1"))),
                ((ip("::"), 0), Some(ip("fd12::1"))),
                ((ip("10.77.0.0"), 16), None),
            ],
        };
        assert!(wanted.apply().unwrap());
        let link = netlink.link("v0").unwrap().unwrap();
        assert_eq!((link.up, link.mtu), (true, 1400));
        let there = netlink.addresses().unwrap();
        for (address, prefix) in wanted.addresses.clone() {
            assert!(there.contains(&Address { index, address, prefix }), "{there:?}");
        }
        let routes = netlink.routes().unwrap();
        for (to, gateway) in wanted.routes.clone() {
            let is =
                |one: &Route| (one.destination, one.gateway, one.index) == (to, gateway, index);
            assert!(routes.iter().any(is), "{to:?} of {routes:?}");
        }
        // An interface that is up stays as it is; one that is down is set up again.
        wanted.mtu = 1300;
        assert!(wanted.apply().unwrap());
        assert_eq!(netlink.link("v0").unwrap().unwrap().mtu, 1400);
        netlink.change(index, down).unwrap();
        wanted.routes.push(((ip("10.78.0.0"), 16), Some(ip("192.0.2.1"))));
        let error = wanted.apply().unwrap_err().to_string();
        assert!(error.starts_with("cannot add the route to 10.78.0.0/16 by v0: "), "{error}");
        wanted.name = "none".into();
        let error = wanted.apply().unwrap_err().to_string();
        assert_eq!(error, "the interface none is not there any more");
    });
}

#[test]
fn an_interface_without_ipv6_has_ipv4_as_root() {
    in_namespace(|| {
        let mut netlink = Netlink::open().unwrap();
        let off = "/proc/sys/net/ipv6/conf/default/disable_ipv6";
        if std::fs::write(off, "1").is_err() {
            println!("SKIPPED: an_interface_without_ipv6_has_ipv4_as_root: needs IPv6");
            return;
        }
        let Some(index) = station(&mut netlink) else { return };
        let ip = |text: &str| -> IpAddr { text.parse().unwrap() };
        let down = LinkChange { up: Some(false), ..Default::default() };
        netlink.change(index, down).unwrap();
        let wanted = InterfaceSettings {
            name: "v0".into(),
            mac: netlink.link("v0").unwrap().unwrap().mac.unwrap(),
            mtu: 1500,
            addresses: vec![(ip("10.9.8.7"), 24), (ip("fd12::7"), 64)],
            routes: vec![((ip("::"), 0), Some(ip("fd12::1")))],
        };
        assert!(!wanted.apply().unwrap());
        let mut there = netlink.addresses().unwrap();
        there.retain(|one| one.index == index);
        assert_eq!(there, [Address { index, address: ip("10.9.8.7"), prefix: 24 }]);
    });
}

#[test]
fn the_kernel_s_refusals_come_back_as_root() {
    in_namespace(|| {
        let mut netlink = Netlink::open().unwrap();
        let error = netlink.remove(77).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENODEV));
        let nowhere = Address { index: 77, address: "10.0.0.1".parse().unwrap(), prefix: 8 };
        assert!(netlink.add_address(&nowhere).is_err());
        assert!(netlink.link("slip0").unwrap().is_none());
        // The socket is still in step.
        assert_eq!(netlink.links().unwrap().iter().filter(|link| link.name == "lo").count(), 1);
    });
}
