//! The carrier of guests: it exchanges messages with guests and carries their streams.
//!
//! [`Carrying`] is a task on a reactor of its own, whose thread is `slipway-guests`. Each part is a
//! type in a file of its own, and only its own methods write its private fields:
//!
//! | field | file | state | changed by |
//! |---|---|---|---|
//! | `guests` | `guest` | channels, named streams, requests in flight | `channels`, `lifecycle` |
//! | `pairs` | `pairs`, `pair` | streams, and which of them get turns | `carry`, `lifecycle` |
//! | `programs` | `programs` | programs' pairs, and their families' signals | here, `lifecycle` |
//! | `requests` | `requests` | times of unanswered requests to guests | `lifecycle` |
//! | `book` | `book` | listeners and counters, which the engine's thread reads | `channels` |
//! | `policy` | | connections that are allowed | `obey` |
//! | `log` | `crate::log` | log lines, limited in rate | all |
//! | `commands`, `news` | `mailbox` | messages from and to the engine's thread | all |
//! | `last_work` | | when there was work last | `poll` |
//! | `asleep` | | the sleep that the next step ends | `sleep`, `wake` |
//!
//! The reactor watches the bells of families whose signals are taken here (`join`, `part`); they
//! end a sleep, as commands and guests do.
//!
//! A step ([`Task::poll`]) has these parts:
//!
//! | part | file | does |
//! |---|---|---|
//! | `wake` | here | ends a sleep, and lowers the bells that ended it |
//! | `obey` | here | carries out the engine's commands |
//! | `refuse_overdue` | `lifecycle` | refuses connections whose guest does not answer |
//! | `attend` | `channels` | takes guests' signals and messages |
//! | `take_family_signals` | here | takes programs' signals |
//! | `carry` | here | moves bytes of streams, and ends those that are over |
//! | `notify` | here | interrupts guests, and wakes the engine's thread for news |
//! | `reset_unwoken` | `lifecycle` | resets streams whose program could not be woken |
//! | `sleep` | here | arms all streams and falls asleep, if there was nothing to do for [`POLL`] |

use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use slipway_family::Family;
use slipway_reactor::{Context, Event as Ready, Interest, Step, Task};
use slipway_ring::cross::{heavy, is_told_surely};

use super::book::Book;
use super::guest::{Guest, GuestTable};
use super::mailbox::{Command, News, NewsSender};
use super::pair::EndOwner;
use super::pairs::Pairs;
use super::programs::Programs;
use super::requests::Requests;
use crate::log::Log;
use crate::policy::Policy;
use crate::remote::Event;

/// The time for which the task polls after the last work before it sleeps.
const POLL: Duration = Duration::from_micros(50);
/// The longest sleep where a program's wake-up is not reliable.
const NAP: Duration = Duration::from_millis(1);

/// A sleep of the task.
struct Sleep {
    /// All pairs with programs have a turn after the sleep, since a signal may be missing.
    naps: bool,
}

/// The carrier of guests.
pub struct Carrying {
    pub guests: GuestTable,
    pub pairs: Pairs,
    pub programs: Programs,
    pub requests: Requests,
    pub book: Arc<Book>,
    pub policy: Policy,
    pub log: Log,
    commands: Receiver<Command>,
    pub news: NewsSender,
    last_work: Instant,
    asleep: Option<Sleep>,
}

impl Carrying {
    /// Makes a carrier without guests.
    pub fn new(
        commands: Receiver<Command>,
        news: NewsSender,
        book: Arc<Book>,
        policy: Policy,
    ) -> Self {
        Self {
            guests: GuestTable::new(),
            pairs: Pairs::default(),
            programs: Programs::default(),
            requests: Requests::default(),
            book,
            policy,
            log: Log::default(),
            commands,
            news,
            last_work: Instant::now(),
            asleep: None,
        }
    }

