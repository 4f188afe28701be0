//! The task that carries an engine's bytes on the commands of the engine's thread. It has a reactor
//! of its own, so that the ciphers of links have a processor to themselves.
//!
//! The signal plane (who is there, who listens, what policy says) and the data plane share no
//! memory but FIFOs. [`Command`]s go one way, [`News`] the other. Signals of programs come straight
//! to the task, each family's from its table (`slipway_sgiov_spec::table`).
//!
//! A step looks for commands, for signals and at the sockets by itself. The reactor has the bells
//! of families, the commands' waker and the links' descriptor to end a sleep, and is otherwise
//! asked for nothing: while there is work, it costs a system call in 200 µs.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::task::Waker;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};
use slipway_family::Family;
use slipway_reactor::{Context, Event as Ready, Interest, Reactor, Step, Task};
use slipway_ring::cross::is_told_surely;
use slipway_sgiov_spec::Address;

use crate::connection::Report;
use crate::event::{Event, StreamId};
use crate::links::Links;
use crate::patience::Patience;
use crate::renewal::Renewal;
use crate::shares::View as SharesView;
use crate::stream::End;

/// The most signals of a family that are taken at a time.
const SIGNALS: usize = 1024;
/// Longest sleep while a program may miss that it has to wake the carrier.
const NAP: Duration = Duration::from_millis(1);
/// The reactor's token of the links' descriptor; families have their numbers, which are lower.
const LINKS: u32 = u32::MAX;

/// A command to the carrier.
pub enum Command {
    /// Calls [`Links::open`]; [`News::Opening`] with the same ticket follows.
    Open {
        /// The number that the answer repeats.
        ticket: u64,
        /// The tenant.
        tenant: String,
        /// The program's address.
        source: Address,
        /// The address that the program connects to.
        destination: Address,
    },
    /// Calls [`Links::attach`].
    Attach {
        /// The stream.
        stream: StreamId,
        /// The engine's end.
        end: End,
        /// The family, and the entry whose number it signals for this stream.
        entry: (u32, u32),
    },
    /// Calls [`Links::refuse`].
    Refuse(StreamId, u32),
    /// Calls [`Links::leave`].
    Leave(StreamId),
    /// Calls [`Links::reset`].
    Reset(StreamId),
    /// Adds a family that may have streams.
    Join(u32, Family),
    /// Removes a family whose streams were left ([`Command::Leave`]).
    Part(u32),
    /// Calls [`Links::set_weight`].
    Weight(String, f64),
    /// Calls [`Links::set_rate`].
    Rate(String, u64),
    /// Calls [`Links::renew`].
    Renew(Box<Renewal>),
    /// Calls [`Links::reports`]; [`News::Reports`] follows.
    Report,
    /// Calls [`Links::shares`]; [`News::Shares`] follows.
    Shares,
}

/// A message of the carrier to its owner.
#[derive(Clone, Debug, PartialEq)]
pub enum News {
    /// The answer to [`Command::Open`].
    Opening {
        /// The ticket of the command.
        ticket: u64,
        /// The stream, or an error number of errno(3).
        stream: Result<StreamId, u32>,
    },
    /// An event of the links.
    Event(Event),
    /// The counters of all connections.
    Reports(Vec<Report>),
    /// The shares of all tenants.
    Shares(SharesView),
}

/// The owner's handle of the carrier, which ends, with its thread, when the handle is dropped.
pub struct Carrier {
    commands: Sender<Command>,
    wake: Waker,
    news: Receiver<News>,
    notice: Arc<OwnedFd>,
    /// Its drop ends the task.
    _reactor: Reactor,
}

impl Carrier {
    /// Starts the carrier on a thread of its own.
    ///
    /// # Errors
    /// No descriptors, or no thread, are available.
    pub fn start(links: Links) -> std::io::Result<Self> {
        let notice = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let (commands, theirs) = channel();
        let (told, news) = channel();
        let carrying = Carrying {
            links,
            commands: theirs,
            news: told,
            notice: notice.clone(),
            families: HashMap::new(),
            places: HashMap::new(),
            told: false,
            patience: Patience::new(Instant::now()),
            asleep_since: None,
        };
        let (reactor, wake) = Reactor::of_one(reactor_settings(), Box::new(carrying))?;
        Ok(Self { commands, wake, news, notice, _reactor: reactor })
    }

