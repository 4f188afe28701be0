//! A container's cgroup (kernel documentation, "Control Group v2"): setting its limits, listing,
//! stopping and killing its processes, detecting out-of-memory kills, and restricting devices.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Once;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use slipway_agent_protocol::v1::Resources;

use crate::init::VolumeSpec;
use crate::{device_policy, group, log};

/// The time that removing a cgroup waits for the last process to leave.
const LEAVE: Duration = Duration::from_secs(2);

/// The longest time that the processes of a container take to stop.
const STOP: Duration = Duration::from_secs(10);

/// The time in which memory that has come to a NUMA node is there for containers.
const NODE: Duration = Duration::from_secs(20);

/// The period of a CPU limit, microseconds.
const CPU_PERIOD_US: u32 = 100_000;

/// The directory below which containers have their cgroups.
pub struct Hierarchy {
    directory: PathBuf,
    restricts_devices: bool,
}

impl Hierarchy {
    /// Uses `directory` of a cgroup2 file system, and enables the available controllers for the
    /// cgroups in it.
    ///
    /// # Errors
    /// There is no cgroup2 at that place.
    pub fn new(directory: &Path) -> io::Result<Hierarchy> {
        let parent = directory.parent().unwrap_or(Path::new("/"));
        std::fs::metadata(parent.join("cgroup.procs"))?;
        make(directory)?;
        for level in [parent, directory] {
            for controller in ["+cpu", "+memory", "+pids", "+io", "+hugetlb"] {
                // Controllers are enabled one by one, so that a missing one does not keep the
                // others from being enabled.
                let _ = std::fs::write(level.join("cgroup.subtree_control"), controller);
            }
        }
        // A cgroup's memory is protected as far as that of those above it is. Without the mount
        // option `memory_recursiveprot` this protects no cgroup that does not ask for it.
        for protection in ["memory.min", "memory.low"] {
            let _ = std::fs::write(directory.join(protection), "max");
        }
        let restricts_devices = device_policy::is_supported();
        Ok(Hierarchy { directory: directory.to_owned(), restricts_devices })
    }

    /// Returns whether the kernel supports [`Cgroup::restrict_devices`].
    pub fn restricts_devices(&self) -> bool {
        self.restricts_devices
    }

    /// Creates the cgroup of container `id` with its limits. The name must have been checked.
    ///
    /// # Errors
    /// The kernel lacks a controller, or refuses a limit.
    pub fn create(&self, id: &str, limits: &Resources) -> Result<Cgroup> {
        let path = self.directory.join(id);
        make(&path).with_context(|| format!("creating cgroup {}", path.display()))?;
        let cgroup = Cgroup(path);
        match cgroup.limit(limits) {
            Ok(()) => Ok(cgroup),
            Err(error) => {
                let _ = std::fs::remove_dir(cgroup.path());
                Err(error)
            }
        }
    }
}

fn make(path: &Path) -> io::Result<()> {
    match std::fs::create_dir(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        result => result,
    }
}

/// One container's cgroup.
pub struct Cgroup(PathBuf);

