//! Measures where the time of commands goes, layer by layer, while a [`Tracer`] is installed.
//!
//! Another thread makes a [`Tracer`] and hands it to the controller with `Request::Trace`.
//! Without one, each step of a command costs one branch. With one, the steps are stamped:
//!
//! | stamp | when | ends the layer |
//! |---|---|---|
//! | seen | the doorbell was found changed | |
//! | fetched | the entry was copied in | [`Layer::Fetch`] |
//! | submitted | the disk is about to get the (first) request | [`Layer::Submit`] |
//! | ended | the disk gave the (last) completion | [`Layer::Backend`] |
//! | signalled | the completion entry was written, its interrupt sent | [`Layer::Complete`] |
//!
//! The clock is read once for all commands that take a step together. A command counts when it is
//! complete, so its layers add up to its [`Layer::Whole`] exactly. Stamps lie in a table by
//! in-flight slot. The histograms are those of a [`Latencies`], which the caller of
//! `Request::TakeLatencies` swaps for an empty one: nothing is copied, locked or allocated on
//! the controller's thread.
//!
//! Commands of I/O queues that reach a disk are traced, whatever their status. Of commands of
//! several steps (Verify, Copy) only the first step is traced, and of fused pairs nothing. Admin
//! commands, and commands that end before they reach a disk, are not traced.

use std::sync::Arc;

use slipway_block::Completion;
use slipway_nvme_spec::opcode::NvmOpcode;
use slipway_telemetry::{Clock, Histogram};

use crate::namespace::Attached;
use crate::parts::Limits;
use crate::queue::SubmissionQueue;

/// A stretch of a command's way through the controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layer {
    /// From the time at which the doorbell's new value was seen to the time at which the entry was
    /// copied in. This includes waiting for room in the completion queue or among the commands in
    /// flight, or for a limit of the controller.
    Fetch,
    /// From the copied entry to the disk: checks, PRPs, pinning, and commands of the same batch
    /// that came before.
    Submit,
    /// The disk's own time, as the controller sees it.
    Backend,
    /// From the disk's completion to the interrupt, or, where there is no interrupt, to the entry
    /// in the completion queue.
    Complete,
    /// From the first stamp to the last.
    Whole,
}

impl Layer {
    /// All layers, in the order of a command's way; `Whole` last.
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
    /// All classes.
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

/// Latencies in nanoseconds by queue, opcode class and layer. About 600 KiB of address space for
/// each queue, of which only the counters in use become resident.
#[derive(Default)]
pub struct Latencies {
    queues: Vec<[Layers; OpcodeClass::ALL.len()]>,
    /// Sampled commands without a histogram, since their queue was made after this value.
    missed: u64,
}

impl Latencies {
    /// Makes empty histograms for the I/O queues 1 to `queues`.
    pub fn new(queues: u16) -> Self {
        let queues = (0..queues).map(|_| Default::default()).collect();
        Self { queues, missed: 0 }
    }

    /// Returns one histogram, or `None` if the queue has none.
    pub fn get(&self, queue: u16, class: OpcodeClass, layer: Layer) -> Option<&Histogram> {
        let queue = self.queues.get(usize::from(queue).checked_sub(1)?)?;
        Some(&queue[class as usize][layer as usize])
    }

    /// Adds another thread's counts: those of queues that both have, and the missed commands.
    pub fn merge(&mut self, other: &Self) {
        for (own, other) in self.queues.iter_mut().zip(&other.queues) {
            for (own, other) in own.iter_mut().flatten().zip(other.iter().flatten()) {
                own.merge(other);
            }
        }
        self.missed += other.missed;
    }

    /// Returns the highest number of an I/O queue with histograms; they begin with queue 1.
    pub fn queues(&self) -> u16 {
        self.queues.len() as u16
    }

