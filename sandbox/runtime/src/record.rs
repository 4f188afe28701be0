//! The record of a sandbox, kept on disk so that it outlives the daemon.
//!
//! A field that is added later needs `#[serde(default)]`: a daemon passes over records that it
//! cannot read, with a warning, and their sandboxes with them. The fields that one concern has are
//! a structure with methods of its own, as [`FreePageReporting`] is. On disk they are keys of the
//! record itself (`#[serde(flatten)]`), whose names never change.
//!
//! `slipway inspect` prints the record, and has no form but JSON: a field of [`Record`] is shown
//! without further code. So is one of [`Settings`], which each container has, and of [`Added`],
//! which those of a pod have (`record/container.rs`). What is shown and not recorded, such as the
//! memory that layers hold now, is added in `layers::described`, by the caller `inspect` in
//! `service`. A record of an earlier build is read in the tests of `record/store.rs` and
//! `record/volume.rs`, and `docs/operation.md` says what is in the sandbox's directory.

mod boot;
mod confinement;
mod container;
mod cpus;
mod empty_dir;
mod function;
mod memory;
mod needs;
mod network;
mod origin;
mod placement;
mod plugged;
mod process;
mod reporting;
mod run;
mod saving;
mod share;
mod store;
mod volume;

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use slipway_hypervisor::VmRecord;
use slipway_telemetry::Timeline;

pub use self::boot::BootRecord;
pub use self::confinement::{Confinement, ControlGroup};
pub use self::container::{Added, Disks, Limits, Settings};
pub use self::cpus::Cpus;
pub use self::empty_dir::{EmptyDir, EmptyDirs};
pub use self::function::{
    FunctionPool, Given, GivenNic, GivenSockets, OwnFunction, TakenFunction, Wish,
};
pub(crate) use self::memory::REGION_MARGIN;
pub use self::memory::{BOUND_CONTAINERS, BoundMemory, MemoryBounds};
pub use self::needs::Needs;
pub use self::network::{FurtherInterface, NamespaceInterface, Network, Nic, PortRates, Route};
pub use self::origin::Origin;
pub use self::placement::Placement;
pub use self::plugged::PluggedFunctions;
pub use self::process::Process;
pub use self::reporting::FreePageReporting;
pub use self::run::Run;
pub use self::saving::Saving;
pub use self::share::{ClientMemory, MountedTree, Share, ShareServer, TreeIdentity};
pub use self::store::{LAYER, MOST_ADDED, MOST_ASKED, Store, check_size, layer_of};
pub use self::volume::{Device, FileStamp, HostDevice, Volume};

/// A sandbox's state in its life cycle.
///
/// A new state has its word in `as_str` and its place in `is_live`, which says whether `release`
/// and the next daemon (`recover`, `adopt`) have something to end. Records on disk have it: an
/// earlier build passes over a record with a word that it does not know. Clients get the word: the
/// comments at `state` in `sandbox.proto`, `STATES` of the CLI's `metrics/figures.rs` with the row
/// of `sandboxes` in `docs/observe.md`, `has_ended` and `state_text` in `manage/listing.rs`. A word
/// that only replaces another one in lists, as `PAUSED` does, is no state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SandboxState {
    /// The sandbox is recorded, and nothing is started.
    Created,
    /// The start is under way; the container's process does not run yet.
    Starting,
    /// The container's process runs.
    Running,
    /// The container ended. Its guest writes back its volumes, or the sandbox's resources are being
    /// released.
    Stopping,
    /// The container ended, by itself or because it was stopped.
    Exited,
    /// The start failed, or the microVM or its agent failed while the container ran.
    Failed,
    /// The daemon ended before the sandbox did, and no later daemon adopted it.
    Lost,
}

/// The word in place of "running" for a container whose processes are stopped.
pub const PAUSED: &str = "paused";

impl SandboxState {
    /// Returns whether a task of the daemon creates, runs or ends a sandbox in this state. Only
    /// then may the sandbox hold an interface, a VMM, an endpoint or a cgroup.
    pub fn is_live(self) -> bool {
        matches!(self, Self::Created | Self::Starting | Self::Running | Self::Stopping)
    }

    /// Returns the word that `slipway ps` prints for the state.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Created => "created",
            Self::Starting => "starting",
            Self::Running => "running",
            Self::Stopping => "stopping",
            Self::Exited => "exited",
            Self::Failed => "failed",
            Self::Lost => "lost",
        }
    }
}

/// A network interface that the VMM emulates.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EmulatedNic {
    /// "e1000" or "virtio".
    pub model: String,
    /// The TAP interface of the host.
    pub tap: String,
    /// The MAC address.
    pub mac: String,
}