impl Cgroup {
    /// Returns the cgroup's directory.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Sets limits. A limit of 0 stays as it is.
    ///
    /// # Errors
    /// The container uses more memory than its new limit and cannot let go of it, or the kernel
    /// refuses a limit.
    pub fn limit(&self, limits: &Resources) -> Result<()> {
        let Resources { memory_bytes, cpu_quota_us, cpu_weight, pids, .. } = *limits;
        if memory_bytes != 0 {
            self.reclaim(memory_bytes)?;
        }
        let text = |limit: u64, most: u64| match limit {
            limit if limit == most => "max".to_owned(),
            limit => limit.to_string(),
        };
        let pids = u64::from(pids);
        let high = limits.memory_high_bytes;
        let (low, min) = (limits.memory_low_bytes, limits.memory_min_bytes);
        // No protection is 0 bytes of it.
        let protected = |bytes: u64| match bytes {
            u64::MAX => "0".to_owned(),
            bytes => bytes.to_string(),
        };
        // As in the protocol, where 0 leaves it as it is: 1 stands for the file's 0, 2 for its 1.
        let oom_group = u64::from(limits.oom_group);
        let files = [
            ("memory.oom.group", oom_group, u64::from(oom_group > 1).to_string()),
            ("memory.high", high, text(high, u64::MAX)),
            ("memory.low", low, protected(low)),
            ("memory.min", min, protected(min)),
            ("memory.max", memory_bytes, text(memory_bytes, u64::MAX)),
            ("cpu.max", cpu_quota_us, format!("{} {CPU_PERIOD_US}", text(cpu_quota_us, u64::MAX))),
            ("cpu.weight", u64::from(cpu_weight), cpu_weight.to_string()),
            ("pids.max", pids, text(pids, u32::MAX.into())),
        ];
        for (file, _, value) in files.iter().filter(|(_, limit, _)| *limit != 0) {
            std::fs::write(self.0.join(file), value)
                .with_context(|| format!("setting the container's {file} to {value}"))?;
        }
        match limits.huge_page_bytes {
            0 => Ok(()),
            bytes => self.limit_huge_pages(&text(bytes, u64::MAX)),
        }
    }

    /// Sets the limits of the huge pages of 2 MiB that processes use, and of those that they have
    /// reserved by mappings: without the latter a process would be killed, and not refused, at the
    /// limit. A kernel without the controller sets none.
    fn limit_huge_pages(&self, value: &str) -> Result<()> {
        static MISSING: Once = Once::new();
        if !self.write_huge_pages(value)? {
            MISSING.call_once(|| log!("no hugetlb controller: huge pages are not limited"));
        }
        Ok(())
    }

    /// Keeps a container that has no limit of huge pages from those of others, as far as the kernel
    /// has the controller.
    ///
    /// # Errors
    /// The kernel refuses the limit.
    pub fn deny_huge_pages(&self) -> Result<()> {
        self.write_huge_pages("0").map(drop)
    }

    /// Writes the limits of huge pages. Returns `false` if the kernel has none.
    fn write_huge_pages(&self, value: &str) -> Result<bool> {
        let files = ["hugetlb.2MB.max", "hugetlb.2MB.rsvd.max"];
        let there = files.map(|file| self.0.join(file)).into_iter().filter(|file| file.exists());
        let mut limited = false;
        for file in there {
            std::fs::write(&file, value)
                .with_context(|| format!("setting {} to {value}", file.display()))?;
            limited = true;
        }
        Ok(limited)
    }

