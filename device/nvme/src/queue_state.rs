//! Queues as a saved state has them.

use serde::{Deserialize, Serialize};
use slipway_doorbells::Doorbells;
use slipway_nvme_spec::registers::{head_doorbell, tail_doorbell};

use crate::cell::Cell;
use crate::queue::{CompletionQueue, Queues, SubmissionQueue};

/// The values that a queue saw last, and the value that it may not have looked at yet.
#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct DoorbellState {
    pub register: u32,
    /// The register's value when the state was saved.
    pub rung: u32,
    /// The value of the shadow page's entry, and whether the host has changed it.
    pub shadow: Option<(u32, bool)>,
}

impl DoorbellState {
    /// Returns the state of a new queue's doorbell.
    pub fn fresh(shadow: bool) -> Self {
        Self { register: 0, rung: 0, shadow: shadow.then_some((0, false)) }
    }
}

#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SubmissionState {
    pub id: u16,
    pub completion: u16,
    pub base: u64,
    pub size: u32,
    pub head: u32,
    pub tail: u32,
    pub doorbell: DoorbellState,
}

#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct CompletionState {
    pub id: u16,
    pub base: u64,
    pub size: u32,
    pub head: u32,
    pub tail: u32,
    pub phase: bool,
    pub vector: Option<u16>,
    pub doorbell: DoorbellState,
}

/// Queues as a state has them.
#[derive(Clone, Default)]
pub(crate) struct QueueStates {
    pub submission: Vec<SubmissionState>,
    pub completion: Vec<CompletionState>,
}

impl QueueStates {
    /// Adds a new submission queue.
    pub fn add_submission(&mut self, (id, completion): (u16, u16), ring: (u64, u32), shadow: bool) {
        let ((base, size), doorbell) = (ring, DoorbellState::fresh(shadow));
        let (head, tail) = (0, 0);
        let queue = SubmissionState { id, completion, base, size, head, tail, doorbell };
        self.submission.push(queue);
    }

    /// Adds a new completion queue.
    pub fn add_completion(
        &mut self,
        (id, vector): (u16, Option<u16>),
        ring: (u64, u32),
        shadow: bool,
    ) {
        let ((base, size), doorbell) = (ring, DoorbellState::fresh(shadow));
        let (head, tail, phase) = (0, 0, true);
        self.completion.push(CompletionState {
            id,
            base,
            size,
            head,
            tail,
            phase,
            vector,
            doorbell,
        });
    }

    /// Notes the present values of the registers.
    pub fn note_rung(&mut self, doorbells: &Doorbells) {
        for queue in &mut self.submission {
            queue.doorbell.rung = doorbells.load(tail_doorbell(queue.id));
        }
        for queue in &mut self.completion {
            queue.doorbell.rung = doorbells.load(head_doorbell(queue.id));
        }
    }

    /// Adds another thread's queues.
    pub fn append(&mut self, other: &Self) {
        self.submission.extend_from_slice(&other.submission);
        self.completion.extend_from_slice(&other.completion);
    }
}

impl From<&Queues> for QueueStates {
    fn from(queues: &Queues) -> Self {
        Self {
            submission: queues.submissions().map(save_submission).collect(),
            completion: queues.completions().map(save_completion).collect(),
        }
    }
}

fn save_doorbell(cell: &Cell) -> DoorbellState {
    DoorbellState { register: cell.seen(), rung: cell.seen(), shadow: cell.shadow_seen() }
}

fn save_submission(queue: &SubmissionQueue) -> SubmissionState {
    SubmissionState {
        id: queue.id,
        completion: queue.completion,
        base: queue.base,
        size: queue.size,
        head: queue.head,
        tail: queue.tail,
        doorbell: save_doorbell(&queue.doorbell),
    }
}

fn save_completion(queue: &CompletionQueue) -> CompletionState {
    CompletionState {
        id: queue.id,
        base: queue.base,
        size: queue.size,
        head: queue.head,
        tail: queue.tail,
        phase: queue.phase,
        vector: queue.vector,
        doorbell: save_doorbell(&queue.doorbell),
    }
}