/// A PCI function of the host that the VMM has by VFIO.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AssignedFunction {
    /// The address on the host.
    pub pci_address: String,
    /// Set if the guest has an IOMMU in front of its devices.
    pub iommu: bool,
}

/// The settings and the state of one sandbox.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Record {
    /// The sandbox's id: 12 hexadecimal digits.
    pub id: String,
    /// The sandbox's name, unique among the sandboxes of the node.
    pub name: String,
    /// The image and the first process of the sandbox's own container. A pod has none.
    #[serde(flatten)]
    pub settings: Settings,
    /// Set if the sandbox is a pod: it has no container of its own, and ends when it is stopped.
    #[serde(default)]
    pub pod: bool,
    /// The containers that were added to a pod, in the order of their creation.
    #[serde(default)]
    pub added: Vec<Added>,
    /// The most containers of a pod that have not ended; 0: no bound but that of every pod.
    #[serde(default)]
    pub max_containers: u32,
    /// The template that the sandbox is a fork of, or `None` if its guest booted.
    #[serde(default)]
    pub template: Option<String>,
    /// Why the sandbox booted although the node was to choose a template for it; empty: it has one,
    /// or the node was to choose none.
    #[serde(default)]
    pub template_why_not: String,
    /// The traits of the sandbox that was saved, if the template is a snapshot.
    #[serde(default)]
    pub origin: Option<Origin>,
    /// The files that the guest booted, once it was started; `None`: an earlier version did that.
    #[serde(default)]
    pub booted: Option<BootRecord>,
    /// The saves of the sandbox's machine.
    #[serde(flatten)]
    pub saving: Saving,
    /// The number of identifiers chosen so far for disks of a pod's containers. The next identifier
    /// follows from it, round after round (`pod_disks`).
    #[serde(default)]
    pub attached: u32,
    /// The directories of a pod's guest that its containers share by name.
    #[serde(default)]
    pub empty_dirs: EmptyDirs,
    /// The sandbox's state.
    pub state: SandboxState,
    /// CLOCK_REALTIME at the sandbox's creation, ns since the epoch.
    pub created_ns: u64,
    /// The version of Slipway whose daemon created and started the sandbox; empty: an earlier one.
    #[serde(default)]
    pub version: String,
    /// The run of the sandbox's own container, or of the pod.
    #[serde(flatten)]
    pub run: Run,
    /// The size of guest memory in bytes that the sandbox has now.
    pub memory_bytes: u64,
    /// The memory that it began with and can be given.
    #[serde(default)]
    pub memory: MemoryBounds,
    /// The memory of a pod that is for one container each.
    #[serde(default)]
    pub bound: BoundMemory,
    /// The most bytes of host memory that the volatile layers hold together; 0: as many as those of
    /// all sandboxes, as an earlier version had it.
    #[serde(default)]
    pub layers_bytes: u64,
    /// The virtual CPUs.
    #[serde(flatten)]
    pub cpus: Cpus,
    /// The limits of the sandbox's own container in the guest, beside its memory and CPUs. Those of
    /// a pod as a whole, which its guest does not keep, as the last update said them.
    #[serde(default)]
    pub limits: Limits,
    /// Set from before an update of a pod's limits changes anything until what it set free has gone
    /// back to the host. A daemon that finds it set has the guest follow the recorded limits.
    #[serde(default)]
    pub changing_limits: bool,
    /// The host name in the container's UTS namespace.
    pub hostname: String,
    /// Block volumes; the first is namespace 3.
    pub volumes: Vec<Volume>,
    /// The user's own guest kernel, or `None` for the node's.
    pub kernel: Option<PathBuf>,
    /// The accelerator: "auto", "kvm" or "tcg".
    pub accelerator: String,
    /// The user's labels.
    pub labels: std::collections::BTreeMap<String, String>,
    /// Set if the sandbox is removed when it has ended.
    pub remove: bool,
    /// The sandbox's interface in a network, held from its creation to its end.
    #[serde(default)]
    pub network: Option<Network>,
    /// A network interface that the VMM emulates, for comparisons.
    #[serde(default)]
    pub emulated_nic: Option<EmulatedNic>,
    /// A PCI function of the host that the VMM has by VFIO, for comparisons.
    #[serde(default)]
    pub assigned_function: Option<AssignedFunction>,
    /// The socket of the engine that serves the sandbox's socket function, which a fork is given
    /// once its guest goes on. `None`: the sandbox has no such function.
    #[serde(default)]
    pub sockets: Option<PathBuf>,
    /// Directories and files of the host in the sandbox's own container.
    #[serde(default)]
    pub shares: Vec<Share>,
    /// The number of trees of the host that were mounted for containers.
    #[serde(default)]
    pub trees: u32,
    /// The process that serves directories and files of the host.
    #[serde(default)]
    pub share_server: ShareServer,
    /// The functions that the machine is given while the guest runs.
    #[serde(flatten)]
    pub plugged: PluggedFunctions,
    /// The device and inode number of the shared pages with the sandbox's root, or `None` if its
    /// root is a disk.
    #[serde(default)]
    pub shared_root: Option<(u64, u64)>,
    /// The reports of pages that the guest does not use.
    #[serde(flatten)]
    pub reporting: FreePageReporting,
    /// The part of the host that the VMM has.
    #[serde(flatten)]
    pub confinement: Confinement,
    /// The user id of the VMM while it runs.
    pub vmm_uid: Option<u32>,
    /// The VMM's process while it runs.
    pub vm: Option<VmRecord>,
    /// The timeline of the start, stage by stage; CLOCK_MONOTONIC.
    pub timeline: Timeline,
}

