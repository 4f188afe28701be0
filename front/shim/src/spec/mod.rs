//! Translates containerd's requests to those of Slipway's daemon.
//!
//! Kernel file systems, namespaces and masked paths need no translation: a microVM has its own. A
//! wish that cannot be honoured, and that decides what a container can see or reach, is an error:
//! one line with the next step. `docs/containerd.md` lists both, and what is ignored.

mod copies;
mod oci;

use std::collections::{BTreeMap, HashMap};

use slipway_sandbox_api::v1;

pub use self::oci::Oci;
use self::oci::{Capabilities, Linux, Mount, Process, Resources};
use crate::ttrpc::Failure;

/// The annotation that names one of Slipway's networks, or "none".
const NETWORK: &str = "dev.slipway.network";
/// The annotation with a sandbox's memory: bytes, or with a suffix K, M or G of powers of 1024.
const MEMORY: &str = "dev.slipway.memory";
/// The annotation with a sandbox's number of CPUs.
const CPUS: &str = "dev.slipway.cpus";
/// The annotation with the most CPUs that an update can give.
const MAX_CPUS: &str = "dev.slipway.max-cpus";
/// The label with containerd's namespace.
const LABEL_NAMESPACE: &str = "dev.slipway.containerd.namespace";
/// The label with the container's id.
const LABEL_ID: &str = "dev.slipway.containerd.id";
/// The least memory of a sandbox whose container has a limit, bytes: its kernel needs some too.
const LEAST_MEMORY: u64 = 128 << 20;
/// File systems that the agent mounts itself, where it mounts them.
const OWN_MOUNTS: [&str; 8] =
    ["/proc", "/sys", "/dev", "/dev/pts", "/dev/shm", "/dev/mqueue", "/sys/fs/cgroup", "/run"];
/// The capabilities that the agent gives to a container that is not privileged.
const DEFAULT: [&str; 14] = [
    "CAP_AUDIT_WRITE",
    "CAP_CHOWN",
    "CAP_DAC_OVERRIDE",
    "CAP_FOWNER",
    "CAP_FSETID",
    "CAP_KILL",
    "CAP_MKNOD",
    "CAP_NET_BIND_SERVICE",
    "CAP_NET_RAW",
    "CAP_SETFCAP",
    "CAP_SETGID",
    "CAP_SETPCAP",
    "CAP_SETUID",
    "CAP_SYS_CHROOT",
];
/// Capabilities that only a privileged container has together.
const PRIVILEGED: [&str; 4] = ["CAP_SYS_ADMIN", "CAP_SYS_MODULE", "CAP_SYS_RAWIO", "CAP_NET_ADMIN"];

/// Returns the labels by which a sandbox tells whose it is.
pub fn labels(namespace: &str, id: &str) -> HashMap<String, String> {
    [(LABEL_NAMESPACE, namespace), (LABEL_ID, id)]
        .map(|(key, value)| (key.to_owned(), value.to_owned()))
        .into()
}

/// Translates a container. The caller adds name, image, labels, streams and [`files`].
///
/// # Errors
/// One line that names what cannot be honoured, and says what to do.
pub fn run_spec(oci: &Oci) -> Result<v1::RunSpec, String> {
    let privileged = privileged(oci.process.capabilities.as_ref())?;
    check_namespaces(&oci.linux)?;
    oci.mounts.iter().try_for_each(check_mount)?;
    check_rest(oci, privileged)?;
    let process = &oci.process;
    let (entrypoint, command) = command(&process.args)?;
    let size = process.console_size.as_ref();
    Ok(v1::RunSpec {
        entrypoint: Some(entrypoint),
        command,
        env: process.env.clone(),
        cwd: process.cwd.clone(),
        user: user(process),
        hostname: oci.hostname.clone(),
        rows: size.map_or(0, |size| size.height),
        columns: size.map_or(0, |size| size.width),
        memory_bytes: memory(oci)?,
        cpus: number(&oci.annotations, CPUS)?.unwrap_or_else(|| cpus(&oci.linux.resources)),
        max_cpus: number(&oci.annotations, MAX_CPUS)?.unwrap_or(0),
        privileged,
        read_only: oci.root.readonly,
        limits: process.rlimits.iter().map(limit).collect(),
        network: oci.annotations.get(NETWORK).cloned().unwrap_or_default(),
        ..v1::RunSpec::default()
    })
}

