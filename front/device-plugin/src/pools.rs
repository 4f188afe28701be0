//! The daemon's pools, as devices.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use slipway_plane_api::functions::{self, SOCKETS};
use slipway_plane_api::{VfClient, connect, vf_v1};
use tokio::sync::watch;

use crate::Sockets;

/// The time between two looks at the pools.
const LOOK: Duration = Duration::from_secs(1);
/// The longest time that an answer of the daemon may take.
const ANSWER: Duration = Duration::from_secs(10);
/// The largest message of the daemon, bytes.
const LARGEST: usize = 16 << 20;
/// The most functions of a pool.
const MOST: usize = 1024;
/// The most pools that are advertised.
const MOST_POOLS: usize = 64;
/// The time for which a pool that is gone is advertised as an empty one.
const FAREWELL: Duration = Duration::from_secs(300);
/// The longest name of a pool.
const LONGEST: usize = 32;

/// A function of a pool, as a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Device {
    /// A pod can have it, or has it.
    pub is_healthy: bool,
    /// A pod can have it now, without a wait for a reset.
    pub is_ready: bool,
}

/// The functions of each pool by their numbers.
pub type Devices = BTreeMap<String, BTreeMap<u32, Device>>;

/// The daemon whose pools are advertised.
pub(crate) struct Source {
    daemon: PathBuf,
    /// The names of the pools; empty: all pools.
    wanted: Vec<String>,
    /// The node's socket functions, if it has some for pods.
    sockets: Option<Sockets>,
    client: Option<VfClient>,
    /// Pools of which the log has a line that says why they are not advertised.
    told: BTreeSet<String>,
}

impl Source {
    pub(crate) fn new(daemon: &Path, wanted: &[String], sockets: Option<Sockets>) -> Self {
        let (daemon, wanted) = (daemon.to_owned(), wanted.to_owned());
        Self { daemon, wanted, sockets, client: None, told: BTreeSet::new() }
    }

    /// Keeps the devices up to date. A pool that is gone has none, and is forgotten some minutes
    /// later; without a daemon none is healthy.
    pub(crate) async fn follow(mut self, sender: watch::Sender<Devices>) -> Infallible {
        let (mut serves, mut gone) = (None, Gone::new());
        loop {
            let asked = self.ask().await;
            if serves != Some(asked.is_ok()) {
                serves = Some(asked.is_ok());
                match &asked {
                    Ok(_) => tracing::info!(daemon = %self.daemon.display(), "the daemon serves"),
                    Err(why) => tracing::warn!(why, "no function is healthy"),
                }
            }
            sender
                .send_if_modified(|devices| change(devices, asked.ok(), &mut gone, Instant::now()));
            tokio::time::sleep(LOOK).await;
        }
    }

    /// Asks the daemon for the devices.
    ///
    /// # Errors
    /// One line: the daemon does not answer.
    pub(crate) async fn ask(&mut self) -> Result<Devices, String> {
        let asked = tokio::time::timeout(ANSWER, self.pools()).await;
        let pools = asked.unwrap_or_else(|_| {
            let (daemon, limit) = (self.daemon.display(), ANSWER.as_secs());
            Err(format!("the daemon at {daemon} does not answer within {limit} s"))
        });
        if pools.is_err() {
            self.client = None;
        }
        let pools = pools?;
        let sockets = socket_functions(self.sockets.clone()).await;
        Ok(self.choose(pools, sockets))
    }

    async fn pools(&mut self) -> Result<Vec<vf_v1::Pool>, String> {
        let client = match &mut self.client {
            Some(client) => client,
            none => {
                let channel = connect(&self.daemon).await.map_err(|_| {
                    let daemon = self.daemon.display();
                    format!("no daemon serves at {daemon}; `slipway daemon` starts one")
                })?;
                none.insert(VfClient::new(channel).max_decoding_message_size(LARGEST))
            }
        };
        let reply = client.list_pools(vf_v1::ListPoolsRequest {}).await;
        reply.map(|reply| reply.into_inner().pools).map_err(|status| status.message().to_owned())
    }

