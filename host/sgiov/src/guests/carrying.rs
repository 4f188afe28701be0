//! The carrier of guests: it exchanges messages with guests and carries their streams.
//!
//! [`Carrying`] is the work of a carrier (`slipway_family`, which has its frame), whose thread is
//! `slipway-guests`. Each part is a type in a file of its own, and only its own methods write its
//! private fields:
//!
//! | field | file | state | changed by |
//! |---|---|---|---|
//! | `guests` | `guest` | channels, named streams, requests in flight | `channels`, `lifecycle` |
//! | `pairs` | `pairs`, `pair` | streams, and which of them get turns | `carry`, `lifecycle` |
//! | `programs` | `programs` | programs' pairs, and claims of their families | here, `lifecycle` |
//! | `requests` | `requests` | times of unanswered requests to guests | `lifecycle` |
//! | `book` | `book` | listeners and counters, which the engine's thread reads | `channels` |
//! | `policy` | | connections that are allowed | `obey` |
//! | `stalls` | `slipway_family` | tenants whose memory made the carrier sleep | `charger` |
//! | `log` | `crate::log` | log lines, limited in rate | all |
//! | `news` | `messages` | messages to the engine's thread | all |
//! | `idle_since` | | when work was first looked for in vain | `worked`, `looks_on` |
//! | `naps` | | whether all streams with programs get turns after the sleep | `rest`, `woken` |
//!
//! A turn has these parts:
//!
//! | part | file | does |
//! |---|---|---|
//! | `refuse_overdue` | `lifecycle` | refuses connections whose guest does not answer |
//! | `attend` | `channels` | takes guests' signals and messages |
//! | `carry` | here | moves bytes of streams, and ends those that are over |
//! | `notify` | here | interrupts guests that sleep |
//! | `announce` | `slipway_family` | wakes the engine's thread for news |
//! | `reset_unwoken` | `lifecycle` | resets streams whose program could not be woken |
//!
//! After [`POLL`] without anything to do, `rest` arms all streams.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use slipway_family::{Families, NAP, NewsSender, Rest, Stalls, Work};
use slipway_ring::cross::{heavy, is_told_surely};

use super::book::Book;
use super::charger::Charger;
use super::claims::Claims;
use super::guest::{Guest, GuestTable, Tenants};
use super::messages::{Command, News};
use super::pair::{EndOwner, Pair};
use super::pairs::Pairs;
use super::programs::Programs;
use super::requests::Requests;
use crate::log::Log;
use crate::policy::Policy;
use crate::remote::{Event, Line};

/// The time for which the carrier polls after the last work before it sleeps.
const POLL: Duration = Duration::from_micros(50);

/// The work of the carrier of guests.
pub struct Carrying {
    pub guests: GuestTable,
    pub pairs: Pairs,
    pub programs: Programs,
    pub requests: Requests,
    pub book: Arc<Book>,
    pub policy: Policy,
    /// Pairs of tenants: that of a stream's two ends, or a guest's own, twice.
    pub stalls: Stalls<Tenants>,
    pub log: Log,
    pub news: NewsSender<News>,
    /// The time since which the carrier has found no work. `None` if the last turn had work.
    idle_since: Option<Instant>,
    /// Set if the carrier sleeps for [`NAP`] at most, and then gives turns to all pairs with
    /// programs, since a program may miss that it has to signal.
    naps: bool,
}

impl Carrying {
    /// Makes a carrier without guests.
    pub fn new(news: NewsSender<News>, book: Arc<Book>, policy: Policy) -> Self {
        Self {
            guests: GuestTable::new(),
            pairs: Pairs::default(),
            programs: Programs::default(),
            requests: Requests::default(),
            book,
            policy,
            stalls: Stalls::new(Instant::now()),
            log: Log::default(),
            news,
            idle_since: None,
            naps: false,
        }
    }

    /// Gives the pair of a family's entry a turn, or all pairs of the family without an entry.
    fn stir_entry(&mut self, family: u32, entry: Option<u32>) {
        match entry {
            Some(entry) => {
                let pair = self.programs.at_entry(family, entry);
                pair.into_iter().for_each(|pair| self.pairs.stir(pair));
            }
            None => self.stir_all(self.programs.of_family(family)),
        }
    }

    /// Resets the streams of a family whose signals are invalid or whose bell cannot be watched,
    /// since the carrier would not notice the family's events.
    fn family_spoiled(&mut self, number: u32) {
        let text = "a program's signals cannot be taken: its streams to guests are reset";
        self.log.line("family", format_args!("{text}"));
        let pairs = self.programs.of_family(number);
        self.programs.part(number);
        pairs.into_iter().for_each(|pair| self.reset_pair(pair));
    }

