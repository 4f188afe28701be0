//! Decisions of a function's server: which replica has an invocation, and when replicas and
//! sandboxes come and go. A state machine without input and output, to which the time is told.
//!
//! The strategy is RunD-V's (VIII, Figure 12). An invocation goes to an idle replica. If there is
//! none, a sandbox with room gets one more replica (*scaling up*). A sandbox in which a replica is
//! being made or removed is passed over, memory that goes back to the host included, and so is one
//! that is full. If no sandbox is left, a new
//! one is made (*scaling out*). Meanwhile the invocation waits, and has the first replica that is
//! free. Replicas that were idle for the keep-alive time are removed, one at a time in a sandbox,
//! and then the sandbox that is empty.
//!
//! Beyond the paper: of several idle replicas the last used one is taken, so that the others grow
//! old; the fullest sandbox grows first; a sandbox in which a replica could not be made does not
//! grow any more; after a failure nothing is made for a time that doubles with each.
//!
//! A new rule is here alone, with a case in `scheduler/tests.rs`, of which
//! `bounds_hold_whatever_happens` tries any order of events; the dispatcher carries out its
//! `Action`s. `docs/functions.md` describes the rules, `tests/e2e/18-function.sh` shows them, and
//! `slipway bench function` measures what one costs.

mod sandbox;
#[cfg(test)]
mod tests;

use std::time::{Duration, Instant};

use self::sandbox::{Phase, Replica, Sandbox};
pub use self::sandbox::{ReplicaId, SandboxId};
use super::queue::{Client, Queue, Ticket};

/// The time in which nothing is made after the first failure; it doubles with each.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
/// The longest time in which nothing is made after a failure.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// The bounds of a function.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// The most invocations in a replica at once, at least 1.
    pub concurrency: u32,
    /// The most replicas in a sandbox, at least 1.
    pub replicas: u32,
    /// The least number of sandboxes, which stay without replicas.
    pub least_sandboxes: u32,
    /// The most sandboxes, at least 1.
    pub sandboxes: u32,
    /// The most invocations that wait, at least 1.
    pub queue: usize,
    /// The longest time that an invocation waits.
    pub wait: Duration,
    /// The time after which an idle replica is removed.
    pub keep_alive: Duration,
}

/// The reason why an invocation has no replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The queue is full.
    Full,
    /// It waited for too long.
    Late,
    /// No replica could be started.
    NotStarted,
    /// The server ends.
    Ending,
}

/// The way in which an invocation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// It has an answer.
    Answered,
    /// It failed, and its replica is as good as before.
    Failed,
    /// It failed, and a process of it may be left in its replica, which is not used again.
    Broken,
}

/// An order to the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Run an invocation in a replica, and say [`Scheduler::done`].
    Invoke(Ticket, ReplicaId),
    /// Refuse an invocation.
    Refuse(Ticket, Refusal),
    /// Make a sandbox, and say [`Scheduler::sandbox_made`].
    MakeSandbox(SandboxId),
    /// Make a replica, and say [`Scheduler::replica_made`].
    MakeReplica(ReplicaId),
    /// Remove a replica, and say [`Scheduler::replica_removed`].
    RemoveReplica(ReplicaId),
    /// Remove a sandbox, and say [`Scheduler::sandbox_removed`].
    RemoveSandbox(SandboxId),
}

/// Counts since the server began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Invocations that were given to a replica.
    pub invocations: u64,
    /// Invocations that failed in a replica.
    pub failed: u64,
    /// Invocations that no replica had.
    pub refused: u64,
    /// Replicas that were asked for: scaling up.
    pub up: u64,
    /// Sandboxes that were asked for: scaling out.
    pub out: u64,
    /// Replicas that were removed after the keep-alive time, or since they were broken.
    pub recycled: u64,
}

/// The figures of a sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SandboxFigures {
    /// The sandbox.
    pub id: SandboxId,
    /// "starting", "ready" or "removing".
    pub state: &'static str,
    /// Replicas in it, also those that are being made or removed.
    pub replicas: u32,
    /// Invocations in it.
    pub busy: u32,
}

