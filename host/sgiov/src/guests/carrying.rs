//! The thread that exchanges messages with guests and carries their streams.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ops::Bound;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, Sender};
use std::time::{Duration, Instant};

use rustix::event::epoll;
use rustix::io::Errno;
use slipway_family::Family;
use slipway_sgiov_function::{Attended, Broken, Peer};
use slipway_sgiov_spec::Address;
use slipway_sgiov_spec::function::Message;
use slipway_vfio_user::Control;

use super::Bell;
use super::beside::Claims;
use super::book::{Book, Counts};
use super::guest::Guest;
use super::pair::{Answerer, EndOwner, Pair, PairEnd};
use crate::log::Log;
use crate::policy::Policy;
use crate::remote::{Event, Line};
use crate::slab::Slab;

/// The time for which the thread polls after the last work before it sleeps.
const POLL: Duration = Duration::from_micros(50);
/// The number of looks without a result after which a stream is armed.
const PATIENCE: u8 = 64;
/// The number of signals of a guest or a family that are taken at a time.
pub const SIGNALS: usize = 1024;
/// The number of messages of a guest that are handled at a time.
const MESSAGES: usize = 64;
/// The number of messages that a guest may leave unread before its own messages wait.
pub const BACKLOG: usize = 1024;
/// The datum in epoll of the eventfd that wakes the thread; families have lower ones.
pub const WAKE: u64 = u64::MAX;

/// A command to the carrying thread.
pub enum Command {
    Add {
        guest: u32,
        peer: Peer,
        control: Control,
    },
    Remove(u32),
    Family(u32, Family),
    /// A family whose signals the links' thread takes.
    Beside(u32, Arc<Claims>),
    /// An entry of a family of [`Command::Beside`] has signalled. `None`: any entry may have.
    Stirred(u32, Option<u32>),
    /// The signals of a family of [`Command::Beside`] are invalid.
    Spoiled(u32),
    FamilyEnded(u32),
    Policy(Policy),
    Connect {
        connection: u32,
        guest: Option<u32>,
        from: Address,
        to: Address,
        line: Line,
    },
    Answer {
        incoming: u32,
        answer: Result<(u32, Line), u32>,
    },
    Closed(u32),
    Stop,
}

/// News of the carrying thread.
pub enum News {
    Event(Event),
    /// A guest's VMM has gone.
    Gone(u32),
}

/// Returns the number of errno(3) that messages carry.
pub fn number(errno: Errno) -> u32 {
    errno.raw_os_error().unsigned_abs()
}

pub struct Carrying {
    pub guests: BTreeMap<u32, Guest>,
    pub pairs: Slab<Pair>,
    /// Pairs with a program of this node, by connection.
    pub hosts: HashMap<u32, u32>,
    /// Pairs with a program of this node, by family and entry.
    pub entries: HashMap<(u32, u32), u32>,
    pub families: HashMap<u32, Family>,
    /// Families whose signals the links' thread takes.
    pub beside: HashMap<u32, Arc<Claims>>,
    pub hot: Vec<u32>,
    /// Pairs whose program could not be woken. They are reset.
    deaf: Vec<u32>,
    /// Idle pairs, each with the time at which it was queued ([`Pair::resting`]).
    pub resting: VecDeque<(Instant, u32)>,
    /// Pairs that a guest was asked to accept, each with the time of the request.
    pub asked: VecDeque<(Instant, u32)>,
    pub book: Arc<Book>,
    pub policy: Policy,
    pub log: Log,
    pub epoll: OwnedFd,
    commands: Receiver<Command>,
    pub wake: Arc<Bell>,
    pub news: Sender<News>,
    notice: Arc<Bell>,
    pub told: bool,
}

