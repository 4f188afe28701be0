//! Daemons of the measurement's own, for ways that switch a mechanism off by a setting.
//!
//! A daemon reads its settings when it starts, and the node's daemon serves others as well. So each
//! of these ways has a daemon beside it, with the node's settings but for one, with directories and
//! user ids of its own, the node's images, and a keeper if the node has one. All daemons run until
//! the measurement ends, so that their turns alternate with those of the node's daemon.

use std::fs::OpenOptions;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};
use slipway_bench::arms::Arm;
use slipway_plane_api::VfClient;
use slipway_runtime::{Config, SandboxClient};

use super::pool::Pool;
use super::{NETWORK, own};
use crate::args::NodeArgs;
use crate::bench::removal::remove_all;
use crate::bench::scratch::Scratch;
use crate::client::{connect, connect_functions, try_connect};
use crate::keeper;

/// The longest time that a daemon may take until it serves: it may try a VMM first.
const START: Duration = Duration::from_secs(120);
/// The longest time that a process may take to end after it was told to.
const END: Duration = Duration::from_secs(60);
/// The longest time that a process may take to end which nobody waits for any more. A daemon gives
/// its clients 5 s.
const FAREWELL: Duration = Duration::from_secs(10);
/// The time between two looks at a process.
const LOOK: Duration = Duration::from_millis(20);
/// The most sandboxes in a network that nobody gave a subnet.
const MOST: u32 = 253;

/// A daemon of the measurement's own, with a pool of functions on its network.
pub struct OwnDaemon {
    /// The way whose turns it takes.
    pub arm: Arm,
    pub client: SandboxClient,
    pub functions: VfClient,
    pool: Pool,
    // Fields are dropped in this order: a daemon ends before its keeper, and then its files go.
    daemon: Process,
    keeper: Option<Process>,
    _folders: [Scratch; 2],
}

impl OwnDaemon {
    /// Starts the daemon of a way, and makes its pool with a function for each of `count`
    /// sandboxes. `place` tells the daemons of a measurement apart, from 1 on. The daemon ends with
    /// the calling thread.
    ///
    /// # Errors
    /// The mechanism is off on this node, the daemon does not start, or no function can be made.
    pub async fn start(arm: Arm, node: &Config, place: u32, count: u32) -> Result<Self> {
        let folders = [Scratch::make_in(&node.data_dir)?, Scratch::make_in(&node.run_dir)?];
        let [data, run] = &folders;
        let (data_dir, run_dir) = (data.path().to_owned(), run.path().to_owned());
        let settings = Config { data_dir, run_dir, ..apart(without(arm, node)?, place)? };
        let config = settings.data_dir.join("settings.toml");
        std::fs::write(&config, settings.to_toml()?)?;
        std::os::unix::fs::symlink(node.images_dir(), settings.images_dir())?;
        let args = NodeArgs {
            config,
            run_dir: Some(settings.run_dir.clone()),
            data_dir: Some(settings.data_dir.clone()),
        };
        let mut keeper = match settings.keeper {
            true => Some(Process::start("keeper", &args.config, &settings)?),
            false => None,
        };
        if let Some(keeper) = &mut keeper {
            let socket = keeper::socket(&settings);
            keeper.wait(START, async || Ok(socket.exists().then_some(()))).await?;
        }
        let mut daemon = Process::start("daemon", &args.config, &settings)?;
        daemon.wait(START, async || try_connect(&settings).await).await?;
        let client = connect(&args, &settings).await?;
        let functions = connect_functions(&args, &settings).await?;
        let pool = Pool::make(&args, &settings, NETWORK, count).await?;
        Ok(Self { arm, client, functions, pool, daemon, keeper, _folders: folders })
    }

    /// Removes the sandboxes that are left and the pool, and ends the daemon.
    ///
    /// # Errors
    /// The first thing that did not go. The daemon is ended in any case.
    pub async fn end(self) -> Result<()> {
        let Self { client, functions, pool, mut daemon, keeper, _folders: folders, .. } = self;
        let removed = remove_left(&client).await;
        let removed = removed.and(pool.remove().await);
        // A daemon that ends waits for its clients.
        drop((client, functions));
        let mut ended = daemon.end().await;
        drop(daemon);
        if let Some(mut keeper) = keeper {
            ended = ended.and(keeper.end().await);
        }
        drop(folders);
        removed.and(ended)
    }
}

/// Removes the sandboxes of this process that a daemon has.
///
/// # Errors
/// The daemon goes away, or refuses the removal of one; the others are removed even so.
pub async fn remove_left(client: &SandboxClient) -> Result<()> {
    remove_all(client, &format!("{}-", own())).await
}

