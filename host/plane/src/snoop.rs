//! Reports latencies of an endpoint's commands to a client at intervals.
//!
//! A session gives the controller a tracer, takes its histograms each interval (by jobs in the
//! controller's mailbox, so that the reactor only swaps a pointer), and removes the tracer when the
//! client is gone.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use slipway_nvme::{Controller, Latencies, Layer, Limits, Mailbox, OpcodeClass, Tracer};
use slipway_plane_api::{histogram, v1};
use slipway_telemetry::{Clock, monotonic_ns};
use slipway_vfio_user::Control;
use tokio::sync::{mpsc, oneshot};
use tokio::time::MissedTickBehavior;
use tonic::Status;

use crate::Error;

/// The default interval in milliseconds.
const INTERVAL: u32 = 1_000;
/// The range of valid intervals in milliseconds.
const INTERVALS: std::ops::RangeInclusive<u32> = 10..=3_600_000;
/// The time that a controller may take to run a job: it runs none while its client's memory is
/// being unmapped.
const PATIENCE: Duration = Duration::from_secs(15);
/// The number of reports in flight to a client. A client that reads slowly misses nothing, but its
/// reports cover longer intervals.
const QUEUE: usize = 4;

/// The means to reach a controller that one client at a time can trace.
#[derive(Clone)]
pub struct Target {
    mailbox: Mailbox,
    control: Control,
    limits: Limits,
    taken: Arc<AtomicBool>,
}

impl Target {
    /// Makes a target of the controller with this mailbox and these limits, behind this endpoint.
    pub fn new(mailbox: Mailbox, limits: Limits, control: Control) -> Self {
        Self { mailbox, control, limits, taken: Arc::default() }
    }

    /// Has the controller do `job` and returns the result, or `None` if the controller has ended or
    /// does not run the job in time.
    async fn ask<T: Send + 'static>(
        &self,
        job: impl FnOnce(&mut Controller) -> T + Send + 'static,
    ) -> Option<T> {
        self.ask_at(&self.mailbox, job).await
    }

    /// Has the part of the controller with this mailbox do `job`, as [`Target::ask`] does.
    async fn ask_at<T: Send + 'static>(
        &self,
        mailbox: &Mailbox,
        job: impl FnOnce(&mut Controller) -> T + Send + 'static,
    ) -> Option<T> {
        let (sender, answer) = oneshot::channel();
        mailbox.post(move |controller| {
            // If the caller has given up waiting, the result is dropped.
            let _ = sender.send(job(controller));
        });
        self.control.poke();
        tokio::time::timeout(PATIENCE, answer).await.ok()?.ok()
    }
}

/// The one session of a target. Dropping it admits the next one.
struct Session {
    target: Target,
    /// The mailboxes of the controller and of each of its lanes, which count separately.
    mailboxes: Vec<Mailbox>,
    from_ns: u64,
}

impl Drop for Session {
    fn drop(&mut self) {
        // Needed even if `start` failed: a job of it may run after the caller gave up waiting.
        for mailbox in &self.mailboxes {
            mailbox.post(|controller| drop(controller.trace(None)));
        }
        self.target.control.poke();
        self.target.taken.store(false, Ordering::Release);
    }
}

pub type Reports = mpsc::Receiver<Result<v1::SnoopReport, Status>>;

/// Starts tracing `target` with stamps of `clock`. Reports come until the receiver is dropped.
pub async fn start(
    target: Target,
    clock: Arc<dyn Clock>,
    request: &v1::SnoopRequest,
) -> Result<Reports, Error> {
    let interval = if request.interval_ms == 0 { INTERVAL } else { request.interval_ms };
    if !INTERVALS.contains(&interval) {
        return Err(Error::Invalid(format!(
            "an interval of {interval} ms is not within {} to {} ms",
            INTERVALS.start(),
            INTERVALS.end()
        )));
    }
    if target.taken.swap(true, Ordering::AcqRel) {
        return Err(Error::Snooped(request.id.clone()));
    }
    let mailboxes = vec![target.mailbox.clone()];
    let mut session = Session { target, mailboxes, from_ns: 0 };
    let gone = || Error::Unknown(request.id.clone());
    let shape = session.target.ask(|one| (one.io_queues(), one.lane_mailboxes()));
    let (queues, lanes) = shape.await.ok_or_else(gone)?;
    session.mailboxes.extend(lanes);
    for mailbox in &session.mailboxes {
        let limits = &session.target.limits;
        let latencies = Latencies::new(queues);
        let tracer = Box::new(Tracer::new(clock.clone(), request.every, limits, latencies));
        let started = session.target.ask_at(mailbox, |controller| {
            // There was no tracer: only sessions set one, and this is the only session.
            drop(controller.trace(Some(tracer)));
            monotonic_ns()
        });
        session.from_ns = started.await.ok_or_else(gone)?;
    }
    let (sender, reports) = mpsc::channel(QUEUE);
    tokio::spawn(session.run(Duration::from_millis(interval.into()), sender));
    Ok(reports)
}

