//! Ways to a group, as a turn runs them.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, ensure};
use serde::{Deserialize, Serialize};
use slipway_cgroup::{Group, Hierarchies, Limits, Pool, ROOT, Settings};
use slipway_telemetry::monotonic_ns;

use super::releases::Releases;
use super::{CgroupLoad, Joint, Sleepers};
use crate::measurement::Subject;
use crate::statistics::percentile;

/// The limits that every group gets.
pub(super) const LIMITS: Limits = Limits { memory_bytes: 512 << 20, cpus: 2, threads: 256 };
/// The longest time that a pool is given to become full.
const PATIENCE: Duration = Duration::from_secs(120);

/// The result of a turn.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CgroupMeasured {
    /// Time from the first request to the end of the last, ns.
    pub total_ns: u64,
    /// Median time of a request, ns.
    pub p50_ns: u64,
    /// 99th percentile of the time of a request, ns.
    pub p99_ns: u64,
    /// CPU time that the pool took to make all groups before the turn, ns. `None` without a pool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refill_ns: Option<u64>,
}

/// A way to a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// The group is made, its limits are set, and a process moves in.
    Create,
    /// The same for as many requests at once as there are CPUs, in the order of arrival.
    CreateFifo,
    /// In the order of arrival, too, the group is taken from the pool, its limits are set, and a
    /// process moves in.
    Pool,
    /// The same in no order.
    PoolNoFifo,
    /// As [`Create`](Self::Create), but the process moves itself, which version 1 alone has.
    CreateSelf,
    /// As [`Pool`](Self::Pool), but the process moves itself, as VMMs do, on version 1 alone.
    PoolSelf,
    /// The group is made.
    Mkdir,
    /// The group is taken from the pool.
    Take,
}

/// A version of control groups.
#[derive(Clone, Debug)]
pub enum Version {
    /// Version 1, with the hierarchies of these controllers.
    V1(Vec<String>),
    /// Version 1, with one hierarchy of all controllers.
    Joint(Arc<Joint>),
    /// Version 2.
    V2,
}

impl Version {
    /// Returns the mount points, or `None` if the host has not mounted all of them.
    pub(super) fn roots(&self) -> Option<Vec<PathBuf>> {
        let root = Path::new(ROOT);
        let roots: Vec<_> = match self {
            Self::V1(controllers) => controllers.iter().map(|name| root.join(name)).collect(),
            Self::Joint(joint) => vec![joint.path().to_owned()],
            Self::V2 if root.join("cgroup.controllers").exists() => vec![root.to_owned()],
            // Beside version 1, where systemd mounts it.
            Self::V2 => vec![root.join("unified")],
        };
        let marker = match self {
            Self::V2 => "cgroup.controllers",
            Self::V1(_) | Self::Joint(_) => "cgroup.clone_children",
        };
        roots.iter().all(|root| root.join(marker).exists()).then_some(roots)
    }
}

/// A way to a group, on one version of control groups.
pub struct CgroupWay {
    name: String,
    about: String,
    way: Way,
    all: Hierarchies,
    /// Keeps a joint hierarchy mounted.
    _version: Version,
    sleepers: Arc<Sleepers>,
    releases: Releases,
}

impl CgroupWay {
    /// Returns the subject `name`. Returns `None` if the host lacks the version's hierarchies. All
    /// subjects are made before the first turn.
    pub fn new(
        name: &str,
        about: &str,
        way: Way,
        version: &Version,
        sleepers: &Arc<Sleepers>,
    ) -> Option<Self> {
        Some(Self {
            name: name.to_owned(),
            about: about.to_owned(),
            way,
            all: Hierarchies::at(version.roots()?, &parent_name()),
            _version: version.clone(),
            sleepers: Arc::clone(sleepers),
            releases: Releases::begin(),
        })
    }