    /// Chooses the pools that are advertised beside socket functions, and says once of each other
    /// one that was asked for why it is not.
    fn choose(
        &mut self,
        pools: Vec<vf_v1::Pool>,
        sockets: Option<BTreeMap<u32, Device>>,
    ) -> Devices {
        let mut devices = Devices::new();
        let is_wanted = self.wanted.is_empty() || self.wanted.iter().any(|name| name == SOCKETS);
        if let Some(sockets) = sockets.filter(|_| is_wanted) {
            devices.insert(SOCKETS.to_owned(), sockets);
        }
        for pool in pools {
            let is_named = self.wanted.contains(&pool.name);
            if !is_named && !self.wanted.is_empty() {
                continue;
            }
            match check(&pool).and_then(|()| has_room(&devices)) {
                Ok(()) => _ = devices.insert(pool.name.clone(), of_pool(&pool)),
                Err(why) => self.tell(&pool.name, why),
            }
        }
        let missing = self.wanted.iter().filter(|name| !devices.contains_key(*name));
        for name in missing.cloned().collect::<Vec<_>>() {
            let why = match name == SOCKETS {
                true => "`pod_sockets` in the node's settings is 0",
                false => "the node has no such pool; `slipway vf create` makes one",
            };
            self.tell(&name, why);
        }
        devices
    }

    fn tell(&mut self, pool: &str, why: &str) {
        if self.told.len() < MOST && self.told.insert(pool.to_owned()) {
            tracing::warn!(pool, why, "a pool is not advertised");
        }
    }
}

/// Returns the node's socket functions, which are healthy while the engine serves.
async fn socket_functions(sockets: Option<Sockets>) -> Option<BTreeMap<u32, Device>> {
    let Sockets { count, engine, serves } = sockets?;
    // An engine that is stopped is waited for.
    let asked = tokio::task::spawn_blocking(move || serves(&engine)).await;
    let serves = asked.unwrap_or(false);
    let device = Device { is_healthy: serves, is_ready: serves };
    Some((0..count).map(|number| (number, device)).collect())
}

fn has_room(devices: &Devices) -> Result<(), &'static str> {
    if devices.len() < MOST_POOLS { Ok(()) } else { Err("64 pools are advertised, the most") }
}

/// Checks that a pool's functions can be devices of a pod.
fn check(pool: &vf_v1::Pool) -> Result<(), &'static str> {
    // Disks, network interfaces and hardware. A later version may have others, which no pod can
    // have yet.
    if pool.template.as_ref().is_none_or(|template| template.kind.is_none()) {
        return Err("its functions are of a kind that this version does not know");
    }
    if pool.name == SOCKETS {
        return Err("its name is that of socket functions: make it under another one");
    }
    let edge = |byte: Option<u8>| byte.is_some_and(|byte| byte.is_ascii_alphanumeric());
    let inner = |byte: u8| byte.is_ascii_alphanumeric() || b"-_".contains(&byte);
    let name = &pool.name;
    let is_resource = edge(name.bytes().next()) && edge(name.bytes().next_back());
    if !is_resource || !name.bytes().all(inner) || name.len() > LONGEST {
        return Err("a resource's name begins and ends with a letter or a digit");
    }
    if pool.vfs.len() > MOST {
        return Err("it has more functions than a pool can have");
    }
    Ok(())
}

fn of_pool(pool: &vf_v1::Pool) -> BTreeMap<u32, Device> {
    pool.vfs.iter().map(|vf| (vf.number, device(vf))).collect()
}

/// Returns the device for a function. The device of a function that somebody else than a pod has is
/// unhealthy, since kubelet gives out healthy devices.
fn device(vf: &vf_v1::Vf) -> Device {
    let is_ready = vf.state == "ready" && !vf.draining;
    let is_pods = vf.state == "taken" && functions::is_pods(&vf.owner);
    let is_healthy = is_ready || !vf.draining && (is_pods || vf.state == "being reset");
    Device { is_healthy, is_ready }
}

