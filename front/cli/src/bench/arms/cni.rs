//! The CNI plugin `bridge` of containernetworking-plugins, with addresses of its plugin
//! `host-local`, as a container engine calls them (CNI specification 1.0.0, sections 2 and 3).

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::{Context, Result, ensure};
use serde_json::json;

use crate::bench::scratch::Scratch;
use crate::bench::vm::Namespace;

/// Where distributions and the plugins' own archives install plugins, unless CNI_PATH names places.
const PLACES: &str = "/usr/lib/cni:/opt/cni/bin";
/// The container of the trial, whose number no sandbox has.
const TRIAL: u32 = u32::MAX;

/// An operation of a plugin.
#[derive(Clone, Copy, Debug)]
pub enum Operation {
    /// Make the interface of a container.
    Add,
    /// Remove it, and give its address back.
    Del,
}

/// The plugin, which makes a veth pair for a container and puts the other end into a bridge.
pub struct BridgePlugin {
    /// The folder with the plugins.
    folder: PathBuf,
    /// The files of `host-local`.
    addresses: Scratch,
}

impl BridgePlugin {
    /// Finds the plugin, and has it make and remove an interface.
    ///
    /// # Errors
    /// A plugin is not installed, or does not work on this host.
    pub fn find() -> Result<Self> {
        let places = std::env::var("CNI_PATH").unwrap_or_else(|_| PLACES.to_owned());
        let has_both = |folder: &PathBuf| {
            ["bridge", "host-local"].iter().all(|name| folder.join(name).is_file())
        };
        let folder = std::env::split_paths(&places).find(has_both).with_context(|| {
            format!("bridge and host-local of containernetworking-plugins are not in {places}")
        })?;
        let plugin = Self { folder, addresses: Scratch::make_in(&std::env::temp_dir())? };
        let (hub, container) = (Namespace::make()?, Namespace::make()?);
        plugin.call(&hub, Operation::Add, TRIAL, container.path())?;
        plugin.call(&hub, Operation::Del, TRIAL, container.path())?;
        Ok(plugin)
    }

    /// Makes or removes the interface of a container in the network namespace at `path`. The bridge
    /// is in `hub`, where the first call makes it.
    ///
    /// # Errors
    /// The plugin's own words.
    pub fn call(
        &self,
        hub: &Namespace,
        operation: Operation,
        number: u32,
        path: &str,
    ) -> Result<()> {
        let mut command = hub.command(&self.folder.join("bridge").to_string_lossy());
        let word = match operation {
            Operation::Add => "ADD",
            Operation::Del => "DEL",
        };
        command.env("CNI_COMMAND", word).env("CNI_CONTAINERID", format!("bench-{number}"));
        command.env("CNI_NETNS", path).env("CNI_IFNAME", "eth0").env("CNI_PATH", &self.folder);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().context("the plugin bridge")?;
        let network = network(self.addresses.path()).to_string();
        // It fits a pipe, so that this does not wait for what the plugin writes.
        let written = child.stdin.take().map(|mut input| input.write_all(network.as_bytes()));
        let ended = child.wait_with_output().context("the plugin bridge")?;
        ensure!(ended.status.success(), "bridge, {word}: {}", words(&ended.stdout, &ended.stderr));
        written.transpose().context("the plugin bridge")?;
        Ok(())
    }
}

/// Returns the configuration of the network. It has no way out, and so no masquerading.
fn network(addresses: &Path) -> serde_json::Value {
    json!({
        "cniVersion": "0.4.0",
        "name": "slipway-bench",
        "type": "bridge",
        "bridge": "cni0",
        "isDefaultGateway": true,
        "ipMasq": false,
        "ipam": {
            "type": "host-local",
            "dataDir": addresses,
            "ranges": [[{"subnet": "10.88.0.0/16"}]],
        },
    })
}

/// Returns what a plugin said of its failure: the message of its answer, or what it complained.
fn words(answer: &[u8], complaint: &[u8]) -> String {
    let answer: serde_json::Value = serde_json::from_slice(answer).unwrap_or_default();
    match answer["msg"].as_str() {
        Some(message) => message.to_owned(),
        None => String::from_utf8_lossy(complaint).trim().to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_kept_in_the_given_folder() {
        let network = network(Path::new("/tmp/one"));
        assert_eq!(network["ipam"]["dataDir"], "/tmp/one");
        assert_eq!(
            (&network["type"], &network["ipam"]["type"]),
            (&json!("bridge"), &json!("host-local"))
        );
    }

    #[test]
    fn a_failure_is_told_in_the_plugins_words() {
        assert_eq!(words(br#"{"code": 11, "msg": "no addresses"}"#, b"x"), "no addresses");
        assert_eq!(words(b"", b"nsenter: failed\n"), "nsenter: failed");
    }
}
