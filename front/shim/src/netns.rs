//! The network namespace of a container whose hooks give it its network.
//!
//! nerdctl has plugins of CNI make a container's interface in a hook, which finds the namespace by
//! the process that stands for the container, as `/proc/PID/ns/net`. The VMM does not run then, and
//! the shim's process may be killed. So a process without other work has the namespace,
//! `slipway-shim-network`. It ends when nobody can write to its standard input any more. The shim
//! can, and its [`holder`](crate::hold).

use std::collections::BTreeSet;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::process::Stdio;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use slipway_sandbox_api::v1;
use tokio::io::AsyncReadExt;
use tokio::process::Command;

use crate::hold::{KeptDescriptor, THIS};
use crate::network;
use crate::store::{RestartStore, Store, name};

/// The name of the process.
const NAME: &str = "slipway-shim-network";
/// The kind of the files with process ids, and of pipes among the holder's descriptors.
const KIND: &str = "network";
/// The longest time that the process may take to make its namespace.
const PATIENCE: Duration = Duration::from_secs(30);
/// The setting for no network.
const NONE: &str = "none";

/// The network namespace of a container. Its process ends when this value is dropped, and the
/// namespace when nobody else has it either.
pub struct Network {
    pid: u32,
    /// The end for writing of the process's standard input.
    lifeline: KeptDescriptor,
    /// The interfaces that the kernel has put into it.
    kernels: BTreeSet<String>,
}

impl Network {
    /// Makes a namespace without interfaces but those of the kernel.
    ///
    /// # Errors
    /// One line: no process, or no namespace is left.
    pub async fn make() -> Result<Self, String> {
        let failed = |why: &str| format!("no network namespace for the container's hooks: {why}");
        let (stdin, lifeline) = io::pipe().map_err(|error| failed(&error.to_string()))?;
        let mut command = Command::new(THIS);
        command.arg0(NAME).arg("network").current_dir("/").stdin(Stdio::from(stdin));
        command.stdout(Stdio::piped()).stderr(Stdio::null());
        // tokio reaps it.
        let mut child = command.spawn().map_err(|error| failed(&error.to_string()))?;
        let made = match child.stdout.take() {
            Some(mut stdout) => tokio::time::timeout(PATIENCE, stdout.read_u8()).await,
            None => return Err(failed("its process has no output")),
        };
        let (Ok(Ok(_)), Some(pid)) = (made, child.id()) else {
            return Err(failed("its process did not make one"));
        };
        let lifeline = KeptDescriptor::alone(OwnedFd::from(lifeline));
        Ok(Self { pid, lifeline, kernels: interfaces(pid) })
    }

    /// Returns the namespace that an earlier serving process has made for the container `id`.
    pub fn left(keep: &RestartStore, id: &str) -> Option<Self> {
        let name = name(KIND, &[id]);
        let pid = keep.store.get_json(&name)?;
        let lifeline = keep.holder.as_ref()?.take(&name)?;
        Some(Self { pid, lifeline, kernels: BTreeSet::new() })
    }

    /// Keeps it from here on for the next serving process, as that of the container `id`.
    pub fn keep_in(&mut self, keep: &RestartStore, id: &str) {
        let name = name(KIND, &[id]);
        keep.store.put_json(&name, &self.pid);
        if let (Some(holder), Ok(copy)) = (&keep.holder, self.lifeline.copy()) {
            self.lifeline = holder.put(name, copy.into());
        }
    }

    /// Removes what was kept of the container `id`.
    pub fn forget(store: &Store, id: &str) {
        store.remove(&name(KIND, &[id]));
    }

    /// Returns the process that has the namespace.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Has a sandbox have the interface that the hooks have made, or no network if they have made
    /// none, unless its configuration names a network.
    pub fn give(&self, run: &mut v1::RunSpec) {
        if !run.network.is_empty() {
            return;
        }
        match interfaces(self.pid).is_subset(&self.kernels) {
            true => run.network = NONE.to_owned(),
            false => run.network_namespace = format!("/proc/{}/ns/net", self.pid),
        }
    }
}

/// The place of a container's namespace, if it has one.
#[derive(Default)]
pub struct HookNetwork(Mutex<Option<Network>>);

impl HookNetwork {
    /// Puts a namespace there, if there is one.
    pub fn fill(&self, network: Option<Network>) {
        *self.lock() = network;
    }

    /// Keeps the namespace for the next serving process, as that of the container `id`.
    pub fn keep_in(&self, keep: &RestartStore, id: &str) {
        if let Some(network) = &mut *self.lock() {
            network.keep_in(keep, id);
        }
    }

    /// Returns the process that has the namespace.
    pub fn pid(&self) -> Option<u32> {
        self.lock().as_ref().map(Network::pid)
    }

    /// Lets the namespace go, and removes what was kept of the container `id`.
    pub fn clear(&self, store: &Store, id: &str) {
        if self.lock().take().is_some() {
            Network::forget(store, id);
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<Network>> {
        // The value is valid after any panic: it is replaced whole.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the names of the interfaces in the network namespace of a process (proc_pid_net(5)).
fn interfaces(pid: u32) -> BTreeSet<String> {
    let table = std::fs::read_to_string(format!("/proc/{pid}/net/dev")).unwrap_or_default();
    names(&table)
}

/// Returns the names in a table of interfaces, which begins with two lines of titles.
fn names(table: &str) -> BTreeSet<String> {
    let lines = table.lines().skip(2).filter_map(|line| line.split_once(':'));
    lines.map(|(name, _)| name.trim().to_owned()).collect()
}

/// Runs the process that has a namespace: makes it, prints a byte, and waits for the end of
/// standard input.
///
/// # Errors
/// One line: there is no right to make one, or none is left.
pub fn hold() -> Result<(), String> {
    // Signals to a group or a terminal are not for it.
    let _ = rustix::process::setsid();
    let _ = rustix::thread::set_name(c"slipway-network");
    network::leave_host()?;
    let failed = |error: io::Error| error.to_string();
    io::stdout().write_all(b"\n").and_then(|()| io::stdout().flush()).map_err(failed)?;
    let mut byte = [0; 1];
    while io::stdin().read(&mut byte).map_err(failed)? > 0 {}
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interfaces_are_named_by_the_kernels_table() {
        let table = "Inter-|   Receive      |  Transmit\n face |bytes    |bytes\n    \
                     lo:       0       0\nveth0:1 2\n";
        assert_eq!(names(table), ["lo".to_owned(), "veth0".to_owned()].into());
        assert!(names("").is_empty());
        assert!(interfaces(std::process::id()).contains("lo"));
    }

    fn network(kernels: &BTreeSet<String>) -> Network {
        let (_, lifeline) = io::pipe().unwrap();
        let lifeline = KeptDescriptor::alone(lifeline.into());
        Network { pid: std::process::id(), lifeline, kernels: kernels.clone() }
    }

    #[test]
    fn a_sandbox_has_what_the_hooks_have_made() {
        let (own, mut run) = (interfaces(std::process::id()), v1::RunSpec::default());
        network(&BTreeSet::new()).give(&mut run);
        let path = format!("/proc/{}/ns/net", std::process::id());
        assert_eq!((run.network.as_str(), &run.network_namespace), ("", &path));
        let mut run = v1::RunSpec::default();
        network(&own).give(&mut run);
        assert_eq!((run.network.as_str(), run.network_namespace.as_str()), (NONE, ""));
        let mut run = v1::RunSpec { network: "lab".into(), ..Default::default() };
        network(&BTreeSet::new()).give(&mut run);
        assert_eq!((run.network.as_str(), run.network_namespace.as_str()), ("lab", ""));
    }
}
