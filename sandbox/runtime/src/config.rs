//! The node's settings: `/etc/slipway/config.toml`, then `/etc/slipway/config.d/*.toml` in name
//! order, then the command line's options.
//!
//! A new setting is a field of `Config` with its default in `Default`, and a row of the table in
//! `docs/operation.md`. A wrong value is found when the daemon starts, and by `slipway daemon
//! --check`: `check_settings` of `daemon/settings.rs` (`front/cli`) calls the function of `checks`
//! that parses or checks it, and so do the setting's users. No command shows settings; what follows
//! from one is shown where it has its effect, and by `slipway doctor` if a host may lack what it
//! needs. An older build refuses a file that names it. Tests are below. A setting that can be wrong
//! has a row in the table of the test `each_wrong_setting_is_named`, which is in
//! `daemon/settings.rs`, too; `tests/e2e/50-bad-input.sh` has wrong values.

mod checks;
mod programs;

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

pub use programs::find_library;

use crate::{Error, Result};

/// The settings file that is read unless another is given.
pub const CONFIG_FILE: &str = "/etc/slipway/config.toml";
/// The most functions of pools that a pod's machine can have room for, each of which is a slot of
/// its bus.
pub const MOST_FUNCTIONS: u32 = 8;
/// The most virtual CPUs of a sandbox.
pub(crate) const MOST_CPUS: u32 = 64;

