//! The owner of a function's state: it hears of invocations, and carries out what the scheduler
//! decides. All others talk to it by messages.
//!
//! Its inbox has no bound of its own: a connection, of which there are only so many, has at most a
//! few messages in it.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Error, Result, anyhow};
use slipway_runtime::RETURN;
use tokio::sync::{mpsc, oneshot};
use tokio::task::{JoinError, JoinSet};

use super::fleet::Fleet;
use super::invocation::{Call, Outcome};
use super::queue::{Client, Ticket};
use super::scheduler::{Action, End, Limits, Refusal, ReplicaId, SandboxId, Scheduler};
use super::status::{About, SandboxStatus, Status};
use crate::client::Lost;

/// The longest time in which the sandboxes are removed at the end.
const CLEAN_UP: Duration = Duration::from_secs(120);
/// The time after which sandboxes that are left or began meanwhile are looked for again at the end.
const LOOK: Duration = Duration::from_secs(1);

type Reply = oneshot::Sender<Result<Permit, Refusal>>;

/// A message to the dispatcher.
enum Event {
    Request(Client, Ticket, Reply),
    /// The client of an invocation that waits has left.
    Left(Ticket),
    Done(ReplicaId, End),
    /// A sandbox does not run any more.
    Lost(SandboxId),
    SandboxMade(SandboxId, bool),
    ReplicaMade(ReplicaId, bool),
    ReplicaRemoved(ReplicaId, bool),
    SandboxRemoved(SandboxId),
    Status(oneshot::Sender<Status>),
}

type Events = mpsc::UnboundedSender<Event>;

/// A start or removal under way. One that is dropped before its end has failed.
struct Task {
    /// The message that it has failed; `None` once it has ended.
    failed: Option<Event>,
    events: Events,
}

impl Task {
    fn end(mut self, event: Event) {
        self.failed = None;
        // Fails if the server has ended.
        let _ = self.events.send(event);
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        if let Some(event) = self.failed.take() {
            let _ = self.events.send(event);
        }
    }
}

/// The right to run one invocation in a replica. Dropping it gives the replica back.
pub struct Permit {
    replica: ReplicaId,
    /// The end that the dispatcher hears of.
    end: End,
    events: Events,
}

impl Drop for Permit {
    fn drop(&mut self) {
        // Fails if the server has ended.
        let _ = self.events.send(Event::Done(self.replica, self.end));
    }
}

/// An invocation that waits for its replica. Dropping it has the dispatcher forget it.
struct Waiting {
    ticket: Ticket,
    waits: bool,
    events: Events,
}

impl Drop for Waiting {
    fn drop(&mut self) {
        if self.waits {
            let _ = self.events.send(Event::Left(self.ticket));
        }
    }
}

/// A way to the dispatcher.
pub struct Handle {
    events: Events,
    tickets: AtomicU64,
    fleet: Arc<Fleet>,
}

impl Handle {
    /// Waits for a replica.
    ///
    /// # Errors
    /// The reason why there is none.
    pub async fn replica(&self, client: Client) -> Result<Permit, Refusal> {
        let ticket = self.tickets.fetch_add(1, Ordering::Relaxed);
        let (reply, answer) = oneshot::channel();
        let _ = self.events.send(Event::Request(client, ticket, reply));
        let mut waiting = Waiting { ticket, waits: true, events: self.events.clone() };
        let answer = answer.await;
        waiting.waits = false;
        answer.unwrap_or(Err(Refusal::Ending))
    }

    /// Runs an invocation, and returns its end and the name of its replica. Must run to its end,
    /// whether or not its client waits: otherwise the replica counts as broken.
    pub async fn invoke(&self, mut permit: Permit, call: Call) -> (Outcome, String) {
        permit.end = End::Broken;
        let replica = permit.replica;
        let outcome = self.fleet.invoke(replica, call).await;
        if matches!(outcome, Outcome::Lost(_)) && !self.fleet.is_usable(replica.sandbox).await {
            let _ = self.events.send(Event::Lost(replica.sandbox));
        }
        permit.end = outcome.end();
        (outcome, self.fleet.replica_name(replica))
    }

