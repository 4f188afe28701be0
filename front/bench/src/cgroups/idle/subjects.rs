//! Idle processes in one group, or in a group each, as a turn runs them.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use serde::{Deserialize, Serialize};
use slipway_cgroup::{Hierarchies, Pool, Settings};

use super::IdleLoad;
use super::host::{Idle, Lost};
use crate::cgroups::releases::Releases;
use crate::cgroups::subjects::{LIMITS, parent_name, parents, remove_all};
use crate::cgroups::{Sleepers, Version};
use crate::measurement::Subject;

/// The time between two looks at which processes are due.
const BETWEEN: Duration = Duration::from_millis(10);
/// The time from the first wake until the load of all groups is what it stays: load tracking
/// forgets half of a load in 32 ms.
const SETTLE: Duration = Duration::from_millis(500);

/// The result of a turn.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct IdleMeasured {
    /// The number of the host's processors.
    pub processors: u32,
    /// The length of the time in which nothing but the processes ran, ns.
    pub window_ns: u64,
    /// The time for which the processors were not idle meanwhile, all of them together, ns.
    pub busy_ns: u64,
    /// How often processes were woken in the whole turn, in a thousand seconds.
    pub woken_in_1000s: u64,
    /// The time that a program which never slept lost afterwards, as long as `window_ns`, ns.
    pub lost_ns: u64,
    /// The median of its interruptions, ns.
    pub p50_ns: u64,
    /// The 99th percentile of its interruptions, ns.
    pub p99_ns: u64,
}

/// The groups that the processes are in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Grouping {
    /// All are in one.
    One,
    /// Each has its own.
    Each,
    /// Each has its own, without the controller `cpu`.
    EachWithoutCpu,
}

/// Idle processes in groups of one version.
pub struct IdleGroups {
    name: String,
    about: String,
    grouping: Grouping,
    all: Hierarchies,
    window: Duration,
    sleepers: Arc<Sleepers>,
    releases: Releases,
}

impl IdleGroups {
    /// Returns the subject `name`, which measures twice for the time `window`. `second` chooses
    /// version 2 of control groups. `sleepers` are on pipes. Returns `None` if the host lacks the
    /// hierarchies, or if version 2 has no controller `cpu`.
    pub fn new(
        (name, about): (&str, &str),
        grouping: Grouping,
        second: bool,
        window: Duration,
        sleepers: &Arc<Sleepers>,
    ) -> Option<Self> {
        let controller = match grouping {
            Grouping::EachWithoutCpu => "memory",
            Grouping::One | Grouping::Each => "cpu",
        };
        let version = if second { Version::V2 } else { Version::V1(vec![controller.to_owned()]) };
        let roots = version.roots()?;
        if second {
            let controllers = roots.first()?.join("cgroup.controllers");
            let controllers = std::fs::read_to_string(controllers).ok()?;
            controllers.split_ascii_whitespace().find(|name| *name == "cpu")?;
        }
        let all = Hierarchies::at(roots, &parent_name());
        let (name, about) = (name.to_owned(), about.to_owned());
        let (sleepers, releases) = (Arc::clone(sleepers), Releases::begin());
        Some(Self { name, about, grouping, all, window, sleepers, releases })
    }

    /// Makes the groups, and moves the processes in.
    fn fill(&self, count: usize) -> Result<()> {
        let settings = Settings { tag: "pool".into(), size: 0, limits: LIMITS };
        let pool = Pool::new(self.all.clone(), settings)?;
        pool.open(Some(&BTreeSet::new()));
        if self.grouping == Grouping::One {
            // Without limits: those of one sandbox are not for all of the processes.
            let group = pool.make("made")?;
            self.check_cpu()?;
            return (0..count).try_for_each(|number| Ok(group.join(self.pid(number)?)?));
        }
        let made = (0..count).map(|number| pool.make(&format!("made-{number}")));
        let mut groups = made.collect::<slipway_cgroup::Result<Vec<_>>>()?;
        if self.grouping == Grouping::EachWithoutCpu {
            self.disable_cpu()?;
        } else {
            self.check_cpu()?;
        }
        for (number, group) in groups.iter_mut().enumerate() {
            group.limit(LIMITS)?;
            group.join(self.pid(number)?)?;
        }
        Ok(())
    }