/// The pools that are gone, and since when.
type Gone = BTreeMap<String, Instant>;

/// Brings the devices up to date. Returns whether that changes anything.
fn change(devices: &mut Devices, now: Option<Devices>, gone: &mut Gone, at: Instant) -> bool {
    let lost = Device { is_healthy: false, is_ready: false };
    let new = match now {
        Some(mut now) => {
            gone.retain(|pool, _| !now.contains_key(pool));
            for pool in devices.keys().filter(|pool| !now.contains_key(*pool)) {
                gone.entry(pool.clone()).or_insert(at);
            }
            // Kubelet is told that they have no devices, before they are forgotten.
            gone.retain(|_, since| at.saturating_duration_since(*since) < FAREWELL);
            gone.keys().for_each(|pool| _ = now.insert(pool.clone(), BTreeMap::new()));
            now
        }
        None => {
            let mut same = devices.clone();
            same.values_mut().flat_map(BTreeMap::values_mut).for_each(|device| *device = lost);
            same
        }
    };
    let changed = *devices != new;
    *devices = new;
    changed
}

#[cfg(test)]
mod tests {
    use slipway_plane_api::vf_v1::template;

    use super::*;

    fn vf(number: u32, state: &str, owner: &str) -> vf_v1::Vf {
        let (state, owner) = (state.to_owned(), owner.to_owned());
        vf_v1::Vf { number, state, owner, ..Default::default() }
    }

    fn pool(name: &str, vfs: Vec<vf_v1::Vf>) -> vf_v1::Pool {
        let kind = Some(template::Kind::Nvme(template::Nvme::default()));
        let template = Some(vf_v1::Template { kind, ..Default::default() });
        vf_v1::Pool { name: name.to_owned(), template, vfs, ..Default::default() }
    }

    #[test]
    fn what_no_pod_can_have_is_not_healthy() {
        let states = [
            (vf(0, "ready", ""), true, true),
            (vf(0, "taken", "slipway-pod:0123456789ab.0"), true, false),
            (vf(0, "taken", "sandbox:4f1c"), false, false),
            (vf(0, "being reset", ""), true, false),
            (vf(0, "failed", ""), false, false),
            (vf(0, "not answering", ""), false, false),
            (vf(0, "drained", ""), false, false),
            (vf(0, "a later version's", ""), false, false),
        ];
        for (vf, is_healthy, is_ready) in states {
            assert_eq!(device(&vf), Device { is_healthy, is_ready }, "{vf:?}");
            let draining = vf_v1::Vf { draining: true, ..vf };
            assert!(!device(&draining).is_healthy, "{draining:?}");
        }
    }

    #[test]
    fn pools_that_are_no_resources_are_left_out() {
        let ready = || vec![vf(0, "ready", "")];
        let of_kind = |kind| Some(vf_v1::Template { kind, ..Default::default() });
        let nic = Some(template::Kind::Nic(template::Nic::default()));
        let nics = vf_v1::Pool { template: of_kind(nic), ..pool("nics", ready()) };
        let hardware = Some(template::Kind::Hardware(template::Hardware::default()));
        let hardware = vf_v1::Pool { template: of_kind(hardware), ..pool("hw", ready()) };
        let later = vf_v1::Pool { template: of_kind(None), ..pool("later", ready()) };
        let many = (0..=MOST as u32).map(|number| vf(number, "ready", "")).collect();
        let all = vec![
            pool("fast", ready()),
            nics,
            hardware,
            later,
            pool("-fast", ready()),
            pool("fast_", ready()),
            pool("a/b", ready()),
            pool("", ready()),
            pool("sockets", ready()),
            pool(&"x".repeat(33), ready()),
            pool("many", many),
        ];
        let names = |wanted: &[&str]| {
            let wanted: Vec<_> = wanted.iter().map(|&one| one.to_owned()).collect();
            let chosen = Source::new(Path::new("/s"), &wanted, None).choose(all.clone(), None);
            chosen.into_keys().collect::<Vec<_>>()
        };
        assert_eq!(names(&[]), ["fast", "hw", "nics"]);
        assert_eq!(names(&["nics", "later", "none"]), ["nics"]);
        assert_eq!(names(&["other"]), [""; 0]);
        let pools = (0..2 * MOST_POOLS).map(|one| pool(&one.to_string(), ready())).collect();
        assert_eq!(Source::new(Path::new("/s"), &[], None).choose(pools, None).len(), MOST_POOLS);
    }

