//! Pods of containerd's Sandbox API. Nobody writes a configuration of such a pod's sandbox. This
//! module makes the one that containerd's CRI plugin writes for a pause container of the same pod,
//! so that the pod has the same microVM either way.

use std::collections::BTreeMap;

use prost::Message;

use super::oci::{Linux, Namespace, Oci};
use super::pod::{POD_MEMORY, POD_PERIOD, POD_QUOTA, POD_SHARES};
use super::{POD_NAME, POD_NAMESPACE};
use crate::containerd::{self as cd, NamespaceMode};
use crate::role::{KINDS, PODS};

/// The name of the message with a pod's configuration.
const CONFIG: &str = "runtime.v1.PodSandboxConfig";
/// The beginning of the names of Slipway's annotations.
const OWN: &str = "dev.slipway.";
/// The annotations that count on a node which does not say so, as [`pod_of_sandbox`] takes them:
/// those that give a pod no more than its limits.
pub const ALLOWED: &str = "dev.slipway.template,dev.slipway.empty-dir";
/// The kernel settings of a pod that does not name them, as of containerd's own defaults.
const SYSCTLS: [(&str, &str); 2] =
    [("net.ipv4.ip_unprivileged_port_start", "0"), ("net.ipv4.ping_group_range", "0 2147483647")];
/// The size of the largest `/etc/resolv.conf` of a pod, bytes.
pub const MOST_RESOLVER: usize = 64 << 10;

/// A pod that containerd's Sandbox API asks for.
#[derive(Debug)]
pub struct SandboxPod {
    /// The configuration of its sandbox.
    pub oci: Oci,
    /// The content of `/etc/resolv.conf` of its containers; `None` stands for the host's.
    pub resolver: Option<String>,
}

/// Translates the creation of a sandbox. `allowed` are the annotations of the pod that count, as
/// names with commas between them; a name that ends with `*` stands for all that begin so. Others
/// than Slipway's never count: containerd hands over all that the pod's author has written.
///
/// # Errors
/// One line: the request has other options than a pod's configuration, or a root.
pub fn pod_of_sandbox(
    request: &cd::CreateSandboxRequest,
    allowed: &str,
) -> Result<SandboxPod, String> {
    if !request.rootfs.is_empty() {
        return Err("a sandbox has no root of its own: create it without mounts".to_owned());
    }
    let config = config(request.options.as_ref())?;
    let resolver = config.dns_config.as_ref().map(resolver);
    if resolver.as_ref().is_some_and(|text| text.len() > MOST_RESOLVER) {
        return Err("the pod's DNS settings are larger than 64 KiB: leave some out".to_owned());
    }
    let id = request.sandbox_id.as_str();
    let mut annotations = annotations(id, &config, allowed);
    let linux = config.linux.unwrap_or_default();
    annotations.extend(limits(&linux));
    let oci = Oci {
        hostname: config.hostname,
        annotations,
        linux: Linux {
            namespaces: namespaces(&linux, &request.netns_path),
            cgroups_path: cgroup_path(&linux.cgroup_parent, id),
            sysctl: sysctls(&linux),
            ..Linux::default()
        },
        ..Oci::default()
    };
    Ok(SandboxPod { oci, resolver })
}

fn config(options: Option<&cd::Any>) -> Result<cd::PodSandboxConfig, String> {
    let name = options.map_or("", |any| any.type_url.rsplit('/').next().unwrap_or_default());
    let Some(any) = options.filter(|_| name == CONFIG) else {
        return Err(format!(
            "the sandbox's options are {name:?}, and not {CONFIG}: only pods of containerd's CRI \
             plugin are sandboxes"
        ));
    };
    cd::PodSandboxConfig::decode(any.value.as_slice())
        .map_err(|error| format!("the sandbox's options are no {CONFIG}: {error}"))
}

