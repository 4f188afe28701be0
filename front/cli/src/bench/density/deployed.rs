//! A node with more and more sandboxes, as the subject of turns.

use std::rc::Rc;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use slipway_bench::density::{
    DensityLoad, DensityMeasured, Idle, Processes, Quantity, Starts, Taken, Unit, available_bytes,
    shortage,
};
use slipway_bench::{NOT_TRIED, Own, Subject};
use slipway_telemetry::monotonic_ns;
use tokio::sync::Mutex;

use super::fleet::Fleet;
use crate::args::{DensityArgs, DensityEngine};
use crate::bench::interruptible::Interruptible;

/// The length of a look at whether sandboxes idle.
const LOOK: Duration = Duration::from_secs(1);
/// The longest time that they are given to become idle.
const PATIENCE: Duration = Duration::from_secs(60);
/// The processor time that a VMM which idles may use during a look.
const IDLE: Duration = Duration::from_millis(10);
/// The least memory that a sandbox is expected to take, bytes.
const LEAST: f64 = (1 << 20) as f64;
/// The factor by which the next sandboxes may take more than those before.
const MARGIN: f64 = 1.25;

/// The sandboxes of a node, which stay from turn to turn.
pub struct Deployed {
    /// The name of the VMM.
    engine: String,
    about: String,
    calls: Rc<Interruptible>,
    fleet: Rc<Mutex<Fleet>>,
    /// The time for which sandboxes are left alone.
    period: Duration,
    /// The memory of a guest, bytes.
    memory_bytes: u64,
    /// The memory that a sandbox is expected to take, bytes.
    each: f64,
    /// The unit of the turn before, and the memory before the first one of it.
    begun: Option<(Unit, Taken)>,
    /// The pod, and the number of its containers.
    pod: Option<(String, u32)>,
    /// Units of which a turn failed.
    failed: Vec<Unit>,
}

impl Deployed {
    /// Starts two sandboxes and removes them: what a node makes once is made by the first. The next
    /// sandboxes are expected to take what the second took.
    ///
    /// # Errors
    /// The node runs sandboxes on another VMM than the user named, two do not fit or do not start,
    /// or a signal has ended this.
    pub fn begin(
        calls: &Rc<Interruptible>,
        fleet: &Rc<Mutex<Fleet>>,
        args: &DensityArgs,
        memory_bytes: u64,
    ) -> Result<Self> {
        let period = Duration::from_secs_f64(args.idle);
        let (engine, each) = calls.wait(async {
            let mut fleet = fleet.lock().await;
            fits(2, memory_bytes)?;
            fleet.grow(1).await?;
            let engine = fleet.engine().await?;
            let expected = args.engine.map_or(&*engine, |engine| engine.program());
            ensure!(
                engine == expected,
                "this node's daemon runs sandboxes on {engine}, not on {expected}: `vmm` in its \
                 settings says so"
            );
            let before = before(&mut fleet).await?;
            fleet.grow(2).await?;
            let second = idle(&mut fleet, before, period).await?;
            fleet.clear().await?;
            anyhow::Ok((engine, largest(&second, 1)))
        })?;
        let begun = match args.engine {
            Some(DensityEngine::Hollow) => "no guest code runs",
            _ if args.fork => "forks of a template",
            _ => "booted",
        };
        let about = format!("guests of {} MiB, {begun}", memory_bytes >> 20);
        let (calls, fleet) = (Rc::clone(calls), Rc::clone(fleet));
        let (begun, pod, failed) = (None, None, Vec::new());
        Ok(Self { engine, about, calls, fleet, period, memory_bytes, each, begun, pod, failed })
    }

    async fn turn(&mut self, load: &DensityLoad) -> Result<DensityMeasured> {
        let fleet = Rc::clone(&self.fleet);
        let mut fleet = fleet.lock().await;
        let before = self.before(&mut fleet, load.unit).await?;
        let starts = match load.unit {
            Unit::Sandbox => self.sandboxes(&mut fleet, load).await?,
            Unit::Replica => self.replicas(&mut fleet, load.count).await?,
        };
        if load.more > 0 {
            return Ok(DensityMeasured { idle: None, starts });
        }
        let idle = idle(&mut fleet, before, self.period).await?;
        if load.unit == Unit::Sandbox && load.count > 0 {
            self.each = largest(&idle, load.count);
        }
        Ok(DensityMeasured { idle: Some(idle), starts })
    }