    /// Keeps the container to the memory of NUMA node 0 and of `node`, which has only memory that
    /// the kernel can move. Node 0 is for what the kernel cannot move, as the buffers of pipes: it
    /// refuses those to a container that has no other memory. Waits until the node has memory.
    ///
    /// # Errors
    /// The kernel has no cpusets, or the node has no memory in time.
    pub async fn keep_to_node(&self, node: u32) -> Result<()> {
        for level in [self.0.ancestors().nth(2), self.0.parent()].into_iter().flatten() {
            std::fs::write(level.join("cgroup.subtree_control"), "+cpuset").context(
                "the guest's kernel has no cpusets, which keep containers' memory apart",
            )?;
        }
        let nodes = if node == 0 { "0".to_owned() } else { format!("0,{node}") };
        std::fs::write(self.0.join("cpuset.mems"), &nodes)
            .with_context(|| format!("setting the container's cpuset.mems to {nodes}"))?;
        let deadline = tokio::time::Instant::now() + NODE;
        let has = || group::last_node(&group::read(&self.0.join("cpuset.mems.effective")));
        while has() != Some(node) {
            if tokio::time::Instant::now() >= deadline {
                bail!("no memory has come to NUMA node {node} of the guest");
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        Ok(())
    }

    /// Takes memory from the container's caches until it uses at most `limit` bytes. The kernel
    /// kills processes of a cgroup that is over its limit, so a limit is set only after this.
    ///
    /// # Errors
    /// The container uses more than that.
    fn reclaim(&self, limit: u64) -> Result<()> {
        let used = self.memory_bytes();
        if used > limit {
            // Fails if not all of it could be reclaimed.
            let _ = std::fs::write(self.0.join("memory.reclaim"), (used - limit).to_string());
        }
        let used = self.memory_bytes();
        if used > limit {
            bail!(
                "the container uses {} KiB of memory, which is more than {} KiB",
                used.div_ceil(1024),
                limit / 1024
            );
        }
        Ok(())
    }

    /// Returns the memory that the container uses, caches included, in bytes.
    pub fn memory_bytes(&self) -> u64 {
        group::number(&group::read(&self.0.join("memory.current")))
    }

    /// Restricts the container's processes to opening the standard devices and `volumes`.
    pub fn restrict_devices(&self, volumes: &[VolumeSpec]) -> io::Result<()> {
        device_policy::attach(&self.0, volumes)
    }

    /// Moves a process into a new cgroup directly below this one.
    ///
    /// # Errors
    /// The process has ended.
    pub fn part(&self, name: &str, pid: i32) -> io::Result<Cgroup> {
        let part = Cgroup(self.0.join(name));
        make(&part.0)?;
        if let Err(error) = std::fs::write(part.0.join("cgroup.procs"), pid.to_string()) {
            let _ = std::fs::remove_dir(&part.0);
            return Err(error);
        }
        Ok(part)
    }

    /// Returns the ids of the processes in this cgroup and in those directly below it, in the
    /// agent's PID namespace.
    pub fn processes(&self) -> Vec<i32> {
        let parts = std::fs::read_dir(&self.0).into_iter().flatten().flatten();
        let parts = parts.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
        let groups = std::iter::once(self.0.clone()).chain(parts.map(|entry| entry.path()));
        let list = |group: PathBuf| std::fs::read_to_string(group.join("cgroup.procs"));
        let lists: Vec<_> = groups.filter_map(|group| list(group).ok()).collect();
        lists.iter().flat_map(|list| list.lines()).filter_map(|pid| pid.parse().ok()).collect()
    }

    /// Stops all processes where they are, or has them go on, and waits until that is so. If the
    /// kernel does not stop them all, they go on.
    pub async fn freeze(&self, frozen: bool) -> io::Result<()> {
        let set = |frozen: bool| {
            std::fs::write(self.0.join("cgroup.freeze"), if frozen { "1" } else { "0" })
        };
        set(frozen)?;
        let deadline = tokio::time::Instant::now() + STOP;
        while self.is_frozen()? != frozen {
            if tokio::time::Instant::now() >= deadline {
                set(false)?;
                return Err(io::Error::new(io::ErrorKind::TimedOut, "a process does not stop"));
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        Ok(())
    }

    /// Returns whether all processes are stopped.
    pub fn is_frozen(&self) -> io::Result<bool> {
        let events = std::fs::read_to_string(self.0.join("cgroup.events"))?;
        Ok(events.lines().any(|line| line == "frozen 1"))
    }

    /// Kills every process in this cgroup and in those below it.
    pub fn kill(&self) -> io::Result<()> {
        std::fs::write(self.0.join("cgroup.kill"), "1")
    }

    /// Sends `signal` to every process of [`Cgroup::processes`] that there is now.
    pub fn signal(&self, signal: u32) -> io::Result<()> {
        if signal == libc::SIGKILL as u32 && self.kill().is_ok() {
            return Ok(());
        }
        self.processes().into_iter().try_for_each(|pid| crate::signal::send(pid, signal))
    }

    /// Returns whether the out-of-memory killer killed one of the processes.
    pub fn out_of_memory(&self) -> bool {
        group::value(&group::read(&self.0.join("memory.events")), "oom_kill") > 0
    }

    /// Removes the cgroup and those that its processes created below it, once the processes are
    /// gone.
    pub async fn remove(&self) -> io::Result<()> {
        let deadline = tokio::time::Instant::now() + LEAVE;
        loop {
            match remove_tree(&self.0) {
                Err(error)
                    if error.kind() == io::ErrorKind::ResourceBusy
                        && tokio::time::Instant::now() < deadline =>
                {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
                result => return result,
            }
        }
    }
}

/// Removes a cgroup directory and those below it. The files in it disappear with it.
fn remove_tree(path: &Path) -> io::Result<()> {
    for entry in std::fs::read_dir(path)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            match remove_tree(&entry.path()) {
                // That of a fork which has ended meanwhile.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                removed => removed?,
            }
        }
    }
    std::fs::remove_dir(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_files_of_the_group() {
        let dir = tempfile::tempdir().unwrap();
        let cgroup = Cgroup(dir.path().to_owned());
        let file = |name: &str| std::fs::read_to_string(dir.path().join(name)).ok();
        cgroup.limit(&Resources::default()).unwrap();
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "0 changes nothing");
        let limits = Resources {
            cpu_quota_us: 50_000,
            pids: 7,
            memory_high_bytes: 3,
            memory_low_bytes: 2,
            memory_min_bytes: 1,
            oom_group: 2,
            ..Resources::default()
        };
        cgroup.limit(&limits).unwrap();
        for (name, value) in [
            ("cpu.max", "50000 100000"),
            ("pids.max", "7"),
            ("memory.high", "3"),
            ("memory.low", "2"),
            ("memory.min", "1"),
            ("memory.oom.group", "1"),
        ] {
            assert_eq!(file(name).as_deref(), Some(value), "{name}");
        }
        assert_eq!(file("memory.max"), None);
        let most = u64::MAX;
        let (memory_high_bytes, memory_low_bytes) = (most, most);
        let taken = Resources { memory_high_bytes, memory_low_bytes, oom_group: 1, ..limits };
        cgroup.limit(&taken).unwrap();
        let names = ["memory.high", "memory.low", "memory.oom.group"];
        let values = names.map(|name| file(name).unwrap());
        assert_eq!(values, ["max", "0", "0"]);
    }

    #[test]
    fn huge_pages_are_limited_where_the_kernel_can() {
        let dir = tempfile::tempdir().unwrap();
        let cgroup = Cgroup(dir.path().to_owned());
        let limit = |huge_page_bytes| {
            cgroup.limit(&Resources { huge_page_bytes, ..Resources::default() }).unwrap();
        };
        limit(4 << 20);
        cgroup.deny_huge_pages().unwrap();
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "it makes no file");
        let files = ["hugetlb.2MB.max", "hugetlb.2MB.rsvd.max"].map(|file| dir.path().join(file));
        for file in &files {
            std::fs::write(file, "max").unwrap();
        }
        for (bytes, text) in [(0, "max"), (4 << 20, "4194304"), (1, "1"), (u64::MAX, "max")] {
            limit(bytes);
            for file in &files {
                assert_eq!(std::fs::read_to_string(file).unwrap(), text);
            }
        }
        cgroup.deny_huge_pages().unwrap();
        assert!(files.iter().all(|file| std::fs::read_to_string(file).unwrap() == "0"));
    }

    #[tokio::test]
    async fn a_container_is_kept_to_its_node_once_that_has_memory() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("containers/one");
        std::fs::create_dir_all(&path).unwrap();
        let cgroup = Cgroup(path.clone());
        let comes = async {
            tokio::time::sleep(Duration::from_millis(20)).await;
            std::fs::write(path.join("cpuset.mems.effective"), "0,3\n").unwrap();
        };
        std::fs::write(path.join("cpuset.mems.effective"), "0\n").unwrap();
        let (kept, ()) = tokio::join!(cgroup.keep_to_node(3), comes);
        kept.unwrap();
        let text = |path: PathBuf| std::fs::read_to_string(path).unwrap();
        assert_eq!(text(path.join("cpuset.mems")), "0,3");
        for level in [dir.path().to_owned(), dir.path().join("containers")] {
            assert_eq!(text(level.join("cgroup.subtree_control")), "+cpuset");
        }
        std::fs::write(path.join("cpuset.mems.effective"), "0\n").unwrap();
        cgroup.keep_to_node(0).await.unwrap();
        assert_eq!(text(path.join("cpuset.mems")), "0");
    }

    #[test]
    fn a_directory_without_cgroup2_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        assert!(Hierarchy::new(&dir.path().join("containers")).is_err());
    }
}
