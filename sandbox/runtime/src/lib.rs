//! The life of a container: from an image in the cache and a request, to a process in a microVM of
//! its own, to the release of everything that it used.
//!
//! How the pieces meet:
//! - [`Service`] is the daemon's gRPC interface (`slipway-sandbox-api`); front ends are its clients
//!   ([`SandboxClient`]);
//! - [`Node`] owns the node's sandboxes, their names and the user ids of their VMMs, and takes over
//!   what an earlier daemon left;
//! - [`sandbox::Sandbox`] is one sandbox: its record on disk ([`record`]) and its handles;
//! - `create` checks a request and writes the record of a new sandbox, `config` has the node's
//!   settings;
//! - `function` describes a sandbox's NVMe functions: the root and most volumes are namespaces of
//!   the first; `volume` has the files behind them, and `shared_root` roots in shared memory;
//! - [`guests`] is the thread that runs sandboxes' lives and communicates with guests, and
//!   [`files`] are the threads that access the disk; the control thread, on which [`Service`] runs,
//!   does neither;
//! - [`boot`] finds and makes the files that a guest boots from;
//! - `start` leads a sandbox through its stages (control group, disks, NVMe functions, VMM, guest,
//!   container), and `life` from there to its end. `release` gives back everything that it held,
//!   also after a daemon that was killed. `configure` gives a guest the settings that it has as a
//!   whole;
//! - `recover` reads what an earlier daemon left; `adopt` takes over a sandbox that outlived it;
//! - [`container`] is one container with its streams, and `target` a container that a call names;
//!   `pod` adds containers to a sandbox that has none of its own, `pod_functions` gives them
//!   functions of pools, `pod_disks` disks, and `carrier` carries their output. `copies` and
//!   `put_files` are files that containers have copies of, and `copying` carries those that
//!   clients copy out of containers and into them;
//! - `connect` carries connections of clients to ports of a sandbox;
//! - `network` gives a sandbox its interface in a network, which the networks' service of
//!   `slipway-plane-api` assigns;
//! - `cgroup` gives a sandbox's VMM its control group, one of `slipway-cgroup`'s pool if one is
//!   ready;
//! - `cpus` gives a running sandbox CPUs and takes them away;
//! - `placement` confines a sandbox to CPUs and memory nodes of the host;
//! - `resize` gives a running sandbox memory and takes it away; `pod` does both as the limits of a
//!   pod's containers need it. `own_limits` changes those of a sandbox's own container, and
//!   `reporting` has the guest give back pages that it does not use;
//! - [`security`] checks what a container's processes may do, and passes it to the agent;
//! - `save` saves machines whose guests have booted as `templates`, and `fork` has sandboxes begin
//!   with them; `automatic` chooses templates for sandboxes that name none, and `warm` makes them.
//!   `snapshot` saves sandboxes that run, `pause` stops them, and `to_file` puts the memory of a
//!   paused one into a file;
//! - `sockets` gets a sandbox a socket function from the node's socket engine;
//! - `layers` bounds the memory of volatile layers, of a sandbox and of the node;
//! - `fetcher` keeps the process running that fetches the blocks of images that were pulled lazily;
//! - `images` removes images that were made for containerd and that nothing uses any more;
//! - `shares` has the process started that serves directories of the host to a sandbox;
//! - `empty_dirs` gives containers of a pod directories of the guest, and the pod a disk for them;
//! - [`traces`] sends the spans of calls and of the stages of starts to a collector;
//! - `snoop` forwards the latencies of a guest's commands, as the guest reports them;
//! - the plane is reached through `slipway-plane-api` only, the VMM through `slipway-hypervisor`,
//!   the guest through the agent's protocol.
//!
//! Dependencies: `tokio`, `tonic` and `prost` for the service; `hyper-util` and `tower` carry calls
//! to an agent over its port; `serde`, `serde_json` and `toml` for records and settings, `hex` for
//! bytes in records, `sha2` for the digests of templates' files; `rustix` and `libc` for system
//! calls and signal numbers; `tracing` for the daemon's log.
//!
//! Feature: `fuzz` has the entries of the fuzz targets.

mod adopt;
pub mod agent;
mod automatic;
pub mod boot;
mod carrier;
mod cgroup;
pub mod config;
mod configure;
mod connect;
pub mod container;
mod copies;
mod copying;
mod cpus;
mod create;
mod empty_dirs;
mod emulated;
mod error;
mod fetcher;
pub mod files;
mod fork;
mod function;
#[cfg(feature = "fuzz")]
pub mod fuzz;
pub mod guests;
mod images;
mod layers;
mod life;
mod lock;
pub mod log;
mod look;
mod memory;
pub mod name;
mod network;
mod node;
pub mod old_layers;
mod oom_score;
mod own_limits;
mod pause;
mod placement;
mod pod;
mod pod_disks;
mod pod_functions;
pub mod proc;
pub mod process;
mod put_files;
mod reach;
pub mod record;
mod recover;
mod release;
mod reporting;
mod resize;
mod root;
mod running;
pub mod sandbox;
mod save;
pub mod security;
mod service;
mod shared_root;
mod shares;
mod shelf;
mod snapshot;
mod snoop;
mod sockets;
mod spares;
mod stages;
mod start;
mod starts;
pub mod stdio;
mod target;
mod templates;
mod to_file;
pub mod traces;
mod uids;
pub mod volume;
mod warm;

pub use config::{Config, find_library};
pub use error::{Error, Result};
pub use images::in_use as images_in_use;
pub use layers::{
    by_default as layers_by_default, check as check_layers, of_node as layers_of_node,
};
pub use life::RETURN;
pub use network::missing as missing_for_networks;
pub use node::{Node, Parts};
pub use record::BOUND_CONTAINERS;
pub use service::Service;
pub use service::snapshots::SnapshotService;
pub use service::templates::TemplateService;
pub use slipway_sandbox_api::{
    SandboxClient, SnapshotClient, TemplateClient, capabilities, copies as host_copies, forward, v1,
};
pub use templates::check_chosen as check_template_name;

/// The version of this daemon, and of the VMMs that it starts.
pub(crate) const VERSION: &str = env!("CARGO_PKG_VERSION");