/// Settings of a node. Every field has a default; a file needs to name only what differs.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// The directory of sockets and locks, on a tmpfs. Its path is short, since socket paths hold
    /// at most 107 bytes.
    pub run_dir: PathBuf,
    /// The directory of images, records, logs and scratch volumes.
    pub data_dir: PathBuf,
    /// The directory of tools of which the distribution's version is too old
    /// (`bin/qemu-system-x86_64`).
    pub tools_dir: PathBuf,
    /// The directory of the guest kernel: `vmlinuz`, `modules/`, `release`.
    pub kernel_dir: PathBuf,
    /// The static agent. If unset: `slipway-agent` beside the running program, then
    /// `/usr/libexec/slipway/slipway-agent`.
    pub agent: Option<PathBuf>,
    /// The first of the user ids that VMMs run as, one for each sandbox. No user of the host may
    /// have an id in `vmm_uid_base..vmm_uid_base + vmm_uid_count`.
    pub vmm_uid_base: u32,
    /// The number of user ids for VMMs, and so the most live sandboxes at once.
    pub vmm_uid_count: u32,
    /// Memory in bytes of a sandbox without `--memory`.
    pub memory_bytes: u64,
    /// The source of a sandbox's memory: "kernel", or "pool": recycled pages, which are zeroed
    /// when the sandbox first sees them. "pool" needs `vmm = "native"`, or "auto" where that is
    /// used, and is meant for a node with a keeper.
    pub memory: String,
    /// The most bytes of memory that the pool holds without a sandbox.
    pub pool_bytes: u64,
    /// The pages of the pool's memory: "base", the machine's own of 4 KiB, or "huge", of 2 MiB,
    /// which are taken of what `vm.nr_hugepages` and `vm.nr_overcommit_hugepages` allow. A sandbox
    /// for which too few huge pages are left has base pages.
    pub pool_pages: String,
    /// Set if recycled memory of the pool is zeroed when the sandbox first sees it. Otherwise, and
    /// without a keeper, it is zeroed before the sandbox has it, which takes longer the more it is.
    pub late_zeroing: bool,
    /// The root of sandboxes: "off", a disk for each, or "on", pages that the sandboxes of one
    /// image share, which are in memory once and in no guest's page cache. A sandbox that cannot
    /// share its root, one with an image that was pulled lazily among them, has a disk, and the
    /// log has the reason.
    pub shared_root: String,
    /// Set if guests report pages that they do not use, and the host has them back while they run,
    /// unless a sandbox says otherwise. Forks do as the machine that was saved.
    /// A sandbox whose guest cannot, or whose memory is a pool's or pinned for hardware, keeps what
    /// it has touched, and the log has the reason.
    pub free_page_reporting: bool,
    /// The most bytes of memory that shared roots have together.
    pub shared_root_bytes: u64,
    /// The number of control groups that the daemon makes ahead for VMMs. 0: each is made when its
    /// sandbox starts.
    pub cgroup_pool: u32,
    /// The number of VMMs that the daemon starts ahead, at most 64. Each waits in a control group
    /// of the pool, with one of the user ids for VMMs. 0: each is started when its sandbox starts.
    pub spare_vmms: u32,
    /// The parent of the control groups of VMMs, relative to the root of each hierarchy. A group
    /// that is delegated to the daemon is given here, as in
    /// "/system.slice/slipway.service/sandboxes".
    pub cgroup_parent: String,
    /// Set if the VMMs of containerd's pods are in the pods' own control groups. Without a value
    /// those of `slipway-vmm` are, and QEMU, which needs more memory than kubelet's limits leave
    /// for it, is not.
    pub pod_cgroups: Option<bool>,
    /// Virtual CPUs of a sandbox without `--cpus`.
    pub cpus: u32,
    /// The size of the volatile layer in bytes: the most that a container can write to its root.
    /// The layer takes host memory only as it is written.
    pub volatile_layer_bytes: u64,
    /// Set if volatile layers are copies on write of one file system for each size, which was
    /// formatted before. Otherwise the start of each container formats a file system for it alone.
    pub layer_template: bool,
    /// The most bytes of host memory that the volatile layers of a sandbox or pod hold together, if
    /// it names no number. 0: twice `volatile_layer_bytes`.
    pub layers_bytes: u64,
    /// The most bytes of host memory that the volatile layers of all sandboxes hold together. 0:
    /// half of the memory that the daemon may use.
    pub node_layers_bytes: u64,
    /// The most bytes of disk that the `emptyDir` volumes of a pod have together; those in memory
    /// do not count. 0: 64 GiB, but not over half of the file system of the data directory.
    pub empty_dirs_bytes: u64,
    /// The most bytes that a container's kept output takes on disk.
    pub log_bytes: u64,
    /// The most bytes that the kept output of a pod's containers takes on disk, together; at least
    /// 128 MiB. Containers have their parts of it until they are removed.
    pub pod_log_bytes: u64,
    /// The seconds without use after which the node removes an image that was made for containerd.
    /// 0: such images stay.
    pub containerd_images_unused_s: u64,
    /// Set if `slipway run`, `slipway pod run` and `slipway image pull` pull images lazily without
    /// being asked to.
    pub lazy_pulls: bool,
    /// The seconds within which a sandbox must reach its agent.
    pub boot_timeout_s: u64,
    /// The accelerator: "auto", "kvm", "tcg", or "hollow", which runs no guest code.
    pub accelerator: String,
    /// The VMM: "auto", "native" (Slipway's own, which needs KVM) or "qemu". "auto" is Slipway's
    /// own where guests run on KVM with it, and QEMU elsewhere.
    pub vmm: String,
    /// The processor that guests see: "host", all that KVM offers on this host, or "x86-64-v2",
    /// "x86-64-v3" or "x86-64-v4", a level of the x86-64 psABI, the same on all hosts of a kind.
    /// A level needs `vmm = "native"`, or "auto" where that is used.
    pub cpu_template: String,
    /// The number of threads that serve devices.
    pub reactors: u32,
    /// The most microseconds that a thread that serves devices polls after its last work before it
    /// sleeps, up to a second. The actual time follows the traffic. 0: the thread sleeps at once.
    pub poll_budget_us: u32,
    /// Set if sandboxes, named disks and endpoints outlive the daemon. If so, a keeper process
    /// holds their memory and descriptors while the daemon is restarted, however it ended.
    /// Something must start the daemon again.
    pub keeper: bool,
    /// The network of sandboxes without `--network`: a network's name; "none"; or "auto", which is
    /// the network "default" on a host that can have networks, and none elsewhere.
    pub network: String,
    /// The pool of virtual functions that sandboxes without `--vf` have their interfaces of, where
    /// one is ready on the switch of their network. Empty: none; each interface is made when its
    /// sandbox starts.
    pub vf_pool: String,
    /// The number of functions of pools that the microVM of a pod has room for, at most 8. 0: none.
    pub pod_functions: u32,
    /// The most memory that a pod can have while it runs, in percent of what it begins with, if it
    /// names no most: room for limits of its containers that are raised. At most the host's memory;
    /// at most 100: no room. Pods have it where their VMM can add memory, and unless they are forks
    /// of a template.
    pub pod_max_memory_percent: u32,
    /// The most virtual CPUs that a pod can have while it runs, if it names no most: room for CPU
    /// limits of its containers that are raised; at most 32. Up to what a pod begins with: no room.
    /// Forks of a template have none either. The default is 0, since each CPU that may come costs
    /// the start of a pod a virtual CPU of KVM with its thread, and the guest its per-CPU memory.
    pub pod_max_cpus: u32,
    /// The number of containers of pods that `slipway device-plugin` lets have the socket function
    /// of their pods, at most 1024. 0: none, and the microVM of a pod has no room for one.
    pub pod_sockets: u32,
    /// The template of sandboxes of `slipway run --count` without `--from`: "auto", the node's own
    /// template of their machine, or "off", none: they boot.
    pub templates: String,
    /// The most templates that the node makes by itself, for sandboxes with "auto"; 0: none.
    pub auto_templates: u32,
    /// The number of starts of an image within `templates_within_s` from which single sandboxes of
    /// it begin with a template of the node's own, as with "auto"; at most 1000. 0: they boot. All
    /// sandboxes of one machine share a template, whoever asks for them.
    pub templates_after: u32,
    /// The seconds within which starts count for `templates_after`, at least 1.
    pub templates_within_s: u64,
    /// The number of memories that are ready for forks of each template or snapshot with which a
    /// sandbox began in the last ten minutes, at most 64. Each costs what forks are known to need,
    /// and all of them have at most `pool_bytes`, beside the memory that the pool recycles. 0: what
    /// a fork needs is copied while it begins.
    pub spare_forks: u32,
    /// The destinations beyond the host that sandboxes can reach: "all", or "internet", which
    /// excludes private networks. Both exclude link-local addresses, and with them a cloud's
    /// metadata.
    pub network_reach: String,
    /// Addresses and networks that sandboxes can reach in any case, as in `["10.1.2.3",
    /// "10.8.0.0/16"]`.
    pub network_allow: Vec<String>,
    /// Further addresses and networks that sandboxes cannot reach; `network_allow` takes
    /// precedence.
    pub network_deny: Vec<String>,
    /// The collector of OpenTelemetry that gets the traces of calls and starts, by OTLP over gRPC:
    /// `http://HOST:4317`, or `unix:/PATH`. Empty: that of `OTEL_EXPORTER_OTLP_ENDPOINT` in the
    /// daemon's environment, if there is one.
    pub otlp_endpoint: String,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            run_dir: "/run/slipway".into(),
            data_dir: "/var/lib/slipway".into(),
            tools_dir: "/var/lib/slipway/tools".into(),
            kernel_dir: "/var/lib/slipway/kernel".into(),
            agent: None,
            vmm_uid_base: 1_879_048_192,
            vmm_uid_count: 4096,
            memory_bytes: 256 << 20,
            memory: "kernel".into(),
            pool_bytes: 2 << 30,
            pool_pages: "base".into(),
            late_zeroing: true,
            shared_root: "off".into(),
            free_page_reporting: false,
            shared_root_bytes: 1 << 30,
            cgroup_pool: 16,
            spare_vmms: 0,
            cgroup_parent: "/slipway".into(),
            pod_cgroups: None,
            cpus: 1,
            volatile_layer_bytes: 2 << 30,
            layer_template: true,
            layers_bytes: 0,
            node_layers_bytes: 0,
            empty_dirs_bytes: 0,
            log_bytes: 256 << 20,
            pod_log_bytes: 2 << 30,
            containerd_images_unused_s: 86_400,
            lazy_pulls: false,
            boot_timeout_s: 120,
            accelerator: "auto".into(),
            vmm: "auto".into(),
            cpu_template: "host".into(),
            reactors: 1,
            poll_budget_us: 200,
            keeper: false,
            network: "auto".into(),
            vf_pool: String::new(),
            pod_functions: 0,
            pod_max_memory_percent: 200,
            pod_max_cpus: 0,
            pod_sockets: 0,
            templates: "auto".into(),
            auto_templates: 8,
            templates_after: 0,
            templates_within_s: 600,
            spare_forks: 0,
            network_reach: "all".into(),
            network_allow: Vec::new(),
            network_deny: Vec::new(),
            otlp_endpoint: String::new(),
        }
    }
}