    fn yes(_: &Path) -> bool {
        true
    }

    fn no(_: &Path) -> bool {
        false
    }

    #[tokio::test]
    async fn socket_functions_are_healthy_while_an_engine_serves() {
        let of = |serves| Some(Sockets { count: 2, engine: "/e".into(), serves });
        for (serves, is) in [(yes as fn(&Path) -> bool, true), (no as fn(&Path) -> bool, false)] {
            let device = Device { is_healthy: is, is_ready: is };
            let both = BTreeMap::from([(0, device), (1, device)]);
            let sockets = socket_functions(of(serves)).await;
            assert_eq!(sockets, Some(both.clone()));
            let mut all = Source::new(Path::new("/s"), &[], None);
            assert_eq!(all.choose(Vec::new(), sockets.clone())[SOCKETS], both);
            let mut others = Source::new(Path::new("/s"), &["fast".to_owned()], None);
            assert!(others.choose(Vec::new(), sockets).is_empty());
        }
        assert_eq!(socket_functions(None).await, None);
    }

    #[test]
    fn devices_that_are_gone_are_told_too() {
        let ready = Device { is_healthy: true, is_ready: true };
        let of = |pools: &[&str]| -> Devices {
            pools.iter().map(|&name| (name.to_owned(), BTreeMap::from([(0, ready)]))).collect()
        };
        let (mut devices, mut gone, at) = (Devices::new(), Gone::new(), Instant::now());
        let mut change = |devices: &mut Devices, now| super::change(devices, now, &mut gone, at);
        assert!(!change(&mut devices, None));
        assert!(change(&mut devices, Some(of(&["a", "b"]))));
        assert!(!change(&mut devices, Some(of(&["a", "b"]))));
        // A daemon that ends takes no device away, so that its pods stay where they are.
        assert!(change(&mut devices, None));
        assert!(devices["a"].values().all(|device| !device.is_healthy));
        assert!(!change(&mut devices, None));
        assert!(change(&mut devices, Some(of(&["b"]))));
        assert!(devices["a"].is_empty() && devices["b"][&0].is_healthy);
    }

    #[test]
    fn pools_that_are_gone_are_forgotten() {
        let ready = Device { is_healthy: true, is_ready: true };
        let pool = || Some(Devices::from([("a".to_owned(), BTreeMap::from([(0, ready)]))]));
        let none = || Some(Devices::new());
        let (mut devices, mut gone, begin) = (Devices::new(), Gone::new(), Instant::now());
        let mut change = |now: Option<Devices>, after: Duration| {
            change(&mut devices, now, &mut gone, begin + after)
        };
        let second = Duration::from_secs(1);
        assert!(change(pool(), Duration::ZERO));
        assert!(change(none(), second));
        // It has come back, and goes once more.
        assert!(change(pool(), FAREWELL));
        assert!(change(none(), 2 * FAREWELL));
        assert!(!change(none(), 3 * FAREWELL - second));
        // Not while nobody knows what pools there are.
        assert!(!change(None, 3 * FAREWELL));
        assert!(change(none(), 3 * FAREWELL));
        assert!(!change(none(), 4 * FAREWELL));
        assert!(devices.is_empty() && gone.is_empty());
    }
}