/// Checks ways that have daemons of their own against the node's settings, the network and the
/// number of sandboxes.
///
/// # Errors
/// A mechanism is off on this node, so that nothing would be switched off, or a daemon of its own
/// has no such network.
pub fn check(arms: &[Arm], node: &Config, network: &str, count: u32) -> Result<()> {
    for arm in arms.iter().filter(|arm| arm.has_own_daemon()) {
        without(*arm, node)?;
        ensure!(
            network == NETWORK && count <= MOST,
            "the way {arm} has a daemon of its own, with the network {NETWORK} and at most {MOST} \
             sandboxes"
        );
    }
    Ok(())
}

/// Returns the node's settings without the mechanism that a way switches off.
fn without(arm: Arm, node: &Config) -> Result<Config> {
    let mut settings = node.clone();
    let (is_on, needs) = match arm {
        Arm::PoolNoCgroups => {
            settings.cgroup_pool = 0;
            // They wait in groups of the pool.
            settings.spare_vmms = 0;
            (node.cgroup_pool > 0, "cgroup_pool")
        }
        Arm::PoolNoLayer => {
            settings.layer_template = false;
            (node.layer_template, "layer_template = true")
        }
        Arm::PoolNoLate => {
            settings.late_zeroing = false;
            let is_late = node.uses_pool()? && node.keeper && node.late_zeroing;
            (is_late, "memory = \"pool\", keeper = true and late_zeroing = true")
        }
        Arm::PoolNoRoot => {
            settings.shared_root = "off".to_owned();
            (node.shares_roots()?, "shared_root = \"on\"")
        }
        other => bail!("the way {other} has no daemon of its own"),
    };
    ensure!(is_on, "the way {arm} has nothing to switch off: the node's settings need {needs}");
    Ok(settings)
}

/// Returns settings for a daemon beside the node's, which removes no image of the node's.
fn apart(node: Config, place: u32) -> Result<Config> {
    let further = node.vmm_uid_count.checked_mul(place);
    let base = further.and_then(|further| node.vmm_uid_base.checked_add(further));
    let vmm_uid_base = base.context("there are no user ids for VMMs of a further daemon")?;
    Ok(Config { vmm_uid_base, containerd_images_unused_s: 0, ..node })
}

/// A daemon's or keeper's process, which ends with the thread that started it. One that is dropped
/// is told to end, and killed if it does not.
struct Process {
    child: Child,
    what: &'static str,
    log: PathBuf,
}

