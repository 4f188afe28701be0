//! IP forwarding: switched on for networks of sandboxes, and for nothing else.
//!
//! Linux decides by the incoming interface whether a packet may be forwarded. Packets of sandboxes
//! come in by their network's interface, and the answers by any other. So every interface needs
//! forwarding; but a host that did not forward before must not become a router between its other
//! interfaces.
//!
//! - If the host forwards for its own reasons (`net.ipv4.ip_forward`,
//!   `net.ipv6.conf.all.forwarding`), nothing is changed.
//! - If it does not, forwarding is switched on at each interface (`net.ipv4.conf.*.forwarding`,
//!   `net.ipv6.conf.*.force_forwarding`), and the packet filter drops all packets that neither come
//!   from a network of sandboxes nor go to one ([`OnlyForSandboxes`], `rules`). The filter's rule
//!   is there first. The switch for the whole host stays off. So if another program sets it later,
//!   for containers of another kind, this is noticed: with the next sandbox that comes or goes, the
//!   rule goes.
//! - IPv6 of kernels before 6.17 has only the switch for the whole host. It is used there, with the
//!   same rule. Interfaces that learn their routes from router advertisements are told to go on.
//! - When the last network with a way out goes, the former state is restored. If a switch cannot
//!   be, the record and the filter's rule stay until the next attempt. The state is recorded in a
//!   file that does not survive a restart of the machine, as the switches do not. Each network
//!   namespace has switches of its own, and a file. A lock beside the file keeps daemons apart: one
//!   that restores the state while another switches forwarding on would remove the record and
//!   leave some switches on for ever.

mod switches;

use std::collections::BTreeSet;
use std::fs;
use std::io::{ErrorKind, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use slipway_lock::Lock;

use self::switches::{FOUR, PROC, SIX, Switches, is_set};
use crate::host::DEVICE;
use crate::{Error, Result};

/// The longest wait for another daemon that changes the switches, which takes it milliseconds.
const PATIENCE: Duration = Duration::from_secs(5);

/// The address families for which the host forwards for networks of sandboxes alone: all other
/// packets of the family must be dropped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OnlyForSandboxes {
    /// `true` for IPv4.
    pub ipv4: bool,
    /// `true` for IPv6.
    pub ipv6: bool,
}

/// The state before forwarding was switched on.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
struct PriorForwarding {
    /// Interfaces that forwarded IPv4; `None` if nothing was switched on.
    four: Option<BTreeSet<String>>,
    /// Interfaces that forwarded IPv6; `None` if nothing was switched on.
    six: Option<BTreeSet<String>>,
    /// Interfaces that took router advertisements, if the switch of the whole host was used for
    /// IPv6.
    six_whole: Option<BTreeSet<String>>,
}

/// The host's switches, and the file that records their former state.
#[derive(Clone, Debug)]
pub(crate) struct Forwarding {
    file: PathBuf,
    switches: Switches,
}

impl Forwarding {
    /// Returns the switches of the calling thread's network namespace. Its cookie becomes a part of
    /// the file's name: a daemon in another namespace must neither use the record nor remove it.
    ///
    /// # Errors
    /// [`Error::Host`] if the kernel does not tell the cookie.
    pub fn new(file: &Path) -> Result<Self> {
        let cookie = slipway_netns::cookie();
        let cookie = cookie.map_err(Error::host("cannot tell the network namespace"))?;
        let stem = file.file_stem().unwrap_or_default().to_string_lossy();
        let named = file.with_file_name(format!("{stem}-{cookie}.json"));
        // The host's record of an earlier version, which had no cookie.
        if file.exists() && !named.exists() && is_first_namespace() {
            let _ = fs::rename(file, &named);
        }
        Ok(Self { file: named, switches: Switches(PROC.into()) })
    }

    /// Returns whether a daemon has switched forwarding on, and none has restored the former state.
    pub fn is_recorded(&self) -> bool {
        self.file.exists()
    }

    /// Returns the families that are, or would be, forwarded for networks of sandboxes alone.
    ///
    /// # Errors
    /// [`Error::Host`] if the record or a switch cannot be read.
    pub fn only_for_sandboxes(&self) -> Result<OnlyForSandboxes> {
        let switches = &self.switches;
        let ipv6 = switches.has(SIX.family)
            && (!is_set(&switches.whole_six())? || self.load()?.six_whole.is_some());
        Ok(OnlyForSandboxes { ipv4: !is_set(&switches.whole_four())?, ipv6 })
    }