    /// Sends the carrier a command.
    pub fn command(&self, command: Command) {
        if self.commands.send(command).is_ok() {
            self.wake.wake_by_ref();
        }
    }

    /// Returns the descriptor that is readable when there is news.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.notice.as_fd()
    }

    /// Takes all news.
    pub fn news(&self) -> impl Iterator<Item = News> + '_ {
        slipway_peer::eventfd::drain(self.notice.as_fd());
        self.news.try_iter()
    }
}

/// Returns the settings of the carrier's reactor.
fn reactor_settings() -> slipway_reactor::Settings {
    slipway_reactor::Settings {
        name: "slipway-link".into(),
        // How long to poll is the task's decision (`Patience`).
        poll_budget: Duration::ZERO,
        self_polling: true,
        on_panic: Arc::new(|why| tracing::error!("links to other engines have ended: {why}")),
        ..slipway_reactor::Settings::default()
    }
}

/// A family, and the streams of its entries.
struct Member {
    family: Family,
    entries: HashMap<u32, StreamId>,
}

struct Carrying {
    links: Links,
    commands: Receiver<Command>,
    news: Sender<News>,
    notice: Arc<OwnedFd>,
    families: HashMap<u32, Member>,
    /// The family and entry of each stream.
    places: HashMap<StreamId, (u32, u32)>,
    /// News was sent, and the owner must be notified.
    told: bool,
    patience: Patience,
    /// The time at which the task fell asleep, from then until its next step.
    asleep_since: Option<Instant>,
}

impl Task for Carrying {
    fn start(&mut self, context: &mut Context<'_>) -> std::io::Result<()> {
        context.watch_shared(self.links.shared_descriptor(), Interest::Read, LINKS)
    }

    fn poll(&mut self, context: &mut Context<'_>) -> Step {
        self.wake(context.events());
        // Not the reactor's time, which is up to eight rounds old.
        let now = Instant::now();
        let worked = self.obey(context, now) | self.listen(context, now) | self.links.turn(now);
        self.tell();
        if worked {
            self.patience.worked(Instant::now());
            Step::Busy
        } else if self.patience.lasts(now) {
            std::thread::yield_now();
            self.patience.gave_up(now, Instant::now());
            Step::Looking
        } else {
            self.sleep(context, now)
        }
    }
}

impl Carrying {
    /// Carries out pending commands. Returns whether there were any.
    fn obey(&mut self, context: &mut Context<'_>, now: Instant) -> bool {
        let mut some = false;
        while let Ok(command) = self.commands.try_recv() {
            some = true;
            match command {
                Command::Open { ticket, tenant, source, destination } => {
                    let stream = self.links.open(&tenant, source, destination, now);
                    self.say(News::Opening { ticket, stream });
                }
                Command::Attach { stream, end, entry } => {
                    if let Some(member) = self.families.get_mut(&entry.0) {
                        member.entries.insert(entry.1, stream);
                        self.places.insert(stream, entry);
                    }
                    self.links.attach(stream, end);
                }
                Command::Refuse(stream, errno) => self.links.refuse(stream, errno, now),
                Command::Leave(stream) => self.links.leave(stream, now),
                Command::Reset(stream) => self.links.reset(stream, now),
                Command::Join(number, family) => self.join(context, number, family),
                Command::Part(number) => drop(self.part(context, number)),
                Command::Weight(tenant, weight) => self.links.set_weight(&tenant, weight),
                Command::Rate(tenant, rate) => self.links.set_rate(&tenant, rate),
                Command::Renew(renewal) => self.links.renew(*renewal, now),
                Command::Report => {
                    let reports = self.links.reports();
                    self.say(News::Reports(reports));
                }
                Command::Shares => {
                    let shares = self.links.shares(now);
                    self.say(News::Shares(shares));
                }
            }
        }
        some
    }

    fn say(&mut self, news: News) {
        self.told |= self.news.send(news).is_ok();
    }

    fn join(&mut self, context: &mut Context<'_>, number: u32, family: Family) {
        // Without a watch of its bell, a family's signals would be seen only while others keep this
        // task awake. So it is better for the family to have no streams.
        if context.watch_shared(family.shared_bell(), Interest::Read, number).is_ok() {
            self.families.insert(number, Member { family, entries: HashMap::new() });
        }
    }

