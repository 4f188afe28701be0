//! Where the time of commands goes, layer by layer, while somebody asks.
//!
//! A [`Tracer`] is made by another thread and handed to the controller by a job of its mailbox.
//! Without one, each step of a command costs one branch. With one, the steps are stamped:
//!
//! | stamp | when | ends the layer |
//! |---|---|---|
//! | seen | the doorbell was found changed | |
//! | fetched | the entry was copied in | [`Layer::Fetch`] |
//! | submitted | the disk is about to get the (first) request | [`Layer::Submit`] |
//! | ended | the disk gave the (last) completion | [`Layer::Backend`] |
//! | signalled | the entry is in the completion queue and its interrupt was sent | [`Layer::Complete`] |
//!
//! A stamp is read once for all commands that take a step together, and a command counts when it
//! is complete, so its layers add up to its [`Layer::Whole`] exactly. Stamps lie in a table by
//! in-flight slot; histograms are those of a [`Latencies`], which whoever asks swaps for an empty
//! one: nothing is copied, locked or allocated on the controller's thread.
//!
//! Commands of I/O queues that reach a disk are traced, whatever their status; of commands of several
//! steps (Verify, Copy) the first step, of fused pairs nothing. Admin commands are
//! not, nor is what ends before it reaches a disk.

use std::sync::Arc;

use slipway_block::Completion;
use slipway_nvme_spec::opcode::NvmOpcode;
use slipway_telemetry::{Clock, Histogram};

use crate::namespace::Attached;
use crate::queue::SubmissionQueue;
use crate::{Controller, Limits};

/// A stretch of a command's way through the controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layer {
    /// From the doorbell's new value being seen to the entry being copied in. Waiting for room in
    /// the completion queue or among the commands in flight is in it.
    Fetch,
    /// From there to the disk: checks, PRPs, pinning, commands of the same batch before it.
    Submit,
    /// In the disk, as the controller sees it.
    Backend,
    /// From the disk's completion to the interrupt, or to the entry being in the completion queue
    /// where there is no interrupt.
    Complete,
    /// From the first stamp to the last.
    Whole,
}

impl Layer {
    /// All, in the order of a command's way; `Whole` last.
    pub const ALL: [Self; 5] =
        [Self::Fetch, Self::Submit, Self::Backend, Self::Complete, Self::Whole];
}

/// Commands that are counted together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpcodeClass {
    /// Read.
    Read,
    /// Write.
    Write,
    /// Flush.
    Flush,
    /// Everything else that reaches a disk.
    Other,
}

impl OpcodeClass {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Read, Self::Write, Self::Flush, Self::Other];

    fn of(opcode: u8) -> Self {
        match NvmOpcode(opcode) {
            NvmOpcode::Read => Self::Read,
            NvmOpcode::Write => Self::Write,
            NvmOpcode::Flush => Self::Flush,
            _ => Self::Other,
        }
    }
}

type Layers = [Histogram; Layer::ALL.len()];

/// Latencies in nanoseconds by queue, opcode class and layer. About 600 KiB for each queue, of
/// which only what is counted becomes resident.
#[derive(Default)]
pub struct Latencies {
    queues: Vec<[Layers; OpcodeClass::ALL.len()]>,
    /// Commands that were sampled and found no place: queues made after this was.
    missed: u64,
}

impl Latencies {
    /// Empty ones for the I/O queues 1 to `queues`.
    pub fn new(queues: u16) -> Self {
        let queues = (0..queues).map(|_| Default::default()).collect();
        Self { queues, missed: 0 }
    }

    /// One histogram; None for a queue that has none.
    pub fn get(&self, queue: u16, class: OpcodeClass, layer: Layer) -> Option<&Histogram> {
        let queue = self.queues.get(usize::from(queue).checked_sub(1)?)?;
        Some(&queue[class as usize][layer as usize])
    }

    /// Adds what another thread counted: queues that both have, and what it missed.
    pub fn merge(&mut self, other: &Self) {
        for (own, other) in self.queues.iter_mut().zip(&other.queues) {
            for (own, other) in own.iter_mut().flatten().zip(other.iter().flatten()) {
                own.merge(other);
            }
        }
        self.missed += other.missed;
    }

    /// The I/O queues that there are histograms for: 1 to this.
    pub fn queues(&self) -> u16 {
        self.queues.len() as u16
    }

    /// Commands that were sampled and not counted, since their queue was made after the histograms.
    pub fn missed(&self) -> u64 {
        self.missed
    }