    /// Returns the figures of the function, or `None` if the server has ended.
    pub async fn status(&self) -> Option<Status> {
        let (reply, answer) = oneshot::channel();
        let _ = self.events.send(Event::Status(reply));
        answer.await.ok()
    }
}

/// The owner of a function's state.
pub struct Dispatcher {
    about: About,
    fleet: Arc<Fleet>,
    scheduler: Scheduler,
    events: Events,
    inbox: mpsc::UnboundedReceiver<Event>,
    waiting: HashMap<Ticket, Reply>,
    /// Starts and removals under way.
    tasks: JoinSet<()>,
    /// Set if the server ends.
    ending: bool,
}

impl Dispatcher {
    /// Makes the owner of a function that has the sandboxes `adopted`, and the way to it.
    pub fn new(
        about: About,
        fleet: Arc<Fleet>,
        limits: Limits,
        adopted: &[SandboxId],
    ) -> (Self, Handle) {
        let (events, inbox) = mpsc::unbounded_channel();
        let mut scheduler = Scheduler::new(limits);
        let now = Instant::now();
        adopted.iter().for_each(|id| scheduler.adopt(now, *id));
        let (waiting, tasks) = (HashMap::new(), JoinSet::new());
        let tickets = AtomicU64::new(1);
        let handle = Handle { events: events.clone(), tickets, fleet: Arc::clone(&fleet) };
        let ending = false;
        (Self { about, fleet, scheduler, events, inbox, waiting, tasks, ending }, handle)
    }

    /// Serves until `stop`.
    pub async fn serve(&mut self, stop: impl Future<Output = ()>) {
        let actions = self.scheduler.advance(Instant::now());
        self.carry_out(actions);
        self.run(stop).await;
    }

    /// Refuses invocations from now on, and waits for the end of those that run, or for `stop`.
    pub async fn drain(&mut self, stop: impl Future<Output = ()>) {
        self.ending = true;
        let actions = self.scheduler.end();
        self.carry_out(actions);
        self.run(stop).await;
    }

    /// Refuses the invocations that still come after [`Dispatcher::drain`], until `stop`.
    pub async fn refuse<T>(&mut self, stop: impl Future<Output = T>) {
        tokio::pin!(stop);
        loop {
            let actions = tokio::select! {
                _ = &mut stop => return,
                Some(event) = self.inbox.recv() => self.handle(event),
            };
            self.carry_out(actions);
        }
    }

    /// Handles messages until `stop`, or until the server ends and no invocation runs.
    async fn run(&mut self, stop: impl Future<Output = ()>) {
        tokio::pin!(stop);
        while !self.ending || self.scheduler.busy() > 0 {
            let due = self.scheduler.due();
            let actions = tokio::select! {
                () = &mut stop => return,
                Some(event) = self.inbox.recv() => self.handle(event),
                Some(ended) = self.tasks.join_next() => {
                    log(ended);
                    Vec::new()
                }
                () = until(due) => self.scheduler.advance(Instant::now()),
            };
            self.carry_out(actions);
        }
    }

    fn handle(&mut self, event: Event) -> Vec<Action> {
        let now = Instant::now();
        match event {
            Event::Request(client, ticket, reply) => {
                self.waiting.insert(ticket, reply);
                self.scheduler.request(now, client, ticket)
            }
            Event::Left(ticket) => {
                self.waiting.remove(&ticket);
                self.scheduler.cancel(now, ticket)
            }
            Event::Done(replica, end) => self.scheduler.done(now, replica, end),
            Event::Lost(id) => self.scheduler.lost(now, id),
            Event::SandboxMade(id, runs) => self.scheduler.sandbox_made(now, id, runs),
            Event::ReplicaMade(id, runs) => self.scheduler.replica_made(now, id, runs),
            Event::ReplicaRemoved(id, gone) => self.scheduler.replica_removed(now, id, gone),
            Event::SandboxRemoved(id) => self.scheduler.sandbox_removed(now, id),
            Event::Status(reply) => {
                let _ = reply.send(self.status());
                Vec::new()
            }
        }
    }