    /// Does what [`Carrying::family_spoiled`] does for the family with these claims, unless it has
    /// ended: the links' carrier may find its signals invalid after the engine has given its number
    /// to another family.
    fn claimed_family_spoiled(&mut self, number: u32, claims: &Arc<Claims>) {
        if self.programs.has_claims(number, claims) {
            self.family_spoiled(number);
        }
    }

    /// Returns whether signals of a line's program reach this carrier, from the program's family or
    /// by the links' carrier.
    fn hears(&self, families: &mut Families<()>, line: &Line) -> bool {
        families.member(line.family).is_some() || self.programs.is_claimed(line.family)
    }

    /// Reports an event to the engine's thread.
    pub fn report(&mut self, event: Event) {
        self.news.send(News::Event(event));
    }

    /// Gives these pairs turns from the next round on.
    pub fn stir_all(&mut self, pairs: Vec<u32>) {
        pairs.into_iter().for_each(|pair| self.pairs.stir(pair));
    }

    /// Attends to guests, carries streams and interrupts guests, but those that are left out at
    /// `now`, and charges the tenants whose memory makes the thread sleep. Returns whether there
    /// was anything to do.
    fn serve(&mut self, now: Instant) -> bool {
        if self.stalls.settle(now) {
            self.pairs.readmit();
        }
        self.stalls.begin(now);
        let worked = self.attend() | self.carry();
        self.notify();
        self.stalls.end();
        worked
    }

    /// Charges `tenants` for the time for which the thread slept since the last charge. Pass `None`
    /// if the work was for nobody in particular, or if the work of single peers was not measured
    /// when it began.
    pub fn charge(&mut self, tenants: Option<Tenants>) {
        let Self { stalls, log, .. } = self;
        Charger { stalls, log }.charge(tenants.as_ref());
    }

    /// Gives a turn to every stream that has something to do. Returns whether any had.
    fn carry(&mut self) -> bool {
        let mut worked = false;
        for number in self.pairs.round() {
            let tenants = self.pairs.get(number).and_then(Pair::tenants);
            if tenants.is_some_and(|tenants| self.stalls.until(tenants).is_some()) {
                self.pairs.leave_out(number);
                continue;
            }
            let tenants = tenants.filter(|_| self.stalls.is_alert()).cloned();
            let Some(report) = self.pairs.turn(number, &self.guests) else { continue };
            worked |= report.worked;
            self.count(number, report.bytes);
            for end in [0, 1].into_iter().filter(|end| report.wake[*end]) {
                self.wake_owner(number, end);
            }
            for end in [0, 1].into_iter().filter(|end| report.over[*end]) {
                self.finish_end(number, end);
                worked = true;
            }
            self.pairs.stay(number);
            self.charge(tenants);
        }
        let Self { pairs, guests, stalls, log, .. } = self;
        pairs.end_round(guests, &mut Charger { stalls, log });
        worked
    }

    /// Adds the bytes that came from each end to the counters of the guests at the ends.
    fn count(&self, number: u32, bytes: [u64; 2]) {
        let Some(pair) = self.pairs.get(number).filter(|_| bytes != [0; 2]) else { return };
        for (at, end) in pair.ends.iter().enumerate() {
            let Some(EndOwner::Guest { guest, .. }) = end.as_ref().map(|end| &end.owner) else {
                continue;
            };
            if let Some(guest) = self.guests.get(guest) {
                guest.count(bytes[at], bytes[1 - at]);
            }
        }
    }

    /// Wakes the program at an end, by its family's eventfd or by a signal to its guest.
    pub fn wake_owner(&mut self, number: u32, end: usize) {
        let Some(end) = self.pairs.end(number, end) else { return };
        match &end.owner {
            EndOwner::Program { line, .. } => self.programs.wake(line, number),
            EndOwner::Guest { guest, line, .. } => {
                let (guest, arena, stream) = (*guest, line.arena, line.stream);
                let there = self.guests.get_mut(&guest);
                if let Some(Err(why)) = there.map(|there| there.signal(arena, stream)) {
                    self.break_off(guest, why);
                }
            }
        }
    }

    /// Arms all streams, so that their ends signal the next change, and asks all guests that are
    /// not left out to wake the carrier. Returns `false` if there is work.
    fn ask_to_wake(&mut self) -> bool {
        let Self { pairs, guests, stalls, log, .. } = self;
        pairs.arm(0, guests, &mut Charger { stalls, log });
        self.notify();
        self.news.announce();
        if !self.pairs.is_quiet() {
            return false;
        }
        heavy();
        let Self { guests, stalls, log, .. } = self;
        let mut charger = Charger { stalls, log };
        charger.skip();
        let mut quiet = true;
        // The loop does not end at the first guest with work, so that each guest is asked.
        for guest in guests.values_mut() {
            if !charger.is_left_out(&guest.tenants) {
                quiet &= guest.sleep();
                charger.charge(Some(&guest.tenants));
            }
        }
        quiet
    }

