//! The ledger: networks and their leases, kept on disk.
//!
//! Each network has two files, written aside and renamed: a crash of the daemon leaves the old file
//! or the new one. The file that describes the network is flushed to the disk as well. The file of
//! leases is not: that would cost each start milliseconds, and no sandbox outlives a crash of the
//! machine. A lease is written before it is used, with those of all sandboxes that wait for a write
//! (`saves`), and names its sandbox; the next daemon is told which exist, and frees the others.
//! Each interface that a sandbox has in a namespace of others is in a file of its own, written
//! likewise. So is each attachment of a container (`attachment/store.rs`).
//!
//! A new property of networks is a field of [`Network`], with `#[serde(default)]` since files of
//! earlier builds lack it, and one of `CreateNetworkRequest` and `Network` in `network.proto`.
//! `Networks::make` checks it, and `describe` shows it (`networks`). Its part of the packet filter
//! is in `rules`; of the name server in `dns/zone.rs` (the network's own names) or `dns/server.rs`
//! and `upstream.rs` (all others), by `serve_names`; of the switch in `CreateSwitchRequest`
//! (`plane.proto`) from `bring_up`, which `Fabric::create_switch` reads. In `front/cli` it is in
//! `args/network.rs` and `network.rs` (request, `as_json`). `docs/networks.md` describes it. Tests
//! are `tests/networks_as_root.rs`, `tests/e2e/45-network.sh`.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::{Path, PathBuf};

use ipnet::{Ipv4Net, Ipv6Net};
use serde::{Deserialize, Serialize};

use crate::publish::Published;
use crate::{Error, Mac, Result};

/// Version of the files. A file of another version belongs to another build, and is left alone.
const VERSION: u32 = 1;
/// The directory of the interfaces in namespaces of others.
const UPLINKS: &str = "uplinks";

/// A network.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Network {
    /// Version of the file's layout.
    pub version: u32,
    /// The name, unique on the node.
    pub name: String,
    /// The host's end of the network: the name of a TAP interface.
    pub device: String,
    /// The network's IPv4 addresses.
    pub subnet: Ipv4Net,
    /// The host's IPv4 address in the network.
    pub gateway: Ipv4Addr,
    /// The network's IPv6 addresses.
    pub prefix: Ipv6Net,
    /// Largest packet in bytes, without the Ethernet header.
    pub mtu: u32,
    /// Nothing leads out of the network or into it, except that the host itself may send into it.
    pub internal: bool,
    /// CLOCK_REALTIME of the creation, ns since the epoch.
    pub created_ns: u64,
    /// Memory ports, by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub ports: BTreeMap<String, HostPort>,
    /// Leases by the sandbox's id; in a file of their own.
    #[serde(skip)]
    pub leases: BTreeMap<String, Lease>,
    /// The largest [`Lease::sequence`] of an attachment since this process began.
    #[serde(skip)]
    pub last_sequence: u64,
    /// The number of changes of sandboxes' leases since this process began.
    #[serde(skip)]
    pub changes: u64,
    /// The number of those changes that the file of leases has.
    #[serde(skip)]
    pub saved: u64,
}

/// A memory port, for a program of the host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostPort {
    /// The only address that the port may send from; `None` for any.
    pub mac: Option<Mac>,
    /// Slots of each ring; 0 for the plane's default.
    pub slots: u32,
    /// Bytes of a slot.
    pub payload: u32,
    /// User and group that may connect; `None` for root.
    pub owner: Option<(u32, u32)>,
}

/// A sandbox's addresses and ports in a network.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lease {
    /// The sandbox's name.
    pub name: String,
    /// The MAC address of the sandbox's interface.
    pub mac: Mac,
    /// The sandbox's IPv4 address.
    pub ipv4: Ipv4Addr,
    /// The sandbox's IPv6 address.
    pub ipv6: Ipv6Addr,
    /// Ports of the host that lead to the sandbox.
    #[serde(default)]
    pub published: Vec<Published>,
    /// The lease belongs to a container's attachment, whose file has it.
    #[serde(skip)]
    pub attached: bool,
    /// The place of an attachment in the order in which those of its network were made, from 1; 0
    /// for a sandbox. Of several with one name, the first has the name.
    #[serde(default)]
    pub sequence: u64,
}

/// A sandbox's interface in a network namespace of others.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Uplink {
    /// The sandbox's name.
    pub sandbox: String,
    /// The path of the namespace.
    pub namespace: PathBuf,
    /// The device number of the namespace's file.
    pub device: u64,
    /// The inode number of the namespace's file.
    pub inode: u64,
    /// The interface's name.
    pub interface: String,
    /// The interface's number in the namespace.
    pub index: u32,
    /// The interface's MAC address.
    pub mac: Mac,
    /// The network whose switch the sandbox has a port of in place of the interface, which carries
    /// settings only; `None` if the interface is the port.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<String>,
    /// The place among the sandbox's interfaces, from 0.
    #[serde(default)]
    pub number: u32,
}