impl Drop for Process {
    fn drop(&mut self) {
        // A daemon that is killed leaves on the host what it has made, such as control groups.
        let begun = Instant::now();
        let _ = self.tell();
        while matches!(self.child.try_wait(), Ok(None)) && begun.elapsed() < FAREWELL {
            std::thread::sleep(LOOK);
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Process {
    /// Starts `slipway daemon` or `slipway keeper`, as `what` says, with a file of settings.
    fn start(what: &'static str, file: &Path, settings: &Config) -> Result<Self> {
        let log = settings.data_dir.join(format!("{what}.log"));
        let output = OpenOptions::new().create(true).append(true).open(&log)?;
        let mut command = Command::new(slipway_bench::slipway()?);
        command.arg(what).arg("--config").arg(file);
        command.arg("--run-dir").arg(&settings.run_dir);
        command.arg("--data-dir").arg(&settings.data_dir);
        command.current_dir("/").stdin(Stdio::null());
        command.stdout(output.try_clone()?).stderr(output);
        // Its own process group: ^C at this terminal does not reach it.
        command.process_group(0);
        slipway_bench::end_with_this_thread(&mut command);
        let child = command.spawn().with_context(|| format!("cannot start a {what}"))?;
        Ok(Self { child, what, log })
    }

    /// Waits until `look` finds something.
    async fn wait<T>(
        &mut self,
        limit: Duration,
        look: impl AsyncFn() -> Result<Option<T>>,
    ) -> Result<T> {
        let begun = Instant::now();
        loop {
            if let Some(found) = look().await? {
                return Ok(found);
            }
            if let Some(status) = self.child.try_wait()? {
                bail!("the {} ended with {status}: {}", self.what, self.last_words());
            }
            let late = begun.elapsed() > limit;
            ensure!(!late, "the {} does not serve: {}", self.what, self.last_words());
            tokio::time::sleep(LOOK).await;
        }
    }

    /// Tells the process to end, if it has not.
    fn tell(&mut self) -> Result<()> {
        if self.child.try_wait()?.is_none() {
            kill_process(Pid::from_child(&self.child), Signal::TERM)?;
        }
        Ok(())
    }

    /// Tells the process to end, and waits until it has. One that does not end is killed when it is
    /// dropped.
    async fn end(&mut self) -> Result<()> {
        let begun = Instant::now();
        self.tell()?;
        while self.child.try_wait()?.is_none() {
            ensure!(begun.elapsed() < END, "the {} does not end: {}", self.what, self.last_words());
            tokio::time::sleep(LOOK).await;
        }
        Ok(())
    }

    /// Returns the last line of the log.
    fn last_words(&self) -> String {
        let text = std::fs::read(&self.log).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        text.lines().last().unwrap_or("its log is empty").to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the settings of a node with all mechanisms.
    fn node() -> Config {
        Config {
            memory: "pool".to_owned(),
            keeper: true,
            shared_root: "on".to_owned(),
            ..Config::default()
        }
    }

    #[test]
    fn each_daemon_lacks_one_mechanism() {
        let node = node();
        let changed = |arm| {
            let its = without(arm, &node).unwrap();
            [
                its.cgroup_pool != node.cgroup_pool,
                its.layer_template != node.layer_template,
                its.late_zeroing != node.late_zeroing,
                its.shared_root != node.shared_root,
            ]
        };
        let arms = [Arm::PoolNoCgroups, Arm::PoolNoLayer, Arm::PoolNoLate, Arm::PoolNoRoot];
        for (place, arm) in arms.into_iter().enumerate() {
            let expected: [bool; 4] = std::array::from_fn(|other| other == place);
            assert_eq!((arm.has_own_daemon(), changed(arm)), (true, expected), "{arm}");
        }
        let own = Arm::ALL.into_iter().filter(|arm| arm.has_own_daemon());
        assert!(own.eq(arms), "each has settings");
        assert!(without(Arm::Pool, &node).is_err());
    }

    #[test]
    fn what_is_off_on_the_node_cannot_be_switched_off() {
        let refusal = |arm, node: &Config, network, count| {
            check(&[Arm::Pool, arm], node, network, count).map_err(|error| error.to_string())
        };
        let (usual, full) = (Config::default(), node());
        assert_eq!(refusal(Arm::PoolNoCgroups, &usual, NETWORK, 200), Ok(()));
        assert_eq!(refusal(Arm::PoolNoLate, &full, NETWORK, 200), Ok(()));
        assert!(refusal(Arm::PoolNoLate, &usual, NETWORK, 1).unwrap_err().contains("keeper"));
        assert!(refusal(Arm::PoolNoRoot, &usual, NETWORK, 1).unwrap_err().contains("shared_root"));
        let none = Config { cgroup_pool: 0, layer_template: false, ..usual.clone() };
        for arm in [Arm::PoolNoCgroups, Arm::PoolNoLayer] {
            assert!(refusal(arm, &none, NETWORK, 1).unwrap_err().contains("nothing to switch off"));
        }
        assert!(refusal(Arm::PoolNoLayer, &usual, "other", 1).unwrap_err().contains("default"));
        assert!(refusal(Arm::PoolNoLayer, &usual, NETWORK, 254).unwrap_err().contains("253"));
        assert_eq!(refusal(Arm::Slipway, &none, "other", 300), Ok(()));
    }

    #[test]
    fn a_process_that_is_dropped_is_told_to_end_first() {
        let folder = tempfile::tempdir().unwrap();
        let [runs, told] = ["runs", "told"].map(|name| folder.path().join(name));
        let (mark, begin) = (told.display(), runs.display());
        let script =
            format!("trap 'touch {mark}; exit' TERM; touch {begin}; while :; do sleep 0.01; done");
        let child = Command::new("sh").arg("-c").arg(script).spawn().unwrap();
        let process = Process { child, what: "daemon", log: PathBuf::new() };
        while !runs.exists() {
            std::thread::sleep(LOOK);
        }
        drop(process);
        assert!(told.exists());
    }

    #[test]
    fn daemons_have_user_ids_of_their_own() {
        let base = |place| apart(Config::default(), place).unwrap().vmm_uid_base;
        assert_eq!(base(2) - base(1), Config::default().vmm_uid_count);
        assert!(base(1) - Config::default().vmm_uid_base >= Config::default().vmm_uid_count);
        let many = Config { vmm_uid_count: u32::MAX, ..Config::default() };
        assert!(apart(many, 2).is_err());
    }
}
