//! The fields of the OCI runtime specification that the shim uses. Others are ignored: what they
//! ask for is either the agent's own affair or checked in [`super`].
//!
//! A new field is in one of the structures below. What becomes of it is decided where its kind is:
//! a property of processes in `process_spec` and `exec_spec`, a right of theirs in `security`, a
//! limit in `limits`, a mount in `mounts::plan`, a device in `devices`. A wish that cannot be
//! honoured is refused there, or in a `check` that `run_spec` or `check_rest` calls. What the
//! daemon must know for it is a field of `RunSpec`: the heads of `create` and `process` in
//! `sandbox/runtime`; of a limit, a field of `Resources`: the head of `record/container.rs` there.
//! [`Resources`] are those of updates, too, and `updated` makes them of a pod's own limits. Tests:
//! `src/tests/spec.rs`, and `pod.rs` for pods; `docs/containerd.md` says what is honoured, refused
//! and ignored.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::Path;

use serde::{Deserialize, Serialize};

/// The size of the largest configuration, bytes.
const MOST: u64 = 4 << 20;

/// A container's configuration (`config.json`).
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Oci {
    #[serde(rename = "ociVersion")]
    pub version: String,
    pub process: Process,
    pub root: Root,
    pub hostname: String,
    pub mounts: Vec<Mount>,
    pub annotations: BTreeMap<String, String>,
    pub linux: Linux,
    /// By the names of the points at which they run.
    pub hooks: BTreeMap<String, Option<Vec<Hook>>>,
}

/// A program of the host's.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Hook {
    pub path: String,
    /// The words of its command line, its name among them.
    pub args: Vec<String>,
    /// The whole environment.
    pub env: Vec<String>,
    /// The longest run, seconds.
    pub timeout: Option<i64>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Root {
    pub path: String,
    pub readonly: bool,
}

#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(default)]
pub struct Mount {
    pub destination: String,
    #[serde(rename = "type")]
    pub kind: String,
    pub source: String,
    pub options: Vec<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Process {
    pub terminal: bool,
    pub console_size: Option<ConsoleSize>,
    pub user: User,
    pub args: Vec<String>,
    pub env: Vec<String>,
    pub cwd: String,
    pub capabilities: Option<Capabilities>,
    pub rlimits: Vec<Rlimit>,
    pub no_new_privileges: bool,
    pub oom_score_adj: Option<i32>,
    pub apparmor_profile: String,
    pub selinux_label: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct ConsoleSize {
    pub height: u32,
    pub width: u32,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct User {
    pub uid: u32,
    pub gid: u32,
    pub additional_gids: Vec<u32>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Capabilities {
    pub bounding: Vec<String>,
    pub permitted: Vec<String>,
    pub inheritable: Vec<String>,
    pub ambient: Vec<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Rlimit {
    #[serde(rename = "type")]
    pub kind: String,
    pub soft: u64,
    pub hard: u64,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Linux {
    pub namespaces: Vec<Namespace>,
    pub devices: Vec<Device>,
    pub resources: Resources,
    pub cgroups_path: String,
    pub sysctl: BTreeMap<String, String>,
    pub masked_paths: Vec<String>,
    pub readonly_paths: Vec<String>,
    pub seccomp: Option<slipway_seccomp::Profile>,
    /// The label of SELinux that what is mounted has.
    pub mount_label: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Namespace {
    #[serde(rename = "type")]
    pub kind: String,
    pub path: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Device {
    pub path: String,
    /// "b": block; "c" and "u": character; "p": FIFO.
    #[serde(rename = "type")]
    pub kind: String,
    pub major: i64,
    pub minor: i64,
}

/// Resources: of a new container, and of an update.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Resources {
    pub memory: Option<Memory>,
    pub cpu: Option<Cpu>,
    pub pids: Option<Pids>,
    pub devices: Vec<DeviceRule>,
    #[serde(rename = "hugepageLimits")]
    pub huge_pages: Vec<HugePages>,
    /// Files of a control group of version 2, and what they are to have.
    pub unified: BTreeMap<String, String>,
}

/// A limit of the huge pages of one size.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct HugePages {
    /// The size of a page, as "2MB".
    pub page_size: String,
    /// The limit, bytes.
    pub limit: u64,
}

/// A rule of the device control group.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct DeviceRule {
    pub allow: bool,
    #[serde(rename = "type")]
    pub kind: String,
    pub major: Option<i64>,
    pub minor: Option<i64>,
    /// Letters of what is allowed: "r", "w", "m".
    pub access: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Memory {
    pub limit: Option<i64>,
    /// The memory that the kernel takes back last.
    pub reservation: Option<i64>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Cpu {
    pub quota: Option<i64>,
    pub period: Option<u64>,
    pub shares: Option<u64>,
    /// A list of the host's CPUs, as "0-3,5".
    pub cpus: String,
    /// A list of the host's memory nodes.
    pub mems: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Pids {
    pub limit: Option<i64>,
}

impl Oci {
    /// Reads the configuration of a bundle.
    ///
    /// # Errors
    /// One line: it cannot be read, or is none.
    pub fn load(bundle: &Path) -> Result<Self, String> {
        let path = bundle.join("config.json");
        let named = |error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
        let file = std::fs::File::open(&path).map_err(|error| named(&error))?;
        let mut json = Vec::new();
        file.take(MOST + 1).read_to_end(&mut json).map_err(|error| named(&error))?;
        if json.len() as u64 > MOST {
            return Err(named(&"larger than 4 MiB"));
        }
        serde_json::from_slice(&json).map_err(|error| named(&error))
    }

    /// Returns the path of the root, if the configuration names one.
    pub fn root_path(&self) -> Option<&str> {
        Some(self.root.path.as_str()).filter(|path| !path.is_empty())
    }
}
