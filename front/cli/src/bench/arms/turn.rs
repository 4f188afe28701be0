//! One turn: sandboxes that start at once in one way, or one after the other.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use futures_util::future::{join_all, try_join_all};
use indicatif::ProgressBar;
use slipway_bench::arms::{Arm, INTERFACE, Point, RESET, Singles};
use slipway_plane_api::VfClient;
use slipway_runtime::{SandboxClient, v1};
use slipway_telemetry::{Timeline, monotonic_ns};
use tokio::sync::Mutex;

use super::own_daemon::{OwnDaemon, remove_left};
use super::runc::Runc;
use super::wires::Wires;
use super::{own, timeline};
use crate::bench::DiscardedOutput;
use crate::bench::removal::remove;
use crate::progress::stage_spinner;
use crate::run::{self, Start};
use crate::session::SessionSettings;
use crate::vf;

/// The wait that stands for a function-level reset (PCI Express 5.0, section 6.6.2).
const RESET_TIME: Duration = Duration::from_millis(100);

/// The clients, wishes and namespaces that all turns share.
pub struct Turns {
    pub client: SandboxClient,
    pub functions: VfClient,
    /// The request for a sandbox without its name, memory and network.
    pub spec: v1::RunSpec,
    /// The network of the sandboxes that have one.
    pub network: String,
    /// Containers wait for networks.
    pub waits: bool,
    /// The pool of hardware that the user named.
    pub hardware: Option<String>,
    /// The namespaces of sandboxes with interfaces of the kernel's.
    pub wires: Option<Arc<Wires>>,
    /// The peer, if it is measured.
    pub runc: Option<Arc<Runc>>,
    /// The daemons of ways that have their own.
    pub daemons: Vec<OwnDaemon>,
    /// The one lock for all functions, of the way that has it.
    pub devset: Mutex<()>,
}

impl Turns {
    /// Starts sandboxes at once, and removes them when all have started. Returns their timelines,
    /// and the time in ns for which the processors were busy meanwhile.
    ///
    /// # Errors
    /// One does not start, or cannot be removed.
    pub async fn at_once(&self, arm: Arm, point: Point) -> Result<(Vec<Timeline>, u64)> {
        let numbers: Vec<u32> = (0..point.count).collect();
        self.start(arm, point, &numbers).await
    }

    /// Starts as many sandboxes one after the other, each of which is removed before the next.
    ///
    /// # Errors
    /// As [`Turns::at_once`].
    pub async fn singly(&self, arm: Arm, point: Point) -> Result<Singles> {
        let mut singles = Singles { times_ns: Vec::new(), busy_ns: 0 };
        for number in 0..point.count {
            let (timelines, busy_ns) = self.start(arm, point, &[number]).await?;
            let ends = timelines.iter().flat_map(|one| &one.stages).map(|stage| stage.end_ns);
            singles.times_ns.push(ends.max().unwrap_or(0));
            singles.busy_ns += busy_ns;
        }
        Ok(singles)
    }

    async fn start(&self, arm: Arm, point: Point, numbers: &[u32]) -> Result<(Vec<Timeline>, u64)> {
        let busy = || slipway_bench::busy_ns().unwrap_or(0);
        let spinner = stage_spinner(numbers.len() as u32);
        let (began, busy_before) = (monotonic_ns(), busy());
        let starts = numbers.iter().map(|number| self.start_one(arm, point, *number, &spinner));
        let started = join_all(starts).await;
        let busy_ns = busy().saturating_sub(busy_before);
        spinner.finish_and_clear();
        let names = started.iter().flatten().map(|start| start.name.clone());
        let removed = try_join_all(names.map(|name| self.remove(arm, name))).await;
        let timelines = started.into_iter().map(|start| timeline(start?));
        let timelines = timelines.collect::<Result<Vec<_>>>()?;
        removed?;
        self.clean_up(arm, numbers).await?;
        Ok((slipway_bench::aligned(timelines, began), busy_ns))
    }

    /// Returns the daemon of a way that has its own.
    fn daemon_of(&self, arm: Arm) -> Option<&OwnDaemon> {
        self.daemons.iter().find(|one| one.arm == arm)
    }