impl Carrying {
    pub fn new(
        wake: Arc<Bell>,
        (commands, news, notice): (Receiver<Command>, Sender<News>, Arc<Bell>),
        book: Arc<Book>,
        policy: Policy,
    ) -> std::io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let data = epoll::EventData::new_u64(WAKE);
        epoll::add(&epoll, wake.0.as_fd(), data, epoll::EventFlags::IN)?;
        Ok(Self {
            guests: BTreeMap::new(),
            pairs: Slab::default(),
            hosts: HashMap::new(),
            entries: HashMap::new(),
            families: HashMap::new(),
            beside: HashMap::new(),
            hot: Vec::new(),
            deaf: Vec::new(),
            resting: VecDeque::new(),
            asked: VecDeque::new(),
            book,
            policy,
            log: Log::default(),
            epoll,
            commands,
            wake,
            news,
            notice,
            told: false,
        })
    }

    pub fn run(mut self) {
        let mut last = Instant::now();
        while let Some(commanded) = self.obey() {
            self.give_up();
            let worked = commanded | self.attend() | self.listen() | self.carry();
            self.tell();
            let worked = worked | self.give_up_deaf();
            if worked {
                last = Instant::now();
            } else if last.elapsed() < POLL {
                std::thread::yield_now();
            } else {
                self.sleep();
            }
        }
    }

    /// Carries out the commands. Returns `None` if the thread is to end.
    fn obey(&mut self) -> Option<bool> {
        let mut some = false;
        while let Ok(command) = self.commands.try_recv() {
            some = true;
            match command {
                Command::Add { guest, peer, control } => {
                    let counts = self.book.counts(guest);
                    self.guests.insert(guest, Guest::new(peer, control, counts));
                }
                Command::Remove(guest) => {
                    self.lose(guest);
                    self.guests.remove(&guest);
                }
                Command::Family(number, family) => self.join(number, family),
                Command::Policy(policy) => self.policy = policy,
                Command::Beside(number, claims) => drop(self.beside.insert(number, claims)),
                Command::Stirred(number, entry) => self.stirred(number, entry),
                Command::Spoiled(number) => self.spoiled(number),
                Command::FamilyEnded(number) => self.part(number),
                Command::Connect { connection, guest, from, to, line } => {
                    self.connect((connection, line), guest, from, to);
                }
                Command::Answer { incoming, answer } => self.answered(incoming, answer),
                Command::Closed(connection) => self.closed(connection),
                Command::Stop => return None,
            }
        }
        Some(some)
    }

    pub fn say(&mut self, event: Event) {
        self.told |= self.news.send(News::Event(event)).is_ok();
    }

    /// Looks at every guest. Returns whether there was something to do.
    fn attend(&mut self) -> bool {
        let (mut worked, mut next) = (false, self.guests.keys().next().copied());
        while let Some(guest) = next {
            match self.attend_one(guest) {
                Ok(some) => worked |= some,
                Err(why) => self.break_off(guest, why),
            }
            let after = (Bound::Excluded(guest), Bound::Unbounded);
            next = self.guests.range(after).next().map(|(guest, _)| *guest);
        }
        worked
    }

    fn attend_one(&mut self, number: u32) -> Result<bool, Broken> {
        let Some(guest) = self.guests.get_mut(&number) else { return Ok(false) };
        if guest.channel.is_none() {
            guest.channel = guest.peer.take();
            guest.greeted = false;
        }
        let Some(channel) = &mut guest.channel else { return Ok(false) };
        let was_suspended = guest.suspended;
        match channel.attend()? {
            Attended::Over => {
                self.lose(number);
                self.look_for_vmms();
                return Ok(true);
            }
            Attended::Suspended => {
                guest.suspended = true;
                return Ok(false);
            }
            Attended::On => guest.suspended = false,
        }
        let mut stirred = Vec::new();
        let mut worked = channel.flush()?;
        // Signals are counted, not streams: a guest may signal entries without a stream for
        // ever.
        for _ in 0..SIGNALS {
            let Some(stream) = channel.signal()? else { break };
            stirred.extend(guest.streams.get(&stream));
            worked = true;
        }
        if channel.overflowed() || was_suspended {
            stirred.extend(guest.streams.values());
            worked = true;
        }
        stirred.into_iter().for_each(|pair| self.stir(pair));
        for _ in 0..MESSAGES {
            let Some(message) = self.hear(number)? else { break };
            self.talk(number, message)?;
            worked = true;
        }
        Ok(worked)
    }

    fn hear(&mut self, guest: u32) -> Result<Option<Message>, Broken> {
        let channel = self.guests.get_mut(&guest).and_then(|guest| guest.channel.as_mut());
        match channel.filter(|channel| channel.backlog() < BACKLOG) {
            Some(channel) => channel.hear(),
            None => Ok(None),
        }
    }

    /// Breaks the function of a guest that violated the protocol.
    pub fn break_off(&mut self, number: u32, why: Broken) {
        let (_, name) = self.book.who(number).unwrap_or_default();
        self.log.line(
            "guest",
            format_args!(
                "the socket function of guest {name} is broken ({why:?}): its streams end"
            ),
        );
        if let Some(channel) = self.guests.get(&number).and_then(|guest| guest.channel.as_ref()) {
            channel.break_off(why);
        }
        self.lose(number);
    }

    /// Has a stream looked at.
    pub fn stir(&mut self, number: u32) {
        if let Some(pair) = self.pairs.get_mut(number)
            && !std::mem::replace(&mut pair.hot, true)
        {
            pair.idle = 0;
            self.hot.push(number);
        }
    }

    /// Gives a turn to every stream that has something to do. Returns whether any had.
    fn carry(&mut self) -> bool {
        let mut worked = false;
        for number in std::mem::take(&mut self.hot) {
            let Some(pair) = self.pairs.get_mut(number) else { continue };
            let done = pair.turn(&self.guests);
            pair.idle = if done.worked { 0 } else { pair.idle.saturating_add(1) };
            worked |= done.worked;
            let over = pair.over();
            self.count(number, done.bytes);
            for end in [0, 1].into_iter().filter(|end| done.tell[*end]) {
                self.tell_end(number, end);
            }
            for end in [0, 1].into_iter().filter(|end| over[*end]) {
                self.end(number, end);
                worked = true;
            }
            if self.pairs.get(number).is_some() {
                self.hot.push(number);
            }
        }
        if self.hot.iter().any(|number| self.pairs.get(*number).is_some_and(|p| p.idle > PATIENCE))
        {
            self.rest(PATIENCE);
        }
        worked
    }

    fn count(&self, number: u32, bytes: [u64; 2]) {
        let Some(pair) = self.pairs.get(number).filter(|_| bytes != [0; 2]) else { return };
        for (at, end) in pair.ends.iter().enumerate() {
            if let Some(PairEnd { who: EndOwner::Guest { guest, .. }, .. }) = end
                && let Some(guest) = self.guests.get(guest)
            {
                Counts::add(&guest.counts.sent, bytes[at]);
                Counts::add(&guest.counts.received, bytes[1 - at]);
            }
        }
    }

    /// Wakes the program of an end.
    pub fn tell_end(&mut self, number: u32, end: usize) {
        let Some(end) = self.pairs.get(number).and_then(|pair| pair.ends[end].as_ref()) else {
            return;
        };
        match &end.who {
            EndOwner::Host { line, .. } => {
                if !slipway_peer::eventfd::raise(line.eventfd.as_fd()) {
                    // A program that cannot be woken without waiting loses its stream.
                    self.deaf.push(number);
                }
            }
            EndOwner::Guest { guest, line, .. } => {
                let (number, arena, stream) = (*guest, line.arena, line.stream);
                let channel = self.guests.get_mut(&number).and_then(|guest| guest.channel.as_mut());
                if let Some(Err(why)) = channel.map(|channel| channel.raise(arena, stream)) {
                    self.break_off(number, why);
                }
            }
        }
    }

    /// Resets streams whose program could not be woken. Returns whether there were any.
    fn give_up_deaf(&mut self) -> bool {
        let deaf = std::mem::take(&mut self.deaf);
        for number in &deaf {
            self.reset(*number, 0);
            self.reset(*number, 1);
            self.stir(*number);
        }
        // These programs were not woken for the reset either. They see it at their next look.
        self.deaf.clear();
        !deaf.is_empty()
    }

    /// Passes the news on to the engine's thread.
    pub fn tell(&mut self) {
        for guest in self.guests.values_mut() {
            if let Some(channel) = &mut guest.channel {
                channel.tell();
            }
        }
        if std::mem::take(&mut self.told) {
            std::task::Wake::wake_by_ref(&self.notice);
        }
    }

    /// Resets the streams of a guest whose channel has ended.
    pub fn lose(&mut self, number: u32) {
        self.book.unlisten(number, None);
        let Some(guest) = self.guests.get_mut(&number) else { return };
        let connections = std::mem::take(&mut guest.connections);
        guest.streams.clear();
        guest.leaving.clear();
        (guest.suspended, guest.unanswered) = (false, 0);
        guest.counts.running.store(false, Ordering::Relaxed);
        guest.counts.streams.store(0, Ordering::Relaxed);
        let channel = guest.channel.take();
        for (pair, end) in connections.into_values() {
            if let Some(there) = self.pairs.get_mut(pair) {
                there.ends[end] = None;
                self.partner_lost(pair, 1 - end);
            }
        }
        let awaits = |pair: &Pair| pair.awaits == Some(Answerer::Guest(number));
        let asked: Vec<u32> =
            self.pairs.iter().filter(|(_, pair)| awaits(pair)).map(|(pair, _)| pair).collect();
        for pair in asked {
            self.refused(pair, number_of_refusal());
        }
        // The last reference to the guest's memory.
        drop(channel);
    }
}

fn number_of_refusal() -> u32 {
    number(Errno::CONNREFUSED)
}

#[cfg(test)]
mod tests;
