use super::*;

const CLIENT: Client = Client::Root;
const NOTHING: [Action; 0] = [];
const LIMITS: Limits = Limits {
    concurrency: 1,
    replicas: 2,
    least_sandboxes: 0,
    sandboxes: 2,
    queue: 4,
    wait: Duration::from_secs(10),
    keep_alive: Duration::from_secs(60),
};

/// A scheduler with a clock of its own.
struct Rig {
    scheduler: Scheduler,
    start: Instant,
    /// Seconds since the start.
    seconds: u64,
}

impl Rig {
    fn new(limits: Limits) -> Self {
        Self { scheduler: Scheduler::new(limits), start: Instant::now(), seconds: 0 }
    }

    fn now(&self) -> Instant {
        self.start + Duration::from_secs(self.seconds)
    }

    /// Sets the clock, and does what is due.
    fn at(&mut self, seconds: u64) -> Vec<Action> {
        self.seconds = seconds;
        self.scheduler.advance(self.now())
    }

    /// Returns the second at which something is due.
    fn due(&self) -> Option<u64> {
        self.scheduler.due().map(|at| at.duration_since(self.start).as_secs())
    }

    fn request(&mut self, ticket: Ticket) -> Vec<Action> {
        self.scheduler.request(self.now(), CLIENT, ticket)
    }

    fn sandbox_made(&mut self, id: SandboxId, runs: bool) -> Vec<Action> {
        self.scheduler.sandbox_made(self.now(), id, runs)
    }

    fn replica_made(&mut self, id: ReplicaId, runs: bool) -> Vec<Action> {
        self.scheduler.replica_made(self.now(), id, runs)
    }

    fn done(&mut self, id: ReplicaId, end: End) -> Vec<Action> {
        self.scheduler.done(self.now(), id, end)
    }

    /// Makes the sandbox `id` with one replica, for the invocation `ticket`, which ends.
    fn with_one(&mut self, id: SandboxId, number: u32, ticket: Ticket) -> ReplicaId {
        let replica = replica(id, number);
        assert_eq!(self.request(ticket), [Action::MakeSandbox(id)]);
        assert_eq!(self.sandbox_made(id, true), [Action::MakeReplica(replica)]);
        assert_eq!(self.replica_made(replica, true), [Action::Invoke(ticket, replica)]);
        assert_eq!(self.done(replica, End::Answered), NOTHING);
        replica
    }
}

fn replica(sandbox: SandboxId, number: u32) -> ReplicaId {
    ReplicaId { sandbox, number }
}

#[test]
fn idle_replicas_come_first_then_more_of_them_then_more_sandboxes_then_the_queue() {
    let mut rig = Rig::new(LIMITS);
    let first = rig.with_one(1, 1, 1);
    assert_eq!(rig.request(2), [Action::Invoke(2, first)]);
    let second = replica(1, 2);
    assert_eq!(rig.request(3), [Action::MakeReplica(second)]);
    // The only sandbox is changing, so the next invocation needs another one.
    assert_eq!(rig.request(4), [Action::MakeSandbox(2)]);
    assert_eq!(rig.request(5), NOTHING);
    assert_eq!(rig.replica_made(second, true), [Action::Invoke(3, second)]);
    let third = replica(2, 3);
    assert_eq!(rig.sandbox_made(2, true), [Action::MakeReplica(third)]);
    assert_eq!(rig.done(first, End::Answered), [Action::Invoke(4, first)]);
    let fourth = replica(2, 4);
    assert_eq!(rig.replica_made(third, true), [Action::Invoke(5, third)]);
    assert_eq!(rig.request(6), [Action::MakeReplica(fourth)]);
    assert_eq!(rig.replica_made(fourth, true), [Action::Invoke(6, fourth)]);
    // Everything is full.
    assert_eq!(rig.request(7), NOTHING);
    assert_eq!((rig.scheduler.busy(), rig.scheduler.waiting()), (4, 1));
    let counts = rig.scheduler.counts();
    assert_eq!((counts.invocations, counts.up, counts.out), (6, 4, 2));
}

#[test]
fn a_burst_on_a_sandbox_makes_its_replicas_one_after_the_other() {
    let mut rig = Rig::new(Limits { sandboxes: 1, replicas: 8, queue: 8, ..LIMITS });
    assert_eq!(rig.request(1), [Action::MakeSandbox(1)]);
    for ticket in 2..=8 {
        assert_eq!(rig.request(ticket), NOTHING);
    }
    let mut made = rig.sandbox_made(1, true);
    for number in 1..=8 {
        assert_eq!(made, [Action::MakeReplica(replica(1, number))]);
        made = rig.replica_made(replica(1, number), true);
        assert_eq!(made.remove(0), Action::Invoke(number.into(), replica(1, number)));
    }
    assert_eq!(made, NOTHING);
}

