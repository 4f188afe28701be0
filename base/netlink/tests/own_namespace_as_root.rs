//! Against the kernel, in a network namespace of the test's own.
#![allow(clippy::unwrap_used, unsafe_code)]

use std::net::IpAddr;

use slipway_netlink::{Address, LinkChange, Netlink, Route};

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
        netlink.change(lo.index, LinkChange { up: Some(true), ..Default::default() }).unwrap();
        netlink.change(lo.index, LinkChange { mtu: Some(9000), ..Default::default() }).unwrap();
        let lo = netlink.link("lo").unwrap().unwrap();
        assert!(lo.up);
        assert_eq!(lo.mtu, 9000);

        let four: IpAddr = "10.9.8.7".parse().unwrap();
        let six: IpAddr = "fd12::7".parse().unwrap();
        for (address, prefix) in [(four, 24), (six, 64)] {
            let address = Address { index: lo.index, address, prefix };
            netlink.add_address(&address).unwrap();
            netlink.add_address(&address).unwrap();
            let there = netlink.addresses().unwrap();
            assert_eq!(there.iter().filter(|one| **one == address).count(), 1, "{there:?}");
        }
        let route = Route {
            destination: ("0.0.0.0".parse().unwrap(), 0),
            gateway: Some("10.9.8.1".parse().unwrap()),
            index: lo.index,
        };
        netlink.add_route(&route).unwrap();
        netlink.add_route(&route).unwrap();
        let link = Route {
            destination: ("10.77.0.0".parse().unwrap(), 16),
            gateway: None,
            index: lo.index,
        };
        netlink.add_route(&link).unwrap();
        let routes = netlink.routes().unwrap();
        assert_eq!(routes.iter().filter(|one| **one == route).count(), 1, "{routes:?}");
        assert!(routes.contains(&link), "{routes:?}");

        netlink.remove_address(&Address { index: lo.index, address: four, prefix: 24 }).unwrap();
        let there = netlink.addresses().unwrap();
        assert!(there.iter().all(|one| one.address != four), "{there:?}");
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