    fn carry_out(&mut self, actions: Vec<Action>) {
        for action in actions {
            match action {
                Action::Invoke(ticket, replica) => {
                    let (end, events) = (End::Answered, self.events.clone());
                    self.reply(ticket, Ok(Permit { replica, end, events }));
                }
                Action::Refuse(ticket, refusal) => self.reply(ticket, Err(refusal)),
                Action::MakeSandbox(id) => {
                    self.begin(Event::SandboxMade(id, false), move |fleet| async move {
                        let name = fleet.sandbox_name(id);
                        let made = fleet.make_sandbox(id).await;
                        Event::SandboxMade(id, succeeded(made, &name, "the sandbox does not start"))
                    });
                }
                Action::MakeReplica(id) => {
                    self.begin(Event::ReplicaMade(id, false), move |fleet| async move {
                        let name = fleet.replica_name(id);
                        let made = fleet.make_replica(id).await;
                        Event::ReplicaMade(id, succeeded(made, &name, "the replica does not start"))
                    });
                }
                Action::RemoveReplica(id) => {
                    self.begin(Event::ReplicaRemoved(id, false), move |fleet| async move {
                        let name = fleet.replica_name(id);
                        let removed = fleet.remove_replica(id).await;
                        let gone = succeeded(removed, &name, "the replica is not removed");
                        Event::ReplicaRemoved(id, gone)
                    });
                }
                Action::RemoveSandbox(id) => {
                    self.begin(Event::SandboxRemoved(id), move |fleet| async move {
                        let name = fleet.sandbox_name(id);
                        let removed = fleet.remove(&name).await;
                        succeeded(removed, &name, "the sandbox is left until the server ends");
                        Event::SandboxRemoved(id)
                    });
                }
            }
        }
    }

    fn reply(&mut self, ticket: Ticket, reply: Result<Permit, Refusal>) {
        if let Some(client) = self.waiting.remove(&ticket) {
            // The permit of a client that has left is dropped here.
            let _ = client.send(reply);
        }
    }

    /// Begins a task that ends with a message: with `failed` if it panics.
    fn begin<F>(&mut self, failed: Event, task: impl FnOnce(Arc<Fleet>) -> F)
    where
        F: Future<Output = Event> + Send + 'static,
    {
        let (events, work) = (self.events.clone(), task(Arc::clone(&self.fleet)));
        let task = Task { failed: Some(failed), events };
        self.tasks.spawn(async move {
            let event = work.await;
            task.end(event);
        });
    }

    fn status(&self) -> Status {
        let figures = self.scheduler.figures();
        let counts = self.scheduler.counts();
        let sandboxes = figures.iter().map(|one| SandboxStatus {
            name: self.fleet.sandbox_name(one.id),
            state: one.state.to_owned(),
            replicas: one.replicas,
            busy: one.busy,
        });
        let sandboxes = sandboxes.collect();
        let (zygote, forked) = self.fleet.zygotes();
        Status {
            about: self.about.clone(),
            state: if self.ending { "ending" } else { "serving" }.to_owned(),
            replicas: figures.iter().map(|sandbox| sandbox.replicas).sum(),
            busy: self.scheduler.busy(),
            waiting: self.scheduler.waiting(),
            invocations: counts.invocations,
            failed: counts.failed,
            refused: counts.refused,
            replicas_made: counts.up,
            sandboxes_made: counts.out,
            recycled: counts.recycled,
            zygote,
            forked,
            sandboxes,
        }
    }

    /// Removes all sandboxes of the function, also those that are still being made. Tries again
    /// those that are not removed.
    ///
    /// # Errors
    /// It takes longer than [`CLEAN_UP`], or there is no daemon any more.
    pub async fn clean_up(&mut self) -> Result<()> {
        let mut last = None;
        let cleaned = tokio::time::timeout(CLEAN_UP, self.remove_all(&mut last)).await;
        cleaned.unwrap_or_else(|_| {
            let late = format!("the sandboxes are not removed within {} s", CLEAN_UP.as_secs());
            Err(match last {
                Some(error) => error.context(late),
                None => anyhow!(late),
            })
        })
    }

