//! `slipway bench startup`: starts sandboxes at once, and shows where the time went.

use std::cell::Cell;
use std::rc::Rc;

use anyhow::{Result, bail};
use slipway_bench::arms::{ArmExtra, ArmMeasured, ArmPlan, ArmSubject, ArmsReport, Point};
use slipway_bench::{Own, Subject, Turn, busy_ns};
use slipway_runtime::{Config, SandboxClient, v1};
use slipway_telemetry::{Timeline, monotonic_ns};

use super::interruptible::Interruptible;
use super::reports::{self, View};
use super::{accelerator, arms, machine_of, machine_processors, start_at_once, subjects, tell};
use crate::args::{NodeArgs, Pull, StartupArgs};
use crate::client::connect;
use crate::run::{Fetched, Start};
use crate::session::Event;
use crate::{image, report};

/// Measures, and shows the report.
pub fn startup(node: &NodeArgs, config: &Config, args: &StartupArgs) -> Result<i32> {
    if args.has_turns() {
        return arms::arms(node, config, args);
    }
    reports::complete(&reports::show(&VIEW, &args.files(), || measure(node, config, args))?)
}

/// The view of reports of sandboxes that start in one way.
const VIEW: View<ArmsReport> = View {
    title: |measured| {
        let what = report::title(last(measured).len(), &measured.extra.image);
        format!("{what}\n{}", measured.environment.line())
    },
    picture: |measured, title| slipway_bench::svg(last(measured), title),
    table: |measured, colour| {
        let statistics = slipway_bench::statistics(&measured.timelines());
        let table = slipway_bench::table(&statistics, colour);
        let bars = slipway_bench::bars(last(measured), report::width(), colour);
        format!("{table}\n{bars}\n{}", measured.obstacles())
    },
    differences: |before, now, colour| slipway_bench::compare(before, now).table(colour),
};

/// Returns the timelines of the last round.
fn last(measured: &ArmsReport) -> &[Timeline] {
    measured.runs.last().map(|run| run.measured.timelines.as_slice()).unwrap_or_default()
}

fn measure(node: &NodeArgs, config: &Config, args: &StartupArgs) -> Result<ArmsReport> {
    let calls = Rc::new(Interruptible::new()?);
    let (client, image) = calls.wait(async {
        let client = connect(node, config).await?;
        anyhow::Ok((client, image::ensure(config, &args.image, Pull::Missing).await?))
    })?;
    let spec = v1::RunSpec {
        command: vec!["true".to_owned()],
        remove: true,
        network: args.network.clone().unwrap_or_else(|| "none".to_owned()),
        memory_bytes: args.memory.first().copied().unwrap_or(0),
        ..machine_of(args, &image.digest.to_string())?
    };
    let count = args.count.first().copied().unwrap_or(1);
    let plan = ArmPlan::new(vec![Point { count, memory_bytes: spec.memory_bytes }], args.rounds);
    let volumes = u32::try_from(spec.volumes.len() + spec.shares.len())?;
    let subject = Sandboxes { calls: Rc::clone(&calls), client, config: config.clone(), spec };
    let subjects: Vec<Box<ArmSubject>> = vec![Box::new(subject)];
    let accelerator = accelerator(args.accel.as_deref());
    let told = |turn: &Turn<'_, Point>| tell(args, turn);
    let report = subjects::report_telling(subjects, plan, accelerator, told);
    let mut report: ArmsReport = calls.check().and(report)?;
    report.extra = ArmExtra { image: args.image.clone(), volumes, waits: false };
    Ok(report)
}

/// Sandboxes that start at once, each with the same request.
struct Sandboxes {
    calls: Rc<Interruptible>,
    client: SandboxClient,
    config: Config,
    spec: v1::RunSpec,
}

impl Subject for Sandboxes {
    type Load = Point;
    type Measured = ArmMeasured;

    fn name(&self) -> &str {
        "sandboxes"
    }

    fn about(&self) -> String {
        "each runs `true`, and is removed".to_owned()
    }

    fn own(&self) -> Own {
        Own::BusyNode
    }

    fn is_ended(&self) -> bool {
        self.calls.check().is_err()
    }

    fn run(&mut self, point: &Point) -> Result<ArmMeasured> {
        self.calls.wait(async {
            let busy = BusyUntilRun::begin(|| busy_ns().unwrap_or(0));
            let began = monotonic_ns();
            // The image is in the cache: each round finds it there, as each `run` does.
            image::ensure(&self.config, &self.spec.image_digest, Pull::Never).await?;
            let fetched = Fetched { began, ended: monotonic_ns() };
            let specs = vec![self.spec.clone(); point.count as usize];
            let started = start_at_once(&self.client, specs, |event| busy.hear(event)).await;
            let busy_ns = busy.ns();
            let timelines = started.into_iter().map(|start| timeline(start?));
            let timelines = fetched.align(timelines.collect::<Result<_>>()?);
            let processors = machine_processors();
            anyhow::Ok(ArmMeasured { timelines, processors, busy_ns, singles: None })
        })
    }
}

/// The time for which the processors are busy until the last of several sandboxes runs. Their ends
/// and removals are not part of a start.
struct BusyUntilRun<F> {
    /// Returns the time for which the processors were busy so far, ns.
    busy: F,
    before: u64,
    /// That time when a sandbox was last heard to run.
    ran: Cell<u64>,
}

impl<F: Fn() -> u64> BusyUntilRun<F> {
    /// Begins the time now.
    fn begin(busy: F) -> Self {
        let before = busy();
        Self { busy, before, ran: Cell::new(before) }
    }

    /// Takes note of an event of a sandbox's session.
    fn hear(&self, event: &Event) {
        if matches!(event, Event::Started(_)) {
            self.ran.set((self.busy)());
        }
    }

    /// Returns the time, ns.
    fn ns(&self) -> u64 {
        self.ran.get().saturating_sub(self.before)
    }
}

/// Returns the timeline of a sandbox whose program has ended.
fn timeline(start: Start) -> Result<Timeline> {
    match (start.timeline, start.exit) {
        (Some(timeline), Some(exit)) if exit.status == 0 => Ok(timeline),
        (_, Some(exit)) => {
            bail!("sandbox {} ended with status {}: {}", start.name, exit.status, exit.reason)
        }
        _ => bail!("sandbox {} did not run", start.name),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_of_sandboxes_are_not_part_of_their_starts() {
        let now = Cell::new(10);
        let busy = BusyUntilRun::begin(|| now.get());
        assert_eq!(busy.ns(), 0);
        let started = || Event::Started(Vec::new());
        let events = [Event::Created("a".to_owned()), started(), started()];
        for (time, event) in [20, 30, 45].into_iter().zip(events) {
            now.set(time);
            busy.hear(&event);
        }
        now.set(70);
        assert_eq!(busy.ns(), 35);
    }
}