    /// Returns the memory before the first one of a unit. Removes those of another unit.
    async fn before(&mut self, fleet: &mut Fleet, unit: Unit) -> Result<Taken> {
        if let Some((_, before)) = self.begun.filter(|(begun, _)| *begun == unit) {
            return Ok(before);
        }
        fleet.clear().await?;
        let before = before(fleet).await?;
        self.begun = Some((unit, before));
        Ok(before)
    }

    /// Starts sandboxes until there are as many as the load has, and further ones beside them.
    async fn sandboxes(&self, fleet: &mut Fleet, load: &DensityLoad) -> Result<Starts> {
        let missing = load.count.saturating_sub(fleet.count());
        fits(missing.saturating_add(load.more), (self.each * MARGIN) as u64)?;
        fleet.grow(load.count).await?;
        Ok(match load.more {
            0 => Starts::default(),
            more => Starts(vec![fleet.burst(more).await?]),
        })
    }

    /// Starts containers of the pod until there are `count`.
    async fn replicas(&mut self, fleet: &mut Fleet, count: u32) -> Result<Starts> {
        if self.pod.is_none() {
            fits(1, self.memory_bytes)?;
            self.pod = Some((fleet.pod().await?, 0));
        }
        let (pod, there) = self.pod.as_mut().context("there is no pod")?;
        let mut starts = Starts::default();
        while *there < count {
            starts.0.push(vec![fleet.replica(pod).await?]);
            *there += 1;
        }
        Ok(starts)
    }
}

impl Subject for Deployed {
    type Load = DensityLoad;
    type Measured = DensityMeasured;

    fn name(&self) -> &str {
        &self.engine
    }

    fn about(&self) -> String {
        self.about.clone()
    }

    fn own(&self) -> Own {
        Own::BusyNode
    }

    fn is_ended(&self) -> bool {
        self.calls.check().is_err()
    }

    fn run(&mut self, load: &DensityLoad) -> Result<DensityMeasured> {
        ensure!(!self.failed.contains(&load.unit), NOT_TRIED);
        let calls = Rc::clone(&self.calls);
        let measured = calls.wait(self.turn(load));
        if measured.is_err() {
            self.failed.push(load.unit);
        }
        measured
    }
}

/// Checks that `count` more sandboxes of `each` bytes fit into the host's memory.
fn fits(count: u32, each: u64) -> Result<()> {
    match shortage(available_bytes(), count, each) {
        Some(reason) => bail!("{reason}"),
        None => Ok(()),
    }
}

/// Returns what each of `count` sandboxes took, as far as processes or the host have it, bytes.
fn largest(idle: &Idle, count: u32) -> f64 {
    let each = |quantity| idle.each(quantity, count);
    each(Quantity::Pss).max(each(Quantity::Host)).max(LEAST)
}

/// Returns the memory that is taken when everything idles.
async fn before(fleet: &mut Fleet) -> Result<Taken> {
    let processes = fleet.processes().await?;
    wait_until_idle(&processes).await?;
    fleet.memory(&processes).await
}

/// Measures what is there, when it idles, and leaves it alone for a period.
async fn idle(fleet: &mut Fleet, before: Taken, period: Duration) -> Result<Idle> {
    let processes = fleet.processes().await?;
    let settled = wait_until_idle(&processes).await?;
    let taken = fleet.memory(&processes).await?;
    let (began, used) = (monotonic_ns(), processes.cpu()?);
    tokio::time::sleep(period).await;
    let cpu = processes.cpu()?.since(used);
    let idle_ns = monotonic_ns().saturating_sub(began).max(1);
    let guest_used = fleet.guest_used().await;
    Ok(Idle { before, taken, guest_used, settled, idle_ns, cpu })
}

/// Waits until VMMs idle. Returns `false` if they do not in time.
async fn wait_until_idle(processes: &Processes) -> Result<bool> {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let most = LOOK.as_nanos() as u64 * cores as u64 / 2;
    let each = IDLE.as_nanos() as u64;
    let allowed = each.saturating_mul(processes.vmms.len() as u64 + 1).min(most);
    let mut waited = Duration::ZERO;
    loop {
        let before = processes.cpu()?;
        tokio::time::sleep(LOOK).await;
        waited += LOOK;
        // The first look is at what has just been started.
        if waited > LOOK && processes.cpu()?.since(before).own() <= allowed {
            return Ok(true);
        }
        if waited >= PATIENCE {
            return Ok(false);
        }
    }
}