impl Record {
    /// Returns the digests of the images of all containers.
    pub fn image_digests(&self) -> impl Iterator<Item = &str> {
        let added = self.added.iter().map(|added| &added.settings);
        let all = std::iter::once(&self.settings).chain(added);
        all.map(|settings| settings.image_digest.as_str()).filter(|digest| !digest.is_empty())
    }

    /// Returns whether an image of a live container was not there in full when it was given.
    pub fn has_lazy_image(&self) -> bool {
        let mut added = self.added.iter().filter(|added| added.state.is_live());
        self.settings.lazy || added.any(|added| added.settings.lazy)
    }

    /// Returns the settings of the container that users call `named`: the sandbox's own, or with a
    /// slash one of the pod's.
    pub fn settings_of(&self, named: &str) -> &Settings {
        let added = named.split_once('/').and_then(|(_, container)| self.added(container));
        added.map_or(&self.settings, |added| &added.settings)
    }

    /// Returns whether the machine belongs to the sandbox alone: the sandbox is no fork, and is not
    /// made for a template.
    pub fn has_own_machine(&self) -> bool {
        self.template.is_none() && !self.saving.is_for_template()
    }

    /// Returns the bytes of memory that the guest has or may plug.
    pub fn guest_bytes(&self) -> u64 {
        self.memory_bytes.saturating_add(self.bound.granted())
    }

    /// Returns the bytes of the machine's regions of hot-plug memory.
    pub fn hot_bytes(&self) -> u64 {
        self.memory.room().saturating_add(self.bound.room())
    }

    /// Returns the bytes of memory that the machine begins with, and keeps.
    pub fn ram_bytes(&self) -> u64 {
        let grows = self.memory.room() > 0;
        if grows { self.memory.boot_bytes } else { self.memory_bytes }
    }

    /// Returns the size in bytes of the file of the guest's memory: what the machine begins with,
    /// and behind it its regions of hot-plug memory.
    pub fn memory_file_bytes(&self) -> u64 {
        self.ram_bytes().saturating_add(self.hot_bytes())
    }

    /// Returns the container `name` that was added to the pod.
    pub fn added(&self, name: &str) -> Option<&Added> {
        self.added.iter().find(|one| one.name == name)
    }

    /// Returns the containers of a pod that have disks, with these. Only such containers can have
    /// anything in the guest.
    pub fn added_with_disks(&self) -> impl Iterator<Item = (&Added, &Disks)> {
        self.added.iter().filter_map(|one| Some((one, one.disks.as_ref()?)))
    }

