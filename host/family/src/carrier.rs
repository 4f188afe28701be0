//! Carriers of streams: tasks that look for their work in memory and at sockets by themselves, on
//! the commands of the engine's thread.
//!
//! [`Work`] is what differs between carriers. The same for all of them, and here: commands and news
//! (`mailbox`), families with their signals and bells, and when a step looks again or sleeps. Each
//! carrier has a reactor of its own, so that it has a processor to itself.
//!
//! A step ends the sleep that it was woken from, carries out commands, takes signals of families
//! and has the work's turn. The reactor has the bells of families, the commands' waker and the
//! work's descriptor to end a sleep, and is otherwise asked for nothing: while there is work, it
//! costs a system call in 200 µs.
//!
//! A family's program can take pages of its table away, and a look at the table then waits in a
//! page fault, and with it all streams of the carrier. The tenant of the family pays for that
//! ([`Stalls`]): the carrier does not touch the tables of its families for a time, which thus
//! neither signal nor wake it.

use std::collections::HashMap;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::task::Waker;
use std::time::{Duration, Instant};

use slipway_reactor::{Context, Event as Ready, Interest, Reactor, Settings, Stalls, Step, Task};

use crate::Family;
use crate::mailbox::{self, CommandSender, NewsReceiver, NewsSender, Order};

/// The longest sleep while a program may miss that it has to wake the carrier.
pub const NAP: Duration = Duration::from_millis(1);
/// The most signals of a family that are taken in a step.
const SIGNALS: usize = 1024;
/// The most commands that are carried out in a step. Some come as fast as they are carried out: the
/// signals that another carrier passes on ([`Beside`](crate::Beside)). Each of these may concern
/// all streams of a family.
const COMMANDS: usize = 128;
/// The reactor's token of [`Work::descriptor`]; families have their numbers, which are lower.
const OWN: u32 = u32::MAX;

/// The work of a carrier, in which carriers differ. All calls come from the carrier's task, and
/// none may block.
pub trait Work: Send + 'static {
    /// A command of the engine's thread.
    type Command: Send + 'static;
    /// The work's own state of each family whose signals the carrier takes.
    type Member: Default + Send + 'static;

    /// Returns the descriptor, beside the bells of families, that ends a sleep when it is readable.
    fn descriptor(&self) -> Option<Arc<OwnedFd>>;

    /// Carries out a command.
    fn obey(&mut self, command: Self::Command, families: &mut Families<Self::Member>, now: Instant);

    /// Handles a signal of a family's entry. Without an entry, any entry may have changed.
    fn signalled(&mut self, family: u32, member: &Self::Member, entry: Option<u32>);

    /// Handles that a family's signals are invalid. The family was removed, since its events would
    /// not be noticed any more.
    fn spoiled(&mut self, family: u32, member: Self::Member, now: Instant);

    /// Handles that the tables of a tenant's families are left out for a while, since one of them
    /// made the carrier sleep for the time `slept`.
    fn stands_still(&mut self, tenant: &str, slept: Duration);

    /// Moves a bounded number of bytes, and announces the news since the last turn. Returns whether
    /// there was anything to do.
    fn turn(&mut self, families: &mut Families<Self::Member>, now: Instant) -> bool;

    /// Notes that a step had work.
    fn worked(&mut self);

    /// Returns whether a step that began at `now` and had no work is followed by another at once.
    /// If so, the call has given the processor up for a moment.
    fn looks_on(&mut self, now: Instant) -> bool;

    /// Has all peers wake the carrier. Passes a full barrier between what the carrier did before
    /// and what it looks at afterwards. Announces its news.
    fn rest(&mut self, now: Instant) -> Rest;

    /// Has peers wake the carrier no more. `since` is when the carrier fell asleep after
    /// [`Work::rest`], or `None` if it did not.
    fn woken(&mut self, since: Option<Instant>);
}

/// The answer of [`Work::rest`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rest {
    /// There is something to do already.
    Awake,
    /// The carrier may sleep, until this time at most.
    Asleep(Option<Instant>),
}

/// A family, and what the work keeps of it.
struct Joined<M> {
    family: Family,
    member: M,
}

/// The families whose signals a carrier takes.
pub struct Families<M> {
    /// The families, by their numbers.
    joined: HashMap<u32, Joined<M>>,
    /// The tenants whose families' tables made the carrier sleep. They outlast their families,
    /// since a program can begin any number of these.
    stalls: Stalls<Arc<str>>,
}

impl<M> Default for Families<M> {
    fn default() -> Self {
        Self { joined: HashMap::new(), stalls: Stalls::new(Instant::now()) }
    }
}