    fn count(&mut self, stamps: &Stamps, signalled: u64) {
        let queue = usize::from(stamps.queue).wrapping_sub(1);
        let Some(queue) = self.queues.get_mut(queue) else {
            self.missed += 1;
            return;
        };
        let layers = &mut queue[stamps.class as usize];
        let bounds = [stamps.seen, stamps.fetched, stamps.submitted, stamps.ended, signalled];
        // Counters of two processors may differ by some ticks, should the thread have moved.
        let durations = [
            bounds[1].saturating_sub(bounds[0]),
            bounds[2].saturating_sub(bounds[1]),
            bounds[3].saturating_sub(bounds[2]),
            bounds[4].saturating_sub(bounds[3]),
        ];
        layers.iter_mut().zip(durations).for_each(|(layer, duration)| layer.record(duration));
        layers[Layer::Whole as usize].record(durations.iter().sum());
    }
}

/// What is known of a command so far. Times are the tracer's clock's; 0: has not happened.
#[derive(Clone, Copy)]
struct Stamps {
    queue: u16,
    class: OpcodeClass,
    seen: u64,
    fetched: u64,
    submitted: u64,
    ended: u64,
}

const NOTHING: Stamps =
    Stamps { queue: 0, class: OpcodeClass::Other, seen: 0, fetched: 0, submitted: 0, ended: 0 };

/// What a controller needs to trace: made by another thread, see [`Controller::trace`].
pub struct Tracer {
    clock: Arc<dyn Clock>,
    /// One doorbell change in so many is followed; 0: as many as cost little.
    every: u32,
    /// As `every`, of the moment.
    stride: u32,
    /// When a change was followed last.
    followed_at: u64,
    /// Until the next one.
    left: u32,
    /// When the doorbell that announced an entry was seen, by queue and entry; 0: not followed.
    seen: Vec<Box<[u64]>>,
    /// Entries with a time in `seen`.
    waiting: u32,
    /// When the entries at hand were copied in.
    fetched: u64,
    /// When the command at hand began and ended, which its disk carried out at once.
    at_once: Option<[u64; 2]>,
    /// By in-flight slot; `seen` is 0 for commands that are not followed.
    open: Box<[Stamps]>,
    /// Slots of `open` that are followed.
    followed: u32,
    /// Completed, and not interrupted for yet.
    done: Vec<Stamps>,
    latencies: Latencies,
}

/// Nanoseconds between two doorbell changes that are followed, where the tracer chooses.
const SPACING: u64 = 20_000;
/// Most changes that are passed over then: rare ones follow upon many.
const MOST_STRIDE: u64 = 64;

impl Tracer {
    /// Follows the commands of one doorbell change in `every`, of a controller with these limits, and
    /// counts them in `latencies`. With 0 it follows all while they are rare, and about one in 20 µs
    /// while they are not: stamping a command takes some 200 ns.
    pub fn new(clock: Arc<dyn Clock>, every: u32, limits: &Limits, latencies: Latencies) -> Self {
        let in_flight = limits.in_flight as usize;
        let seen = |_| vec![0; usize::from(limits.queue_entries)].into_boxed_slice();
        Self {
            clock,
            every,
            stride: every.max(1),
            followed_at: 0,
            left: 1,
            seen: (0..=limits.queue_pairs).map(seen).collect(),
            waiting: 0,
            fetched: 0,
            at_once: None,
            open: vec![NOTHING; in_flight].into_boxed_slice(),
            followed: 0,
            done: Vec::with_capacity(in_flight),
            latencies,
        }
    }

    fn now(&self) -> u64 {
        self.clock.nanos().max(1)
    }

    /// How many doorbell changes from the one at `now` to the next that is followed.
    fn stride(&mut self, now: u64) -> u32 {
        if self.every == 0 {
            let gap = now.saturating_sub(self.followed_at).max(1);
            let stride = u64::from(self.stride) * SPACING / gap;
            self.stride = stride.clamp(1, MOST_STRIDE) as u32;
            self.followed_at = now;
        }
        self.stride
    }

    /// Queue `queue` looked at its doorbell; its tail was `before`.
    pub(crate) fn observed(&mut self, queue: &SubmissionQueue, before: u32) {
        if queue.id == 0 || queue.tail == before {
            return;
        }
        self.left -= 1;
        if self.left > 0 {
            return;
        }
        let now = self.now();
        self.left = self.stride(now);
        let Some(seen) = self.seen.get_mut(usize::from(queue.id)) else {
            self.latencies.missed += 1;
            return;
        };
        let mut at = before;
        while at != queue.tail {
            if let Some(seen) = seen.get_mut(at as usize) {
                *seen = now;
                self.waiting += 1;
            }
            at = if at + 1 < queue.size { at + 1 } else { 0 };
        }
    }

    /// Entries were copied in.
    pub(crate) fn fetched(&mut self) {
        if self.waiting > 0 {
            self.fetched = self.now();
        }
    }