impl Config {
    /// Reads `file` and its drop-ins (`config.d/*.toml` beside it). A missing file is no error.
    ///
    /// # Errors
    /// [`Error::Config`] with the file and the reason why it is invalid.
    pub fn load(file: &Path) -> Result<Self> {
        let mut merged = toml::Table::new();
        for path in sources(file)? {
            let text = std::fs::read_to_string(&path).map_err(|error| bad(&path, &error))?;
            let table: toml::Table = text.parse().map_err(|error| bad(&path, &error))?;
            merged.extend(table);
        }
        toml::Value::Table(merged).try_into().map_err(|error| bad(file, &error))
    }

    /// Returns the text of a settings file that names all of these settings.
    ///
    /// # Errors
    /// [`Error::Invalid`] if TOML has no place for a value, as for a path that is not UTF-8.
    pub fn to_toml(&self) -> Result<String> {
        toml::to_string(self).map_err(|error| Error::Invalid(format!("settings: {error}")))
    }

    /// Returns the directory of templates.
    pub fn templates_dir(&self) -> PathBuf {
        self.data_dir.join("templates")
    }

    /// Returns the path of the daemon's gRPC socket.
    pub fn socket(&self) -> PathBuf {
        self.run_dir.join("slipway.sock")
    }

    /// Returns the path of the socket of the pool of memory.
    pub fn pool_socket(&self) -> PathBuf {
        self.run_dir.join("pool.sock")
    }

