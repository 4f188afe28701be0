//! Sandboxes and replicas of a function, as its scheduler knows them.

use std::time::{Duration, Instant};

/// The number of a sandbox, unique for its function.
pub type SandboxId = u32;

/// A replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ReplicaId {
    /// The sandbox that has it.
    pub sandbox: SandboxId,
    /// The number of the replica, unique in its server.
    pub number: u32,
}

/// The part of a life in which a sandbox or a replica is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// It is being made.
    Starting,
    /// It can be used.
    Ready,
    /// It is being removed.
    Removing,
}

/// A replica of a function.
#[derive(Debug)]
pub struct Replica {
    /// The replica's name in the orders of the scheduler.
    pub id: ReplicaId,
    /// The part of its life.
    pub phase: Phase,
    /// Invocations in it.
    pub busy: u32,
    /// Set if it gets no more invocations.
    pub retired: bool,
    /// The time of the last invocation's end.
    pub idle_since: Instant,
}

impl Replica {
    /// Returns whether the replica can have one more invocation.
    pub fn has_room(&self, concurrency: u32) -> bool {
        self.phase == Phase::Ready && !self.retired && self.busy < concurrency
    }

    /// Returns the time at which the replica is to be removed, or `None` if it is busy or not
    /// ready.
    fn leaves_at(&self, keep_alive: Duration) -> Option<Instant> {
        let idle = self.phase == Phase::Ready && self.busy == 0;
        let patience = if self.retired { Duration::ZERO } else { keep_alive };
        idle.then(|| self.idle_since + patience)
    }
}

/// A sandbox of a function.
#[derive(Debug)]
pub struct Sandbox {
    /// The sandbox's number.
    pub id: SandboxId,
    /// The part of its life.
    pub phase: Phase,
    /// Cleared if no more replicas are made in it.
    pub grows: bool,
    /// The time at which it is removed if it has no replica.
    pub empty_until: Instant,
    /// The replicas in it, in the order of their creation.
    pub replicas: Vec<Replica>,
}

impl Sandbox {
    /// Returns whether a replica is being made or removed, and the memory of its own plugged or
    /// unplugged with it: the flag of RunD-V's Figure 12.
    fn is_changing(&self) -> bool {
        self.replicas.iter().any(|replica| replica.phase != Phase::Ready)
    }

    /// Returns whether one more replica can be made in the sandbox now.
    pub fn has_room(&self, most: u32) -> bool {
        let grows = self.phase == Phase::Ready && self.grows && !self.is_changing();
        grows && self.replicas.len() < most as usize
    }

    /// Returns the number of invocations in the sandbox.
    pub fn busy(&self) -> u32 {
        self.replicas.iter().map(|replica| replica.busy).sum()
    }

    /// Returns the next replica that is to be removed, by its index, and when. Returns `None`
    /// while another one is being made or removed.
    pub fn oldest(&self, keep_alive: Duration) -> Option<(Instant, usize)> {
        let replicas = self.replicas.iter().enumerate().filter(|_| !self.is_changing());
        let timed = replicas.filter_map(|(at, one)| Some((one.leaves_at(keep_alive)?, at)));
        timed.min()
    }

    /// Returns the time at which the sandbox is to be removed, or `None` if it stays: it has a
    /// replica, or it is none of the `spare` ones and can grow.
    pub fn leaves_at(&self, spare: bool) -> Option<Instant> {
        let leaves = self.phase == Phase::Ready && self.replicas.is_empty();
        (leaves && (spare || !self.grows)).then_some(self.empty_until)
    }

    /// Has the sandbox grow no more, and leave as soon as it is empty.
    pub fn close(&mut self, now: Instant) {
        (self.grows, self.empty_until) = (false, now);
    }
}
