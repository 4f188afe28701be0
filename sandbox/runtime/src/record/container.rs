//! The record of a container.
//!
//! A new limit of a container is a field of [`Limits`], with `#[serde(default)]` and with its
//! part in [`changed_by`](Limits::changed_by), and one of `Resources` in `sandbox.proto` and
//! `agent.proto`; 0 stands for no limit, or for no change. `pod::request` checks it, and the
//! agent's `Cgroup::limit` writes it to the container's group. It comes from `front/shim`
//! (`spec/limits`), `slipway pod run` (`front/cli`, `spec`) and `slipway update` (`manage`).
//! `docs/pods.md`, `docs/containerd.md`; `tests/e2e/12-pods.sh`, `75-pods.sh`.
//!
//! A limit of another controller than cpu, memory, pids and io needs that controller in the
//! agent's `Hierarchy::new`. `slipway update` has a limit in `UpdateArgs` (`args/manage.rs`), and
//! `update_request` of `manage` must send `resources` for a sandbox of its own, too. The runtime
//! changes limits in `own_limits.rs`, and those of a pod's containers in `pod/update.rs`.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use slipway_agent_protocol::HUGE_PAGE;

use super::{EmptyDir, Placement, Process, Run, SandboxState, Share, Volume, Wish};

/// The image of a container and its first process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Settings {
    /// The image's name as the user gave it; empty for a pod, which has no image.
    pub image: String,
    /// The digest of the image's manifest.
    pub image_digest: String,
    /// The image's EROFS file: the read-only root.
    pub image_path: PathBuf,
    /// Set if the file was not there in full when the container was made: it is read through the
    /// process that fetches its blocks.
    #[serde(default)]
    pub lazy: bool,
    /// The container's first process.
    pub process: Process,
    /// The number of the signal that asks the container to end.
    pub stop_signal: u32,
    /// Set if the container has all capabilities and devices.
    pub privileged: bool,
    /// Set if the container's root is mounted read-only.
    pub read_only: bool,
    /// The CPUs and the memory nodes of the host to which the container keeps.
    #[serde(default)]
    pub placement: Placement,
}

/// A container that was added to a pod.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Added {
    /// The container's name, unique in its pod.
    pub name: String,
    /// The image and the first process.
    #[serde(flatten)]
    pub settings: Settings,
    /// The host name in the container's UTS namespace; empty: the pod's.
    #[serde(default)]
    pub hostname: String,
    /// The container's state.
    pub state: SandboxState,
    /// CLOCK_REALTIME at the container's creation, ns since the epoch.
    pub created_ns: u64,
    /// CLOCK_REALTIME at the start of the first process, ns since the epoch, or `None` if it never
    /// ran.
    pub started_ns: Option<u64>,
    /// The container's run.
    #[serde(flatten)]
    pub run: Run,
    /// The path of the file for the container's termination message; empty: it has none.
    #[serde(default)]
    pub message_path: String,
    /// The termination message, once the container ended.
    #[serde(default)]
    pub message: String,
    /// The limits of the container in the guest.
    pub limits: Limits,
    /// The namespaces of the pod's first NVMe function that the container has.
    pub disks: Option<Disks>,
    /// The region of the pod's memory that is the container's alone, from before its start on.
    #[serde(default)]
    pub region: Option<u32>,
    /// Files and block devices of the host that the container has as block devices.
    #[serde(default)]
    pub volumes: Vec<Volume>,
    /// Functions of pools that the container has as block devices, or its pod as interfaces.
    #[serde(default)]
    pub functions: Vec<Wish>,
    /// The engine whose socket function the container asked for.
    #[serde(default)]
    pub sockets: Option<PathBuf>,
    /// Directories and files of the host in the container.
    #[serde(default)]
    pub shares: Vec<Share>,
    /// Directories of the pod's guest in the container.
    #[serde(default)]
    pub empty_dirs: Vec<EmptyDir>,
    /// The most bytes of its kept output; 0: the node's setting for one container.
    #[serde(default)]
    pub log_bytes: u64,
    /// Set if the container is removed when it has ended.
    pub remove: bool,
    /// Set if the container is in the PID namespace that such containers of the pod share.
    #[serde(default)]
    pub shares_processes: bool,
    /// The name of the container of the pod in whose PID namespace the container is; empty: as
    /// `shares_processes` says.
    #[serde(default)]
    pub processes_of: String,
}

/// The limits of a container in its guest, as in cgroup2. 0: no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// Memory in bytes.
    pub memory_bytes: u64,
    /// CPU time in each 100 ms, microseconds.
    pub cpu_quota_us: u64,
    /// The weight of the container when containers compete for CPUs, 1 to 10000; 0: 100.
    pub cpu_weight: u32,
    /// Processes and threads.
    pub pids: u32,
    /// The memory above which the kernel slows the container down, in bytes.
    #[serde(default)]
    pub memory_high_bytes: u64,
    /// The memory that the kernel takes back last, in bytes.
    #[serde(default)]
    pub memory_low_bytes: u64,
    /// The memory that the kernel never takes back, in bytes.
    #[serde(default)]
    pub memory_min_bytes: u64,
    /// The processes that the kernel ends if memory is short: 2, all of the container; 1 or 0, one.
    #[serde(default)]
    pub oom_group: u32,
    /// The memory in huge pages of 2 MiB, beside `memory_bytes`, as far as it is whole pages: fewer
    /// bytes than one page has stand for none.
    #[serde(default)]
    pub huge_page_bytes: u64,
}

