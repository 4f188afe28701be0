//! Attachments of containers: interfaces that were made for them in network namespaces, and the
//! files that remember them.
//!
//! Each attachment has a file, which is written before its interface is made or its function is
//! taken, and removed when nothing is left of them. The network is up by then, and published ports
//! are bound: neither needs the file. The file is not flushed: it survives a crash of the daemon,
//! and no namespace outlives a crash of the machine. A file that cannot be read was not written to
//! its end, so there is no interface and no function.
//!
//! The file of a removed attachment is renamed, and becomes that of a later one: with many
//! containers that come and go, ext4 spends a fifth of an attachment's time on a new file, since it
//! passes over inodes that were freed in the last five seconds (`recently_deleted`).
//!
//! A container that is removed while no daemon serves leaves a *note* beside the file, an empty
//! file that others than the daemon make (front/cni). The next daemon does what it asks for.

use std::collections::BTreeMap;
use std::fs;
use std::io::{ErrorKind, Write};
use std::net::IpAddr;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use slipway_netns::Identity;
use slipway_plane_api::attachments::{self, DIR, FILE, NOTE};
use slipway_plane_api::network_v1 as v1;
use slipway_telemetry::trace::TraceContext;

use crate::ledger::{Lease, Uplink, make_private};
use crate::{Error, Result};

/// A container's interface that was made in a network namespace.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attachment {
    /// The identity that CNI gives it.
    pub key: AttachmentKey,
    /// The network.
    pub network: String,
    /// The path of the namespace.
    pub namespace: PathBuf,
    /// The device number of the namespace's file.
    pub device: u64,
    /// The inode number of the namespace's file.
    pub inode: u64,
    /// The addresses and published ports.
    pub lease: Lease,
    /// Routes beside those to the network's own addresses: destination and next hop.
    pub routes: Vec<(IpNet, Option<IpAddr>)>,
    /// The interface carries settings only, for a sandbox that has a port of the switch.
    #[serde(default)]
    pub function: bool,
    /// The pool of which the attachment has a function for that sandbox; empty: none.
    #[serde(default)]
    pub pool: String,
    /// The settings of that function if it is hardware, which no sandbox in the namespace has.
    #[serde(default)]
    pub hardware: Option<HardwareSettings>,
    /// The rates of the container's port.
    #[serde(default)]
    pub rates: Rates,
    /// The place in a trace to which the attachment belongs, and with it a sandbox in the
    /// namespace. It is lost with the daemon.
    #[serde(skip)]
    pub trace: Option<TraceContext>,
}

/// The settings of a function of hardware, beside its MAC address and its rate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HardwareSettings {
    /// The VLAN whose frames it has, without their tag; 0 for that of its pool.
    pub vlan: u32,
    /// It may send frames that do not have its MAC address.
    pub no_spoof_check: bool,
}

/// The rates of a port in bytes per second, and their bursts in bytes. Zeros stand for any rate and
/// for the default burst.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rates {
    /// The rate at which the port may send.
    pub max_rate: u64,
    /// The burst of `max_rate`.
    pub max_burst: u64,
    /// The rate at which the port receives.
    pub receive_rate: u64,
    /// The burst of `receive_rate`.
    pub receive_burst: u64,
}

impl Rates {
    /// Checks rates from outside; absent ones are none.
    ///
    /// # Errors
    /// [`Error::Invalid`]: a burst without a rate.
    pub fn of(rates: Option<&v1::PortRates>) -> Result<Self> {
        let v1::PortRates { max_rate, max_burst, receive_rate, receive_burst } =
            rates.copied().unwrap_or_default();
        for (rate, burst) in [(max_rate, max_burst), (receive_rate, receive_burst)] {
            if rate == 0 && burst > 0 {
                return Err(Error::Invalid(format!(
                    "a burst of {burst} bytes has no rate: give a rate above 0, or no burst"
                )));
            }
        }
        Ok(Self { max_rate, max_burst, receive_rate, receive_burst })
    }

    /// Returns the rates for the interface, or `None` if there are none.
    pub fn describe(&self) -> Option<v1::PortRates> {
        let Self { max_rate, max_burst, receive_rate, receive_burst } = *self;
        let rates = v1::PortRates { max_rate, max_burst, receive_rate, receive_burst };
        (*self != Self::default()).then_some(rates)
    }
}

impl Attachment {
    /// Returns the path of the namespace as text.
    pub fn path(&self) -> String {
        self.namespace.to_string_lossy().into_owned()
    }

    /// Returns the identity of the namespace.
    pub fn identity(&self) -> Identity {
        Identity { device: self.device, inode: self.inode }
    }

    /// Returns whether a sandbox's interface is this one, which was made for the sandbox's port.
    pub fn is_of(&self, uplink: &Uplink) -> bool {
        let own = (self.device, self.inode, self.lease.mac, &self.key.interface);
        self.function && own == (uplink.device, uplink.inode, uplink.mac, &uplink.interface)
    }
}

/// The identity of an attachment, as CNI defines it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AttachmentKey {
    /// The name of the network configuration.
    pub configuration: String,
    /// The container's id.
    pub container: String,
    /// The interface's name in the namespace.
    pub interface: String,
}

