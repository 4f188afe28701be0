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
//! - When the last network with a way out goes, the former state is restored. It is recorded in a
//!   file that does not survive a restart of the machine, as the switches do not. Each network
//!   namespace has switches of its own, and a file. A lock beside the file keeps daemons apart: one
//!   that restores the state while another switches forwarding on would remove the record and
//!   leave some switches on for ever.

use std::collections::BTreeSet;
use std::fs;
use std::io::{ErrorKind, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use slipway_lock::Lock;

use crate::host::DEVICE;
use crate::{Error, Result};

const PROC: &str = "/proc/sys/net";
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
struct Before {
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
}

/// The switches of one family: a directory with one switch for each interface.
struct Switches {
    family: &'static str,
    name: &'static str,
}

const FOUR: Switches = Switches { family: "ipv4", name: "forwarding" };
const SIX: Switches = Switches { family: "ipv6", name: "force_forwarding" };

impl Switches {
    fn path(&self, interface: &str) -> PathBuf {
        Path::new(PROC).join(self.family).join("conf").join(interface).join(self.name)
    }

    /// Returns the interfaces that have the switch. New interfaces start with the value of
    /// "default".
    fn interfaces(&self) -> Vec<String> {
        let named = ["default".to_owned()].into_iter().chain(interfaces(self.family));
        named.filter(|name| self.path(name).exists()).collect()
    }

    fn on(&self) -> BTreeSet<String> {
        self.interfaces().into_iter().filter(|name| is_set(&self.path(name))).collect()
    }

    fn open(&self) -> Result<()> {
        for name in self.interfaces() {
            let path = self.path(&name);
            if !is_set(&path)
                && let Err(error) = fs::write(&path, "1")
                && path.exists()
            {
                return Err(Error::host("cannot switch IP forwarding on")(error));
            }
        }
        Ok(())
    }

    fn close(&self, before: &BTreeSet<String>) {
        for name in self.interfaces().iter().filter(|name| !before.contains(*name)) {
            let _ = fs::write(self.path(name), "0");
        }
    }
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
        Ok(Self { file: named })
    }

    /// Returns the families that are, or would be, forwarded for networks of sandboxes alone.
    ///
    /// # Errors
    /// [`Error::Host`] if the record cannot be read.
    pub fn only_for_sandboxes(&self) -> Result<OnlyForSandboxes> {
        let ipv6 =
            is_there(SIX.family) && (!is_set(&whole_six()) || self.load()?.six_whole.is_some());
        Ok(OnlyForSandboxes { ipv4: !is_set(&whole_four()), ipv6 })
    }

    /// Switches forwarding on for the families of `only`. The packet filter must have its rules
    /// already, and the interface of a network must exist. Sleeps while another daemon changes the
    /// switches.
    ///
    /// # Errors
    /// [`Error::Host`]; no switch is changed if that is for the record.
    pub fn open(&self, only: OnlyForSandboxes) -> Result<()> {
        let _lock = self.lock()?;
        let mut before = self.load()?;
        // If the host now forwards for its own reasons, that must not be undone later.
        before.four = before.four.filter(|_| only.ipv4);
        before.six = before.six.filter(|_| only.ipv6);
        if only.ipv4 && before.four.is_none() {
            before.four = Some(FOUR.on());
        }
        let each = SIX.path("all").exists();
        if only.ipv6 && each && before.six.is_none() {
            before.six = Some(SIX.on());
        }
        if only.ipv6 && !each && before.six_whole.is_none() {
            before.six_whole = Some(takers_of_advertisements());
        }
        self.save(&before)?;
        if only.ipv4 {
            FOUR.open()?;
        }
        match &before.six_whole {
            Some(takers) if only.ipv6 => open_six_whole(takers),
            _ if only.ipv6 => SIX.open(),
            _ => Ok(()),
        }
    }

    /// Restores the former state, unless networks of another daemon exist (`own` are this one's
    /// interfaces). Sleeps while another daemon changes the switches.
    ///
    /// # Errors
    /// [`Error::Host`] if another daemon keeps the lock or the record cannot be read; nothing is
    /// changed then.
    pub fn close(&self, own: &BTreeSet<String>) -> Result<()> {
        if !self.file.exists() {
            return Ok(());
        }
        let _lock = self.lock()?;
        let others = |name: &String| name.starts_with(DEVICE) && !own.contains(name);
        // A daemon makes its interface before it waits for the lock in `open`.
        if !self.file.exists() || interfaces(FOUR.family).iter().any(others) {
            return Ok(());
        }
        let before = self.load()?;
        if let Some(before) = before.four.filter(|_| !is_set(&whole_four())) {
            FOUR.close(&before);
        }
        if let Some(before) = before.six.filter(|_| !is_set(&whole_six())) {
            SIX.close(&before);
        }
        if let Some(takers) = before.six_whole {
            let _ = fs::write(whole_six(), "0");
            takers.iter().for_each(|name| drop(fs::write(accept_ra(name), "1")));
        }
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
    fn load(&self) -> Result<Before> {
        let read = match fs::read(&self.file) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Before::default()),
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

    fn save(&self, before: &Before) -> Result<()> {
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

fn whole_four() -> PathBuf {
    Path::new(PROC).join("ipv4/ip_forward")
}

fn whole_six() -> PathBuf {
    Path::new(PROC).join("ipv6/conf/all/forwarding")
}

/// Returns whether the host has switches of the family: it has none if IPv6 is switched off.
fn is_there(family: &str) -> bool {
    Path::new(PROC).join(family).join("conf").exists()
}

fn is_set(path: &Path) -> bool {
    fs::read_to_string(path).is_ok_and(|value| value.trim() == "1")
}

/// Returns the interfaces of the host except the loopback.
fn interfaces(family: &str) -> Vec<String> {
    let entries = fs::read_dir(Path::new(PROC).join(family).join("conf"));
    let names = entries.into_iter().flatten().flatten();
    let names = names.filter_map(|entry| entry.file_name().into_string().ok());
    names.filter(|name| !["all", "default", "lo"].contains(&name.as_str())).collect()
}

fn accept_ra(interface: &str) -> PathBuf {
    Path::new(PROC).join("ipv6/conf").join(interface).join("accept_ra")
}

/// Returns the interfaces that take router advertisements unless the host forwards (1).
fn takers_of_advertisements() -> BTreeSet<String> {
    let all = ["all", "default"].map(str::to_owned).into_iter().chain(interfaces(SIX.family));
    all.filter(|name| is_set(&accept_ra(name))).collect()
}

/// Switches IPv6 forwarding on for the whole host. An interface of a forwarding host takes router
/// advertisements only if its value is 2 instead of 1: otherwise the host would lose its default
/// route.
fn open_six_whole(takers: &BTreeSet<String>) -> Result<()> {
    takers.iter().for_each(|name| drop(fs::write(accept_ra(name), "2")));
    let path = whole_six();
    if is_set(&path) {
        return Ok(());
    }
    fs::write(path, "1").map_err(Error::host("cannot switch IPv6 forwarding on"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_that_cannot_be_read_is_not_one_that_is_missing() {
        let dir = tempfile::tempdir().unwrap();
        let forwarding = Forwarding { file: dir.path().join("forwarding.json") };
        // No family: no switch is looked at or changed.
        let none = OnlyForSandboxes::default();
        forwarding.open(none).unwrap();
        assert_eq!(forwarding.load().unwrap(), Before::default());
        fs::write(&forwarding.file, "{\"four\": 4}").unwrap();
        let error = forwarding.open(none).unwrap_err().to_string();
        assert!(error.contains("forwarding.json") && error.contains("remove the file"), "{error}");
        assert!(!error.contains('\n'), "{error}");
        assert_eq!(fs::read_to_string(&forwarding.file).unwrap(), "{\"four\": 4}");
        // A directory in the file's place is an error of read(2).
        fs::remove_file(&forwarding.file).unwrap();
        fs::create_dir(&forwarding.file).unwrap();
        assert!(forwarding.load().is_err());
    }
}