impl Session {
    async fn run(
        mut self,
        interval: Duration,
        sender: mpsc::Sender<Result<v1::SnoopReport, Status>>,
    ) {
        let mut ticks = tokio::time::interval(interval);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        // The first tick is immediate.
        ticks.tick().await;
        loop {
            tokio::select! {
                () = sender.closed() => break,
                _ = ticks.tick() => {}
            }
            let Some(report) = self.report().await else {
                let gone = Status::unavailable("the endpoint was removed");
                let _ = sender.send(Err(gone)).await;
                break;
            };
            if sender.send(Ok(report)).await.is_err() {
                break;
            }
        }
        // The tracer is dropped here, not on the reactor.
        for mailbox in &self.mailboxes {
            drop(self.target.ask_at(mailbox, |controller| controller.trace(None)).await);
        }
    }

    /// Returns the latencies counted since the last report, or `None` if the controller has ended.
    async fn report(&mut self) -> Option<v1::SnoopReport> {
        let queues = self.target.ask(|controller| controller.io_queues()).await?;
        let (mut latencies, mut to_ns) = (Latencies::new(queues), 0);
        for mailbox in &self.mailboxes {
            let fresh = Latencies::new(queues);
            let taken = self
                .target
                .ask_at(mailbox, |controller| (controller.take_latencies(fresh), monotonic_ns()));
            let (counted, at) = taken.await?;
            latencies.merge(&counted?);
            to_ns = at;
        }
        let from_ns = std::mem::replace(&mut self.from_ns, to_ns);
        Some(v1::SnoopReport { from_ns, to_ns, rows: rows(&latencies), missed: latencies.missed() })
    }
}

fn rows(latencies: &Latencies) -> Vec<v1::LatencyRow> {
    let keys =
        (1..=latencies.queues()).flat_map(|queue| OpcodeClass::ALL.map(|class| (queue, class)));
    keys.filter_map(|(queue, class)| row(latencies, queue, class)).collect()
}

/// Returns the row of a queue and an opcode class, or `None` if no such command was completed.
fn row(latencies: &Latencies, queue: u16, class: OpcodeClass) -> Option<v1::LatencyRow> {
    let whole = latencies.get(queue, class, Layer::Whole)?;
    if whole.count() == 0 {
        return None;
    }
    let layers = Layer::ALL.iter().filter_map(|layer| {
        let latency = latencies.get(queue, class, *layer)?;
        Some(v1::LayerLatency {
            layer: layer_name(*layer).into(),
            latency: Some(histogram::to_wire(latency)),
        })
    });
    Some(v1::LatencyRow {
        queue: queue.into(),
        class: class_name(class).into(),
        layers: layers.collect(),
    })
}

fn layer_name(layer: Layer) -> v1::layer_latency::Layer {
    use v1::layer_latency::Layer as Name;
    match layer {
        Layer::Fetch => Name::DoorbellToFetch,
        Layer::Submit => Name::FetchToBackend,
        Layer::Backend => Name::Backend,
        Layer::Complete => Name::CompletionToInterrupt,
        Layer::Whole => Name::Whole,
    }
}

fn class_name(class: OpcodeClass) -> v1::OpcodeClass {
    match class {
        OpcodeClass::Read => v1::OpcodeClass::Read,
        OpcodeClass::Write => v1::OpcodeClass::Write,
        OpcodeClass::Flush => v1::OpcodeClass::Flush,
        OpcodeClass::Other => v1::OpcodeClass::Other,
    }
}