impl<M> Families<M> {
    /// Returns what the work keeps of a family. Returns `None` if there is no such family.
    pub fn member(&mut self, family: u32) -> Option<&mut M> {
        self.joined.get_mut(&family).map(|joined| &mut joined.member)
    }

    /// Lowers the bell of a family. Returns `false` if its program keeps the bell raised.
    fn lower_bell(&self, family: u32) -> bool {
        self.joined.get(&family).is_none_or(|joined| joined.family.lower_bell())
    }
}

/// Charges the tenant of a family if the thread slept in the work since the last charge, which was
/// for this family.
fn charge<W: Work>(stalls: &mut Stalls<Arc<str>>, work: &mut W, family: &Family) {
    if let Some(slept) = stalls.slept()
        && stalls.charge(family.tenant(), slept)
    {
        work.stands_still(family.tenant(), slept);
    }
}

/// The owner's handle of a carrier with commands `C` and news `N`. The carrier ends, with its
/// thread, when the handle is dropped.
pub struct Carrier<C, N> {
    commands: CommandSender<C>,
    news: NewsReceiver<N>,
    /// Its drop ends the task.
    reactor: Option<Reactor>,
}

impl<C, N> Carrier<C, N> {
    /// Starts the carrier of what `work` makes, which gets the sender of the news. Linux shows the
    /// first 15 bytes of `thread`, the thread's name. If the carrier panics or cannot watch its
    /// descriptor, `ended` is called with the reason, and the carrier ends.
    ///
    /// # Errors
    /// No descriptors, or no thread, are available.
    pub fn start<W: Work<Command = C>>(
        thread: &str,
        ended: fn(&str),
        work: impl FnOnce(NewsSender<N>) -> W,
    ) -> std::io::Result<Self> {
        let (sender, news) = mailbox::news()?;
        let (orders, theirs) = channel();
        let families = Families::default();
        let task = CarrierTask { work: work(sender), orders: theirs, families, asleep_since: None };
        let settings = Settings {
            name: thread.into(),
            // How long to poll is the work's decision.
            poll_budget: Duration::ZERO,
            self_polling: true,
            on_panic: Arc::new(ended),
            ..Settings::default()
        };
        let (reactor, wake) = Reactor::of_one(settings, Box::new(task))?;
        Ok(Self { commands: CommandSender::new(orders, wake), news, reactor: Some(reactor) })
    }

    /// Sends the carrier a command.
    pub fn command(&self, command: C) {
        self.commands.send(command);
    }

    /// Adds a family whose signals the carrier takes.
    pub fn join(&self, number: u32, family: Family) {
        self.commands.order(Order::Join(number, family));
    }

    /// Removes a family. Does nothing if the carrier does not take its signals.
    pub fn part(&self, number: u32) {
        self.commands.order(Order::Part(number));
    }

    /// Returns a sender of commands, for another thread.
    pub fn sender(&self) -> CommandSender<C> {
        self.commands.clone()
    }

    /// Returns a waker of the carrier.
    pub fn waker(&self) -> Waker {
        self.commands.waker()
    }

    /// Returns the descriptor that is readable when there is news.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.news.descriptor()
    }

    /// Takes all news, as [`NewsReceiver::take`] does.
    pub fn news(&self) -> impl Iterator<Item = N> + '_ {
        self.news.take()
    }

    /// Returns whether the carrier has ended, by [`Carrier::end`] or by a defect. Commands are then
    /// not carried out any more.
    pub fn has_ended(&self) -> bool {
        self.news.is_over()
    }

    /// Ends the carrier before the handle is dropped, and waits until its work is dropped.
    pub fn end(&mut self) {
        self.reactor = None;
    }
}

/// The task of a carrier.
struct CarrierTask<W: Work> {
    work: W,
    orders: Receiver<Order<W::Command>>,
    families: Families<W::Member>,
    /// The time at which the task fell asleep, from then until its next step.
    asleep_since: Option<Instant>,
}

impl<W: Work> Task for CarrierTask<W> {
    fn start(&mut self, context: &mut Context<'_>) -> std::io::Result<()> {
        let own = self.work.descriptor();
        own.map_or(Ok(()), |own| context.watch_shared(own, Interest::Read, OWN))
    }

    fn poll(&mut self, context: &mut Context<'_>) -> Step {
        self.end_sleep(context.events());
        // Not the reactor's time, which is up to eight rounds old.
        let now = Instant::now();
        // Only here: a family that `set_asleep` has left out must not be served again before the
        // task sleeps, since its signals would not end the sleep.
        self.families.stalls.settle(now);
        let heard = self.obey(context, now) | self.listen(context, now);
        if heard | self.work.turn(&mut self.families, now) {
            self.work.worked();
            Step::Busy
        } else if self.work.looks_on(now) {
            Step::Looking
        } else {
            self.sleep(context, now)
        }
    }
}