    /// Returns the path of the socket of the process that fetches the blocks of images that were
    /// pulled lazily.
    pub fn fetch_socket(&self) -> PathBuf {
        self.run_dir.join("fetch.sock")
    }

    /// Returns the path of the lock that a running daemon holds: one daemon for each data
    /// directory.
    pub fn lock(&self) -> PathBuf {
        self.data_dir.join("daemon.lock")
    }

    /// Returns the path of the daemon's log.
    pub fn daemon_log(&self) -> PathBuf {
        self.data_dir.join("daemon.log")
    }

    /// Returns the directory of the sandboxes' records, logs and scratch volumes.
    pub fn sandboxes_dir(&self) -> PathBuf {
        self.data_dir.join("sandboxes")
    }

    /// Returns the directory of the networks and their address assignments.
    pub fn networks_dir(&self) -> PathBuf {
        self.data_dir.join("networks")
    }

    /// Returns the directory of the sockets of memory ports.
    pub fn ports_dir(&self) -> PathBuf {
        self.run_dir.join("ports")
    }

    /// Returns the directory of the image cache.
    pub fn images_dir(&self) -> PathBuf {
        self.data_dir.join("images")
    }

    /// Returns the directory of files that can be made again: initramfs files, templates of
    /// volatile layers.
    pub fn cache_dir(&self) -> PathBuf {
        self.data_dir.join("cache")
    }
}

fn sources(file: &Path) -> Result<Vec<PathBuf>> {
    let mut sources = Vec::new();
    if file.exists() {
        sources.push(file.to_path_buf());
    }
    let drop_ins = file.with_file_name("config.d");
    if let Ok(entries) = std::fs::read_dir(&drop_ins) {
        let mut found: Vec<PathBuf> = entries
            .filter_map(|entry| Some(entry.ok()?.path()))
            .filter(|path| path.extension().is_some_and(|extension| extension == "toml"))
            .collect();
        found.sort();
        sources.extend(found);
    }
    Ok(sources)
}

fn bad(path: &Path, error: &dyn std::fmt::Display) -> Error {
    Error::Config { path: path.to_path_buf(), reason: error.to_string().replace('\n', " ") }
}

#[cfg(test)]
mod tests {
    use slipway_hypervisor::{AccelChoice, VmmChoice};

    use super::*;