    /// The entry at `head` of queue `queue` was executed, and waits in `slot` of the in-flight table
    /// if it has not ended.
    pub(crate) fn started(&mut self, queue: u16, head: u32, opcode: u8, slot: Option<u32>) {
        let at_once = self.at_once.take();
        let seen = self.seen.get_mut(usize::from(queue)).and_then(|all| all.get_mut(head as usize));
        let seen = seen.map_or(0, std::mem::take);
        if seen == 0 {
            return;
        }
        self.waiting = self.waiting.saturating_sub(1);
        let class = OpcodeClass::of(opcode);
        let stamps = Stamps { queue, class, seen, fetched: self.fetched, ..NOTHING };
        if let Some([submitted, ended]) = at_once {
            return self.keep(Stamps { submitted, ended, ..stamps });
        }
        let Some(open) = slot.and_then(|slot| self.open.get_mut(slot as usize)) else { return };
        *open = stamps;
        self.followed += 1;
    }

    /// Drives a namespace, stamping what it hands on and what it gives back. What is left for the
    /// next turn counts as handed on: it waits for the thread that would copy it.
    pub(crate) fn drive(
        &mut self,
        namespace: &mut Attached,
        left: &mut u64,
        completions: &mut Vec<Completion>,
    ) {
        if self.followed == 0 {
            return namespace.drive(left, completions);
        }
        if !namespace.requests.is_empty() {
            let now = self.now();
            for request in &namespace.requests {
                if let Some(stamps) = self.open.get_mut(request.tag as u32 as usize)
                    && stamps.submitted == 0
                {
                    stamps.submitted = now;
                }
            }
        }
        let before = completions.len();
        namespace.drive(left, completions);
        if completions.len() > before {
            let now = self.now();
            for completion in &completions[before..] {
                if let Some(stamps) = self.open.get_mut(completion.tag as u32 as usize) {
                    stamps.ended = now;
                }
            }
        }
    }

    /// The command in the slot of `tag` is complete; `counts` when its end is somebody's concern.
    pub(crate) fn completed(&mut self, tag: u64, counts: bool) {
        let Some(open) = self.open.get_mut(tag as u32 as usize) else { return };
        if open.seen == 0 {
            return;
        }
        let stamps = std::mem::replace(open, NOTHING);
        self.followed = self.followed.saturating_sub(1);
        if counts {
            self.keep(stamps);
        }
    }

    /// A followed command is complete but for its interrupt. There is a place for each that can be in
    /// flight; of those that never were, more may wait for an interrupt that is held back.
    fn keep(&mut self, stamps: Stamps) {
        if self.done.len() < self.done.capacity() {
            self.done.push(stamps);
        }
    }

    /// The time, if the command at hand may be a followed one; else 0.
    pub(crate) fn stamp(&self) -> u64 {
        if self.waiting > 0 { self.now() } else { 0 }
    }

    /// The command at hand was carried out at once, from the stamp `begun` until now.
    pub(crate) fn transferred(&mut self, begun: u64) {
        self.at_once = (begun > 0).then(|| [begun, self.now()]);
    }

    /// Interrupts were sent.
    pub(crate) fn signalled(&mut self, is_held: impl Fn(u16) -> bool) {
        if self.done.is_empty() {
            return;
        }
        let now = self.now();
        self.done.retain(|stamps| {
            let held = is_held(stamps.queue);
            if !held {
                self.latencies.count(stamps, now);
            }
            held
        });
    }

    /// Submission queue `queue` is gone.
    #[cold]
    pub(crate) fn closed(&mut self, queue: u16) {
        let Some(seen) = self.seen.get_mut(usize::from(queue)) else { return };
        let left = seen.iter().filter(|seen| **seen > 0).count() as u32;
        self.waiting = self.waiting.saturating_sub(left);
        seen.fill(0);
    }

    /// All queues are gone.
    #[cold]
    pub(crate) fn forget(&mut self) {
        self.seen.iter_mut().for_each(|queue| queue.fill(0));
        self.open.fill(NOTHING);
        self.done.clear();
        (self.waiting, self.followed) = (0, 0);
    }
}

impl Controller {
    /// The highest number of its I/O submission queues: how many [`Latencies`] are made for.
    pub fn io_queues(&self) -> u16 {
        self.queues.submission_bound().saturating_sub(1).max(self.last_far_queue())
    }

    /// Traces with `tracer` from now on, or stops; gives the tracer of before. Drop it elsewhere:
    /// it is large.
    pub fn trace(&mut self, tracer: Option<Box<Tracer>>) -> Option<Box<Tracer>> {
        std::mem::replace(&mut self.tracer, tracer)
    }

    /// Gives what was counted since the last call and goes on with `fresh`, which may have
    /// histograms for queues made meanwhile. None, with `fresh` dropped, when nothing is traced.
    pub fn take_latencies(&mut self, fresh: Latencies) -> Option<Latencies> {
        let tracer = self.tracer.as_mut()?;
        Some(std::mem::replace(&mut tracer.latencies, fresh))
    }
}
