//! Interfaces of the kernel's for sandboxes, each in a network namespace of its own.
//!
//! All of them lead into one more namespace: what the host's filters do to bridges is not measured,
//! and nothing is left when this process ends in whatever way. Namespaces are made once. Interfaces
//! are made anew for each start, as a CNI plugin does.

use anyhow::{Context, Result, anyhow};
use slipway_bench::arms::Arm;

use super::cni::{BridgePlugin, Operation};
use crate::bench::vm::Namespace;

/// The commands that make the hub: a bridge for veth pairs, and a link for interfaces that are
/// stacked upon one.
const HUB: &str = "link add bridge type bridge mcast_snooping 0
link set bridge up
addr add 198.18.0.1/15 dev bridge
link add lower type veth peer name far
link set far up
link set lower up
";

/// The namespaces of sandboxes, by their numbers.
pub struct Wires {
    hub: Namespace,
    sandboxes: Vec<Namespace>,
    /// The plugin of the way that has its interfaces of one.
    plugin: Option<BridgePlugin>,
}

impl Wires {
    /// Makes namespaces for `count` sandboxes.
    ///
    /// # Errors
    /// No root, no iproute2, or no veth pairs and bridges.
    pub fn make(count: u32, plugin: Option<BridgePlugin>) -> Result<Self> {
        let hub = Namespace::make()?;
        hub.ip_batch(HUB)?;
        let sandboxes = (0..count).map(|_| Namespace::make()).collect::<Result<Vec<_>>>()?;
        Ok(Self { hub, sandboxes, plugin })
    }

    /// Returns the path of a sandbox's namespace.
    pub fn path(&self, number: u32) -> Result<String> {
        Ok(self.of(number)?.path().to_owned())
    }

    /// Makes the interface of a sandbox. Blocks until it is up.
    ///
    /// # Errors
    /// The kernel has none of this kind, or the sandbox has one already.
    pub fn add(&self, arm: Arm, number: u32) -> Result<()> {
        let sandbox = self.of(number)?;
        if arm == Arm::RuncCni {
            return self.call(Operation::Add, number);
        }
        self.hub.ip_batch(&made(arm, number, sandbox.path()))?;
        sandbox.ip_batch(&configured(number))
    }

    /// Removes the interface of a sandbox, which has been removed.
    ///
    /// # Errors
    /// There is none.
    pub fn remove(&self, arm: Arm, number: u32) -> Result<()> {
        if arm == Arm::RuncCni {
            return self.call(Operation::Del, number);
        }
        self.of(number)?.ip_batch("link delete eth0\n")
    }

    /// Has the plugin make or remove the interface of a sandbox.
    fn call(&self, operation: Operation, number: u32) -> Result<()> {
        let plugin = self.plugin.as_ref().context("no CNI plugin was found")?;
        plugin.call(&self.hub, operation, number, self.of(number)?.path())
    }

    fn of(&self, number: u32) -> Result<&Namespace> {
        let found = self.sandboxes.get(number as usize);
        found.ok_or_else(|| anyhow!("no network namespace was made for sandbox {number}"))
    }
}

/// Returns the commands that make an interface between the hub and the namespace at `path`.
fn made(arm: Arm, number: u32, path: &str) -> String {
    match arm {
        Arm::Veth | Arm::Runc => format!(
            "link add h{number} type veth peer name eth0 netns {path}\n\
             link set h{number} master bridge up\n"
        ),
        stacked => {
            format!("link add link lower name eth0 netns {path} type {stacked} mode bridge\n")
        }
    }
}

/// Returns the commands that give the interface an address and a route, and set it up.
fn configured(number: u32) -> String {
    let (third, fourth) = (number / 250, number % 250 + 2);
    format!(
        "link set lo up\naddr add 198.18.{third}.{fourth}/15 dev eth0\nlink set eth0 up\n\
         route add default via 198.18.0.1\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_sandbox_has_an_interface_and_an_address_of_its_own() {
        let veth = made(Arm::Veth, 7, "/proc/1/task/2/ns/net");
        assert!(veth.starts_with("link add h7 type veth peer name eth0 netns /proc/1/"), "{veth}");
        assert!(veth.ends_with("link set h7 master bridge up\n"), "{veth}");
        let macvtap = made(Arm::Macvtap, 7, "/a");
        assert_eq!(macvtap, "link add link lower name eth0 netns /a type macvtap mode bridge\n");
        assert!(configured(0).contains("198.18.0.2/15"));
        assert!(configured(4095).contains("198.18.16.97/15"));
    }
}