    /// Removes a family, and returns its streams. Bytes that its programs have written are still
    /// sent.
    fn part(&mut self, context: &mut Context<'_>, number: u32) -> Option<HashMap<u32, StreamId>> {
        let member = self.families.remove(&number)?;
        context.unwatch(number);
        Some(member.entries)
    }

    /// Takes signals. Returns whether there were any.
    fn listen(&mut self, context: &mut Context<'_>, now: Instant) -> bool {
        let (mut some, mut spoiled) = (false, None);
        for (number, member) in &mut self.families {
            for _ in 0..SIGNALS {
                match member.family.take() {
                    Ok(Some(entry)) => {
                        some = true;
                        let entry = u32::try_from(entry).ok();
                        let stream = entry.and_then(|entry| member.entries.get(&entry));
                        stream.into_iter().for_each(|stream| self.links.stir(*stream));
                    }
                    Ok(None) => break,
                    Err(_) => {
                        spoiled = Some(*number);
                        break;
                    }
                }
            }
            if member.family.overflowed() {
                some = true;
                member.entries.values().for_each(|stream| self.links.stir(*stream));
            }
        }
        if let Some(number) = spoiled {
            // Logged once for each family, which can only start afresh by attaching again.
            tracing::warn!(family = number, "its signals cannot be: its streams are broken off");
            for stream in self.part(context, number).into_iter().flat_map(HashMap::into_values) {
                self.links.reset(stream, now);
            }
        }
        some
    }

    /// Passes events of the links on to the owner.
    fn tell(&mut self) {
        while let Some(event) = self.links.event() {
            if let Event::Ended { stream, .. } = &event
                && let Some((family, entry)) = self.places.remove(stream)
                && let Some(member) = self.families.get_mut(&family)
                && member.entries.get(&entry) == Some(stream)
            {
                member.entries.remove(&entry);
            }
            self.say(News::Event(event));
        }
        if std::mem::take(&mut self.told) {
            slipway_family::wake(&self.notice);
        }
    }

    /// Falls asleep until there is something to do, unless there is already.
    fn sleep(&mut self, context: &mut Context<'_>, now: Instant) -> Step {
        let briefly = self.patience.is_brief();
        self.set_asleep(true);
        // `rest` and `doze` have a full barrier between setting `asleep` and the look at the
        // signals.
        let quiet = if briefly { self.links.doze(now) } else { self.links.rest(now) };
        if !quiet || self.listen(context, now) {
            self.set_asleep(false);
            return Step::Looking;
        }
        self.asleep_since = Some(now);
        let naps = (briefly || !is_told_surely()) && !self.places.is_empty();
        let longest = longest_sleep(self.links.until_deadline(now), naps);
        Step::Idle(longest.map(|longest| now + longest))
    }

    /// Ends the sleep, if the task slept, and lowers the bells that were found raised.
    fn wake(&mut self, ready: &[Ready]) {
        for Ready { token, .. } in ready {
            if let Some(member) = self.families.get(token)
                && !member.family.lower_bell()
            {
                // The family's own program keeps its bell raised: that costs only the family's
                // share of wakes.
                std::thread::yield_now();
            }
        }
        if let Some(since) = self.asleep_since.take() {
            self.set_asleep(false);
            self.patience.slept(since, Instant::now());
        }
    }

    /// Sets whether programs must raise their families' bells after a signal.
    fn set_asleep(&self, asleep: bool) {
        self.families.values().for_each(|member| member.family.set_asleep(asleep));
    }
}

/// Returns the longest sleep with something due after `due`, or `None` if there is no limit. With
/// `naps` the sleep is a nap.
fn longest_sleep(due: Option<Duration>, naps: bool) -> Option<Duration> {
    // A little longer than until something is due: one wake-up then serves what is due at almost
    // the same time. Not so for a nap.
    let due = due.map(|due| due + Duration::from_micros(100));
    match naps {
        true => Some(due.map_or(NAP, |due| due.min(NAP))),
        false => due,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_nap_is_no_longer_than_a_millisecond() {
        let micros = |count| Some(Duration::from_micros(count));
        assert_eq!((longest_sleep(None, false), longest_sleep(None, true)), (None, micros(1000)));
        for (due, sleep, nap) in
            [(0, 100, 100), (200, 300, 300), (950, 1050, 1000), (9500, 9600, 1000)]
        {
            let due = micros(due);
            assert_eq!(longest_sleep(due, false), micros(sleep));
            assert_eq!(longest_sleep(due, true), micros(nap));
        }
    }
}