impl std::fmt::Display for AttachmentKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { configuration, container, interface } = self;
        write!(f, "interface {interface} of container {container} in \"{configuration}\"")
    }
}

impl AttachmentKey {
    /// Checks and takes an identity from outside.
    ///
    /// # Errors
    /// [`Error::Invalid`].
    pub fn new(configuration: &str, container: &str, interface: &str) -> Result<Self> {
        attachments::check(configuration, container, interface).map_err(Error::Invalid)?;
        Ok(Self {
            configuration: configuration.to_owned(),
            container: container.to_owned(),
            interface: interface.to_owned(),
        })
    }

    /// Returns the identity for the interface.
    pub fn describe(&self) -> v1::ContainerInterface {
        v1::ContainerInterface {
            configuration: self.configuration.clone(),
            container_id: self.container.clone(),
            interface: self.interface.clone(),
        }
    }

    /// Returns the name of the attachment's file, without its extension, and of its lease.
    pub fn id(&self) -> String {
        attachments::id(&self.configuration, &self.container, &self.interface)
    }
}

/// The directory of files without an attachment, in that of networks.
const SPARES: &str = "spare-attachments";
/// The most files without an attachment.
const MOST_SPARES: usize = 1024;

/// The directory of attachments' files.
#[derive(Clone, Debug)]
pub struct Store {
    dir: PathBuf,
    /// The files without an attachment.
    spares: Arc<Mutex<Spares>>,
}

#[derive(Debug)]
struct Spares {
    dir: PathBuf,
    free: Vec<PathBuf>,
    /// The number in the next file's name.
    next: u64,
}

impl Store {
    /// Opens the files in the directory of networks, and creates the directory if needed.
    ///
    /// # Errors
    /// [`Error::File`].
    pub fn open(networks_dir: &Path) -> Result<Self> {
        let dir = networks_dir.join(DIR);
        make_private(&dir)?;
        // An earlier daemon's: this one knows how many it has.
        let spare = networks_dir.join(SPARES);
        let _ = fs::remove_dir_all(&spare);
        make_private(&spare)?;
        let spares = Spares { dir: spare, free: Vec::new(), next: 0 };
        Ok(Self { dir, spares: Arc::new(Mutex::new(spares)) })
    }

    fn spares(&self) -> MutexGuard<'_, Spares> {
        // Changed in single calls: a panic leaves it consistent.
        self.spares.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads all attachments, by id. Files that were not written to their end are removed.
    ///
    /// # Errors
    /// [`Error::File`] if the directory cannot be read.
    pub fn load(&self) -> Result<BTreeMap<String, Attachment>> {
        let mut all = BTreeMap::new();
        for path in self.files(FILE)? {
            match fs::read(&path).and_then(|text| Ok(serde_json::from_slice(&text)?)) {
                Ok(one) => {
                    let one: Attachment = one;
                    all.insert(one.key.id(), one);
                }
                Err(error) => {
                    tracing::warn!(path = %path.display(), %error, "an attachment is lost");
                    let _ = fs::remove_file(&path);
                }
            }
        }
        Ok(all)
    }

    /// Writes an attachment, which has no file yet; on return it survives a crash of the daemon.
    ///
    /// # Errors
    /// [`Error::File`]; there is no file then.
    pub fn save(&self, id: &str, attachment: &Attachment) -> Result<()> {
        let path = self.path(id, FILE);
        let spare = self.spares().free.pop();
        let written = spare.as_ref().unwrap_or(&path);
        let write = || -> std::io::Result<()> {
            let json = serde_json::to_vec(attachment)?;
            let mut options = fs::File::options();
            // Not emptied when it is opened: ext4 would write such a file out when it is closed.
            options.write(true).create(true).truncate(false).mode(0o600);
            let mut file = options.open(written)?;
            file.write_all(&json)?;
            file.set_len(json.len() as u64)?;
            spare.as_ref().map_or(Ok(()), |spare| fs::rename(spare, &path))
        };
        let saved = write();
        if saved.is_err() {
            // To the plugin, a file is an attachment with an address. An error: there is none.
            let _ = fs::remove_file(written);
        }
        saved.map_err(Error::file("cannot write", &path))
    }

    /// Removes an attachment with its note.
    ///
    /// # Errors
    /// [`Error::File`].
    pub fn remove(&self, id: &str) -> Result<()> {
        // The note goes last: without the file it means nothing, and a crash between must not
        // bring the attachment back.
        let file = self.path(id, FILE);
        missing_or(self.set_aside(&file)).map_err(Error::file("cannot remove", file))?;
        let note = self.path(id, NOTE);
        missing_or(fs::remove_file(&note)).map_err(Error::file("cannot remove", note))
    }

    /// Makes the file of an attachment one without, or removes it if there are enough of those.
    fn set_aside(&self, file: &Path) -> std::io::Result<()> {
        let mut spares = self.spares();
        if spares.free.len() == MOST_SPARES {
            return fs::remove_file(file);
        }
        let spare = spares.dir.join(spares.next.to_string());
        fs::rename(file, &spare)?;
        spares.next += 1;
        spares.free.push(spare);
        Ok(())
    }