    /// Returns the client of the daemon that serves a way.
    fn client_of(&self, arm: Arm) -> &SandboxClient {
        self.daemon_of(arm).map_or(&self.client, |one| &one.client)
    }

    /// Returns the client of the functions of the daemon that serves a way.
    fn functions_of(&self, arm: Arm) -> &VfClient {
        self.daemon_of(arm).map_or(&self.functions, |one| &one.functions)
    }

    /// Returns the spec of the sandbox with a number that starts in a way.
    fn spec_of(&self, arm: Arm, point: Point, number: u32) -> Result<v1::RunSpec> {
        let mut spec = v1::RunSpec {
            // Of hundreds of names that a node makes up, two may be the same.
            name: format!("{}-{number}", own()),
            memory_bytes: point.memory_bytes,
            network: self.network.clone(),
            wait_network: self.waits || arm == Arm::NoAsync,
            ..self.spec.clone()
        };
        match arm {
            Arm::Slipway | Arm::NoAsync | Arm::Runc | Arm::RuncCni => {}
            Arm::None => without_network(&mut spec),
            Arm::Pool
            | Arm::VfLocks
            | Arm::OneLock
            | Arm::PoolNoCgroups
            | Arm::PoolNoLayer
            | Arm::PoolNoLate
            | Arm::PoolNoRoot => spec.vf_pool = own(),
            Arm::Veth | Arm::Macvlan | Arm::Macvtap => {
                let wires = self.wires.as_ref().context("no network namespaces were made")?;
                spec.network.clear();
                spec.network_namespace = wires.path(number)?;
            }
            Arm::Tap => {
                without_network(&mut spec);
                spec.emulated_nic = Some(emulated(number));
            }
            Arm::Vf => {
                without_network(&mut spec);
                spec.vf_pool = self.hardware.clone().context("--arms vf needs --vf-pool")?;
            }
        }
        Ok(spec)
    }

    /// Makes the interface of a sandbox, or waits for a reset, as its way has it. Returns the stage
    /// of the start that this is, if it is one.
    async fn prepare(&self, arm: Arm, number: u32) -> Result<Option<&'static str>> {
        if let Some(wires) = self.wires.clone().filter(|_| arm.is_in_namespace()) {
            tokio::task::spawn_blocking(move || wires.add(arm, number)).await??;
            return Ok(Some(INTERFACE));
        }
        if !arm.resets() {
            return Ok(None);
        }
        let _alone = match arm {
            Arm::OneLock => Some(self.devset.lock().await),
            _ => None,
        };
        tokio::time::sleep(RESET_TIME).await;
        Ok(Some(RESET))
    }

    /// Starts a sandbox or the peer's container, after what its way has before it.
    async fn start_one(
        &self,
        arm: Arm,
        point: Point,
        number: u32,
        spinner: &ProgressBar,
    ) -> Result<Start> {
        let spec = self.spec_of(arm, point, number)?;
        let began = monotonic_ns();
        let stage = self.prepare(arm, number).await?;
        let made = monotonic_ns();
        let mut start = match arm {
            Arm::Runc | Arm::RuncCni => self.start_runc(spec.name, number).await?,
            _ => {
                let (client, spinner) = (self.client_of(arm).clone(), spinner.clone());
                let wishes = SessionSettings { stdin: false, tty: false };
                run::start(client, spec, wishes, &mut DiscardedOutput, spinner).await?
            }
        };
        if let (Some(stage), Some(timeline)) = (stage, &mut start.timeline) {
            timeline.record(stage, began, made);
        }
        Ok(start)
    }

    async fn start_runc(&self, name: String, number: u32) -> Result<Start> {
        let runc = self.runc.clone().context("runc is not there")?;
        let network = self.wires.as_ref().context("no network namespaces were made")?;
        let network = network.path(number)?;
        let (began, named) = (monotonic_ns(), name.clone());
        tokio::task::spawn_blocking(move || runc.start(&named, &network)).await??;
        let mut timeline = Timeline::new(name.clone());
        timeline.record("container", began, monotonic_ns());
        Ok(Start { name, exit: None, timeline: Some(timeline) })
    }

    async fn remove(&self, arm: Arm, name: String) -> Result<()> {
        match self.runc.clone().filter(|_| arm.is_runc()) {
            Some(runc) => tokio::task::spawn_blocking(move || runc.remove(&name)).await?,
            None => remove(self.client_of(arm).clone(), name).await,
        }
    }

    /// Removes the sandboxes and interfaces that a turn with `count` sandboxes has left, which
    /// failed.
    ///
    /// # Errors
    /// Something cannot be removed.
    pub async fn remove_left(&self, arm: Arm, count: u32) -> Result<()> {
        match self.runc.as_ref().filter(|_| arm.is_runc()) {
            Some(runc) => runc.remove_left().await?,
            None => remove_left(self.client_of(arm)).await?,
        }
        self.clean_up(arm, &(0..count).collect::<Vec<_>>()).await
    }

    /// Waits until functions are ready again, and removes interfaces.
    async fn clean_up(&self, arm: Arm, numbers: &[u32]) -> Result<()> {
        let pool = match arm {
            _ if arm.takes_of_pool() => Some(own()),
            Arm::Vf => self.hardware.clone(),
            _ => None,
        };
        if let Some(pool) = pool {
            vf::wait_until_ready(&mut self.functions_of(arm).clone(), &pool).await?;
        }
        let Some(wires) = self.wires.clone().filter(|_| arm.is_in_namespace()) else {
            return Ok(());
        };
        let numbers = numbers.to_vec();
        let removed = tokio::task::spawn_blocking(move || {
            // A sandbox that did not start may have none; those of the others go even so.
            let removed = numbers.into_iter().map(|number| wires.remove(arm, number));
            removed.fold(Ok(()), Result::and)
        });
        removed.await?
    }
}