    /// Returns the families of which all packets but those of sandboxes are to be dropped after
    /// [`close`](Self::close) has failed: those that may be forwarded for sandboxes alone. What
    /// cannot be read is taken for that.
    pub fn only_after_failure(&self) -> OnlyForSandboxes {
        let switches = &self.switches;
        let may_be_ours = match self.load() {
            Ok(before) => before.six_whole.is_some(),
            // Newer kernels have a switch of each interface for sandboxes.
            Err(_) => !switches.path(SIX, "all").exists(),
        };
        let is_off = |path: &Path| !is_set(path).unwrap_or(false);
        OnlyForSandboxes {
            ipv4: is_off(&switches.whole_four()),
            ipv6: switches.has(SIX.family) && (is_off(&switches.whole_six()) || may_be_ours),
        }
    }

    /// Switches forwarding on for the families of `only`. The packet filter must have its rules
    /// already, and the interface of a network must exist. Sleeps while another daemon changes the
    /// switches.
    ///
    /// # Errors
    /// [`Error::Host`]; no switch is changed if that is for the record.
    pub fn open(&self, only: OnlyForSandboxes) -> Result<()> {
        let (_lock, switches) = (self.lock()?, &self.switches);
        let mut before = self.load()?;
        // If the host now forwards for its own reasons, that must not be undone later.
        before.four = before.four.filter(|_| only.ipv4);
        before.six = before.six.filter(|_| only.ipv6);
        if only.ipv4 && before.four.is_none() {
            before.four = Some(switches.on(FOUR)?);
        }
        let each = switches.path(SIX, "all").exists();
        if only.ipv6 && each && before.six.is_none() {
            before.six = Some(switches.on(SIX)?);
        }
        if only.ipv6 && !each && before.six_whole.is_none() {
            before.six_whole = Some(switches.takers_of_advertisements()?);
        }
        self.save(&before)?;
        if only.ipv4 {
            switches.open(FOUR)?;
        }
        match &before.six_whole {
            Some(takers) if only.ipv6 => switches.open_six_whole(takers),
            _ if only.ipv6 => switches.open(SIX),
            _ => Ok(()),
        }
    }

    /// Restores the former state, unless networks of another daemon exist (`own` are this one's
    /// interfaces). Sleeps while another daemon changes the switches.
    ///
    /// # Errors
    /// [`Error::Host`] if another daemon keeps the lock or the record cannot be read; nothing is
    /// changed then. [`Error::Host`] if a switch cannot be restored; the record stays then, for the
    /// next attempt.
    pub fn close(&self, own: &BTreeSet<String>) -> Result<()> {
        if !self.is_recorded() {
            return Ok(());
        }
        let _lock = self.lock()?;
        let others = |name: &String| name.starts_with(DEVICE) && !own.contains(name);
        // A daemon makes its interface before it waits for the lock in `open`.
        if !self.is_recorded() || self.switches.interfaces(FOUR.family).iter().any(others) {
            return Ok(());
        }
        self.switches.restore(&self.load()?)?;
        let _ = fs::remove_file(&self.file);
        Ok(())
    }

    fn lock(&self) -> Result<Lock> {
        let lock = || -> std::io::Result<Lock> {
            self.make_dir()?;
            let path = self.file.with_extension("lock");
            Lock::within(&path, PATIENCE).map_err(std::io::Error::other)
        };
        lock().map_err(Error::host("cannot change IP forwarding"))
    }

    fn make_dir(&self) -> std::io::Result<()> {
        self.file.parent().map_or(Ok(()), fs::create_dir_all)
    }

    /// Reads the record. A missing one says that nothing was switched on.
    ///
    /// # Errors
    /// [`Error::Host`] if there is a record that cannot be read. It must not be replaced: the
    /// switches that it names would stay on for ever.
    fn load(&self) -> Result<PriorForwarding> {
        let read = match fs::read(&self.file) {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                return Ok(PriorForwarding::default());
            }
            read => read,
        };
        let before = read.and_then(|text| Ok(serde_json::from_slice(&text)?));
        before.map_err(|error| {
            Error::Host(format!(
                "cannot read {}, which says which interfaces forwarded before: {error}; set the \
                 host's forwarding switches as they should be, and remove the file",
                self.file.display()
            ))
        })
    }

    fn save(&self, before: &PriorForwarding) -> Result<()> {
        if *before == self.load()? {
            return Ok(());
        }
        let save = || -> std::io::Result<()> {
            let aside = self.file.with_extension("new");
            let mut options = fs::File::options();
            options.write(true).create(true).truncate(true).mode(0o600);
            options.open(&aside)?.write_all(&serde_json::to_vec(before)?)?;
            fs::rename(&aside, &self.file)
        };
        save().map_err(Error::host(format!("cannot write {}", self.file.display())))
    }
}

