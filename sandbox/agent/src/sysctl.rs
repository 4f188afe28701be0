//! Kernel settings of the sandbox's namespaces.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;

use anyhow::{Context, Result};
use slipway_agent_protocol::sysctl::{check, is_ipc};

/// The directory of all settings.
const SETTINGS: &str = "/proc/sys";

/// Sets settings of this process's namespaces, from the last name to the first: then
/// `ip_unprivileged_port_start` precedes `ip_local_port_range`, which it limits, and `ip_forward`
/// precedes `conf.…`, which it resets (Linux, *networking/ip-sysctl*).
///
/// # Errors
/// A setting is not one of these namespaces, the kernel lacks it, or refuses the value.
pub fn set_all(settings: &BTreeMap<String, String>) -> Result<()> {
    settings.iter().rev().try_for_each(|(name, value)| set(name, value))
}

fn set(name: &str, value: &str) -> Result<()> {
    let path = Path::new(SETTINGS).join(check(name, value)?);
    let written = std::fs::OpenOptions::new()
        .write(true)
        .open(&path)
        .and_then(|mut file| file.write_all(value.as_bytes()));
    written.with_context(|| format!("the kernel setting {name}={value:?}"))
}

/// Returns those settings that a container with an IPC namespace of its own needs there.
pub fn of_ipc(settings: impl IntoIterator<Item = (String, String)>) -> BTreeMap<String, String> {
    settings.into_iter().filter(|(name, _)| is_ipc(name)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_setting_that_the_kernel_lacks_is_named() {
        let error = format!("{:#}", set("net.no_such.setting", "1").unwrap_err());
        assert!(error.contains("net.no_such.setting=\"1\": No such file"), "{error}");
        assert!(set("vm.swappiness", "1").unwrap_err().to_string().contains("leave it out"));
    }
}
