//! Reports latencies of an endpoint's commands to a client at intervals.
//!
//! A session gives each thread of the controller a tracer, takes its histograms each interval (by
//! requests in the controller's mailbox, so that the reactor only swaps a pointer), and removes the
//! tracers when the client is gone.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use slipway_nvme::{
    Answer, Latencies, Layer, Limits, Mailbox, OpcodeClass, Request, Threads, Tracer,
};
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
/// The time that a controller may take to carry out a request: it carries out none while its
/// client's memory is being unmapped.
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

    /// Posts the request that `request` makes of a callback. Returns the answer and its time, or
    /// `None` if the controller has ended or does not answer in time.
    async fn ask<T: Send + 'static>(
        &self,
        request: impl FnOnce(Answer<T>) -> Request,
    ) -> Option<(T, u64)> {
        let (sender, answer) = oneshot::channel();
        self.mailbox.post(request(Box::new(move |value| {
            // If the caller has given up waiting, the value is dropped.
            let _ = sender.send((value, monotonic_ns()));
        })));
        self.control.poke();
        tokio::time::timeout(PATIENCE, answer).await.ok()?.ok()
    }

    /// Returns the controller's threads, or `None` if the controller has ended.
    async fn threads(&self) -> Option<Threads> {
        Some(self.ask(Request::Threads).await?.0)
    }
}

/// The one session of a target. Dropping it admits the next one.
struct Session {
    target: Target,
    /// The number of the controller's threads, which count separately.
    threads: usize,
    from_ns: u64,
}

impl Drop for Session {
    fn drop(&mut self) {
        // Needed even if `start` failed: a request of it may be carried out after the caller gave
        // up waiting.
        for thread in 0..self.threads {
            self.target.mailbox.post(Request::Trace(thread, None, Box::new(drop)));
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
    let mut session = Session { target, threads: 1, from_ns: 0 };
    let gone = || Error::Unknown(request.id.clone());
    let Threads { count, queues } = session.target.threads().await.ok_or_else(gone)?;
    session.threads = count;
    for thread in 0..count {
        let limits = &session.target.limits;
        let latencies = Latencies::new(queues);
        let tracer = Box::new(Tracer::new(clock.clone(), request.every, limits, latencies));
        // There was no tracer: only sessions set one, and this is the only session.
        let trace = |answer| Request::Trace(thread, Some(tracer), answer);
        let (_, at) = session.target.ask(trace).await.ok_or_else(gone)?;
        session.from_ns = at;
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
        // The tracers are dropped here, not on the reactors.
        for thread in 0..self.threads {
            drop(self.target.ask(|answer| Request::Trace(thread, None, answer)).await);
        }
    }

    /// Returns the latencies counted since the last report, or `None` if the controller has ended.
    async fn report(&mut self) -> Option<v1::SnoopReport> {
        let queues = self.target.threads().await?.queues;
        let (mut latencies, mut to_ns) = (Latencies::new(queues), 0);
        for thread in 0..self.threads {
            let fresh = Latencies::new(queues);
            let take = |answer| Request::TakeLatencies(thread, fresh, answer);
            let (counted, at) = self.target.ask(take).await?;
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
