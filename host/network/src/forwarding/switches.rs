//! The host's switches of IP forwarding: files of [`PROC`], each read and written as a whole.

use std::collections::BTreeSet;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use super::PriorForwarding;
use crate::{Error, Result};

/// The directory of the host's switches. It is of the network namespace of the thread that looks.
pub(super) const PROC: &str = "/proc/sys/net";

/// The switches of one family, of which each interface has one.
#[derive(Clone, Copy)]
pub(super) struct SwitchFamily {
    pub(super) family: &'static str,
    name: &'static str,
}

/// The switches of IPv4.
pub(super) const FOUR: SwitchFamily = SwitchFamily { family: "ipv4", name: "forwarding" };
/// The switches of IPv6, in kernels from 6.17 on.
pub(super) const SIX: SwitchFamily = SwitchFamily { family: "ipv6", name: "force_forwarding" };

/// The directory with all switches of a host ([`PROC`]).
#[derive(Clone, Debug)]
pub(super) struct Switches(pub(super) PathBuf);

impl Switches {
    /// Returns the path of the switch of the whole host for IPv4.
    pub(super) fn whole_four(&self) -> PathBuf {
        self.0.join("ipv4/ip_forward")
    }

    /// Returns the path of the switch of the whole host for IPv6.
    pub(super) fn whole_six(&self) -> PathBuf {
        self.0.join("ipv6/conf/all/forwarding")
    }

    fn accept_ra(&self, interface: &str) -> PathBuf {
        self.0.join("ipv6/conf").join(interface).join("accept_ra")
    }

    /// Returns the path of the switch of an interface.
    pub(super) fn path(&self, kind: SwitchFamily, interface: &str) -> PathBuf {
        self.0.join(kind.family).join("conf").join(interface).join(kind.name)
    }

    /// Returns whether the host has switches of the family: it has none if IPv6 is switched off.
    pub(super) fn has(&self, family: &str) -> bool {
        self.0.join(family).join("conf").exists()
    }

    /// Returns the interfaces of the host except the loopback.
    pub(super) fn interfaces(&self, family: &str) -> Vec<String> {
        let entries = fs::read_dir(self.0.join(family).join("conf"));
        let names = entries.into_iter().flatten().flatten();
        let names = names.filter_map(|entry| entry.file_name().into_string().ok());
        names.filter(|name| !["all", "default", "lo"].contains(&name.as_str())).collect()
    }

    /// Returns the interfaces that have the switch. New interfaces start with the value of
    /// "default".
    fn with(&self, kind: SwitchFamily) -> Vec<String> {
        let named = ["default".to_owned()].into_iter().chain(self.interfaces(kind.family));
        named.filter(|name| self.path(kind, name).exists()).collect()
    }

    /// Returns the interfaces whose switch is on.
    ///
    /// # Errors
    /// [`Error::Host`] for a switch that cannot be read.
    pub(super) fn on(&self, kind: SwitchFamily) -> Result<BTreeSet<String>> {
        all_set(self.with(kind), |name| self.path(kind, name))
    }

    /// Returns the interfaces that take router advertisements unless the host forwards (1).
    ///
    /// # Errors
    /// [`Error::Host`] for a switch that cannot be read.
    pub(super) fn takers_of_advertisements(&self) -> Result<BTreeSet<String>> {
        let all = ["all", "default"].map(str::to_owned).into_iter();
        all_set(all.chain(self.interfaces(SIX.family)), |name| self.accept_ra(name))
    }

    /// Switches all interfaces on.
    ///
    /// # Errors
    /// [`Error::Host`] for a switch that cannot be read or written.
    pub(super) fn open(&self, kind: SwitchFamily) -> Result<()> {
        for name in self.with(kind) {
            let path = self.path(kind, &name);
            if !is_set(&path)? {
                set(&path, "1")?;
            }
        }
        Ok(())
    }

    /// Switches IPv6 forwarding on for the whole host. An interface of a forwarding host takes
    /// router advertisements only if its value is 2 instead of 1: otherwise the host would lose its
    /// default route. So nothing is switched on before all `takers` have it.
    ///
    /// # Errors
    /// [`Error::Host`] for a switch that cannot be read or written.
    pub(super) fn open_six_whole(&self, takers: &BTreeSet<String>) -> Result<()> {
        for name in takers {
            set(&self.accept_ra(name), "2")?;
        }
        let whole = self.whole_six();
        if is_set(&whole)? { Ok(()) } else { set(&whole, "1") }
    }

    /// Restores the state of `before`, as much of it as can be, but not that of a family which the
    /// host forwards for its own reasons by now.
    ///
    /// # Errors
    /// [`Error::Host`] for the first switch that cannot be restored.
    pub(super) fn restore(&self, before: &PriorForwarding) -> Result<()> {
        let four = self.restore_kind(FOUR, &self.whole_four(), before.four.as_ref());
        let six = self.restore_kind(SIX, &self.whole_six(), before.six.as_ref());
        let whole = before.six_whole.as_ref().map(|takers| self.close_six_whole(takers));
        four.and(six).and(whole.unwrap_or(Ok(())))
    }

    /// Restores the switches of one kind, unless that of the `whole` host is on.
    fn restore_kind(
        &self,
        kind: SwitchFamily,
        whole: &Path,
        before: Option<&BTreeSet<String>>,
    ) -> Result<()> {
        match before {
            Some(before) if !is_set(whole)? => self.close(kind, before),
            _ => Ok(()),
        }
    }

    /// Switches all interfaces but those of `before` off.
    fn close(&self, kind: SwitchFamily, before: &BTreeSet<String>) -> Result<()> {
        let mut closed = Ok(());
        // A switch that cannot be written keeps no other switch on.
        for name in self.with(kind).iter().filter(|name| !before.contains(*name)) {
            closed = closed.and(set(&self.path(kind, name), "0"));
        }
        closed
    }

    /// Switches IPv6 forwarding of the whole host off, and gives the `takers` of router
    /// advertisements their value back.
    fn close_six_whole(&self, takers: &BTreeSet<String>) -> Result<()> {
        let closed = set(&self.whole_six(), "0");
        let restored = takers.iter().map(|name| set(&self.accept_ra(name), "1"));
        restored.fold(closed, |all, one| all.and(one))
    }
}

/// Returns those of `names` whose switch, which `path` gives, is on.
fn all_set(
    names: impl IntoIterator<Item = String>,
    path: impl Fn(&str) -> PathBuf,
) -> Result<BTreeSet<String>> {
    let mut found = BTreeSet::new();
    for name in names {
        if is_set(&path(&name))? {
            found.insert(name);
        }
    }
    Ok(found)
}

/// Returns whether a switch is on. That of an interface that has gone is off.
///
/// # Errors
/// [`Error::Host`] if it cannot be read.
pub(super) fn is_set(path: &Path) -> Result<bool> {
    match fs::read_to_string(path) {
        Ok(value) => Ok(value.trim() == "1"),
        Err(error) if path.exists() => {
            Err(Error::host(format!("cannot read {}", path.display()))(error))
        }
        Err(_) => Ok(false),
    }
}

/// Sets a switch. Does nothing for one whose interface has gone.
///
/// # Errors
/// [`Error::Host`] if it cannot be written.
fn set(path: &Path, value: &str) -> Result<()> {
    let opened = fs::File::options().write(true).truncate(true).open(path);
    match opened.and_then(|mut file| file.write_all(value.as_bytes())) {
        Err(error) if path.exists() => {
            let what = format!("cannot change IP forwarding: {}", path.display());
            Err(Error::host(what)(error))
        }
        _ => Ok(()),
    }
}
