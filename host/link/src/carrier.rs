//! The engine's second thread, which carries bytes on the commands of the first.
//!
//! The signal plane (who is there, who listens, what policy says) and the data plane share no
//! memory but FIFOs. [`Command`]s go one way, [`News`] the other. Signals of programs come straight
//! to this thread, each family's from its table (`slipway_sgiov_spec::table`).

use std::collections::HashMap;
use std::io::Error;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};
use slipway_family::Family;
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
/// Longest sleep while a program may miss that it has to wake the thread.
const NAP: Duration = Duration::from_millis(1);
/// Numbers in epoll beyond those of families.
const LINKS: u64 = u64::MAX;
const WAKE: u64 = u64::MAX - 1;

/// A command to the thread.
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
    /// Ends the thread.
    Stop,
}

/// A message of the thread to its owner.
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

/// The owner's handle of the thread, which ends when the handle is dropped.
pub struct Carrier {
    commands: Sender<Command>,
    wake: Arc<OwnedFd>,
    news: Receiver<News>,
    notice: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl Carrier {
    /// Starts the thread.
    ///
    /// # Errors
    /// No descriptors, or no thread, are available.
    pub fn start(links: Links) -> std::io::Result<Self> {
        let bell = || {
            Ok::<_, Error>(Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
        };
        let (wake, notice) = (bell()?, bell()?);
        let (commands, theirs) = channel();
        let (told, news) = channel();
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        for (file, number) in [(links.descriptor(), LINKS), (wake.as_fd(), WAKE)] {
            epoll::add(&epoll, file, epoll::EventData::new_u64(number), epoll::EventFlags::IN)?;
        }
        let carrying = Carrying {
            links,
            epoll,
            commands: theirs,
            wake: wake.clone(),
            news: told,
            notice: notice.clone(),
            families: HashMap::new(),
            places: HashMap::new(),
            told: false,
        };
        let thread = std::thread::Builder::new().name("slipway-link".into());
        let thread = Some(thread.spawn(move || carrying.run())?);
        Ok(Self { commands, wake, news, notice, thread })
    }

    /// Sends the thread a command.
    pub fn command(&self, command: Command) {
        if self.commands.send(command).is_ok() {
            slipway_family::wake(&self.wake);
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

impl Drop for Carrier {
    fn drop(&mut self) {
        self.command(Command::Stop);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// A family, and the streams of its entries.
struct Member {
    family: Family,
    entries: HashMap<u32, StreamId>,
}

struct Carrying {
    links: Links,
    epoll: OwnedFd,
    commands: Receiver<Command>,
    wake: Arc<OwnedFd>,
    news: Sender<News>,
    notice: Arc<OwnedFd>,
    families: HashMap<u32, Member>,
    /// The family and entry of each stream.
    places: HashMap<StreamId, (u32, u32)>,
    /// News was sent, and the owner must be notified.
    told: bool,
}

impl Carrying {
    fn run(mut self) {
        let mut patience = Patience::new(Instant::now());
        loop {
            let now = Instant::now();
            let Some(commanded) = self.obey(now) else { return };
            let worked = commanded | self.listen(now) | self.links.turn(now);
            self.tell();
            if worked {
                patience.worked(Instant::now());
            } else if patience.lasts(now) {
                std::thread::yield_now();
                patience.gave_up(now, Instant::now());
            } else {
                if self.sleep(now, patience.is_brief()) {
                    patience.slept(now, Instant::now());
                }
            }
        }
    }

    /// Carries out pending commands. Returns `None` if the thread must end, otherwise whether there
    /// were any.
    fn obey(&mut self, now: Instant) -> Option<bool> {
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
                Command::Join(number, family) => self.join(number, family),
                Command::Part(number) => drop(self.part(number)),
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
                Command::Stop => return None,
            }
        }
        Some(some)
    }

    fn say(&mut self, news: News) {
        self.told |= self.news.send(news).is_ok();
    }

    fn join(&mut self, number: u32, family: Family) {
        let data = epoll::EventData::new_u64(number.into());
        // Without its bell in epoll, a family's signals would be seen only while others keep this
        // thread awake. So it is better for the family to have no streams.
        if epoll::add(&self.epoll, family.bell(), data, epoll::EventFlags::IN).is_ok() {
            self.families.insert(number, Member { family, entries: HashMap::new() });
        }
    }

    /// Removes a family, and returns its streams. Bytes that its programs have written are still
    /// sent.
    fn part(&mut self, number: u32) -> Option<HashMap<u32, StreamId>> {
        let member = self.families.remove(&number)?;
        let _ = epoll::delete(&self.epoll, member.family.bell());
        Some(member.entries)
    }

    /// Takes signals. Returns whether there were any.
    fn listen(&mut self, now: Instant) -> bool {
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
            for stream in self.part(number).into_iter().flat_map(HashMap::into_values) {
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

    /// Sleeps until there is something to do, unless there is already. `briefly` says that the
    /// sleep will be short in all likelihood. Returns whether the thread slept.
    fn sleep(&mut self, now: Instant, briefly: bool) -> bool {
        self.families.values().for_each(|member| member.family.set_asleep(true));
        // `rest` and `doze` have a full barrier between setting `asleep` and the look at the
        // signals.
        let quiet = if briefly { self.links.doze(now) } else { self.links.rest(now) };
        let may = quiet && !self.listen(now);
        if may {
            self.wait(now, briefly);
        }
        self.families.values().for_each(|member| member.family.set_asleep(false));
        may
    }

    fn wait(&self, now: Instant, briefly: bool) {
        let naps = (briefly || !is_told_surely()) && !self.places.is_empty();
        let patience = longest_sleep(self.links.until_deadline(now), naps);
        let patience = patience.and_then(|patience| Timespec::try_from(patience).ok());
        let none = epoll::EventFlags::empty();
        let mut events = [epoll::Event { flags: none, data: epoll::EventData::new_u64(0) }; 64];
        let count = epoll::wait(&self.epoll, &mut events, patience.as_ref()).unwrap_or(0);
        for event in &events[..count] {
            let drained = match event.data.u64() {
                LINKS => true,
                WAKE => slipway_peer::eventfd::drain(self.wake.as_fd()),
                number => {
                    let member = u32::try_from(number).ok().and_then(|n| self.families.get(&n));
                    member.is_none_or(|member| member.family.lower_bell())
                }
            };
            if !drained {
                // The family's own program keeps its bell raised: that costs only the family's
                // share of wakes.
                std::thread::yield_now();
            }
        }
    }
}

/// Returns the longest sleep with something due after `due`, or `None` if there is no limit. With
/// `naps` the sleep is a nap. epoll_wait(2) gets it in whole milliseconds, rounded up.
fn longest_sleep(due: Option<Duration>, naps: bool) -> Option<Duration> {
    // Sleeps a little longer, or the thread would wake just before something is due, again and
    // again. Not so for a nap: a little longer would be another millisecond.
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
        let millis = |due, naps| {
            let sleep = longest_sleep(due, naps)?;
            // As epoll_wait(2) has it.
            Some(sleep.as_micros().div_ceil(1000))
        };
        let micros = |count| Some(Duration::from_micros(count));
        assert_eq!((millis(None, false), millis(None, true)), (None, Some(1)));
        for (due, sleep, nap) in [(0, 1, 1), (200, 1, 1), (950, 2, 1), (1000, 2, 1), (9500, 10, 1)]
        {
            assert_eq!(
                (millis(micros(due), false), millis(micros(due), true)),
                (Some(sleep), Some(nap))
            );
        }
    }
}
