//! The network between the two programs of a load.

use std::fs::File;
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, bail};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use super::path_of;
use super::peer::Role;
use crate::packet::process::{find, in_namespace, run};

/// The server's and the client's address in a network with a bridge.
pub(super) const ADDRESSES: [Ipv4Addr; 2] =
    [Ipv4Addr::new(10, 203, 0, 1), Ipv4Addr::new(10, 203, 0, 2)];

/// The network namespaces of the two programs. They have no names and are held by descriptors only,
/// so they and their contents disappear with this process, in whatever way it ends. The host's
/// network is not changed.
pub struct Net {
    /// The server's and the client's namespace, in the order of [`ADDRESSES`], or `None` if both
    /// programs are in this process's namespace.
    sides: Option<[File; 2]>,
    /// The bridge's namespace, which disappears with its last descriptor and takes the veth pairs
    /// with it.
    _bridge: Option<File>,
    /// The server's address.
    address: IpAddr,
}

impl Net {
    /// Puts both programs into this process's namespace, on its loopback.
    pub fn here() -> Self {
        Self { sides: None, _bridge: None, address: Ipv4Addr::LOCALHOST.into() }
    }

    /// Puts each program into a namespace of its own, with a veth pair to a Linux bridge in a
    /// third.
    ///
    /// # Errors
    /// If this process is not root, or `ip` is not installed.
    pub fn bridged() -> Result<Self> {
        let [server, client, bridge] = [namespace()?, namespace()?, namespace()?];
        ip(&bridge, "link add br0 type bridge mcast_snooping 0")?;
        ip(&bridge, "link set br0 up")?;
        for (index, (side, address)) in [&server, &client].into_iter().zip(ADDRESSES).enumerate() {
            let path = path_of(side);
            let path = path.display();
            ip(&bridge, &format!("link add port{index} type veth peer name eth0 netns {path}"))?;
            ip(&bridge, &format!("link set port{index} master br0 up"))?;
            ip(side, &format!("address add {address}/24 dev eth0"))?;
            ip(side, "link set lo up")?;
            ip(side, "link set eth0 up")?;
        }
        Ok(Self {
            sides: Some([server, client]),
            _bridge: Some(bridge),
            address: ADDRESSES[0].into(),
        })
    }

    /// Makes a bridged network with IPsec between the two sides: ESP in transport mode,
    /// AES-128-GCM.
    ///
    /// # Errors
    /// If the kernel has no ESP; and those of [`Net::bridged`].
    pub fn with_ipsec() -> Result<Self> {
        let net = Self::bridged()?;
        for (side, own) in net.sides.iter().flatten().zip(ADDRESSES) {
            for (spi, [from, to]) in [(1, [0, 1]), (2, [1, 0])] {
                let (from, to) = (ADDRESSES[from], ADDRESSES[to]);
                let direction = if from == own { "out" } else { "in" };
                // A key and a salt for this run only.
                let key = format!("0x{:040x}", u128::from(std::process::id()) << 32 | spi);
                ip(
                    side,
                    &format!(
                        "xfrm state add src {from} dst {to} proto esp spi {spi} reqid {spi} mode \
                         transport aead rfc4106(gcm(aes)) {key} 128"
                    ),
                )?;
                ip(
                    side,
                    &format!(
                        "xfrm policy add src {from} dst {to} dir {direction} tmpl src {from} dst \
                         {to} proto esp reqid {spi} mode transport"
                    ),
                )?;
            }
        }
        Ok(net)
    }

    /// Returns the files of the server's and the client's namespace, which exist as long as this
    /// process lives. Returns `None` if both programs are in this process's namespace.
    pub fn sides(&self) -> Option<[PathBuf; 2]> {
        self.sides.as_ref().map(|sides| sides.each_ref().map(path_of))
    }

    /// Returns the address on which the server listens.
    pub fn address(&self) -> IpAddr {
        self.address
    }

    /// Makes `command` run in the namespace of the program with this role.
    ///
    /// # Errors
    /// No descriptors are left.
    pub fn enter(&self, role: Role, command: &mut Command) -> Result<()> {
        let Some([server, client]) = &self.sides else { return Ok(()) };
        enter(command, if role == Role::Server { server } else { client })
    }
}

/// Makes a network namespace, which exists as long as the file is open or something runs in it.
fn namespace() -> Result<File> {
    in_namespace(|| {
        File::open("/proc/thread-self/ns/net").context("cannot open a network namespace")
    })
}

/// Makes `command` run in `namespace`.
fn enter(command: &mut Command, namespace: &File) -> Result<()> {
    let namespace = namespace.try_clone()?;
    let enter =
        move || Ok(move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))?);
    #[allow(unsafe_code)] // the namespace of a child is set between fork and exec
    // SAFETY: one system call, which is allowed between fork and exec.
    unsafe {
        command.pre_exec(enter);
    }
    Ok(())
}

/// Runs `ip` in `namespace`. `arguments` are separated by spaces.
fn ip(namespace: &File, arguments: &str) -> Result<()> {
    let Some(program) = find(&["ip"]) else { bail!("`ip` is not installed") };
    let mut command = Command::new(program);
    command.args(arguments.split_whitespace());
    enter(&mut command, namespace)?;
    run(&mut command)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sides_reach_each_other_as_root() {
        if !rustix::process::geteuid().is_root() || find(&["ip"]).is_none() {
            eprintln!("SKIPPED: sides_reach_each_other_as_root: needs root and ip");
            return;
        }
        let net = match Net::bridged() {
            Ok(net) => net,
            // Root in a container may lack the right to make namespaces and bridges.
            Err(error) => {
                eprintln!("SKIPPED: sides_reach_each_other_as_root: {error:#}");
                return;
            }
        };
        let address = |role| {
            let mut command = Command::new(find(&["ip"]).unwrap());
            command.args(["-o", "address", "show", "eth0"]);
            net.enter(role, &mut command).unwrap();
            String::from_utf8(command.output().unwrap().stdout).unwrap()
        };
        assert!(address(Role::Server).contains("10.203.0.1/24"));
        assert!(address(Role::Client).contains("10.203.0.2/24"));
    }
}