/// The state of a function: its sandboxes and replicas, and the invocations that wait.
///
/// Each method returns what is to be done now. [`Scheduler::advance`] is to be called at the time
/// that [`Scheduler::due`] names, too.
#[derive(Debug)]
pub struct Scheduler {
    limits: Limits,
    queue: Queue,
    sandboxes: Vec<Sandbox>,
    next_sandbox: SandboxId,
    next_replica: u32,
    /// Failures in a row.
    failures: u32,
    /// The time before which nothing is made, after a failure.
    not_before: Option<Instant>,
    /// Set if the server ends.
    ending: bool,
    actions: Vec<Action>,
    counts: Counts,
}

impl Scheduler {
    /// Makes the state of a function without sandboxes.
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            queue: Queue::new(limits.queue),
            sandboxes: Vec::new(),
            next_sandbox: 1,
            next_replica: 1,
            failures: 0,
            not_before: None,
            ending: false,
            actions: Vec::new(),
            counts: Counts::default(),
        }
    }

    /// Takes over a sandbox of an earlier server, which has no replica and an id of its own.
    pub fn adopt(&mut self, now: Instant, id: SandboxId) {
        self.next_sandbox = self.next_sandbox.max(id.saturating_add(1));
        let empty_until = now + self.limits.keep_alive;
        let (phase, replicas) = (Phase::Ready, Vec::new());
        self.sandboxes.push(Sandbox { id, phase, grows: true, empty_until, replicas });
    }

    /// Takes an invocation. Its ticket is in one [`Action::Invoke`] or [`Action::Refuse`] later,
    /// unless it is cancelled before.
    pub fn request(&mut self, now: Instant, client: Client, ticket: Ticket) -> Vec<Action> {
        if self.ending {
            self.refuse(ticket, Refusal::Ending);
        } else if let Some(left) = self.queue.push(client, ticket, now) {
            self.refuse(left, Refusal::Full);
        }
        self.advance(now)
    }

    /// Forgets an invocation whose client has left, if it waits.
    pub fn cancel(&mut self, now: Instant, ticket: Ticket) -> Vec<Action> {
        self.queue.remove(ticket);
        self.advance(now)
    }

    /// Notes the end of an invocation in a replica.
    pub fn done(&mut self, now: Instant, id: ReplicaId, end: End) -> Vec<Action> {
        self.counts.failed += u64::from(end != End::Answered);
        if let Some(replica) = self.replica(id) {
            replica.busy = replica.busy.saturating_sub(1);
            replica.retired |= end == End::Broken;
            replica.idle_since = now;
        }
        self.advance(now)
    }

    /// Notes that a sandbox runs, or could not be made; then nothing is left of it.
    pub fn sandbox_made(&mut self, now: Instant, id: SandboxId, runs: bool) -> Vec<Action> {
        let empty_until = now + self.limits.keep_alive;
        if runs && let Some(sandbox) = self.sandbox(id) {
            (sandbox.phase, sandbox.empty_until) = (Phase::Ready, empty_until);
        } else {
            self.sandboxes.retain(|sandbox| sandbox.id != id);
            self.failed(now);
        }
        self.advance(now)
    }

    /// Notes that a replica runs, or could not be made; then nothing is left of it.
    pub fn replica_made(&mut self, now: Instant, id: ReplicaId, runs: bool) -> Vec<Action> {
        if runs && let Some(replica) = self.replica(id) {
            (replica.phase, replica.idle_since) = (Phase::Ready, now);
            self.failures = 0;
        } else {
            self.forget(now, id, false);
            self.failed(now);
        }
        self.advance(now)
    }

    /// Notes that a replica is removed. With `gone` unset it may still be in its sandbox, which
    /// does not grow any more.
    pub fn replica_removed(&mut self, now: Instant, id: ReplicaId, gone: bool) -> Vec<Action> {
        self.forget(now, id, gone);
        self.advance(now)
    }

    /// Notes that a sandbox is removed.
    pub fn sandbox_removed(&mut self, now: Instant, id: SandboxId) -> Vec<Action> {
        self.sandboxes.retain(|sandbox| sandbox.id != id);
        self.advance(now)
    }

    /// Notes that a sandbox does not run any more. It is removed when its invocations have ended.
    pub fn lost(&mut self, now: Instant, id: SandboxId) -> Vec<Action> {
        if let Some(sandbox) = self.sandbox(id) {
            sandbox.close(now);
            sandbox.replicas.iter_mut().for_each(|replica| replica.retired = true);
        }
        self.advance(now)
    }

    /// Refuses the invocations that wait and those that come, and makes and removes nothing more.
    pub fn end(&mut self) -> Vec<Action> {
        self.ending = true;
        self.refuse_all(Refusal::Ending);
        std::mem::take(&mut self.actions)
    }

    /// Does what is due at `now`.
    pub fn advance(&mut self, now: Instant) -> Vec<Action> {
        if !self.ending {
            self.assign();
            if let Some(until) = now.checked_sub(self.limits.wait) {
                let late = self.queue.take_until(until);
                late.into_iter().for_each(|ticket| self.refuse(ticket, Refusal::Late));
            }
            self.grow(now);
            self.shrink(now);
        }
        std::mem::take(&mut self.actions)
    }

    /// Returns the next time at which something is due without an event, or `None` if nothing is.
    pub fn due(&self) -> Option<Instant> {
        if self.ending {
            return None;
        }
        let late = self.queue.oldest().map(|since| since + self.limits.wait);
        let wants = self.queue.len() > 0 || self.standing() < self.limits.least_sandboxes;
        let again = self.not_before.filter(|_| wants);
        let (spare, keep_alive) = (self.spare() > 0, self.limits.keep_alive);
        let leave = self.sandboxes.iter().filter_map(|sandbox| {
            let replica = || sandbox.oldest(keep_alive).map(|(at, _)| at);
            sandbox.leaves_at(spare).or_else(replica)
        });
        leave.chain(late).chain(again).min()
    }

    /// Returns the number of invocations that replicas have.
    pub fn busy(&self) -> u32 {
        self.sandboxes.iter().map(Sandbox::busy).sum()
    }

    /// Returns the number of invocations that wait.
    pub fn waiting(&self) -> usize {
        self.queue.len()
    }

    /// Returns the counts since the server began.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Returns the figures of each sandbox.
    pub fn figures(&self) -> Vec<SandboxFigures> {
        let figures = self.sandboxes.iter().map(|sandbox| SandboxFigures {
            id: sandbox.id,
            state: match sandbox.phase {
                Phase::Starting => "starting",
                Phase::Ready => "ready",
                Phase::Removing => "removing",
            },
            replicas: u32::try_from(sandbox.replicas.len()).unwrap_or(u32::MAX),
            busy: sandbox.busy(),
        });
        figures.collect()
    }

    fn sandbox(&mut self, id: SandboxId) -> Option<&mut Sandbox> {
        self.sandboxes.iter_mut().find(|sandbox| sandbox.id == id)
    }

    fn replica(&mut self, id: ReplicaId) -> Option<&mut Replica> {
        let sandbox = self.sandbox(id.sandbox)?;
        sandbox.replicas.iter_mut().find(|replica| replica.id == id)
    }

    fn refuse(&mut self, ticket: Ticket, refusal: Refusal) {
        self.counts.refused += 1;
        self.actions.push(Action::Refuse(ticket, refusal));
    }

    fn refuse_all(&mut self, refusal: Refusal) {
        for ticket in self.queue.take_all() {
            self.refuse(ticket, refusal);
        }
    }

    /// Drops a replica. Its sandbox grows on if `grows` is set.
    fn forget(&mut self, now: Instant, id: ReplicaId, grows: bool) {
        if let Some(sandbox) = self.sandbox(id.sandbox) {
            sandbox.replicas.retain(|replica| replica.id != id);
            sandbox.empty_until = now;
            if !grows {
                sandbox.close(now);
            }
        }
    }

    /// Waits with further starts after a failure. Refuses those that wait if no replica is there
    /// or comes.
    fn failed(&mut self, now: Instant) {
        let doublings = self.failures.min(5);
        self.failures = self.failures.saturating_add(1);
        self.not_before = Some(now + (FIRST_PAUSE * 2_u32.pow(doublings)).min(LONGEST_PAUSE));
        let serves = |replica: &Replica| replica.phase != Phase::Removing && !replica.retired;
        let hopes = |sandbox: &Sandbox| {
            sandbox.phase == Phase::Starting || sandbox.replicas.iter().any(serves)
        };
        if !self.sandboxes.iter().any(hopes) {
            self.refuse_all(Refusal::NotStarted);
        }
    }

    /// Gives waiting invocations to replicas that have room.
    fn assign(&mut self) {
        let concurrency = self.limits.concurrency;
        while self.queue.len() > 0 {
            let replicas = self.sandboxes.iter_mut().flat_map(|sandbox| &mut sandbox.replicas);
            let free = replicas.filter(|replica| replica.has_room(concurrency));
            let order = |replica: &&mut Replica| {
                (std::cmp::Reverse(replica.busy), replica.idle_since, replica.id.number)
            };
            let Some(replica) = free.max_by_key(order) else { return };
            let Some(ticket) = self.queue.pop() else { return };
            replica.busy += 1;
            self.counts.invocations += 1;
            self.actions.push(Action::Invoke(ticket, replica.id));
        }
    }

    /// Returns the places for invocations that are being made.
    fn coming(&self) -> usize {
        let replicas = self.sandboxes.iter().map(|sandbox| match sandbox.phase {
            // Its first replica is made as soon as it runs.
            Phase::Starting => 1,
            _ => sandbox.replicas.iter().filter(|one| one.phase == Phase::Starting).count(),
        });
        replicas.sum::<usize>() * self.limits.concurrency as usize
    }

    fn grow(&mut self, now: Instant) {
        if self.not_before.is_some_and(|at| at > now) {
            return;
        }
        self.not_before = None;
        while self.queue.len() > self.coming() && (self.grow_up(now) || self.grow_out(now)) {}
        while self.standing() < self.limits.least_sandboxes && self.grow_out(now) {}
    }

    /// Asks for one more replica in a sandbox. Returns `false` if none has room.
    fn grow_up(&mut self, now: Instant) -> bool {
        let most = self.limits.replicas;
        let roomy = self.sandboxes.iter_mut().filter(|sandbox| sandbox.has_room(most));
        let Some(sandbox) = roomy.max_by_key(|sandbox| sandbox.replicas.len()) else {
            return false;
        };
        let id = ReplicaId { sandbox: sandbox.id, number: self.next_replica };
        let (phase, busy, retired) = (Phase::Starting, 0, false);
        sandbox.replicas.push(Replica { id, phase, busy, retired, idle_since: now });
        self.next_replica = self.next_replica.wrapping_add(1);
        self.counts.up += 1;
        self.actions.push(Action::MakeReplica(id));
        true
    }

    /// Asks for one more sandbox. Returns `false` if there are as many as may be.
    fn grow_out(&mut self, now: Instant) -> bool {
        if self.sandboxes.len() >= self.limits.sandboxes as usize {
            return false;
        }
        let (id, phase, replicas) = (self.next_sandbox, Phase::Starting, Vec::new());
        self.sandboxes.push(Sandbox { id, phase, grows: true, empty_until: now, replicas });
        self.next_sandbox = self.next_sandbox.saturating_add(1);
        self.counts.out += 1;
        self.actions.push(Action::MakeSandbox(id));
        true
    }

    /// Returns the number of sandboxes that are not being removed.
    fn standing(&self) -> u32 {
        let stand = self.sandboxes.iter().filter(|sandbox| sandbox.phase != Phase::Removing);
        u32::try_from(stand.count()).unwrap_or(u32::MAX)
    }

    /// Returns the number of sandboxes beyond those that stay without replicas.
    fn spare(&self) -> u32 {
        self.standing().saturating_sub(self.limits.least_sandboxes)
    }

    /// Removes what was idle for long enough: of each sandbox one replica, or the sandbox.
    fn shrink(&mut self, now: Instant) {
        let mut spare = self.spare();
        for sandbox in &mut self.sandboxes {
            if sandbox.leaves_at(spare > 0).is_some_and(|at| at <= now) {
                sandbox.phase = Phase::Removing;
                spare = spare.saturating_sub(1);
                self.actions.push(Action::RemoveSandbox(sandbox.id));
            } else if let Some((at, index)) = sandbox.oldest(self.limits.keep_alive)
                && at <= now
            {
                let replica = &mut sandbox.replicas[index];
                replica.phase = Phase::Removing;
                self.counts.recycled += 1;
                self.actions.push(Action::RemoveReplica(replica.id));
            }
        }
    }
}