    fn pid(&self, number: usize) -> Result<u32> {
        self.sleepers.pid(number).ok_or_else(|| anyhow!("too few processes"))
    }

    /// Returns the files that give groups of version 2 their controllers. Version 1 has none, but a
    /// hierarchy for each controller.
    fn controls(&self) -> impl Iterator<Item = PathBuf> {
        let files = parents(&self.all).map(|parent| parent.join("cgroup.subtree_control"));
        files.filter(|file| file.exists())
    }

    /// Checks that groups of version 2 have the controller `cpu`: the kernel refuses it to them
    /// where processes are in a group above them.
    fn check_cpu(&self) -> Result<()> {
        self.controls().try_for_each(|file| {
            let given = std::fs::read_to_string(&file)
                .with_context(|| format!("cannot read {}", file.display()))?;
            let has_cpu = given.split_ascii_whitespace().any(|name| name == "cpu");
            ensure!(has_cpu, "the kernel gives groups below {} no controller cpu", file.display());
            Ok(())
        })
    }

    /// Takes the controller `cpu` away from all groups of version 2.
    fn disable_cpu(&self) -> Result<()> {
        self.controls().try_for_each(|file| {
            std::fs::write(&file, "-cpu")
                .with_context(|| format!("cannot write {}", file.display()))
        })
    }

    /// Measures while the processes are woken.
    fn measure(&self, load: &IdleLoad) -> Result<IdleMeasured> {
        let done = AtomicBool::new(false);
        let begun = Instant::now();
        let (measured, woken) = std::thread::scope(|scope| {
            let waker = scope.spawn(|| self.wake(load, &done));
            let measured = self.look();
            done.store(true, Ordering::Relaxed);
            (measured, waker.join())
        });
        let woken = woken.map_err(|_| anyhow!("the thread that wakes has failed"))??;
        let passed = begun.elapsed().as_secs_f64();
        let woken_in_1000s = (woken as f64 * 1000.0 / passed) as u64;
        Ok(IdleMeasured { woken_in_1000s, ..measured? })
    }

    /// Measures both times.
    fn look(&self) -> Result<IdleMeasured> {
        std::thread::sleep(SETTLE);
        let (begun, before) = (Instant::now(), Idle::read()?);
        std::thread::sleep(self.window);
        let (passed, now) = (begun.elapsed(), Idle::read()?);
        let window_ns = u64::try_from(passed.as_nanos()).unwrap_or(u64::MAX);
        let lost = Lost::during(passed);
        Ok(IdleMeasured {
            processors: now.processors,
            window_ns,
            busy_ns: now.busy_since(before, window_ns),
            woken_in_1000s: 0,
            lost_ns: lost.ns,
            p50_ns: lost.percentile(50),
            p99_ns: lost.percentile(99),
        })
    }

    /// Wakes one process after the other as often as the load says, until `done`. Returns how many
    /// times.
    fn wake(&self, load: &IdleLoad, done: &AtomicBool) -> Result<u64> {
        let groups = u64::from(load.groups.max(1));
        let each_second = (groups * u64::from(load.wakes)) as f64;
        let (begun, mut woken) = (Instant::now(), 0);
        while !done.load(Ordering::Relaxed) {
            let due = (begun.elapsed().as_secs_f64() * each_second) as u64;
            // A host that wakes more slowly than is asked for ends in time all the same.
            while woken < due && !done.load(Ordering::Relaxed) {
                self.sleepers.wake((woken % groups) as usize)?;
                woken += 1;
            }
            std::thread::sleep(BETWEEN);
        }
        Ok(woken)
    }
}

impl Subject for IdleGroups {
    type Load = IdleLoad;
    type Measured = IdleMeasured;

    fn name(&self) -> &str {
        &self.name
    }

    fn about(&self) -> String {
        self.about.clone()
    }

    fn settle(&self) -> Option<String> {
        self.releases.wait()
    }

    /// Moves the processes into their groups, measures, and removes the groups.
    fn run(&mut self, load: &IdleLoad) -> Result<IdleMeasured> {
        let count = load.groups as usize;
        let measured = self.fill(count).and_then(|()| self.measure(load));
        // Cleaned up whatever failed.
        let back = self.sleepers.bring_back(count, self.all.roots());
        remove_all(&self.all);
        let measured = measured?;
        back?;
        Ok(measured)
    }
}