    /// Returns the container `name` that was added to the pod, to change it.
    pub fn added_mut(&mut self, name: &str) -> Option<&mut Added> {
        self.added.iter_mut().find(|one| one.name == name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The keys of a record on disk, ascending.
    const KEYS: [&str; 73] = [
        "accelerator",
        "added",
        "assigned_function",
        "attached",
        "boot_cpus",
        "booted",
        "bound",
        "cgroup",
        "changing_limits",
        "chosen_cpus",
        "client_memory",
        "confined",
        "control_group",
        "cpus",
        "created_ns",
        "empty_dirs",
        "emulated_nic",
        "exit_status",
        "fork_socket_slot",
        "free_page_reporting",
        "free_page_reporting_asked",
        "free_page_reporting_why_not",
        "function_slots",
        "functions",
        "given_sockets",
        "hostname",
        "id",
        "image",
        "image_digest",
        "image_path",
        "in_file",
        "kernel",
        "labels",
        "launch_cpus",
        "layers_bytes",
        "lazy",
        "least_memory_bytes",
        "limits",
        "max_containers",
        "max_cpus",
        "memory",
        "memory_bytes",
        "name",
        "network",
        "origin",
        "out_of_memory",
        "own_function",
        "paused",
        "placement",
        "plugs",
        "pod",
        "privileged",
        "process",
        "read_only",
        "reason",
        "remove",
        "saves",
        "saving",
        "share_server",
        "shared_root",
        "shares",
        "socket_slot",
        "sockets",
        "state",
        "stop_signal",
        "template",
        "template_why_not",
        "timeline",
        "trees",
        "version",
        "vm",
        "vmm_uid",
        "volumes",
    ];

    #[test]
    fn the_parts_of_a_record_are_keys_of_its_own_on_disk() {
        let record = crate::adopt::tests::record_of(SandboxState::Running);
        let mut written = serde_json::to_value(record).unwrap();
        let mut keys: Vec<_> = written.as_object().unwrap().keys().map(String::as_str).collect();
        keys.sort_unstable();
        assert_eq!(keys, KEYS);
        let parts = r#"{
            "free_page_reporting_asked": true,
            "free_page_reporting": false,
            "free_page_reporting_why_not": "its VMM is QEMU",
            "control_group": "/kubepods/pod1/one",
            "least_memory_bytes": 268435456,
            "cgroup": {
                "path": "/kubepods/pod1/one",
                "before": { "throttled_ns": 1, "oom_kills": 2, "threads_refused": 3 }
            },
            "confined": { "cpus": "0-1", "memory_nodes": "0" },
            "launch_cpus": "0-3",
            "cpus": 3, "boot_cpus": 1, "max_cpus": 4, "chosen_cpus": 2,
            "function_slots": 4, "socket_slot": true, "plugs": 2,
            "given_sockets": {
                "engine": "/e", "device": "sockets-1", "address": "0000:00:06.0", "serves": true
            },
            "functions": [{
                "pool": "fast", "number": 3, "device": "pool-2", "id": "f", "socket": "/vf",
                "address": "0000:00:07.0", "nic": null, "host_address": "0000:01:10.0"
            }],
            "own_function": { "pool": "fast", "addresses": [["10.1.0.2", 24]] },
            "client_memory": { "limit_bytes": 1, "file": [2, 3], "shared": [0, 0] },
            "exit_status": 137, "paused": true, "reason": "it was killed", "out_of_memory": true,
            "saving": true, "in_file": true, "saves": "web"
        }"#;
        let parts: serde_json::Map<_, _> = serde_json::from_str(parts).unwrap();
        written.as_object_mut().unwrap().extend(parts);
        let record: Record = serde_json::from_value(written.clone()).unwrap();
        let Record { reporting, confinement, plugged, .. } = &record;
        assert_eq!((reporting.asked, reporting.is_on), (Some(true), false));
        assert_eq!(reporting.why_not, "its VMM is QEMU");
        assert!(confinement.asks_for_group() && confinement.has_group("/kubepods/pod1/one"));
        assert_eq!((&*confinement.confined.cpus, &*confinement.launch_cpus), ("0-1", "0-3"));
        assert_eq!(confinement.least_memory_bytes, 256 << 20);
        assert_eq!(record.cpus, Cpus { count: 3, boot: 1, max: 4, chosen: 2 });
        let run = Run {
            exit_status: Some(137),
            paused: true,
            reason: "it was killed".to_owned(),
            out_of_memory: true,
        };
        assert_eq!(record.run, run);
        let as_template = Some("web".to_owned());
        assert_eq!(record.saving, Saving { under_way: true, in_file: true, as_template });
        assert_eq!((plugged.slots, plugged.socket_slot, plugged.plugs), (4, true, 2));
        assert!(plugged.serves_sockets() && plugged.has_hardware() && plugged.own.is_some());
        assert!(plugged.in_guest().map(|given| &*given.device).eq(["pool-2"]));
        assert_eq!(plugged.client_memory.map(|memory| memory.file), Some((2, 3)));
        assert_eq!(serde_json::to_value(&record).unwrap(), written);
    }

    #[test]
    fn a_record_tells_whether_an_image_of_it_may_be_incomplete() {
        let mut record = crate::adopt::tests::record_of(SandboxState::Running);
        assert!(!record.has_lazy_image(), "a record of an earlier version");
        record.settings.lazy = true;
        assert!(record.has_lazy_image());
        record.settings.lazy = false;
        record.added = vec![crate::adopt::tests::added_of("a", SandboxState::Running)];
        assert!(!record.has_lazy_image());
        record.added[0].settings.lazy = true;
        assert!(record.has_lazy_image());
        record.added[0].state = SandboxState::Exited;
        assert!(!record.has_lazy_image());
    }
}