/// Returns whether the calling thread is in the network namespace of process 1.
fn is_first_namespace() -> bool {
    let namespace = |of: &str| fs::metadata(format!("/proc/{of}/ns/net")).map(|file| file.ino());
    matches!((namespace("thread-self"), namespace("1")), (Ok(own), Ok(first)) if own == first)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A directory with the switches of a host that forwards nothing, but IPv4 of `eth1`, and whose
    /// `eth0` takes router advertisements.
    struct Host(tempfile::TempDir);

    impl Host {
        /// Makes the host, with a switch for IPv6 of each interface if `each` is set.
        fn new(each: bool) -> Self {
            let host = Self(tempfile::tempdir().unwrap());
            host.put("ipv4/ip_forward", "0");
            for name in ["all", "default", "lo", "eth0", "eth1"] {
                host.put(&format!("ipv4/conf/{name}/forwarding"), "0");
                host.put(&format!("ipv6/conf/{name}/forwarding"), "0");
                host.put(&format!("ipv6/conf/{name}/accept_ra"), "0");
                if each {
                    host.put(&format!("ipv6/conf/{name}/force_forwarding"), "0");
                }
            }
            host.put("ipv4/conf/eth1/forwarding", "1");
            host.put("ipv6/conf/eth0/accept_ra", "1");
            host
        }

        fn path(&self, switch: &str) -> PathBuf {
            self.0.path().join("net").join(switch)
        }

        fn put(&self, switch: &str, value: &str) {
            let path = self.path(switch);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, value).unwrap();
        }

        /// Makes a switch that cannot be read or written, by root either.
        fn spoil(&self, switch: &str) {
            fs::remove_file(self.path(switch)).unwrap();
            fs::create_dir(self.path(switch)).unwrap();
        }

        fn mend(&self, switch: &str, value: &str) {
            fs::remove_dir(self.path(switch)).unwrap();
            self.put(switch, value);
        }

        fn of<const N: usize>(&self, switches: [&str; N]) -> [String; N] {
            switches.map(|switch| fs::read_to_string(self.path(switch)).unwrap())
        }

        fn forwarding(&self) -> Forwarding {
            let (file, net) = (self.0.path().join("forwarding.json"), self.0.path().join("net"));
            Forwarding { file, switches: Switches(net) }
        }
    }

    const FOURS: [&str; 5] = [
        "ipv4/conf/default/forwarding",
        "ipv4/conf/eth0/forwarding",
        "ipv4/conf/eth1/forwarding",
        "ipv4/conf/lo/forwarding",
        "ipv4/ip_forward",
    ];
    const BOTH: OnlyForSandboxes = OnlyForSandboxes { ipv4: true, ipv6: true };

    #[test]
    fn each_interface_forwards_and_is_restored() {
        let host = Host::new(true);
        let forwarding = host.forwarding();
        let sixes = ["default", "eth0", "all"].map(|name| format!("ipv6/conf/{name}"));
        let sixes = sixes.map(|conf| format!("{conf}/force_forwarding"));
        let sixes = sixes.each_ref().map(String::as_str);
        assert_eq!(forwarding.only_for_sandboxes().unwrap(), BOTH);
        forwarding.open(BOTH).unwrap();
        assert_eq!(host.of(FOURS), ["1", "1", "1", "0", "0"]);
        assert_eq!(host.of(sixes), ["1", "1", "0"]);
        // Another daemon's network is there.
        host.put(&format!("ipv4/conf/{DEVICE}0/forwarding"), "1");
        forwarding.close(&BTreeSet::new()).unwrap();
        assert!(host.of(FOURS)[0] == "1" && forwarding.file.exists());
        forwarding.close(&BTreeSet::from([format!("{DEVICE}0")])).unwrap();
        assert_eq!(host.of(FOURS), ["0", "0", "1", "0", "0"]);
        assert_eq!(host.of(sixes), ["0", "0", "0"]);
        assert!(!forwarding.file.exists());
    }

    #[test]
    fn the_whole_host_forwards_ipv6_only_when_all_go_on_taking_advertisements() {
        let host = Host::new(false);
        let forwarding = host.forwarding();
        let six = OnlyForSandboxes { ipv4: false, ipv6: true };
        let whole = ["ipv6/conf/all/forwarding"];
        // One of an interface that has gone does no harm, one that cannot be written does.
        let takers = ["eth0", "gone0"].map(str::to_owned).into();
        forwarding
            .save(&PriorForwarding { six_whole: Some(takers), ..PriorForwarding::default() })
            .unwrap();
        host.spoil("ipv6/conf/eth0/accept_ra");
        let error = forwarding.open(six).unwrap_err().to_string();
        assert!(error.contains("eth0/accept_ra") && !error.contains('\n'), "{error}");
        assert_eq!(host.of(whole), ["0"]);
        host.mend("ipv6/conf/eth0/accept_ra", "1");
        forwarding.open(six).unwrap();
        assert_eq!(host.of(whole), ["1"]);
        assert_eq!(host.of(["ipv6/conf/eth0/accept_ra", "ipv6/conf/eth1/accept_ra"]), ["2", "0"]);
        assert_eq!(forwarding.only_for_sandboxes().unwrap(), BOTH);
        forwarding.close(&BTreeSet::new()).unwrap();
        assert_eq!(host.of(["ipv6/conf/all/forwarding", "ipv6/conf/eth0/accept_ra"]), ["0", "1"]);
    }

    #[test]
    fn a_switch_that_cannot_be_restored_is_tried_again() {
        let host = Host::new(true);
        let forwarding = host.forwarding();
        forwarding.open(BOTH).unwrap();
        host.spoil(FOURS[0]);
        let error = forwarding.close(&BTreeSet::new()).unwrap_err().to_string();
        assert!(error.contains(FOURS[0]), "{error}");
        // The others are restored.
        assert_eq!(host.of([FOURS[1], "ipv6/conf/eth0/force_forwarding"]), ["0", "0"]);
        assert!(forwarding.file.exists());
        host.mend(FOURS[0], "1");
        forwarding.close(&BTreeSet::new()).unwrap();
        assert_eq!(host.of(FOURS), ["0", "0", "1", "0", "0"]);
        assert!(!forwarding.file.exists());
    }

    #[test]
    fn a_switch_that_cannot_be_read_is_not_one_that_is_off() {
        let host = Host::new(true);
        let forwarding = host.forwarding();
        host.spoil(FOURS[2]);
        let error = forwarding.open(BOTH).unwrap_err().to_string();
        assert!(error.contains(FOURS[2]), "{error}");
        assert!(!forwarding.file.exists());
        host.spoil("ipv4/ip_forward");
        assert!(forwarding.only_for_sandboxes().is_err());
    }

    #[test]
    fn a_record_that_cannot_be_read_is_not_one_that_is_missing() {
        let host = Host::new(true);
        let forwarding = host.forwarding();
        // No family: no switch is looked at or changed.
        let none = OnlyForSandboxes::default();
        forwarding.open(none).unwrap();
        assert_eq!(forwarding.load().unwrap(), PriorForwarding::default());
        fs::write(&forwarding.file, "{\"four\": 4}").unwrap();
        let error = forwarding.open(none).unwrap_err().to_string();
        assert!(error.contains("forwarding.json") && error.contains("remove the file"), "{error}");
        assert!(!error.contains('\n'), "{error}");
        assert_eq!(fs::read_to_string(&forwarding.file).unwrap(), "{\"four\": 4}");
        // A host that forwards for its own reasons goes on.
        assert!(forwarding.close(&BTreeSet::new()).is_err());
        assert_eq!(forwarding.only_after_failure(), BOTH);
        for whole in ["ipv4/ip_forward", "ipv6/conf/all/forwarding"] {
            host.put(whole, "1");
        }
        assert_eq!(forwarding.only_after_failure(), OnlyForSandboxes::default());
        // The switch of the whole host for IPv6 may be on for sandboxes.
        fs::remove_file(host.path("ipv6/conf/all/force_forwarding")).unwrap();
        let six = OnlyForSandboxes { ipv4: false, ipv6: true };
        assert_eq!(forwarding.only_after_failure(), six);
        // A directory in the file's place is an error of read(2).
        fs::remove_file(&forwarding.file).unwrap();
        fs::create_dir(&forwarding.file).unwrap();
        assert!(forwarding.load().is_err());
    }
}