    #[test]
    fn drop_ins_override_in_name_order() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("config.toml");
        std::fs::write(&file, "cpus = 2\nmemory_bytes = 1").unwrap();
        std::fs::create_dir(dir.path().join("config.d")).unwrap();
        std::fs::write(dir.path().join("config.d/20.toml"), "cpus = 4").unwrap();
        std::fs::write(dir.path().join("config.d/10.toml"), "cpus = 3").unwrap();
        let config = Config::load(&file).unwrap();
        assert_eq!((config.cpus, config.memory_bytes), (4, 1));
    }

    #[test]
    fn settings_are_read_as_they_are_written() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("config.toml");
        let agent = Some("/opt/agent".into());
        let some = Config { pod_cgroups: Some(false), layer_template: false, agent, ..none() };
        for config in [none(), some] {
            let text = config.to_toml().unwrap();
            std::fs::write(&file, &text).unwrap();
            assert_eq!(Config::load(&file).unwrap().to_toml().unwrap(), text);
        }
        let text = none().to_toml().unwrap();
        assert!(text.contains("layer_template = true") && !text.contains("agent"), "{text}");
    }

    /// Returns settings without the optional ones.
    fn none() -> Config {
        Config { network_deny: vec!["10.0.0.0/8".to_owned()], ..Config::default() }
    }

    #[test]
    fn an_unknown_key_names_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("config.toml");
        std::fs::write(&file, "cpu = 2").unwrap();
        let message = Config::load(&file).unwrap_err().to_string();
        assert!(message.contains("config.toml") && message.contains("cpu"), "{message}");
    }

    #[test]
    fn no_file_gives_the_defaults() {
        let config = Config::load(Path::new("/nonexistent/config.toml")).unwrap();
        assert_eq!(config.cpus, 1);
        config.check_logs().unwrap();
        config.check_cpus().unwrap();
        config.check_templates().unwrap();
        assert_eq!(config.accelerator().unwrap(), AccelChoice::Auto);
        assert_eq!(config.vmm().unwrap(), VmmChoice::Auto);
        let many = Config { pod_max_cpus: checks::MOST_POD_CPUS + 1, ..config.clone() };
        for (cpus, allowed) in [(0, false), (1, true), (MOST_CPUS, true), (MOST_CPUS + 1, false)] {
            let checked = Config { cpus, ..config.clone() }.check_cpus();
            assert_eq!(checked.is_ok(), allowed, "cpus = {cpus}");
        }
        let seldom = Config { templates_after: 1001, ..config.clone() };
        let error = seldom.check_templates().unwrap_err().to_string();
        assert_eq!(error, "templates_after = 1001: at most 1000");
        let ready = |spare_forks| Config { spare_forks, ..config.clone() }.check_templates();
        assert_eq!(config.spare_forks, 0);
        ready(64).unwrap();
        assert_eq!(ready(65).unwrap_err().to_string(), "spare_forks = 65: at most 64");
        let never = Config { templates_within_s: 0, ..config.clone() };
        assert!(never.check_templates().unwrap_err().to_string().starts_with("templates_within_s"));
        assert!(config.forks_many().unwrap());
        let wrong = Config { templates: "on".to_owned(), ..config.clone() };
        let error = wrong.forks_many().unwrap_err().to_string();
        assert_eq!(error, "templates = \"on\": auto or off");
        assert!(many.check_cpus().unwrap_err().to_string().starts_with("pod_max_cpus = 33"));
        let spares = |spare_vmms, cgroup_pool| {
            let config = Config { spare_vmms, cgroup_pool, ..config.clone() };
            config.check_cgroups().map_err(|error| error.to_string())
        };
        assert_eq!((spares(64, 1), spares(0, 0)), (Ok(()), Ok(())));
        assert_eq!(spares(65, 16).unwrap_err(), "spare_vmms = 65: at most 64");
        let error = spares(1, 0).unwrap_err();
        assert!(error.starts_with("spare_vmms = 1: needs cgroup_pool"), "{error}");
        let small = Config { pod_log_bytes: checks::LEAST_POD_LOGS - 1, ..config };
        assert!(small.check_logs().unwrap_err().to_string().starts_with("pod_log_bytes"));
    }
}