    /// Removes all sandboxes until none is left and none is being made. The error of the last
    /// attempt is in `last`.
    ///
    /// # Errors
    /// The daemon has gone, and no other one came within [`RETURN`].
    async fn remove_all(&mut self, last: &mut Option<Error>) -> Result<()> {
        let begun = tokio::time::Instant::now();
        loop {
            let settled = self.tasks.is_empty();
            match self.fleet.remove_all().await {
                Ok(()) if settled => return Ok(()),
                Ok(()) => *last = None,
                Err(error) if error.is::<Lost>() && begun.elapsed() >= RETURN => return Err(error),
                Err(error) => {
                    tracing::info!(error = line(&error), "sandboxes are removed again");
                    *last = Some(error);
                }
            }
            if settled {
                tokio::time::sleep(LOOK).await;
            } else if let Ok(Some(ended)) = tokio::time::timeout(LOOK, self.tasks.join_next()).await
            {
                log(ended);
            }
        }
    }
}

/// Returns at the time `due`, or never without one.
async fn until(due: Option<Instant>) {
    match due {
        Some(due) => tokio::time::sleep_until(due.into()).await,
        None => std::future::pending().await,
    }
}

/// Logs that a start or removal panicked.
fn log(ended: Result<(), JoinError>) {
    if let Err(error) = ended {
        tracing::error!(%error, "a start or removal of the function's has failed");
    }
}

/// Returns whether a task succeeded, and logs why it did not.
fn succeeded(outcome: Result<()>, name: &str, what: &'static str) -> bool {
    if let Err(error) = &outcome {
        tracing::warn!(name, error = line(error), "{what}");
    }
    outcome.is_ok()
}

/// Formats an error and its causes as one printable line.
fn line(error: &Error) -> String {
    slipway_printable::line(&format!("{error:#}"), slipway_printable::MESSAGE)
}

#[cfg(test)]
pub(super) mod tests {
    use tokio::net::UnixStream;

    use super::super::fleet::tests::fleet;
    use super::*;

    #[test]
    fn a_task_that_does_not_end_has_failed() {
        let (events, mut inbox) = mpsc::unbounded_channel();
        let task =
            |id| Task { failed: Some(Event::SandboxMade(id, false)), events: events.clone() };
        task(1).end(Event::SandboxMade(1, true));
        drop(task(2));
        assert!(matches!(inbox.try_recv(), Ok(Event::SandboxMade(1, true))));
        assert!(matches!(inbox.try_recv(), Ok(Event::SandboxMade(2, false))));
        assert!(inbox.try_recv().is_err());
    }

    /// Makes the owner of a function whose daemon has the other end of `stream`.
    pub async fn dispatcher(stream: UnixStream) -> (Dispatcher, Handle) {
        let limits = Limits {
            concurrency: 1,
            replicas: 1,
            least_sandboxes: 0,
            sandboxes: 1,
            queue: 1,
            wait: Duration::from_secs(1),
            keep_alive: Duration::from_secs(1),
        };
        Dispatcher::new(About::default(), Arc::new(fleet(stream).await), limits, &[])
    }

    #[tokio::test]
    async fn a_daemon_that_does_not_come_back_ends_the_clean_up() {
        let (stream, daemon) = UnixStream::pair().unwrap();
        let (mut dispatcher, _handle) = dispatcher(stream).await;
        drop(daemon);
        // The connection is known to be broken before the clock stops, which leaps over input.
        assert!(dispatcher.fleet.remove_all().await.is_err());
        tokio::time::pause();
        let begun = tokio::time::Instant::now();
        let error = dispatcher.clean_up().await.unwrap_err();
        assert!(error.is::<Lost>(), "{error:#}");
        assert!(begun.elapsed() >= RETURN);
    }
}