    /// Returns how many sampled commands were not counted, since their queue was made after the
    /// histograms.
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

/// The stamps of a command so far, in the time of the tracer's clock. 0 stands for a step that has
/// not happened.
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

/// State of a controller that traces. Another thread makes it; see `Request::Trace`.
pub struct Tracer {
    clock: Arc<dyn Clock>,
    /// One of so many doorbell changes is followed; 0 stands for as many as cost little.
    every: u32,
    /// The present value of `every`, which the tracer chooses if `every` is 0.
    stride: u32,
    /// The time at which a change was followed last.
    followed_at: u64,
    /// The number of doorbell changes until the next one that is followed.
    left: u32,
    /// The time at which the doorbell that announced an entry was seen, by queue and entry; 0 if
    /// the entry is not followed.
    seen: Vec<Box<[u64]>>,
    /// The number of entries with a time in `seen`.
    waiting: u32,
    /// The time at which the current entries were copied in.
    fetched: u64,
    /// The times at which the current command began and ended, if its disk carried it out at once.
    at_once: Option<[u64; 2]>,
    /// Stamps by in-flight slot; `seen` is 0 for commands that are not followed.
    open: Box<[Stamps]>,
    /// The number of slots of `open` that are followed.
    followed: u32,
    /// Completed commands whose interrupt has not been sent yet.
    done: Vec<Stamps>,
    latencies: Latencies,
}

/// Nanoseconds between two followed doorbell changes, where the tracer chooses.
const SPACING: u64 = 20_000;
/// Most changes that are passed over where the tracer chooses: rare changes may come after many.
const MOST_STRIDE: u64 = 64;

impl Tracer {
    /// Makes a tracer that follows the commands of one doorbell change in `every`, for a controller
    /// with these limits, and counts them in `latencies`. With `every` 0 it follows all changes
    /// while they are rare, and about one in 20 µs while they are not: stamping a command takes
    /// some 200 ns.
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

    /// Returns the number of doorbell changes from the one at `now` to the next that is followed.
    fn stride(&mut self, now: u64) -> u32 {
        if self.every == 0 {
            let gap = now.saturating_sub(self.followed_at).max(1);
            let stride = u64::from(self.stride) * SPACING / gap;
            self.stride = stride.clamp(1, MOST_STRIDE) as u32;
            self.followed_at = now;
        }
        self.stride
    }

    /// Notes that queue `queue` looked at its doorbell; its tail was `before`.
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

    /// Notes that entries were copied in.
    pub(crate) fn fetched(&mut self) {
        if self.waiting > 0 {
            self.fetched = self.now();
        }
    }

    /// Notes that the entry at `head` of queue `queue` was executed. The command waits in `slot` of
    /// the in-flight table if it has not ended.
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

    /// Drives a namespace, and stamps the requests that it submits and completes. Requests that are
    /// left for the next turn count as submitted: they wait for the thread that would copy their
    /// data.
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

    /// Notes that the command in the slot of `tag` is complete; `counts` is `false` if its end is
    /// not reported.
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

    /// Keeps a followed command that is complete but for its interrupt. There is a place for each
    /// command that can be in flight. Commands that a disk carried out at once were never in
    /// flight, so more of them may wait for a held-back interrupt: those beyond the places are
    /// dropped.
    fn keep(&mut self, stamps: Stamps) {
        if self.done.len() < self.done.capacity() {
            self.done.push(stamps);
        }
    }

    /// Returns the time if the current command may be a followed one, and else 0.
    pub(crate) fn stamp(&self) -> u64 {
        if self.waiting > 0 { self.now() } else { 0 }
    }

    /// Notes that the current command was carried out at once, from the stamp `begun` until now.
    pub(crate) fn transferred(&mut self, begun: u64) {
        self.at_once = (begun > 0).then(|| [begun, self.now()]);
    }

    /// Notes that interrupts were sent, except those of queues for which `is_held` returns `true`.
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

    /// Forgets submission queue `queue`, which was deleted.
    #[cold]
    pub(crate) fn closed(&mut self, queue: u16) {
        let Some(seen) = self.seen.get_mut(usize::from(queue)) else { return };
        let left = seen.iter().filter(|seen| **seen > 0).count() as u32;
        self.waiting = self.waiting.saturating_sub(left);
        seen.fill(0);
    }

    /// Forgets all queues and commands.
    #[cold]
    pub(crate) fn forget(&mut self) {
        self.seen.iter_mut().for_each(|queue| queue.fill(0));
        self.open.fill(NOTHING);
        self.done.clear();
        (self.waiting, self.followed) = (0, 0);
    }

    /// Returns the latencies counted so far, and goes on with `fresh`.
    pub(crate) fn take(&mut self, fresh: Latencies) -> Latencies {
        std::mem::replace(&mut self.latencies, fresh)
    }
}
