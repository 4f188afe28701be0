//! The rights of a container's processes: capabilities, groups, paths of the kernel, kernel
//! settings, and system calls. What the configuration leaves out has runc's meaning: no capability,
//! no hidden path, no filter.

use slipway_sandbox_api::v1;

use super::oci::{Capabilities, DeviceRule, Oci, Process};

/// Capabilities that only a privileged container has together.
const PRIVILEGED: [&str; 4] = ["CAP_SYS_ADMIN", "CAP_SYS_MODULE", "CAP_SYS_RAWIO", "CAP_NET_ADMIN"];

/// Returns whether a container is privileged: it has the capabilities of one, and all devices or no
/// hidden and no read-only path. containerd gives a privileged container no rule for devices if the
/// runtime has `privileged_without_host_devices`.
pub(super) fn is_privileged(oci: &Oci) -> bool {
    let Some(capabilities) = &oci.process.capabilities else { return false };
    let has = |name: &str| capabilities.bounding.iter().any(|one| one == name);
    let sees_all = oci.linux.masked_paths.is_empty() && oci.linux.readonly_paths.is_empty();
    let is_open = sees_all || oci.linux.resources.devices.iter().any(is_all);
    PRIVILEGED.iter().all(|name| has(name)) && is_open
}

fn is_all(rule: &DeviceRule) -> bool {
    let any_kind = ["", "a"].contains(&rule.kind.as_str());
    rule.allow && any_kind && rule.major.is_none() && rule.minor.is_none()
}

/// Translates what the processes of a container may do.
///
/// # Errors
/// One line that names what cannot be honoured.
pub(super) fn of_container(oci: &Oci) -> Result<v1::Security, String> {
    let paths = |paths: &[String]| Some(v1::Paths { paths: paths.to_vec() });
    let process = of_process(&oci.process);
    // No rule depends on capabilities here: that is docker's form of profiles.
    let filter = oci.linux.seccomp.as_ref().map(|profile| profile.compile(&[])).transpose();
    Ok(v1::Security {
        capabilities: Some(process.capabilities.unwrap_or_default()),
        masked: paths(&oci.linux.masked_paths),
        read_only: paths(&oci.linux.readonly_paths),
        sysctls: oci.linux.sysctl.clone().into_iter().collect(),
        seccomp: filter.map_err(|error| error.to_string())?.unwrap_or_default(),
        ..process
    })
}

/// Translates what a further process may do. Capabilities that it leaves out, and the filter of
/// system calls, are its container's.
pub(super) fn of_process(process: &Process) -> v1::Security {
    v1::Security {
        groups: process.user.additional_gids.clone(),
        capabilities: process.capabilities.as_ref().map(capabilities),
        no_new_privileges: process.no_new_privileges,
        ..v1::Security::default()
    }
}

/// Translates capabilities. Root's sets follow from the bounding set, and those of other users from
/// the ambient set. An ambient capability that is not permitted and inheritable too is left out, as
/// by runc: the kernel raises none.
fn capabilities(asked: &Capabilities) -> v1::Capabilities {
    let can_be =
        |name: &&String| asked.permitted.contains(name) && asked.inheritable.contains(name);
    v1::Capabilities {
        names: asked.bounding.clone(),
        ambient: asked.ambient.iter().filter(can_be).cloned().collect(),
    }
}