    /// Interrupts guests that wait for work of this turn. A guest that is left out is interrupted
    /// once it is served again, since only its memory says that it waits.
    fn notify(&mut self) {
        let Self { guests, stalls, log, .. } = self;
        let mut charger = Charger { stalls, log };
        charger.skip();
        for guest in guests.values_mut() {
            if !charger.is_left_out(&guest.tenants) {
                guest.notify();
                charger.charge(Some(&guest.tenants));
            }
        }
    }
}

impl Work for Carrying {
    type Command = Command;
    type Member = ();

    fn descriptor(&self) -> Option<Arc<OwnedFd>> {
        None
    }

    fn obey(&mut self, command: Command, families: &mut Families<()>, _: Instant) {
        match command {
            Command::Add { guest, peer, control } => {
                let (counts, tenant) = (self.book.counts(guest), self.book.tenant(guest).into());
                self.guests.insert(guest, Guest::new(peer, control, tenant, counts));
            }
            Command::Remove(guest) => {
                self.lose(guest);
                self.guests.remove(&guest);
            }
            Command::Policy(policy) => self.policy = policy,
            Command::ClaimedFamily(number, claims) => self.programs.join_claimed(number, claims),
            Command::Signalled(number, entry) => {
                self.programs.seen(number, entry);
                self.stir_entry(number, entry);
            }
            Command::Spoiled(number, claims) => self.claimed_family_spoiled(number, &claims),
            Command::FamilyEnded(number) => self.programs.part(number),
            // A stream whose program's signals do not come would stand still, so it is refused or
            // reset.
            Command::Connect { connection, guest, from, to, line } => {
                let guest = guest.filter(|_| self.hears(families, &line));
                self.program_connects((connection, line), guest, from, to);
            }
            Command::Answer { incoming, answer } => {
                let is_deaf = answer.as_ref().is_ok_and(|(_, line)| !self.hears(families, line));
                self.engine_answers(incoming, answer);
                if is_deaf {
                    self.reset_pair(incoming);
                }
            }
            Command::Closed(connection) => self.program_closes(connection),
        }
    }

    #[inline]
    fn signalled(&mut self, family: u32, (): &(), entry: Option<u32>) {
        self.stir_entry(family, entry);
    }

    fn spoiled(&mut self, family: u32, (): (), _: Instant) {
        self.family_spoiled(family);
    }

    fn stands_still(&mut self, tenant: &str, slept: Duration) {
        let millis = slept.as_millis();
        let text = format_args!(
            "all streams with guests waited {millis} ms for a table of tenant {tenant}'s programs: \
             their signals are left for a while"
        );
        self.log.line("stall", text);
    }

    fn turn(&mut self, _: &mut Families<()>, now: Instant) -> bool {
        self.refuse_overdue();
        let worked = self.serve(now);
        self.news.announce();
        worked | self.reset_unwoken()
    }

    fn worked(&mut self) {
        self.idle_since = None;
    }

    fn looks_on(&mut self, now: Instant) -> bool {
        let since = *self.idle_since.get_or_insert(now);
        let lasts = now.saturating_duration_since(since) < POLL;
        if lasts {
            std::thread::yield_now();
        }
        lasts
    }

    /// Arms the streams and asks the guests to wake the carrier. Returns a sleep if there is still
    /// no work.
    fn rest(&mut self, _: Instant) -> Rest {
        self.report_gone();
        let answer = self.refuse_overdue();
        // Peers know when the carrier falls asleep, and could take their memory away then.
        self.stalls.begin(Instant::now());
        let trim = self.ask_to_wake().then(|| {
            let Self { pairs, guests, stalls, log, .. } = &mut *self;
            pairs.trim(guests, &mut Charger { stalls, log })
        });
        self.stalls.end();
        let Some(trim) = trim else { return Rest::Awake };
        self.naps = !self.programs.is_empty() && !is_told_surely();
        let served = self.stalls.due().map(|at| at.saturating_duration_since(Instant::now()));
        // The sleep ends when the next stream's memory or the oldest request is due, or when a
        // tenant is served again. A nap may end up to `NAP` later than that.
        let due = [trim, answer, served].into_iter().flatten().min();
        let longest = if self.naps { Some(NAP) } else { due };
        Rest::Asleep(longest.map(|longest| Instant::now() + longest))
    }

    fn woken(&mut self, since: Option<Instant>) {
        if since.is_some() {
            self.stalls.woken();
        }
        // A guest's memory may have been taken away while the carrier slept.
        self.stalls.begin(Instant::now());
        let Self { guests, stalls, log, .. } = self;
        let mut charger = Charger { stalls, log };
        for guest in guests.values_mut() {
            guest.awake();
            charger.charge(Some(&guest.tenants));
        }
        self.stalls.end();
        if since.is_some() && self.naps {
            self.stir_all(self.programs.pairs());
        }
    }
}

#[cfg(test)]
mod tests;