#[test]
fn a_replica_that_is_free_first_has_the_invocation_for_which_another_is_made() {
    let mut rig = Rig::new(LIMITS);
    let first = rig.with_one(1, 1, 1);
    assert_eq!(rig.request(2), [Action::Invoke(2, first)]);
    let second = replica(1, 2);
    assert_eq!(rig.request(3), [Action::MakeReplica(second)]);
    assert_eq!(rig.done(first, End::Failed), [Action::Invoke(3, first)]);
    assert_eq!(rig.replica_made(second, true), NOTHING);
    assert_eq!(rig.request(4), [Action::Invoke(4, second)]);
    assert_eq!(rig.scheduler.counts().failed, 1);
}

#[test]
fn invocations_share_a_replica_up_to_its_concurrency() {
    let mut rig = Rig::new(Limits { concurrency: 2, ..LIMITS });
    let first = rig.with_one(1, 1, 1);
    assert_eq!(rig.request(2), [Action::Invoke(2, first)]);
    assert_eq!(rig.request(3), [Action::Invoke(3, first)]);
    let second = replica(1, 2);
    assert_eq!(rig.request(4), [Action::MakeReplica(second)]);
    // The replica that is being made has room for both.
    assert_eq!(rig.request(5), NOTHING);
    let both = [Action::Invoke(4, second), Action::Invoke(5, second)];
    assert_eq!(rig.replica_made(second, true), both);
}

#[test]
fn invocations_are_refused_when_the_queue_is_full_and_when_they_waited_too_long() {
    let mut rig = Rig::new(LIMITS);
    rig.request(1);
    rig.seconds = 4;
    for ticket in 2..=4 {
        rig.request(ticket);
    }
    assert_eq!(rig.request(5), [Action::Refuse(5, Refusal::Full)]);
    assert_eq!(rig.due(), Some(10));
    assert_eq!(rig.at(9), NOTHING);
    assert_eq!(rig.at(10), [Action::Refuse(1, Refusal::Late)]);
    assert_eq!(rig.due(), Some(14));
    assert_eq!(rig.scheduler.cancel(rig.now(), 3), NOTHING);
    let late = [Action::Refuse(2, Refusal::Late), Action::Refuse(4, Refusal::Late)];
    assert_eq!(rig.at(14), late);
    assert_eq!((rig.due(), rig.scheduler.counts().refused), (None, 4));
}

#[test]
fn idle_replicas_go_one_at_a_time_and_then_their_sandbox() {
    let mut rig = Rig::new(LIMITS);
    let first = rig.with_one(1, 1, 1);
    rig.seconds = 1;
    rig.request(2);
    let second = replica(1, 2);
    assert_eq!(rig.request(3), [Action::MakeReplica(second)]);
    rig.replica_made(second, true);
    rig.done(first, End::Answered);
    rig.seconds = 2;
    rig.done(second, End::Answered);
    // The one that was used last is used again.
    assert_eq!(rig.request(4), [Action::Invoke(4, second)]);
    rig.done(second, End::Answered);
    assert_eq!((rig.due(), rig.at(60)), (Some(61), vec![]));
    assert_eq!(rig.at(61), [Action::RemoveReplica(first)]);
    // The sandbox is changing: the other one waits for its turn.
    assert_eq!((rig.at(70), rig.due()), (vec![], None));
    let now = rig.now();
    let next = rig.scheduler.replica_removed(now, first, true);
    assert_eq!(next, [Action::RemoveReplica(second)]);
    let next = rig.scheduler.replica_removed(now, second, true);
    assert_eq!(next, [Action::RemoveSandbox(1)]);
    assert_eq!(rig.request(5), [Action::MakeSandbox(2)]);
    assert_eq!(rig.scheduler.sandbox_removed(now, 1), NOTHING);
    assert_eq!(rig.scheduler.counts().recycled, 2);
}

#[test]
fn the_least_sandboxes_are_made_ahead_and_stay() {
    let mut rig = Rig::new(Limits { least_sandboxes: 1, ..LIMITS });
    assert_eq!(rig.at(0), [Action::MakeSandbox(1)]);
    assert_eq!(rig.sandbox_made(1, true), NOTHING);
    assert_eq!((rig.at(1000), rig.due()), (vec![], None));
    let first = replica(1, 1);
    assert_eq!(rig.request(1), [Action::MakeReplica(first)]);
    rig.replica_made(first, true);
    rig.done(first, End::Answered);
    assert_eq!(rig.at(1060), [Action::RemoveReplica(first)]);
    assert_eq!(rig.scheduler.replica_removed(rig.now(), first, true), NOTHING);
    assert_eq!(rig.due(), None);
    // A sandbox that was lost is made anew.
    let lost = rig.scheduler.lost(rig.now(), 1);
    assert_eq!(lost, [Action::RemoveSandbox(1)]);
    assert_eq!(rig.at(1061), [Action::MakeSandbox(2)]);
}