impl Uplink {
    /// Returns whether the other interface is this one. The kernel gives the inode number of a
    /// namespace that is gone to another one.
    pub fn is_same(&self, other: &Self) -> bool {
        let key = |one: &Self| (one.device, one.inode, one.index, one.mac);
        key(self) == key(other)
    }
}

impl Network {
    /// Makes a network without leases.
    pub fn new(name: String, device: String, subnet: Ipv4Net, prefix: Ipv6Net) -> Self {
        let gateway = nth4(subnet, 1);
        let created = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
        Self {
            version: VERSION,
            name,
            device,
            subnet,
            gateway,
            prefix,
            mtu: crate::DEFAULT_MTU,
            internal: false,
            created_ns: u64::try_from(created.as_nanos()).unwrap_or(0),
            ports: BTreeMap::new(),
            leases: BTreeMap::new(),
            last_sequence: 0,
            changes: 0,
            saved: 0,
        }
    }

    /// Returns whether a sandbox or a memory port needs the network up.
    pub fn is_used(&self) -> bool {
        !self.leases.is_empty() || !self.ports.is_empty()
    }

    /// Returns the place of the next attachment in the order of the network's attachments.
    pub fn next_sequence(&self) -> u64 {
        self.last_sequence.saturating_add(1)
    }

    /// Returns the host's IPv6 address in the network: the first of the prefix.
    pub fn gateway6(&self) -> Ipv6Addr {
        nth6(self.prefix, 1)
    }

    /// Returns the MAC address of the host's end, the same each time it is made.
    pub fn gateway_mac(&self) -> Mac {
        Mac::derived(self.gateway)
    }

    /// Returns whether an address is one of this network's.
    pub fn contains(&self, address: IpAddr) -> bool {
        match address {
            IpAddr::V4(address) => self.subnet.contains(&address),
            IpAddr::V6(address) => self.prefix.contains(&address),
        }
    }
}

/// Returns the `index`-th address of a subnet, from 0.
pub(crate) fn nth4(subnet: Ipv4Net, index: u32) -> Ipv4Addr {
    Ipv4Addr::from_bits(subnet.network().to_bits() | index)
}

/// Returns the `index`-th address of a prefix, from 0.
pub(crate) fn nth6(prefix: Ipv6Net, index: u32) -> Ipv6Addr {
    Ipv6Addr::from_bits(prefix.network().to_bits() | u128::from(index))
}

/// The leases of a network at one time: the path of their file, and its content.
#[derive(Debug)]
pub struct LeaseFile(PathBuf, Vec<u8>);

impl LeaseFile {
    /// Writes the leases; on return they survive a crash of the daemon. The caller is the only one
    /// that writes this network's leases.
    ///
    /// # Errors
    /// [`Error::File`]; the old leases are still there.
    pub fn write(self) -> Result<()> {
        let written = slipway_replace::replace(&self.0, &self.1, false);
        written.map_err(Error::file("cannot write", self.0))
    }
}

/// The directory with the files of all networks.
#[derive(Clone, Debug)]
pub struct Ledger {
    dir: PathBuf,
}

impl Ledger {
    /// Opens the ledger in `dir`, and creates the directory if needed. It is this user's alone: it
    /// says which sandboxes there are, and what they can be reached at.
    ///
    /// # Errors
    /// [`Error::File`].
    pub fn open(dir: &Path) -> Result<Self> {
        make_private(dir)?;
        make_private(&dir.join(UPLINKS))?;
        Ok(Self { dir: dir.to_owned() })
    }

    /// Reads all networks.
    ///
    /// # Errors
    /// [`Error::File`] for a network that cannot be read. Giving out its addresses again would be
    /// worse than not starting.
    pub fn load(&self) -> Result<Vec<Network>> {
        let mut networks = Vec::new();
        for entry in fs::read_dir(&self.dir).map_err(Error::file("cannot read", &self.dir))? {
            let path = entry.map_err(Error::file("cannot read", &self.dir))?.path();
            if path.extension().is_none_or(|extension| extension != "json") {
                continue;
            }
            let text = fs::read(&path).map_err(Error::file("cannot read", &path))?;
            let network = serde_json::from_slice::<Network>(&text).map_err(std::io::Error::from);
            let network = network.and_then(|network| match network.version {
                VERSION => Ok(network),
                other => Err(std::io::Error::other(format!("version {other} of its layout"))),
            });
            let mut network = network.map_err(Error::file("cannot understand", &path))?;
            network.leases = load_leases(&path.with_extension("leases"));
            networks.push(network);
        }
        Ok(networks)
    }

