//! Network namespaces of a test's own.
#![allow(dead_code)] // not every test needs all of it

use std::net::IpAddr;
use std::os::unix::process::CommandExt;
use std::process::Command;

use slipway_netlink::{Address, LinkChange, Netlink};

/// Returns a command that runs one test of this program again, in a network namespace of its own.
pub fn again(test: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture", "--test-threads=1"]);
    // SAFETY: unshare(2) may be called between fork and exec.
    unsafe {
        command.pre_exec(|| match libc::unshare(libc::CLONE_NEWNET) {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        });
    }
    command
}

/// Runs `inside`, the body of the test of this name, in a namespace with these addresses beside
/// loopback's. Without root, prints that the test is skipped.
pub fn alone(test: &str, addresses: &[[u8; 4]], inside: impl FnOnce()) {
    const ROLE: &str = "SLIPWAY_TEST_ROLE";
    if std::env::var(ROLE).is_ok() {
        addresses.iter().for_each(|ip| add_address((*ip).into()));
        return inside();
    }
    if !rustix::process::geteuid().is_root() {
        return println!("SKIPPED: {test}: needs root");
    }
    assert!(again(test).env(ROLE, "inside").status().unwrap().success());
}

/// Adds an address to this network namespace, and sets its loopback interface up.
pub fn add_address(address: IpAddr) {
    let mut netlink = Netlink::open().unwrap();
    let lo = netlink.link("lo").unwrap().unwrap();
    netlink.change(lo.index, LinkChange { up: Some(true), ..Default::default() }).unwrap();
    netlink.add_address(&Address { index: lo.index, address, prefix: 24 }).unwrap();
}

/// Adds so many addresses, from 10.80.0.0 on, to the loopback interface of this network namespace.
pub fn add_many(count: u32) {
    let mut netlink = Netlink::open().unwrap();
    let index = netlink.link("lo").unwrap().unwrap().index;
    for number in 0..count {
        let address = std::net::Ipv4Addr::from(0x0a50_0000 + number).into();
        netlink.add_address(&Address { index, address, prefix: 32 }).unwrap();
    }
}