#[test]
fn a_sandbox_that_is_not_needed_any_more_goes_after_the_keep_alive_time() {
    let mut rig = Rig::new(LIMITS);
    rig.request(1);
    rig.seconds = 5;
    assert_eq!(rig.scheduler.cancel(rig.now(), 1), NOTHING);
    assert_eq!(rig.sandbox_made(1, true), NOTHING);
    assert_eq!((rig.due(), rig.at(64)), (Some(65), vec![]));
    assert_eq!(rig.at(65), [Action::RemoveSandbox(1)]);
}

#[test]
fn failures_make_pauses_that_grow() {
    let mut rig = Rig::new(Limits { wait: Duration::from_secs(100), ..LIMITS });
    rig.request(1);
    assert_eq!(rig.sandbox_made(1, false), [Action::Refuse(1, Refusal::NotStarted)]);
    assert_eq!((rig.request(2), rig.due()), (vec![], Some(1)));
    assert_eq!(rig.at(1), [Action::MakeSandbox(2)]);
    let first = replica(2, 1);
    assert_eq!(rig.sandbox_made(2, true), [Action::MakeReplica(first)]);
    // A sandbox in which no replica can be made is given up.
    let failed = [Action::Refuse(2, Refusal::NotStarted), Action::RemoveSandbox(2)];
    assert_eq!(rig.replica_made(first, false), failed);
    rig.scheduler.sandbox_removed(rig.now(), 2);
    assert_eq!((rig.due(), rig.request(3), rig.due()), (None, vec![], Some(3)));
    for _ in 0..10 {
        let at = rig.due().unwrap();
        let made = rig.at(at);
        let Some(Action::MakeSandbox(id)) = made.first() else { panic!("{made:?}") };
        rig.sandbox_made(*id, false);
        rig.request(at);
    }
    assert_eq!(rig.due(), Some(rig.seconds + 30));
}

#[test]
fn a_failure_beside_a_replica_leaves_the_others_waiting_for_it() {
    let mut rig = Rig::new(LIMITS);
    let first = rig.with_one(1, 1, 1);
    rig.request(2);
    let second = replica(1, 2);
    assert_eq!(rig.request(3), [Action::MakeReplica(second)]);
    assert_eq!(rig.replica_made(second, false), NOTHING);
    assert_eq!(rig.done(first, End::Answered), [Action::Invoke(3, first)]);
    // The sandbox does not grow any more, and serves with what it has.
    assert_eq!(rig.request(4), NOTHING);
    assert_eq!(rig.at(1), [Action::MakeSandbox(2)]);
    assert_eq!(rig.done(first, End::Answered), [Action::Invoke(4, first)]);
}

#[test]
fn a_broken_replica_goes_when_its_other_invocations_have_ended() {
    let mut rig = Rig::new(Limits { concurrency: 2, sandboxes: 1, ..LIMITS });
    let first = rig.with_one(1, 1, 1);
    rig.request(2);
    rig.request(3);
    assert_eq!(rig.done(first, End::Broken), NOTHING);
    let second = replica(1, 2);
    assert_eq!(rig.request(4), [Action::MakeReplica(second)]);
    assert_eq!(rig.done(first, End::Answered), NOTHING);
    let turn = [Action::Invoke(4, second), Action::RemoveReplica(first)];
    assert_eq!(rig.replica_made(second, true), turn);
    assert_eq!(rig.scheduler.replica_removed(rig.now(), first, false), NOTHING);
    // It may still be there, so its sandbox gets no further ones.
    rig.request(5);
    assert_eq!(rig.request(6), NOTHING);
}

#[test]
fn a_lost_sandbox_goes_with_its_replicas() {
    let mut rig = Rig::new(LIMITS);
    let first = rig.with_one(1, 1, 1);
    rig.request(2);
    assert_eq!(rig.scheduler.lost(rig.now(), 1), NOTHING);
    assert_eq!(rig.request(3), [Action::MakeSandbox(2)]);
    assert_eq!(rig.done(first, End::Broken), [Action::RemoveReplica(first)]);
    let removed = rig.scheduler.replica_removed(rig.now(), first, true);
    assert_eq!(removed, [Action::RemoveSandbox(1)]);
    assert_eq!(rig.scheduler.lost(rig.now(), 9), NOTHING);
}

#[test]
fn adopted_sandboxes_are_used_and_their_numbers_are_taken() {
    let mut rig = Rig::new(LIMITS);
    rig.scheduler.adopt(rig.now(), 7);
    let first = replica(7, 1);
    assert_eq!(rig.request(1), [Action::MakeReplica(first)]);
    assert_eq!(rig.request(2), [Action::MakeSandbox(8)]);
    assert_eq!(rig.scheduler.figures().len(), 2);
}