    /// Writes a network's description; on return it survives a crash of the machine.
    ///
    /// # Errors
    /// [`Error::File`]; the old description is still there.
    pub fn save(&self, network: &Network) -> Result<()> {
        let path = self.path(&network.name, "json");
        self.write(&path, network, true)?;
        self.flush().map_err(Error::file("cannot write", &path))
    }

    /// Returns a network's leases as they are now, to be written.
    ///
    /// # Errors
    /// [`Error::File`].
    pub fn leases_of(&self, network: &Network) -> Result<LeaseFile> {
        let path = self.path(&network.name, "leases");
        let own: BTreeMap<&String, &Lease> =
            network.leases.iter().filter(|(_, lease)| !lease.attached).collect();
        let json = serde_json::to_vec_pretty(&own).map_err(std::io::Error::from);
        Ok(LeaseFile(path.clone(), json.map_err(Error::file("cannot write", path))?))
    }

    /// Reads the interfaces in namespaces of others, by their keys. Unreadable ones were lost in a
    /// crash of the machine, with the namespaces.
    ///
    /// # Errors
    /// [`Error::File`] if the directory cannot be read.
    pub fn load_uplinks(&self) -> Result<BTreeMap<String, Uplink>> {
        let dir = self.dir.join(UPLINKS);
        let entries = match fs::read_dir(&dir) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                return Ok(BTreeMap::new());
            }
            entries => entries.map_err(Error::file("cannot read", &dir))?,
        };
        let mut uplinks = BTreeMap::new();
        for entry in entries {
            let path = entry.map_err(Error::file("cannot read", &dir))?.path();
            if path.extension().is_none_or(|extension| extension != "json") {
                continue;
            }
            let id = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            match fs::read(&path).and_then(|text| Ok(serde_json::from_slice(&text)?)) {
                Ok(uplink) => drop(uplinks.insert(id, uplink)),
                Err(error) => {
                    tracing::warn!(path = %path.display(), %error, "an interface is lost");
                }
            }
        }
        Ok(uplinks)
    }

    /// Writes the interface `key` of a sandbox; on return it survives a crash of the daemon.
    ///
    /// # Errors
    /// [`Error::File`].
    pub fn save_uplink(&self, key: &str, uplink: &Uplink) -> Result<()> {
        self.write(&self.dir.join(UPLINKS).join(format!("{key}.json")), uplink, false)
    }

    /// Removes the interface `key` of a sandbox.
    ///
    /// # Errors
    /// [`Error::File`].
    pub fn remove_uplink(&self, key: &str) -> Result<()> {
        let path = self.dir.join(UPLINKS).join(format!("{key}.json"));
        slipway_replace::remove(&path).map(drop).map_err(Error::file("cannot remove", path))
    }

    fn write(&self, path: &Path, content: &impl Serialize, flush: bool) -> Result<()> {
        let json = serde_json::to_vec_pretty(content).map_err(std::io::Error::from);
        let written = json.and_then(|json| slipway_replace::replace(path, &json, flush));
        written.map_err(Error::file("cannot write", path))
    }

    /// Removes a network.
    ///
    /// # Errors
    /// [`Error::File`].
    pub fn remove(&self, name: &str) -> Result<()> {
        // The leases go last: without the description they mean nothing.
        for kind in ["json", "leases"] {
            let path = self.path(name, kind);
            let removed = slipway_replace::remove(&path).and_then(|_| self.flush());
            removed.map_err(Error::file("cannot remove", path))?;
        }
        Ok(())
    }

    fn flush(&self) -> std::io::Result<()> {
        File::open(&self.dir)?.sync_all()
    }

    fn path(&self, name: &str, kind: &str) -> PathBuf {
        self.dir.join(format!("{name}.{kind}"))
    }
}

/// Creates the directory `dir` if it is missing. Closes it to other users, and the files in it that
/// an older build left open to them.
pub(crate) fn make_private(dir: &Path) -> Result<()> {
    let made = slipway_private::make_folder(dir)
        .and_then(|()| slipway_private::close_files(dir, |_| true));
    made.map_err(std::io::Error::other).map_err(Error::file("cannot make private", dir))
}

