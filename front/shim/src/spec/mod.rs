//! Translates containerd's requests to those of Slipway's daemon.
//!
//! Kernel file systems and namespaces need no translation: a microVM has its own. A wish that
//! cannot be honoured, and that decides what a container can see or reach, is an error: one line
//! with the next step. `docs/containerd.md` lists both, and what is ignored.
//!
//! A new annotation has its name here, in `sizes` if it stands for an amount, in `flags` if it is
//! true or false, or in a module of its own. [`run_spec`] reads it for a container with a sandbox
//! of its own, [`pod_spec`] for a pod, [`member_spec`] for a container of a pod, and
//! [`restored_spec`] if a container that begins with a checkpoint may have another value than the
//! saved one. One that needs the daemon or other tasks is read by `TaskMaker` (`create`), as
//! [`TEMPLATE`] is. It has a row in `docs/containerd.md` and a case in `src/tests/spec.rs`, or in
//! `src/tests/pod.rs` if pods have it; `tests/e2e/75-pods.sh` has pods with annotations.
//! A setting that no field of `RunSpec` stands for yet needs one: the head of `create` in
//! `sandbox/runtime`.
//!
//! The authors of pods write annotations. One that they may use without the node's administrator is
//! in [`ALLOWED`], the default of `SLIPWAY_POD_ANNOTATIONS`, which is also `usual_annotations` of
//! `deploy/kubernetes/node/options.sh`, and in `install.yaml` beside it, `docs/containerd.md` and
//! `docs/kubernetes.md`.

mod confinement;
mod control_group;
mod devices;
mod flags;
pub mod hooks;
mod huge_pages;
mod limits;
mod mounts;
mod namespaces;
mod oci;
mod pod;
mod restored;
mod sandbox;
mod security;
mod sizes;
mod sockets;
mod template;
mod updated;

use std::collections::{BTreeMap, HashMap};
use std::path::{Component, Path, PathBuf};

use slipway_sandbox_api::v1;

use self::flags::{FREE_PAGE_REPORTING, flag};
pub use self::huge_pages::needs_huge_pages;
pub use self::mounts::{
    Container, OPTIONS as MOUNT_OPTIONS, asks_for_sockets, is_small_volume, plain_parts,
    read as read_copy, refused, share, volumes_of_part,
};
pub use self::namespaces::PodNamespaces;
pub use self::oci::{Hook, Mount, Oci};
use self::oci::{Process, Resources};
pub use self::pod::{member_spec, member_update, pod_spec};
pub use self::restored::{check_restored, restored_spec};
pub use self::sandbox::{ALLOWED, MOST_RESOLVER, pod_of_sandbox};
use self::sizes::{CPUS, LAYERS, MAX_CPUS, MAX_MEMORY};
pub use self::sockets::{add_sockets, wants_sockets};
pub use self::template::{AUTO, TEMPLATE, begin_with};
pub use self::updated::updated_limits;
use crate::ttrpc::Failure;

/// The annotation that names one of Slipway's networks, or "none".
const NETWORK: &str = "dev.slipway.network";
/// The label with containerd's namespace.
const LABEL_NAMESPACE: &str = "dev.slipway.containerd.namespace";
/// The label with the container's id.
const LABEL_ID: &str = "dev.slipway.containerd.id";
/// The annotations with the name of a pod and of its namespace.
const POD_NAME: &str = "io.kubernetes.cri.sandbox-name";
const POD_NAMESPACE: &str = "io.kubernetes.cri.sandbox-namespace";
/// Annotations of containerd's with Kubernetes' names of a pod or a container, and the labels for
/// them.
const KUBERNETES: [(&str, &str); 3] = [
    (POD_NAMESPACE, "io.kubernetes.pod.namespace"),
    (POD_NAME, "io.kubernetes.pod.name"),
    ("io.kubernetes.cri.container-name", "io.kubernetes.container.name"),
];

/// Returns the labels by which a sandbox or a container tells whose it is.
pub fn labels(
    namespace: &str,
    id: &str,
    annotations: &BTreeMap<String, String>,
) -> HashMap<String, String> {
    let containerd = [(LABEL_NAMESPACE, namespace), (LABEL_ID, id)];
    let kubernetes = KUBERNETES
        .into_iter()
        .filter_map(|(key, label)| Some((label, annotations.get(key)?.as_str())));
    let all = containerd.into_iter().chain(kubernetes);
    all.map(|(key, value)| (key.to_owned(), value.to_owned())).collect()
}

/// Translates a container with a sandbox of its own. The caller adds name, image, labels, streams
/// and copies of files.
///
/// # Errors
/// One line that names what cannot be honoured, and says what to do.
pub fn run_spec(oci: &Oci, container: Container<'_>) -> Result<v1::RunSpec, String> {
    namespaces::check(&oci.linux)?;
    hooks::check(oci)?;
    Ok(v1::RunSpec {
        hostname: oci.hostname.clone(),
        memory_bytes: sizes::memory(oci)?,
        cpus: sizes::number(&oci.annotations, CPUS)?
            .unwrap_or_else(|| sizes::cpus(&oci.linux.resources)),
        max_cpus: sizes::number(&oci.annotations, MAX_CPUS)?.unwrap_or(0),
        max_memory_bytes: sizes::annotated_memory(&oci.annotations, MAX_MEMORY)?.unwrap_or(0),
        layers_bytes: sizes::annotated_memory(&oci.annotations, LAYERS)?.unwrap_or(0),
        free_page_reporting: flag(&oci.annotations, FREE_PAGE_REPORTING)?,
        network: oci.annotations.get(NETWORK).cloned().unwrap_or_default(),
        resources: limits::of_own(&oci.linux.resources)?,
        placement: sizes::placement(&oci.linux.resources),
        ..process_spec(oci, container)?
    })
}