#[test]
fn an_end_refuses_those_that_wait_and_keeps_those_that_run() {
    let mut rig = Rig::new(Limits { sandboxes: 1, replicas: 1, ..LIMITS });
    let first = rig.with_one(1, 1, 1);
    rig.request(2);
    rig.request(3);
    assert_eq!(rig.scheduler.end(), [Action::Refuse(3, Refusal::Ending)]);
    assert_eq!(rig.request(4), [Action::Refuse(4, Refusal::Ending)]);
    assert_eq!(rig.scheduler.busy(), 1);
    assert_eq!(rig.done(first, End::Answered), NOTHING);
    assert_eq!((rig.scheduler.busy(), rig.at(1000), rig.due()), (0, vec![], None));
}

/// Bounds hold, each invocation is heard of once, and nothing is due that was not done.
#[test]
fn bounds_hold_whatever_happens() {
    let limits = Limits { concurrency: 2, replicas: 3, sandboxes: 3, least_sandboxes: 1, ..LIMITS };
    for seed in 1..=64_u64 {
        let mut walk = Walk { random: seed, ..Walk::new(limits) };
        for ticket in 0..400 {
            walk.step(ticket);
        }
        walk.heard.sort_unstable();
        let all = walk.heard.len();
        walk.heard.dedup();
        assert_eq!(walk.heard.len(), all, "an invocation was heard of twice");
    }
}

/// A walk through random events.
struct Walk {
    rig: Rig,
    random: u64,
    /// Orders that are not carried out yet.
    open: Vec<Action>,
    /// Tickets of invocations that were given to a replica or refused.
    heard: Vec<Ticket>,
}

impl Walk {
    fn new(limits: Limits) -> Self {
        Self { rig: Rig::new(limits), random: 1, open: Vec::new(), heard: Vec::new() }
    }

    /// Returns a number below `bound` (Knuth's MMIX generator).
    fn below(&mut self, bound: usize) -> usize {
        let product = self.random.wrapping_mul(6_364_136_223_846_793_005);
        self.random = product.wrapping_add(1_442_695_040_888_963_407);
        (self.random >> 33) as usize % bound
    }

    fn step(&mut self, ticket: Ticket) {
        self.rig.seconds += self.below(4) as u64;
        let now = self.rig.now();
        let actions = match self.below(8) {
            0..3 => self.rig.request(ticket),
            3 => self.rig.scheduler.cancel(now, ticket.saturating_sub(1)),
            4 => self.rig.scheduler.advance(now),
            _ if self.open.is_empty() => self.rig.scheduler.advance(now),
            _ => {
                let at = self.below(self.open.len());
                let action = self.open.swap_remove(at);
                self.carry_out(now, action)
            }
        };
        self.take(actions);
        self.check(now);
    }

    fn carry_out(&mut self, now: Instant, action: Action) -> Vec<Action> {
        let fine = self.below(4) > 0;
        let scheduler = &mut self.rig.scheduler;
        match action {
            Action::Invoke(_, id) if fine => scheduler.done(now, id, End::Answered),
            Action::Invoke(_, id) => scheduler.done(now, id, End::Broken),
            Action::MakeSandbox(id) => scheduler.sandbox_made(now, id, fine),
            Action::MakeReplica(id) => scheduler.replica_made(now, id, fine),
            Action::RemoveReplica(id) => scheduler.replica_removed(now, id, fine),
            Action::RemoveSandbox(id) => scheduler.sandbox_removed(now, id),
            Action::Refuse(..) => Vec::new(),
        }
    }

    fn take(&mut self, actions: Vec<Action>) {
        for action in actions {
            if let Action::Invoke(ticket, _) | Action::Refuse(ticket, _) = action {
                self.heard.push(ticket);
            }
            if !matches!(action, Action::Refuse(..)) {
                self.open.push(action);
            }
        }
    }

    fn check(&self, now: Instant) {
        let (scheduler, limits) = (&self.rig.scheduler, self.rig.scheduler.limits);
        assert!(scheduler.sandboxes.len() <= limits.sandboxes as usize);
        assert!(scheduler.waiting() <= limits.queue);
        assert!(scheduler.due().is_none_or(|at| at > now), "something was not done");
        for sandbox in &scheduler.sandboxes {
            assert!(sandbox.replicas.len() <= limits.replicas as usize);
            assert!(sandbox.replicas.iter().all(|one| one.busy <= limits.concurrency));
            let changing = sandbox.replicas.iter().filter(|one| one.phase != Phase::Ready);
            assert!(changing.count() <= 1, "two replicas of a sandbox change at once");
        }
        let invoked = self.open.iter().filter(|action| matches!(action, Action::Invoke(..)));
        assert_eq!(scheduler.busy() as usize, invoked.count());
    }
}
