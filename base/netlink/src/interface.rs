//! The settings of an interface that is made for a container.

use std::io;
use std::net::IpAddr;

use crate::{Address, Batch, LinkChange, LinkInfo, Netlink, Route};

/// The settings of an interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InterfaceSettings {
    /// Name of the interface.
    pub name: String,
    /// MAC address, by which the interface is known.
    pub mac: [u8; 6],
    /// Largest packet in bytes, without the Ethernet header.
    pub mtu: u32,
    /// Addresses, each with the length of its network's prefix in bits.
    pub addresses: Vec<(IpAddr, u8)>,
    /// Routes: destination with the length of its prefix in bits, and next hop as in
    /// [`Route::gateway`].
    pub routes: Vec<((IpAddr, u8), Option<IpAddr>)>,
}

impl InterfaceSettings {
    /// Sets the interface up with its addresses and routes, in the network namespace of the calling
    /// thread. An interface that is up already, with its MAC address, stays as it is. Where the
    /// namespace has IPv6 switched off, the interface gets IPv4 alone. Returns whether it has IPv6.
    ///
    /// # Errors
    /// The first setting that fails, named in the text. The others may have been made.
    pub fn apply(&self) -> io::Result<bool> {
        let mut netlink = Netlink::open()
            .map_err(|error| failed("cannot reach the kernel's interfaces".into(), error))?;
        let link = netlink.find(&self.name)?;
        if link.up && link.mac == Some(self.mac) {
            return Ok(true);
        }
        no_autoconfiguration(&self.name);
        let outcomes = netlink.send_batch(self.requests(link.index));
        self.judge(outcomes.map_err(|error| self.not_up(error))?)
    }

    /// Lays out the requests: the link's change, the addresses, the routes.
    fn requests(&self, index: u32) -> Batch {
        let mut batch = Batch::default();
        batch.change(index, LinkChange { up: Some(true), mtu: Some(self.mtu), mac: None });
        for &(address, prefix) in &self.addresses {
            batch.add_address(&Address { index, address, prefix });
        }
        for &(destination, gateway) in &self.routes {
            batch.add_route(&Route::new(destination, gateway, index));
        }
        batch
    }

    /// Returns whether the interface has IPv6, by the outcomes of its requests.
    fn judge(&self, outcomes: Vec<io::Result<()>>) -> io::Result<bool> {
        let name = &self.name;
        let mut outcomes = outcomes.into_iter();
        outcomes.next().transpose().map_err(|error| self.not_up(error))?;
        let mut has_ipv6 = true;
        for ((address, prefix), added) in self.addresses.iter().zip(outcomes.by_ref()) {
            match added {
                // The namespace has IPv6 switched off.
                Err(_) if address.is_ipv6() => has_ipv6 = false,
                added => added.map_err(|error| {
                    let net = format!("{address}/{prefix}");
                    failed(format!("cannot give the address {net} to {name}"), error)
                })?,
            }
        }
        for (((to, prefix), _), added) in self.routes.iter().zip(outcomes) {
            if to.is_ipv4() || has_ipv6 {
                added.map_err(|error| {
                    failed(format!("cannot add the route to {to}/{prefix} by {name}"), error)
                })?;
            }
        }
        Ok(has_ipv6)
    }

    fn not_up(&self, error: io::Error) -> io::Error {
        failed(format!("cannot set up {}", self.name), error)
    }
}

impl Netlink {
    /// Returns the link with the name `name`.
    ///
    /// # Errors
    /// The kernel's errors, and [`io::ErrorKind::NotFound`] if there is no such link: a text with
    /// the link's name.
    pub fn find(&mut self, name: &str) -> io::Result<LinkInfo> {
        let link = self.link(name).map_err(|error| failed(format!("cannot find {name}"), error))?;
        let gone = || format!("the interface {name} is not there any more");
        link.ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, gone()))
    }
}

/// Switches duplicate address detection and router advertisements off for the interface `name` of
/// the calling thread's network namespace, which is not up yet. For interfaces whose addresses are
/// given once each. An interface without IPv6 is no error.
pub fn no_autoconfiguration(name: &str) {
    for setting in ["accept_dad", "accept_ra"] {
        // Missing if IPv6 is switched off.
        let _ = std::fs::write(format!("/proc/sys/net/ipv6/conf/{name}/{setting}"), "0");
    }
}

/// Returns an error whose text begins with what failed.
fn failed(what: String, error: io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{what}: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings() -> InterfaceSettings {
        let ip = |text: &str| -> IpAddr { text.parse().unwrap() };
        InterfaceSettings {
            name: "eth0".into(),
            mac: [2, 0, 0, 0, 0, 1],
            mtu: 1500,
            addresses: vec![(ip("10.1.0.2"), 24), (ip("fd00:1::2"), 64)],
            routes: vec![
                ((ip("0.0.0.0"), 0), Some(ip("10.1.0.1"))),
                ((ip("::"), 0), Some(ip("fd00:1::1"))),
            ],
        }
    }

    /// Returns the judgement of outcomes, of which those with these numbers are failures.
    fn judge(failures: &[usize]) -> Result<bool, String> {
        let outcome = |number: usize| -> io::Result<()> {
            match failures.contains(&number) {
                true => Err(io::ErrorKind::PermissionDenied.into()),
                false => Ok(()),
            }
        };
        settings().judge((0..5).map(outcome).collect()).map_err(|error| error.to_string())
    }

    #[test]
    fn the_first_failure_is_named_and_ipv6_may_be_missing() {
        assert_eq!(judge(&[]), Ok(true));
        assert_eq!(judge(&[2, 4]), Ok(false));
        for (failures, text) in [
            (&[0, 1, 2, 3, 4][..], "cannot set up eth0: "),
            (&[1, 3], "cannot give the address 10.1.0.2/24 to eth0: "),
            (&[2, 3], "cannot add the route to 0.0.0.0/0 by eth0: "),
            (&[4], "cannot add the route to ::/0 by eth0: "),
        ] {
            let error = judge(failures).unwrap_err();
            assert!(error.starts_with(text) && !error.contains('\n'), "{error}");
        }
    }
}
