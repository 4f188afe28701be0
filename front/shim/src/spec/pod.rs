//! Pods: the translation of a pod's sandbox, and of the containers in it.

use slipway_sandbox_api::v1;

use super::flags::{FREE_PAGE_REPORTING, flag};
use super::mounts::Container;
use super::namespaces::PodNamespaces;
use super::oci::{Oci, Resources};
use super::sizes::{self, CPUS, LAYERS, MAX_CPUS, MAX_MEMORY, MEMORY};
use super::{
    NETWORK, check_rest, control_group, hooks, huge_pages, limits, mounts, namespaces, process_spec,
};

/// The annotation with the sum of the limits of memory of a pod's containers, bytes.
pub const POD_MEMORY: &str = "io.kubernetes.cri.sandbox-memory";
/// The annotations with the sums of the containers' CPU quotas, their period, and their shares.
pub const POD_QUOTA: &str = "io.kubernetes.cri.sandbox-cpu-quota";
pub const POD_PERIOD: &str = "io.kubernetes.cri.sandbox-cpu-period";
pub const POD_SHARES: &str = "io.kubernetes.cri.sandbox-cpu-shares";
/// The memory that a pod has beyond its containers', for the guest's kernel and agent, bytes.
const OVERHEAD: u64 = 128 << 20;
/// The CPU shares that stand for one CPU.
const SHARES: u32 = 1024;

/// Translates a pod's sandbox: it has no process, so only its size, network and name count. The
/// caller adds name and labels. `node` has the defaults of the node, and `default_group` is the
/// control group that containerd names for a pod without a parent.
///
/// # Errors
/// One line that names what cannot be honoured, and says what to do.
pub fn pod_spec(
    oci: &Oci,
    node: &v1::StatusReply,
    default_group: &str,
) -> Result<v1::RunSpec, String> {
    let network_namespace = namespaces::of_pod(&oci.linux)?;
    let network = oci.annotations.get(NETWORK).cloned().unwrap_or_default();
    if !network.is_empty() && !network_namespace.is_empty() {
        return Err(format!(
            "the pod has the network namespace {network_namespace}, and the annotation \
             {NETWORK}={network:?} too: leave out one of them"
        ));
    }
    check_rest(oci)?;
    hooks::refuse(oci)?;
    let control_group = match node.places_pods {
        true => control_group::of_pod(&oci.linux.cgroups_path, default_group)?,
        false => String::new(),
    };
    // kubelet's limit of a pod's group is that of its containers and 160 MiB (the RuntimeClass's
    // overhead): 128 MiB for the guest, and 32 MiB for the VMM. A larger guest would exceed it.
    let (memory_bytes, least_memory_bytes) = match control_group.is_empty() {
        true => (memory(oci, node.memory_bytes)?, 0),
        false => (memory(oci, 0)?, memory(oci, node.memory_bytes)?),
    };
    Ok(v1::RunSpec {
        makes_pod: true,
        hostname: oci.hostname.clone(),
        memory_bytes,
        least_memory_bytes,
        cpus: cpus(oci, node.cpus)?,
        max_cpus: sizes::number(&oci.annotations, MAX_CPUS)?.unwrap_or(0),
        max_memory_bytes: sizes::annotated_memory(&oci.annotations, MAX_MEMORY)?.unwrap_or(0),
        layers_bytes: sizes::annotated_memory(&oci.annotations, LAYERS)?.unwrap_or(0),
        free_page_reporting: flag(&oci.annotations, FREE_PAGE_REPORTING)?,
        network,
        network_namespace,
        control_group,
        security: security(oci),
        ..v1::RunSpec::default()
    })
}

