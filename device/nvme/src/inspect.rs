//! Views of a controller's threads, for people who look for what it waits for.
//!
//! A view is a copy that the thread itself makes, as the answer to
//! [`Request::Inspect`](crate::Request::Inspect). Making it changes nothing but that a thread which
//! sleeps is polled once. Its size is bounded, whatever queues a guest has made.

use serde::{Deserialize, Serialize};
use slipway_nvme_spec::registers::{head_doorbell, tail_doorbell};

use crate::engine::{IoEngine, Mode};
use crate::queue::{CompletionQueue, SubmissionQueue};

/// The number of queues of each kind that a view of a thread lists. The rest is counted.
const LISTED: usize = 64;

/// One thread of a controller: its own, or that of a lane.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ThreadView {
    /// The controller's registers and state; `None` for a lane.
    pub controller: Option<ControllerView>,
    /// The work that the thread may do: `off`, `draining` (commands in flight end), `running`, or
    /// `failed` (after a fatal error).
    pub mode: String,
    /// The number of requests that disks work on.
    pub requests: u32,
    /// The time in nanoseconds for which the limits hold the next command back; 0 if it may start,
    /// `None` if there are no limits.
    pub held_ns: Option<u64>,
    /// Submission queues by number, up to 64 of them. Queue 0 is the admin queue.
    pub submission: Vec<SubmissionView>,
    /// Completion queues by number, up to 64 of them.
    pub completion: Vec<CompletionView>,
    /// The number of queues that are not listed.
    pub more_queues: usize,
}

/// The state of a controller that exists once.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ControllerView {
    /// `disabled`, `enabled`, `resetting` (it waits for the disks) or `refused` (it could not be
    /// enabled).
    pub phase: String,
    /// The progress of a shutdown: `none`, `draining`, `flushing` or `complete` (section 7.6.2).
    pub shutdown: String,
    /// The register CC (section 3.1.5).
    pub cc: u32,
    /// The register CSTS (section 3.1.6).
    pub csts: u32,
    /// The number of admin commands that wait for a lane or for the end of a queue.
    pub waiting_admin: usize,
}

/// A submission queue (section 4.1.1).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SubmissionView {
    /// The queue's number.
    pub id: u16,
    /// The number of the completion queue for its commands.
    pub completion: u16,
    /// The number of entries.
    pub size: u32,
    /// The next entry to fetch.
    pub head: u32,
    /// The first entry that the host had not submitted at the last look.
    pub tail: u32,
    /// The value of the tail doorbell's register. With shadow doorbells the host need not write it.
    pub doorbell: u32,
    /// The number of commands fetched and not completed, without Asynchronous Event Requests.
    pub in_flight: u32,
    /// The number of commands taken off since the queue was made.
    pub fetched: u64,
    /// The queue ends with its last command in flight.
    pub deleting: bool,
}

/// A completion queue (section 4.1.2).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CompletionView {
    /// The queue's number.
    pub id: u16,
    /// The number of entries.
    pub size: u32,
    /// The next entry that the host will take, as of the last look.
    pub head: u32,
    /// The next entry to write.
    pub tail: u32,
    /// The phase tag of the next entry.
    pub phase: bool,
    /// The value of the head doorbell's register, as for a submission queue.
    pub doorbell: u32,
    /// The number of entries promised to commands in flight.
    pub reserved: u32,
    /// The number of entries written since the queue was made.
    pub posted: u64,
    /// The interrupt vector; `None` if the queue has no interrupts.
    pub vector: Option<u16>,
    /// The number of entries written since the last interrupt.
    pub uninterrupted: u32,
}

impl ThreadView {
    /// Looks at the thread of this engine. The view has no registers.
    pub(crate) fn new(engine: &IoEngine) -> Self {
        let queues = &engine.queues;
        let submission = queues.submissions().take(LISTED);
        let completion = queues.completions().take(LISTED);
        let beyond = queues.submissions().skip(LISTED).count();
        let held = engine.limiter.wait(engine.clock.now());
        Self {
            controller: None,
            mode: mode(engine).to_owned(),
            requests: engine.inflight.requests(),
            held_ns: held.map(|time| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)),
            submission: submission.map(|queue| submission_view(engine, queue)).collect(),
            completion: completion.map(|queue| completion_view(engine, queue)).collect(),
            more_queues: beyond + queues.completions().skip(LISTED).count(),
        }
    }
}

fn mode(engine: &IoEngine) -> &'static str {
    match engine.mode() {
        _ if engine.has_failed() => "failed",
        Mode::Off => "off",
        Mode::Draining => "draining",
        Mode::Running => "running",
    }
}

fn submission_view(engine: &IoEngine, queue: &SubmissionQueue) -> SubmissionView {
    SubmissionView {
        id: queue.id,
        completion: queue.completion,
        size: queue.size,
        head: queue.head,
        tail: queue.tail,
        doorbell: engine.doorbells.load(tail_doorbell(queue.id)),
        in_flight: queue.in_flight,
        fetched: queue.taken,
        deleting: queue.deleting,
    }
}

fn completion_view(engine: &IoEngine, queue: &CompletionQueue) -> CompletionView {
    CompletionView {
        id: queue.id,
        size: queue.size,
        head: queue.head,
        tail: queue.tail,
        phase: queue.phase,
        doorbell: engine.doorbells.load(head_doorbell(queue.id)),
        reserved: queue.reserved,
        posted: queue.written,
        vector: queue.vector,
        uninterrupted: queue.fresh,
    }
}