/// Reads leases. Unreadable ones were lost in a crash of the machine, with the sandboxes that had
/// them.
fn load_leases(path: &Path) -> BTreeMap<String, Lease> {
    let text = match fs::read(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return BTreeMap::new(),
        text => text,
    };
    let leases = text.and_then(|text| Ok(serde_json::from_slice(&text)?));
    leases.unwrap_or_else(|error| {
        tracing::warn!(path = %path.display(), %error, "leases are lost");
        BTreeMap::new()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn network() -> Network {
        let subnet = "10.1.2.0/24".parse().unwrap();
        let prefix = "fd00:1::/64".parse().unwrap();
        Network::new("blue".into(), "slip0".into(), subnet, prefix)
    }

    #[test]
    fn what_was_saved_is_loaded() {
        let dir = tempfile::tempdir().unwrap();
        let ledger = Ledger::open(&dir.path().join("networks")).unwrap();
        assert!(ledger.load().unwrap().is_empty());
        let mut network = network();
        let mac = Some(Mac::derived(Ipv4Addr::new(10, 1, 2, 9)));
        let port = HostPort { mac, slots: 64, payload: 2048, owner: Some((7, 8)) };
        network.ports.insert("gen".into(), port);
        ledger.save(&network).unwrap();
        let lease = Lease {
            name: "web".into(),
            mac: Mac::derived(Ipv4Addr::new(10, 1, 2, 2)),
            ipv4: Ipv4Addr::new(10, 1, 2, 2),
            ipv6: "fd00:1::2".parse().unwrap(),
            published: Published::parse("8080:80").unwrap(),
            attached: false,
            sequence: 7,
        };
        network.leases.insert("0123456789ab".into(), lease);
        ledger.leases_of(&network).unwrap().write().unwrap();
        assert_eq!(ledger.load().unwrap(), std::slice::from_ref(&network));
        ledger.remove("blue").unwrap();
        ledger.remove("blue").unwrap();
        assert!(ledger.load().unwrap().is_empty());
    }

    #[test]
    fn the_files_are_their_users_alone_whichever_build_made_them() {
        use std::os::unix::fs::PermissionsExt;
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o7777;
        let place = tempfile::tempdir().unwrap();
        let dir = place.path().join("networks");
        let uplinks = dir.join(UPLINKS);
        fs::create_dir_all(&uplinks).unwrap();
        let old = [dir.join("red.json"), dir.join("red.leases.new"), uplinks.join("a.json")];
        for path in &old {
            fs::write(path, "{}").unwrap();
            fs::set_permissions(path, PermissionsExt::from_mode(0o644)).unwrap();
        }
        for path in [&dir, &uplinks] {
            fs::set_permissions(path, PermissionsExt::from_mode(0o755)).unwrap();
        }
        let ledger = Ledger::open(&dir).unwrap();
        ledger.save(&network()).unwrap();
        ledger.leases_of(&network()).unwrap().write().unwrap();
        let new = ["blue.json", "blue.leases"].map(|name| dir.join(name));
        for path in old.iter().chain(&new) {
            assert_eq!(mode(path), 0o600, "{}", path.display());
        }
        assert_eq!((mode(&dir), mode(&uplinks)), (0o700, 0o700));
    }

    #[test]
    fn interfaces_of_others_are_kept() {
        let dir = tempfile::tempdir().unwrap();
        let ledger = Ledger::open(dir.path()).unwrap();
        assert!(ledger.load_uplinks().unwrap().is_empty());
        let uplink = Uplink {
            sandbox: "web".into(),
            namespace: "/run/netns/cni-1".into(),
            device: 4,
            inode: 4026532000,
            interface: "eth0".into(),
            index: 2,
            mac: Mac::derived(Ipv4Addr::new(10, 1, 2, 2)),
            network: None,
            number: 0,
        };
        ledger.save_uplink("0123456789ab", &uplink).unwrap();
        fs::write(dir.path().join("uplinks/half.json"), "{").unwrap();
        let loaded = ledger.load_uplinks().unwrap();
        assert_eq!(loaded, [("0123456789ab".to_owned(), uplink)].into());
        // They are no networks.
        assert!(ledger.load().unwrap().is_empty());
        for _ in 0..2 {
            ledger.remove_uplink("0123456789ab").unwrap();
        }
        assert!(ledger.load_uplinks().unwrap().is_empty());
    }

    #[test]
    fn a_crash_while_it_writes_leaves_the_old_one() {
        let dir = tempfile::tempdir().unwrap();
        let ledger = Ledger::open(dir.path()).unwrap();
        let network = network();
        ledger.save(&network).unwrap();
        fs::write(dir.path().join("blue.json.new"), "{\"half\": ").unwrap();
        fs::write(dir.path().join("blue.leases.new"), "{").unwrap();
        assert_eq!(ledger.load().unwrap(), std::slice::from_ref(&network));
        // The state after a crash of the machine.
        fs::write(dir.path().join("blue.leases"), "").unwrap();
        assert_eq!(ledger.load().unwrap(), [network]);
    }

    #[test]
    fn what_is_not_understood_is_said() {
        let dir = tempfile::tempdir().unwrap();
        let ledger = Ledger::open(dir.path()).unwrap();
        ledger.save(&Network { version: 2, ..network() }).unwrap();
        assert!(ledger.load().unwrap_err().to_string().contains("blue.json"));
        fs::write(dir.path().join("blue.json"), "{}").unwrap();
        assert!(ledger.load().unwrap_err().to_string().contains("blue.json"));
    }
}