/// Returns the annotations of the pod's author that count, and those by which containerd tells
/// which pod it is.
fn annotations(id: &str, config: &cd::PodSandboxConfig, allowed: &str) -> BTreeMap<String, String> {
    let authors = config.annotations.iter().filter(|(key, _)| is_allowed(key, allowed));
    let mut all: BTreeMap<_, _> =
        authors.map(|(key, value)| (key.clone(), value.clone())).collect();
    all.insert(KINDS[0].to_owned(), "sandbox".to_owned());
    all.insert(PODS[0].to_owned(), id.to_owned());
    if let Some(metadata) = &config.metadata {
        all.insert(POD_NAME.to_owned(), metadata.name.clone());
        all.insert(POD_NAMESPACE.to_owned(), metadata.namespace.clone());
    }
    all
}

fn is_allowed(key: &str, allowed: &str) -> bool {
    let fits = |pattern: &str| match pattern.strip_suffix('*') {
        Some(beginning) => key.starts_with(beginning),
        None => key == pattern,
    };
    key.starts_with(OWN) && allowed.split(',').map(str::trim).any(fits)
}

/// Returns the annotations by which containerd tells the sums of the containers' limits.
fn limits(linux: &cd::LinuxPodSandboxConfig) -> Vec<(String, String)> {
    let Some(sums) = &linux.resources else { return Vec::new() };
    let sums = [
        (POD_PERIOD, sums.cpu_period),
        (POD_QUOTA, sums.cpu_quota),
        (POD_SHARES, sums.cpu_shares),
        (POD_MEMORY, sums.memory_limit_in_bytes),
    ];
    sums.into_iter().map(|(key, sum)| (key.to_owned(), sum.to_string())).collect()
}

/// Returns the pod's namespaces. Namespaces of the host are left out, as in a container's
/// configuration.
fn namespaces(linux: &cd::LinuxPodSandboxConfig, network: &str) -> Vec<Namespace> {
    let namespace = |kind: &str, path: &str| Namespace { kind: kind.into(), path: path.into() };
    let options = linux.security_context.as_ref().and_then(|one| one.namespace_options.as_ref());
    let Some(options) = options else {
        return vec![namespace("network", network), namespace("pid", ""), namespace("ipc", "")];
    };
    let kinds = [
        ("network", network, options.network()),
        ("pid", "", options.pid()),
        ("ipc", "", options.ipc()),
    ];
    let own = kinds.into_iter().filter(|(_, _, mode)| *mode != NamespaceMode::Node);
    let mut all: Vec<_> = own.map(|(kind, path, _)| namespace(kind, path)).collect();
    if options.userns_options.as_ref().is_some_and(|user| user.mode() == NamespaceMode::Pod) {
        all.push(namespace("user", ""));
    }
    all
}

/// Returns the control group that a pause container would have.
fn cgroup_path(parent: &str, id: &str) -> String {
    let last = parent.rsplit('/').next().unwrap_or_default();
    match parent {
        "" => String::new(),
        _ if last.ends_with(".slice") => format!("{last}:cri-containerd:{id}"),
        _ => format!("{}/{id}", parent.trim_end_matches('/')),
    }
}

fn sysctls(linux: &cd::LinuxPodSandboxConfig) -> BTreeMap<String, String> {
    let defaults = SYSCTLS.map(|(name, value)| (name.to_owned(), value.to_owned()));
    let asked = linux.sysctls.iter().map(|(name, value)| (name.clone(), value.clone()));
    defaults.into_iter().chain(asked).collect()
}

/// Returns the content of resolv.conf (resolv.conf(5)).
fn resolver(dns: &cd::DnsConfig) -> String {
    let line = |word: &str, values: &[String]| {
        (!values.is_empty()).then(|| format!("{word} {}\n", values.join(" ")))
    };
    let servers = dns.servers.iter().map(|server| format!("nameserver {server}\n"));
    let options = line("options", &dns.options);
    line("search", &dns.searches).into_iter().chain(servers).chain(options).collect()
}

#[cfg(test)]
#[path = "../tests/config.rs"]
mod tests;