/// Translates a container's first process, and what it sees of files and devices.
fn process_spec(oci: &Oci, container: Container<'_>) -> Result<v1::RunSpec, String> {
    let privileged = security::is_privileged(oci);
    let mounts::Plan { shares, functions, .. } = mounts::plan(&oci.mounts, container)?;
    let volumes = devices::volumes(&oci.linux, privileged)?;
    check_rest(oci)?;
    let process = &oci.process;
    let (entrypoint, command) = command(&process.args)?;
    let size = process.console_size.as_ref();
    Ok(v1::RunSpec {
        entrypoint: Some(entrypoint),
        command,
        env: process.env.clone(),
        cwd: process.cwd.clone(),
        user: user(process),
        rows: size.map_or(0, |size| size.height),
        columns: size.map_or(0, |size| size.width),
        privileged,
        read_only: oci.root.readonly,
        shares,
        functions,
        volumes,
        limits: process.rlimits.iter().map(limit).collect(),
        oom_score_adj: process.oom_score_adj,
        security: Some(security::of_container(oci)?),
        ..v1::RunSpec::default()
    })
}

/// Returns the mounts whose files a container gets copies of.
///
/// # Errors
/// One line that names a mount that a microVM cannot have.
pub fn copied(mounts: &[Mount], container: Container<'_>) -> Result<Vec<Mount>, String> {
    Ok(mounts::plan(mounts, container)?.copies.into_iter().cloned().collect())
}

/// Returns the path of the host's file for the termination message of a container of a pod.
pub fn message_file(mounts: &[Mount]) -> Option<PathBuf> {
    mounts::message(mounts).map(|mount| PathBuf::from(&mount.source))
}

/// Translates a further process. The caller adds the sandbox's name and the streams.
///
/// # Errors
/// One line: it is not understood, or cannot be honoured.
pub fn exec_spec(json: &[u8]) -> Result<v1::ExecSpec, String> {
    let process: Process =
        serde_json::from_slice(json).map_err(|error| format!("the process: {error}"))?;
    command(&process.args)?;
    confinement::check_process(&process)?;
    let size = process.console_size.as_ref();
    Ok(v1::ExecSpec {
        command: process.args.clone(),
        env: process.env.clone(),
        cwd: process.cwd.clone(),
        user: user(&process),
        rows: size.map_or(0, |size| size.height),
        columns: size.map_or(0, |size| size.width),
        security: Some(security::of_process(&process)),
        ..v1::ExecSpec::default()
    })
}

/// A sandbox's new size and CPUs; 0 stands for no change.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Update {
    /// The number of CPUs.
    pub cpus: u32,
    /// The memory, bytes.
    pub memory_bytes: u64,
    /// The CPUs and the memory nodes of the host, if they change.
    pub placement: Option<v1::Placement>,
    /// The other limits of the sandbox's own container.
    pub resources: Option<v1::Resources>,
}

/// Translates an update of a sandbox's resources.
///
/// # Errors
/// It asks for something else, or names a file of a control group that cannot be set.
pub fn update(json: &[u8]) -> Result<Update, Failure> {
    let asked = resources(json)?;
    huge_pages::check(&asked).map_err(Failure::invalid)?;
    let resources = limits::of_own(&asked).map_err(Failure::invalid)?;
    some(Update { resources, ..sizes_of(&asked, sizes::memory_of_limit) })
}

/// Translates an update of a pod as a whole, whose limits are the sums of its containers'.
///
/// # Errors
/// It asks for something else.
pub fn pod_update(json: &[u8]) -> Result<Update, Failure> {
    some(sizes_of(&resources(json)?, pod::memory_of_limit))
}

fn resources(json: &[u8]) -> Result<Resources, Failure> {
    let read = serde_json::from_slice(json);
    read.map_err(|error| Failure::invalid(format!("the resources: {error}")))
}

/// Returns the changes of a sandbox's machine and of where it runs.
fn sizes_of(asked: &Resources, memory_of: fn(&Resources) -> u64) -> Update {
    Update {
        cpus: sizes::cpus_of_limit(asked),
        memory_bytes: memory_of(asked),
        placement: sizes::placement(asked),
        resources: None,
    }
}

/// Refuses an update that changes nothing that can be changed.
fn some(update: Update) -> Result<Update, Failure> {
    if update == Update::default() {
        let what = "an update of anything but CPU sets and limits of CPU, memory and processes";
        return Err(Failure::unimplemented(what));
    }
    Ok(update)
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

fn check_rest(oci: &Oci) -> Result<(), String> {
    control_group::check(&oci.linux.cgroups_path)?;
    huge_pages::check(&oci.linux.resources)?;
    confinement::check(oci)
}

/// Returns whether a path is absolute and leads nowhere up.
pub fn is_plain_path(path: &Path) -> bool {
    path.is_absolute() && !path.components().any(|part| part == Component::ParentDir)
}

#[cfg(test)]
#[path = "../tests/spec.rs"]
mod tests;