/// Reads the host's files that a container with these mounts gets copies of. May wait for a file
/// system of the host.
///
/// # Errors
/// One line that names the file.
pub fn files(mounts: &[Mount]) -> Result<Vec<v1::File>, String> {
    copies::read(mounts)
}

/// Translates a further process. The caller adds the sandbox's name and the streams.
///
/// # Errors
/// One line: it is not understood, or cannot be honoured.
pub fn exec_spec(json: &[u8]) -> Result<v1::ExecSpec, String> {
    let process: Process =
        serde_json::from_slice(json).map_err(|error| format!("the process: {error}"))?;
    let privileged = privileged(process.capabilities.as_ref())?;
    command(&process.args)?;
    let size = process.console_size.as_ref();
    Ok(v1::ExecSpec {
        command: process.args.clone(),
        env: process.env.clone(),
        cwd: process.cwd.clone(),
        user: user(&process),
        rows: size.map_or(0, |size| size.height),
        columns: size.map_or(0, |size| size.width),
        privileged,
        ..v1::ExecSpec::default()
    })
}

/// Translates an update of resources to a number of CPUs.
///
/// # Errors
/// It asks for something else.
pub fn update(json: &[u8]) -> Result<u32, Failure> {
    let resources: Resources =
        serde_json::from_slice(json).map_err(|error| format!("the resources: {error}"))?;
    if resources.memory.as_ref().and_then(|memory| memory.limit).is_some_and(|limit| limit > 0) {
        return Err(Failure::unimplemented("a change of a running container's memory"));
    }
    match cpus(&resources) {
        0 => Err(Failure::unimplemented("an update of anything but the CPU limit")),
        cpus => Ok(cpus),
    }
}

/// Parts a command line. The entrypoint replaces the image's, so the arguments are exactly these.
fn command(args: &[String]) -> Result<(String, Vec<String>), String> {
    match args.split_first() {
        Some((program, rest)) if !program.is_empty() => Ok((program.clone(), rest.to_vec())),
        _ => Err("the container's configuration names no program to run".to_owned()),
    }
}

fn user(process: &Process) -> String {
    format!("{}:{}", process.user.uid, process.user.gid)
}

fn limit(limit: &oci::Rlimit) -> v1::Limit {
    let name = limit.kind.strip_prefix("RLIMIT_").unwrap_or(&limit.kind).to_ascii_lowercase();
    v1::Limit { name, soft: limit.soft, hard: limit.hard }
}

/// Returns whether a container is privileged: it has the capabilities of one. Fewer capabilities
/// than usual are the usual ones; single ones beside them cannot be had.
fn privileged(asked: Option<&Capabilities>) -> Result<bool, String> {
    let Some(asked) = asked else { return Ok(false) };
    let has = |name: &str| asked.bounding.iter().any(|one| one == name);
    if PRIVILEGED.iter().all(|name| has(name)) {
        return Ok(true);
    }
    match asked.bounding.iter().find(|name| !DEFAULT.contains(&name.as_str())) {
        None => Ok(false),
        Some(name) => Err(format!(
            "{name} cannot be added alone: leave it out, or run the container privileged, which \
             in a microVM concerns its own kernel only"
        )),
    }
}

fn check_namespaces(linux: &Linux) -> Result<(), String> {
    let find = |kind: &str| linux.namespaces.iter().find(|one| one.kind == kind);
    if find("network").is_none() {
        return Err(
            "the host's network cannot be a microVM's: leave out host networking (`--net-host`); \
             the annotation dev.slipway.network names a network"
                .to_owned(),
        );
    }
    for kind in ["pid", "ipc"] {
        if find(kind).is_none() {
            return Err(format!("the host's {kind} namespace cannot be a microVM's: leave it out"));
        }
    }
    if let Some(named) = linux.namespaces.iter().find(|one| !one.path.is_empty()) {
        return Err(format!(
            "a microVM cannot join the {} namespace {}: leave it out{}",
            named.kind,
            named.path,
            match named.kind.as_str() {
                "network" => "; the annotation dev.slipway.network names a network of Slipway's",
                _ => "",
            }
        ));
    }
    if find("user").is_some() {
        return Err("user namespaces are not supported: a microVM has a kernel of its own, so \
                    leave out the mapping of ids"
            .to_owned());
    }
    Ok(())
}