impl<W: Work> CarrierTask<W> {
    /// Carries out pending commands. Returns whether there were any.
    fn obey(&mut self, context: &mut Context<'_>, now: Instant) -> bool {
        for count in 0..COMMANDS {
            let Ok(order) = self.orders.try_recv() else { return count > 0 };
            match order {
                Order::Join(number, family) => self.join(context, number, family),
                Order::Part(number) => drop(self.part(context, number)),
                Order::Obey(command) => self.work.obey(command, &mut self.families, now),
            }
        }
        true
    }

    fn join(&mut self, context: &mut Context<'_>, number: u32, family: Family) {
        // Without a watch of its bell, a family's signals would be seen only while others keep this
        // task awake. So it is better to take none of them.
        if context.watch_shared(family.shared_bell(), Interest::Read, number).is_ok() {
            let joined = Joined { family, member: W::Member::default() };
            self.families.joined.insert(number, joined);
        } else {
            family.give_up();
        }
    }

    /// Removes a family, and returns what the work kept of it.
    fn part(&mut self, context: &mut Context<'_>, number: u32) -> Option<W::Member> {
        let joined = self.families.joined.remove(&number)?;
        context.unwatch(number);
        Some(joined.member)
    }

    /// Takes signals at `now`, the present, but of families that are left out. Returns whether
    /// there were any, or a family's are invalid.
    fn listen(&mut self, context: &mut Context<'_>, now: Instant) -> bool {
        let (mut some, mut spoiled) = (false, None);
        let Self { work, families: Families { joined, stalls }, .. } = self;
        stalls.begin(now);
        for (number, Joined { family, member }) in joined {
            if stalls.until(family.tenant()).is_some() {
                continue;
            }
            for _ in 0..SIGNALS {
                match family.take() {
                    Ok(Some(entry)) => {
                        some = true;
                        if let Ok(entry) = u32::try_from(entry) {
                            work.signalled(*number, member, Some(entry));
                        }
                    }
                    Ok(None) => break,
                    Err(_) => {
                        spoiled = Some(*number);
                        break;
                    }
                }
            }
            if family.overflowed() {
                some = true;
                work.signalled(*number, member, None);
            }
            charge(stalls, work, family);
        }
        stalls.end();
        let Some(number) = spoiled else { return some };
        if let Some(member) = self.part(context, number) {
            self.work.spoiled(number, member, now);
        }
        // The task must not fall asleep: what follows from this is done and announced in a turn.
        true
    }

    /// Falls asleep until there is something to do, unless there is already.
    fn sleep(&mut self, context: &mut Context<'_>, now: Instant) -> Step {
        self.set_asleep(true);
        // `rest` has a full barrier between setting `asleep` and the look at the signals.
        if let Rest::Asleep(until) = self.work.rest(now)
            && !self.listen(context, Instant::now())
        {
            self.asleep_since = Some(now);
            // Families that are left out do not wake the task.
            let served = self.families.stalls.due();
            return Step::Idle(until.into_iter().chain(served).min());
        }
        self.withdraw(None);
        Step::Looking
    }

    /// Ends the sleep, if the task slept, and lowers the bells that were found raised.
    fn end_sleep(&mut self, ready: &[Ready]) {
        for Ready { token, .. } in ready {
            if !self.families.lower_bell(*token) {
                // The family's own program keeps its bell raised: that costs only the family's
                // share of wakes.
                std::thread::yield_now();
            }
        }
        if let Some(since) = self.asleep_since.take() {
            self.families.stalls.woken();
            self.withdraw(Some(since));
        }
    }

    /// Has peers wake the task no more, which has slept since `since`, if it has.
    fn withdraw(&mut self, since: Option<Instant>) {
        self.set_asleep(false);
        self.work.woken(since);
    }

    /// Sets whether programs must raise their families' bells after a signal. Families that are
    /// left out keep what they have: the most that comes of it is a wake-up too many.
    fn set_asleep(&mut self, asleep: bool) {
        let Self { work, families: Families { joined, stalls }, .. } = self;
        stalls.begin(Instant::now());
        for Joined { family, .. } in joined.values() {
            if stalls.until(family.tenant()).is_none() {
                family.set_asleep(asleep);
                charge(stalls, work, family);
            }
        }
        stalls.end();
    }
}

#[cfg(test)]
mod tests;