    /// Carries out the commands. Returns whether there were any.
    fn obey(&mut self, context: &mut Context<'_>) -> bool {
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
                Command::Family(number, family) => self.join(context, number, family),
                Command::Policy(policy) => self.policy = policy,
                Command::ClaimedFamily(number, claims) => {
                    self.programs.join_claimed(number, claims);
                }
                Command::Signalled(number, entry) => {
                    let pairs = self.programs.signalled(number, entry);
                    self.stir_all(pairs);
                }
                Command::Spoiled(number) => self.family_spoiled(context, number),
                Command::FamilyEnded(number) => self.part(context, number),
                Command::Connect { connection, guest, from, to, line } => {
                    self.program_connects((connection, line), guest, from, to);
                }
                Command::Answer { incoming, answer } => self.engine_answers(incoming, answer),
                Command::Closed(connection) => self.program_closes(connection),
            }
        }
        some
    }

    /// Adds a family whose signals this task takes.
    fn join(&mut self, context: &mut Context<'_>, number: u32, family: Family) {
        // Without the watch, the family's signals would be seen only while something else keeps
        // this task awake.
        if context.watch_shared(family.shared_bell(), Interest::Read, number).is_ok() {
            self.programs.join(number, family);
        }
    }

    /// Removes a family that has ended.
    fn part(&mut self, context: &mut Context<'_>, number: u32) {
        if self.programs.part(number).is_some() {
            context.unwatch(number);
        }
    }

    /// Resets the streams of a family whose signals are invalid, since its events would not be
    /// noticed any more.
    fn family_spoiled(&mut self, context: &mut Context<'_>, number: u32) {
        let text = "a program's signals are invalid: its streams to guests are reset";
        self.log.line("family", format_args!("{text}"));
        self.part(context, number);
        for pair in self.programs.of_family(number) {
            self.reset_pair(pair);
        }
    }

    /// Reports an event to the engine's thread.
    pub fn report(&mut self, event: Event) {
        self.news.send(News::Event(event));
    }

    /// Takes the signals of programs. Returns whether there were any.
    fn take_family_signals(&mut self, context: &mut Context<'_>) -> bool {
        let signals = self.programs.take_signals();
        self.stir_all(signals.pairs);
        if let Some(number) = signals.spoiled {
            self.family_spoiled(context, number);
        }
        signals.any
    }

    /// Gives these pairs turns from the next round on.
    pub fn stir_all(&mut self, pairs: Vec<u32>) {
        pairs.into_iter().for_each(|pair| self.pairs.stir(pair));
    }

    /// Gives a turn to every stream that has something to do. Returns whether any had.
    fn carry(&mut self) -> bool {
        let mut worked = false;
        for number in self.pairs.round() {
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
        }
        self.pairs.end_round(&self.guests);
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

    /// Interrupts guests that wait for what was done, and wakes the engine's thread for news.
    fn notify(&mut self) {
        self.guests.values_mut().for_each(Guest::notify);
        self.news.announce();
    }

    /// Falls asleep until the task is woken, unless something has happened meanwhile: first streams
    /// make their wishes, and then all peers are asked to wake the task.
    fn sleep(&mut self, context: &mut Context<'_>) -> Step {
        self.report_gone();
        let answer = self.refuse_overdue();
        self.pairs.arm(0, &self.guests);
        self.notify();
        if !self.pairs.is_quiet() {
            return Step::Looking;
        }
        self.programs.set_asleep(true);
        heavy();
        // All guests, so that each is asked.
        let quiet = self.guests.values_mut().fold(true, |quiet, guest| guest.sleep() & quiet);
        if !quiet || self.take_family_signals(context) {
            self.withdraw_sleep();
            return Step::Looking;
        }
        let naps = !self.programs.is_empty() && !is_told_surely();
        // Until the next stream's memory or the oldest request is due.
        let due = [self.pairs.trim(&self.guests), answer].into_iter().flatten().min();
        let longest = if naps { Some(NAP) } else { due };
        self.asleep = Some(Sleep { naps });
        Step::Idle(longest.map(|longest| Instant::now() + longest))
    }

    /// Ends the sleep, if the task slept, and lowers the bells that were found raised.
    fn wake(&mut self, ready: &[Ready]) {
        for Ready { token, .. } in ready {
            if !self.programs.lower_bell(*token) {
                // The program itself keeps its bell from being lowered, which costs only its own
                // share of wake-ups.
                std::thread::yield_now();
            }
        }
        if let Some(sleep) = self.asleep.take() {
            self.withdraw_sleep();
            if sleep.naps {
                let all = self.programs.pairs();
                self.stir_all(all);
            }
        }
    }

    /// Has peers wake the task no more.
    fn withdraw_sleep(&self) {
        self.programs.set_asleep(false);
        self.guests.values().for_each(Guest::awake);
    }
}

impl Task for Carrying {
    fn poll(&mut self, context: &mut Context<'_>) -> Step {
        self.wake(context.events());
        let commanded = self.obey(context);
        self.refuse_overdue();
        let worked = commanded | self.attend() | self.take_family_signals(context) | self.carry();
        self.notify();
        let worked = worked | self.reset_unwoken();
        if worked {
            self.last_work = Instant::now();
            Step::Busy
        } else if self.last_work.elapsed() < POLL {
            std::thread::yield_now();
            Step::Looking
        } else {
            self.sleep(context)
        }
    }
}

#[cfg(test)]
mod tests;