    /// Returns whether a note says that an attachment is to be removed.
    pub fn is_noted(&self, id: &str) -> bool {
        self.path(id, NOTE).exists()
    }

    /// Returns the ids of all notes.
    ///
    /// # Errors
    /// [`Error::File`] if the directory cannot be read.
    pub fn notes(&self) -> Result<Vec<String>> {
        let stem = |path: PathBuf| Some(path.file_stem()?.to_str()?.to_owned());
        Ok(self.files(NOTE)?.into_iter().filter_map(stem).collect())
    }

    fn files(&self, kind: &str) -> Result<Vec<PathBuf>> {
        let entries = fs::read_dir(&self.dir).map_err(Error::file("cannot read", &self.dir))?;
        let mut files = Vec::new();
        for entry in entries {
            let path = entry.map_err(Error::file("cannot read", &self.dir))?.path();
            if path.extension().is_some_and(|extension| extension == kind) {
                files.push(path);
            }
        }
        Ok(files)
    }

    fn path(&self, id: &str, kind: &str) -> PathBuf {
        self.dir.join(format!("{id}.{kind}"))
    }
}

/// Returns the outcome of a removal, for which a file that is missing is no error.
fn missing_or(removed: std::io::Result<()>) -> std::io::Result<()> {
    match removed {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn an_attachment_is_its_users_alone_whichever_build_made_it() {
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o7777;
        let place = tempfile::tempdir().unwrap();
        let dir = place.path().join(DIR);
        fs::create_dir(&dir).unwrap();
        fs::set_permissions(&dir, PermissionsExt::from_mode(0o755)).unwrap();
        let old = dir.join(format!("old.{FILE}"));
        fs::write(&old, "{}").unwrap();
        fs::set_permissions(&old, PermissionsExt::from_mode(0o644)).unwrap();
        let store = Store::open(place.path()).unwrap();
        assert_eq!((mode(&dir), mode(&old)), (0o700, 0o600));
        assert_eq!(store.files(FILE).unwrap(), [old]);
    }

    #[test]
    fn the_file_of_a_removed_attachment_becomes_that_of_a_later_one() {
        use std::os::unix::fs::MetadataExt;
        let place = tempfile::tempdir().unwrap();
        let store = Store::open(place.path()).unwrap();
        let attachment = |container: &str| Attachment {
            key: AttachmentKey::new("net", container, "eth0").unwrap(),
            network: "blue".to_owned(),
            namespace: PathBuf::from("/run/netns/x"),
            device: 4,
            inode: 5,
            lease: Lease {
                name: container.to_owned(),
                mac: crate::mac::Mac::derived([10, 1, 2, 2].into()),
                ipv4: [10, 1, 2, 2].into(),
                ipv6: "fd00:1::2".parse().unwrap(),
                published: Vec::new(),
                attached: false,
                sequence: 1,
            },
            routes: Vec::new(),
            function: false,
            pool: String::new(),
            hardware: None,
            rates: Rates::default(),
            trace: None,
        };
        let (long, short) = (attachment("a-container-with-a-long-name"), attachment("b"));
        store.save(&long.key.id(), &long).unwrap();
        let inode = |one: &Attachment| fs::metadata(store.path(&one.key.id(), FILE)).unwrap().ino();
        let first = inode(&long);
        store.remove(&long.key.id()).unwrap();
        store.remove(&long.key.id()).unwrap();
        assert!(store.load().unwrap().is_empty());
        store.save(&short.key.id(), &short).unwrap();
        assert_eq!(inode(&short), first);
        assert_eq!(store.load().unwrap(), BTreeMap::from([(short.key.id(), short.clone())]));
        store.remove(&short.key.id()).unwrap();
        // The next daemon removes the files that the last one set aside.
        let next = Store::open(place.path()).unwrap();
        let dir = next.spares().dir.clone();
        assert!(fs::read_dir(dir).unwrap().next().is_none());
        // Nothing is left of a file that cannot be written: to the plugin it has an address.
        store.save(&short.key.id(), &short).unwrap();
        store.remove(&short.key.id()).unwrap();
        fs::create_dir(store.path(&short.key.id(), FILE)).unwrap();
        assert!(store.save(&short.key.id(), &short).is_err());
        let left = store.spares().dir.clone();
        assert_eq!((fs::read_dir(left).unwrap().count(), store.spares().free.len()), (0, 0));
    }

    #[test]
    fn rates_are_kept_as_they_came_and_a_burst_needs_one() {
        let wanted = v1::PortRates { max_rate: 8, receive_rate: 9, receive_burst: 1, max_burst: 0 };
        assert_eq!(Rates::of(Some(&wanted)).unwrap().describe(), Some(wanted));
        assert_eq!(Rates::of(None).unwrap().describe(), None);
        let burst = v1::PortRates { max_burst: 7, ..Default::default() };
        let error = Rates::of(Some(&burst)).unwrap_err().to_string();
        assert!(error.contains("7 bytes has no rate") && !error.contains('\n'), "{error}");
    }
}