    /// Asks for all groups. Returns the time from the first request to the end of the last, and
    /// that of each request, ns.
    fn ask(&self, load: &CgroupLoad, pool: &Pool) -> Result<(u64, Vec<u64>)> {
        let (next, begin) = (AtomicUsize::new(0), Barrier::new(load.threads as usize));
        let thread = || {
            let mut requests = Vec::with_capacity(load.groups as usize);
            begin.wait();
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                if number >= load.groups as usize {
                    return Ok(requests);
                }
                let begun = monotonic_ns();
                self.request(pool, number)?;
                requests.push((begun, monotonic_ns()));
            }
        };
        let all: Result<Vec<Vec<(u64, u64)>>> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..load.threads).map(|_| scope.spawn(thread)).collect();
            let join = |thread: std::thread::ScopedJoinHandle<'_, Result<_>>| {
                thread.join().map_err(|_| anyhow!("a thread of the load failed"))?
            };
            threads.into_iter().map(join).collect()
        });
        let all = all?.concat();
        let begun = all.iter().map(|(begun, _)| *begun).min().unwrap_or(0);
        let ended = all.iter().map(|(_, ended)| *ended).max().unwrap_or(0);
        Ok((ended - begun, all.iter().map(|(begun, ended)| ended - begun).collect()))
    }

    fn request(&self, pool: &Pool, number: usize) -> Result<()> {
        let ordered = matches!(self.way, Way::CreateFifo | Way::Pool | Way::PoolSelf);
        // The wait for the turn is a part of the request's time.
        let _turn = ordered.then(|| pool.turn());
        let mut group = self.group(pool, number)?;
        if matches!(self.way, Way::Mkdir | Way::Take) {
            return Ok(());
        }
        group.limit(LIMITS)?;
        if matches!(self.way, Way::CreateSelf | Way::PoolSelf) {
            let procs = group.procs_files();
            let tasks: Vec<_> = procs.iter().map(|file| file.with_file_name("tasks")).collect();
            return self.sleepers.enter(number, &tasks);
        }
        let pid = self.sleepers.pid(number).ok_or_else(|| anyhow!("too few processes"))?;
        Ok(group.join(pid)?)
    }

    fn group(&self, pool: &Pool, number: usize) -> Result<Group> {
        match self.way {
            Way::Create | Way::CreateFifo | Way::CreateSelf | Way::Mkdir => {
                Ok(pool.make(&format!("made-{number}"))?)
            }
            Way::Pool | Way::PoolNoFifo | Way::PoolSelf | Way::Take => {
                pool.take().ok_or_else(|| anyhow!("the pool is empty at group {number}"))
            }
        }
    }
}

/// Removes all groups, which no process is in, and their parents.
pub(super) fn remove_all(all: &Hierarchies) {
    for name in all.names() {
        let _ = all.group(&name).remove();
    }
    for parent in parents(all) {
        let _ = std::fs::remove_dir(parent);
    }
}

/// Returns the directories that are the parents of all groups, one in each hierarchy.
pub(super) fn parents(all: &Hierarchies) -> impl Iterator<Item = PathBuf> {
    let parent = all.path_of("").trim_matches('/').to_owned();
    all.roots().iter().map(move |root| root.join(&parent))
}

/// Returns the name of the parent of this process's groups.
pub(super) fn parent_name() -> String {
    format!("slipway-bench-{}", std::process::id())
}

impl Subject for CgroupWay {
    type Load = CgroupLoad;
    type Measured = CgroupMeasured;

    fn name(&self) -> &str {
        &self.name
    }

    fn about(&self) -> String {
        self.about.clone()
    }

    fn settle(&self) -> Option<String> {
        self.releases.wait()
    }

    /// Asks for every group of the load, and afterwards removes them.
    fn run(&mut self, load: &CgroupLoad) -> Result<CgroupMeasured> {
        let size = match self.way {
            Way::Pool | Way::PoolNoFifo | Way::PoolSelf | Way::Take => load.groups as usize,
            Way::Create | Way::CreateFifo | Way::CreateSelf | Way::Mkdir => 0,
        };
        let settings = Settings { tag: "pool".into(), size, limits: LIMITS };
        let begun = cpu_time();
        let pool = Pool::new(self.all.clone(), settings)?;
        pool.open(Some(&BTreeSet::new()));
        fill(&pool, size)?;
        // Nothing else runs in this process while the pool fills.
        let refill_ns = (size > 0).then(|| cpu_time().saturating_sub(begun));
        let asked = self.ask(load, &pool);
        // Cleaned up whatever failed.
        let back = self.sleepers.bring_back(load.groups as usize, self.all.roots());
        drop(pool);
        remove_all(&self.all);
        let (total_ns, mut times) = asked?;
        back?;
        times.sort_unstable();
        Ok(CgroupMeasured {
            total_ns,
            p50_ns: percentile(&times, 50),
            p99_ns: percentile(&times, 99),
            refill_ns,
        })
    }
}

/// Waits until the pool is full.
fn fill(pool: &Pool, size: usize) -> Result<()> {
    let begun = Instant::now();
    while (pool.counts().ready as usize) < size {
        ensure!(begun.elapsed() < PATIENCE, "the pool does not fill: {:?}", pool.counts());
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

/// Returns the CPU time of this process, ns.
fn cpu_time() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    time.tv_sec.unsigned_abs() * 1_000_000_000 + time.tv_nsec.unsigned_abs()
}