/// Translates a container of a pod. The caller adds the names, image, labels, streams and files.
///
/// # Errors
/// One line that names what cannot be honoured, and says what to do.
pub fn member_spec(
    oci: &Oci,
    container: Container<'_>,
    pod: PodNamespaces<'_>,
) -> Result<v1::RunSpec, String> {
    if let Some(name) = oci.linux.sysctl.keys().next() {
        return Err(format!("the kernel setting {name} is the pod's: set it there"));
    }
    hooks::refuse(oci)?;
    let message = mounts::message(&oci.mounts).map(|mount| mount.destination.clone());
    Ok(v1::RunSpec {
        termination_message_path: message.unwrap_or_default(),
        shares_processes: namespaces::of_member(&oci.linux, pod)?,
        resources: Some(limits::of_member(&oci.linux.resources)?),
        placement: sizes::placement(&oci.linux.resources),
        ..process_spec(oci, container)?
    })
}

/// Translates an update of a container of a pod: its limits, and its CPUs of the host if they
/// change. Limits that it does not name, and those that no guest keeps, are 0: no change.
///
/// # Errors
/// One line: it is not understood, or names a file of a control group that cannot be set.
pub fn member_update(json: &[u8]) -> Result<(v1::Resources, Option<v1::Placement>), String> {
    let asked: Resources =
        serde_json::from_slice(json).map_err(|error| format!("the resources: {error}"))?;
    huge_pages::check(&asked)?;
    Ok((limits::of_member(&asked)?, sizes::placement(&asked)))
}

/// Returns the kernel settings of a pod.
fn security(oci: &Oci) -> Option<v1::Security> {
    let sysctls = &oci.linux.sysctl;
    let copied = || sysctls.iter().map(|(name, value)| (name.clone(), value.clone())).collect();
    (!sysctls.is_empty()).then(|| v1::Security { sysctls: copied(), ..v1::Security::default() })
}

/// Returns the memory of a pod whose containers have such a limit together, bytes; 0 if there is
/// none.
pub(super) fn memory_of_limit(resources: &Resources) -> u64 {
    sizes::memory_limit(resources).map_or(0, |limit| limit.saturating_add(OVERHEAD))
}

/// Returns a pod's memory, bytes: what its containers may use and [`OVERHEAD`], and at least
/// `least`. 0 stands for that of any sandbox of the node.
fn memory(oci: &Oci, least: u64) -> Result<u64, String> {
    if let Some(bytes) = sizes::annotated_memory(&oci.annotations, MEMORY)? {
        return Ok(bytes);
    }
    let annotated = u64::try_from(integer(oci, POD_MEMORY)?).ok().filter(|bytes| *bytes > 0);
    let limit = annotated.or_else(|| sizes::memory_limit(&oci.linux.resources));
    Ok(limit.map_or(0, |limit| limit.saturating_add(OVERHEAD).max(least)))
}

/// Returns a pod's CPUs: what the quota of its containers stands for. Containers without a quota
/// have shares, for which a pod has at least as many CPUs as any sandbox of the node. 0 stands for
/// that number.
fn cpus(oci: &Oci, least: u32) -> Result<u32, String> {
    if let Some(number) = sizes::number(&oci.annotations, CPUS)? {
        return Ok(number);
    }
    let period = u64::try_from(integer(oci, POD_PERIOD)?).unwrap_or(0);
    let quota = sizes::cpus_of_quota(integer(oci, POD_QUOTA)?, period);
    let shares = u32::try_from(integer(oci, POD_SHARES)?.max(0)).unwrap_or(u32::MAX);
    let limit = if quota > 0 { quota } else { sizes::cpus(&oci.linux.resources) };
    Ok(match (limit, shares.div_ceil(SHARES)) {
        (0, 0) => 0,
        (0, shares) => shares.max(least),
        (limit, _) => limit,
    })
}

/// Returns the number in an annotation, or 0 without it.
fn integer(oci: &Oci, key: &str) -> Result<i64, String> {
    let Some(text) = oci.annotations.get(key) else { return Ok(0) };
    text.parse().map_err(|_| format!("the annotation {key}={text:?} is no number"))
}

#[cfg(test)]
#[path = "../tests/pod.rs"]
mod tests;