impl Limits {
    /// Returns the bytes of the huge pages that the guest makes for the container.
    pub fn huge_bytes(&self) -> u64 {
        self.huge_page_bytes - self.huge_page_bytes % HUGE_PAGE
    }

    /// Returns the change of a container's limits after which the container has these, whatever it
    /// had before: the greatest number stands for no limit. Weight, choice of processes and huge
    /// pages stay where these limits name none.
    pub fn in_full(self) -> Self {
        let or_none = |bytes: u64| if bytes == 0 { u64::MAX } else { bytes };
        Self {
            memory_bytes: or_none(self.memory_bytes),
            cpu_quota_us: or_none(self.cpu_quota_us),
            pids: if self.pids == 0 { u32::MAX } else { self.pids },
            memory_high_bytes: or_none(self.memory_high_bytes),
            memory_low_bytes: or_none(self.memory_low_bytes),
            memory_min_bytes: or_none(self.memory_min_bytes),
            ..self
        }
    }

    /// Returns these limits with those of `change` that are not 0 in their place. The greatest
    /// number stands for no limit.
    pub fn changed_by(self, change: Self) -> Self {
        let either = |old, new, most| match new {
            0 => old,
            new if new == most => 0,
            new => new,
        };
        let count = |old: u32, new: u32| if new == 0 { old } else { new };
        Self {
            memory_bytes: either(self.memory_bytes, change.memory_bytes, u64::MAX),
            cpu_quota_us: either(self.cpu_quota_us, change.cpu_quota_us, u64::MAX),
            cpu_weight: count(self.cpu_weight, change.cpu_weight),
            pids: count(self.pids, change.pids) % u32::MAX,
            memory_high_bytes: either(self.memory_high_bytes, change.memory_high_bytes, u64::MAX),
            memory_low_bytes: either(self.memory_low_bytes, change.memory_low_bytes, u64::MAX),
            memory_min_bytes: either(self.memory_min_bytes, change.memory_min_bytes, u64::MAX),
            oom_group: count(self.oom_group, change.oom_group),
            huge_page_bytes: either(self.huge_page_bytes, change.huge_page_bytes, u64::MAX),
        }
    }
}

impl From<Limits> for slipway_agent_protocol::v1::Resources {
    fn from(limits: Limits) -> Self {
        Self {
            memory_bytes: limits.memory_bytes,
            cpu_quota_us: limits.cpu_quota_us,
            cpu_weight: limits.cpu_weight,
            pids: limits.pids,
            memory_high_bytes: limits.memory_high_bytes,
            memory_low_bytes: limits.memory_low_bytes,
            memory_min_bytes: limits.memory_min_bytes,
            oom_group: limits.oom_group,
            huge_page_bytes: limits.huge_page_bytes,
        }
    }
}

/// The identifiers of the namespaces with a container's root and volumes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Disks {
    /// The namespace with the image.
    pub image: u32,
    /// The namespace with the volatile layer.
    pub volatile: u32,
    /// The namespaces of the volumes, in their order.
    #[serde(default)]
    pub volumes: Vec<u32>,
}

impl Disks {
    /// Returns all identifiers: the image's, the volatile layer's, those of the volumes.
    pub fn all(&self) -> impl Iterator<Item = u32> + '_ {
        [self.image, self.volatile].into_iter().chain(self.volumes.iter().copied())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_replaces_what_it_names_and_the_greatest_number_takes_away() {
        let before = Limits { memory_high_bytes: 3, memory_min_bytes: 4, ..Limits::default() };
        let change = Limits { memory_high_bytes: u64::MAX, oom_group: 2, ..Limits::default() };
        let after = before.changed_by(change);
        assert_eq!(after, Limits { memory_min_bytes: 4, oom_group: 2, ..Limits::default() });
        assert_eq!(after.changed_by(Limits::default()), after, "nothing is named");
    }

    #[test]
    fn limits_in_full_replace_any_others() {
        let wanted = Limits { memory_bytes: 5, cpu_quota_us: 6, ..Limits::default() };
        let had = Limits { memory_bytes: 9, pids: 7, memory_low_bytes: 8, ..Limits::default() };
        assert_eq!(had.changed_by(wanted.in_full()), wanted);
        assert_eq!(had.changed_by(Limits::default().in_full()), Limits::default());
    }

    #[test]
    fn a_guest_makes_whole_huge_pages() {
        let bytes =
            |huge_page_bytes| Limits { huge_page_bytes, ..Limits::default() }.huge_bytes() >> 20;
        assert_eq!([0, 1, 2 << 20, (6 << 20) - 1].map(bytes), [0, 0, 2, 4]);
    }
}