fn check_mount(mount: &Mount) -> Result<(), String> {
    if copies::is_bind(mount) {
        return copies::check(mount);
    }
    let Mount { destination, kind, .. } = mount;
    let known = ["proc", "sysfs", "devpts", "mqueue", "cgroup", "cgroup2"].contains(&kind.as_str());
    let own = OWN_MOUNTS.contains(&destination.as_str());
    if own && (known || kind == "tmpfs") {
        return Ok(());
    }
    Err(format!(
        "a file system of type {kind} cannot be mounted at {destination}: leave it out; a \
         container's root is writable and volatile unless it is read-only"
    ))
}

fn check_rest(oci: &Oci, privileged: bool) -> Result<(), String> {
    // A privileged container has its guest's devices in place of the host's.
    if let Some(device) = oci.linux.devices.first().filter(|_| !privileged) {
        return Err(format!(
            "the host's device {} cannot be given to a microVM: leave it out",
            device.path
        ));
    }
    if let Some(name) = oci.linux.sysctl.keys().next() {
        return Err(format!("the kernel setting {name} is not supported: leave it out"));
    }
    let is_set = |hooks: &Option<Vec<_>>| hooks.as_ref().is_some_and(|hooks| !hooks.is_empty());
    if let Some((name, _)) = oci.hooks.iter().find(|(_, hooks)| is_set(hooks)) {
        return Err(format!("{name} hooks are not supported: leave them out"));
    }
    Ok(())
}

fn memory(oci: &Oci) -> Result<u64, String> {
    if let Some(text) = oci.annotations.get(MEMORY) {
        return size(text).ok_or_else(|| {
            format!("the annotation {MEMORY}={text:?} is no size: bytes, or as 512M or 2G")
        });
    }
    let limit = oci.linux.resources.memory.as_ref().and_then(|memory| memory.limit);
    Ok(match limit.and_then(|limit| u64::try_from(limit).ok()) {
        Some(limit @ 1..) => limit.max(LEAST_MEMORY),
        _ => 0,
    })
}

fn size(text: &str) -> Option<u64> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let shift = match text[digits.len()..].to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kib" | "ki" => 10,
        "m" | "mib" | "mi" => 20,
        "g" | "gib" | "gi" => 30,
        _ => return None,
    };
    digits.parse::<u64>().ok()?.checked_mul(1 << shift).filter(|bytes| *bytes > 0)
}

fn number(annotations: &BTreeMap<String, String>, key: &str) -> Result<Option<u32>, String> {
    let Some(text) = annotations.get(key) else { return Ok(None) };
    match text.parse::<u32>() {
        Ok(number @ 1..) => Ok(Some(number)),
        _ => Err(format!("the annotation {key}={text:?} is no number of CPUs")),
    }
}

/// Returns the CPUs that a quota or a set stands for, or 0 if there is neither.
fn cpus(resources: &Resources) -> u32 {
    let Some(cpu) = &resources.cpu else { return 0 };
    /// The period of a quota that names none, microseconds.
    const PERIOD: u64 = 100_000;
    let period = cpu.period.filter(|period| *period > 0).unwrap_or(PERIOD);
    let quota = cpu.quota.and_then(|quota| u64::try_from(quota).ok()).unwrap_or(0);
    let asked = if quota > 0 { quota.div_ceil(period) } else { set_size(&cpu.cpus) };
    u32::try_from(asked).unwrap_or(u32::MAX)
}

/// Returns the size of a set such as "0-3,5". What is no set counts as nothing.
fn set_size(text: &str) -> u64 {
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (first.trim().parse::<u32>().ok()?, last.trim().parse::<u32>().ok()?);
        Some(u64::from(last).checked_sub(u64::from(first))? + 1)
    };
    text.split(',').filter_map(range).fold(0, u64::saturating_add)
}

#[cfg(test)]
#[path = "../tests/spec.rs"]
mod tests;