fn without_network(spec: &mut v1::RunSpec) {
    spec.network = "none".to_owned();
    spec.wait_network = false;
}

/// Returns QEMU's own interface of a sandbox, on a TAP interface that QEMU makes.
fn emulated(number: u32) -> v1::EmulatedNic {
    let [_, _, high, low] = number.to_be_bytes();
    v1::EmulatedNic {
        model: "virtio".to_owned(),
        tap: format!("slwt{}-{number}", std::process::id() % 100_000),
        mac: format!("52:54:00:02:{high:02x}:{low:02x}"),
    }
}

/// Fails if a way does not go with the kind of sandboxes or other options.
pub fn check(arms: &[Arm], is_hollow: bool, hardware: Option<&str>) -> Result<()> {
    if let Some(arm) = arms.iter().find(|arm| is_hollow && arm.needs_guests()) {
        bail!("the way {arm} needs guests: hollow sandboxes do not have what it is about");
    }
    match (arms.contains(&Arm::Vf), hardware) {
        (true, None) => bail!("the way vf needs a pool of hardware: --vf-pool POOL"),
        (false, Some(_)) => bail!("--vf-pool is for the way vf: --arms vf"),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ways_that_do_not_go_together_are_refused() {
        let refusal = |arms: &[Arm], is_hollow, hardware| {
            check(arms, is_hollow, hardware).map_err(|error| error.to_string())
        };
        assert_eq!(refusal(&[Arm::None, Arm::Tap], false, None), Ok(()));
        for arm in [Arm::Tap, Arm::PoolNoLate, Arm::PoolNoRoot] {
            assert!(refusal(&[Arm::Pool, arm], true, None).unwrap_err().contains("needs guests"));
        }
        assert_eq!(refusal(&[Arm::PoolNoCgroups, Arm::PoolNoLayer], true, None), Ok(()));
        assert!(refusal(&[Arm::Vf], false, None).unwrap_err().contains("--vf-pool POOL"));
        assert!(refusal(&[Arm::Pool], false, Some("a")).unwrap_err().contains("--arms vf"));
        assert_eq!(refusal(&[Arm::Vf], false, Some("a")), Ok(()));
    }

    #[test]
    fn interfaces_of_qemu_have_names_and_addresses_of_their_own() {
        let (first, last) = (emulated(0), emulated(4095));
        assert!(last.tap.len() <= 15 && last.tap != first.tap, "{}", last.tap);
        assert_eq!(last.mac, "52:54:00:02:0f:ff");
    }
}
