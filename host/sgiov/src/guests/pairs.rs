//! The pairs of the carrier, and the schedule of their turns.
//!
//! A pair is in one state of the schedule:
//!
//! | state | meaning | left by |
//! |---|---|---|
//! | hot | gets a turn in each step of the carrier | [`Pairs::arm`], after turns without work |
//! | armed | its ends' programs were asked for a signal | [`Pairs::stir`], on a signal |
//! | resting | armed, has memory, and is queued to release it | [`Pairs::trim`], after [`REST`] |
//! | left out | gets no turn: its tenants' memory made the carrier sleep | [`Pairs::readmit`] |
//!
//! A pair that is stirred while it rests stays in the queue, and rests from its next arming on.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use slipway_ring::cross::heavy;

use super::charger::Charger;
use super::guest::GuestTable;
use super::pair::{Pair, PairEnd, TurnReport};
use crate::slab::Slab;

/// The number of turns without work after which a pair is armed.
const PATIENCE: u8 = 64;
/// The time for which a pair is idle before its memory is released.
const REST: Duration = Duration::from_secs(1);

/// The pairs by number, with their schedule.
#[derive(Default)]
pub struct Pairs {
    all: Slab<Pair>,
    /// Pairs that get a turn in each round. Numbers of pairs that have ended may be among them,
    /// and a number twice.
    hot: Vec<u32>,
    /// Pairs that are left out. Numbers of pairs that have ended may be among them.
    left_out: Vec<u32>,
    /// Idle pairs with memory, each with the time at which it was queued, the oldest first.
    resting: VecDeque<(Instant, u32)>,
}

impl Pairs {
    /// Adds a pair and returns its number.
    pub fn insert(&mut self, pair: Pair) -> u32 {
        self.all.insert(pair)
    }

    /// Removes a pair. Returns `None` if there is none of this number.
    pub fn remove(&mut self, pair: u32) -> Option<Pair> {
        self.all.remove(pair)
    }

    /// Returns a pair. Returns `None` if there is none of this number.
    pub fn get(&self, pair: u32) -> Option<&Pair> {
        self.all.get(pair)
    }

    /// Returns a pair to change it. Returns `None` if there is none of this number.
    pub fn get_mut(&mut self, pair: u32) -> Option<&mut Pair> {
        self.all.get_mut(pair)
    }

    /// Returns an end of a pair. Returns `None` if there is no such pair or the pair has no such
    /// end.
    pub fn end(&self, pair: u32, end: usize) -> Option<&PairEnd> {
        self.get(pair)?.ends[end].as_ref()
    }

    /// Returns an end of a pair to change it. Returns `None` if there is no such pair or the pair
    /// has no such end.
    pub fn end_mut(&mut self, pair: u32, end: usize) -> Option<&mut PairEnd> {
        self.get_mut(pair)?.ends[end].as_mut()
    }

    /// Returns all pairs with their numbers.
    pub fn iter(&self) -> impl Iterator<Item = (u32, &Pair)> {
        self.all.iter()
    }

    /// Gives a pair turns from the next round on.
    pub fn stir(&mut self, number: u32) {
        if let Some(pair) = self.all.get_mut(number)
            && !std::mem::replace(&mut pair.activity.hot, true)
        {
            pair.activity.idle = 0;
            self.hot.push(number);
        }
    }

    /// Returns whether no pair gets a turn.
    pub fn is_quiet(&self) -> bool {
        self.hot.is_empty()
    }

    /// Begins a round. Returns the pairs that get a turn in it; [`Pairs::stay`] or
    /// [`Pairs::leave_out`] must follow for each.
    pub fn round(&mut self) -> Vec<u32> {
        std::mem::take(&mut self.hot)
    }

    /// Gives a pair its turn. Returns `None` if the pair has ended.
    pub fn turn(&mut self, number: u32, guests: &GuestTable) -> Option<TurnReport> {
        let pair = self.all.get_mut(number)?;
        let report = pair.turn(guests);
        let idle = &mut pair.activity.idle;
        *idle = if report.worked { 0 } else { idle.saturating_add(1) };
        Some(report)
    }

    /// Gives a pair a turn in the next round too, unless the pair has ended.
    pub fn stay(&mut self, number: u32) {
        if self.all.get(number).is_some() {
            self.hot.push(number);
        }
    }

    /// Gives a pair no turns until [`Pairs::readmit`], in place of its turn in this round.
    pub fn leave_out(&mut self, number: u32) {
        if let Some(pair) = self.all.get_mut(number)
            && !std::mem::replace(&mut pair.activity.left_out, true)
        {
            self.left_out.push(number);
        }
    }

    /// Gives the pairs that are left out turns from the next round on.
    pub fn readmit(&mut self) {
        for number in std::mem::take(&mut self.left_out) {
            // The number of a pair that has ended may have been reused.
            let pair = self.all.get_mut(number);
            if pair.is_some_and(|pair| std::mem::take(&mut pair.activity.left_out)) {
                self.hot.push(number);
            }
        }
    }

    /// Ends a round: arms the pairs that had no work for long enough.
    pub fn end_round(&mut self, guests: &GuestTable, charger: &mut Charger<'_>) {
        let is_idle =
            |number: &u32| self.all.get(*number).is_some_and(|pair| pair.activity.idle > PATIENCE);
        if self.hot.iter().any(is_idle) {
            self.arm(PATIENCE, guests, charger);
        }
    }

    /// Arms the pairs that had no work in `turns` turns, and leaves out those whose tenants are.
    /// Armed pairs get no more turns until [`Pairs::stir`].
    pub fn arm(&mut self, turns: u8, guests: &GuestTable, charger: &mut Charger<'_>) {
        // The number of a pair that has ended may have been reused.
        self.hot.sort_unstable();
        self.hot.dedup();
        let (idle, mut hot): (Vec<u32>, Vec<u32>) =
            std::mem::take(&mut self.hot).into_iter().partition(|number| {
                self.all.get(*number).is_some_and(|pair| pair.activity.idle >= turns)
            });
        let mut wished = Vec::with_capacity(idle.len());
        for number in idle {
            let Some(pair) = self.all.get_mut(number) else { continue };
            // An earlier pair of the same tenants may have made the carrier sleep.
            if is_left_out(pair, charger) {
                self.leave_out(number);
                continue;
            }
            let to = if pair.wish(guests) { &mut wished } else { &mut hot };
            to.push(number);
            charger.charge(pair.tenants());
        }
        self.hot = hot;
        self.settle(wished, guests, charger);
        // Also done if the carrier never sleeps, or the queue would grow.
        self.trim(guests, charger);
    }

    /// Looks again at pairs whose wishes were just made. Those that have work after all stay hot;
    /// the others are armed, and rest if they have memory.
    fn settle(&mut self, wished: Vec<u32>, guests: &GuestTable, charger: &mut Charger<'_>) {
        if !wished.is_empty() {
            // The sleeper's barrier, once for all pairs: a program that publishes from here on sees
            // the wish, and what was published before is found by the look below.
            heavy();
            charger.skip();
        }
        let now = Instant::now();
        for number in wished {
            let Some(pair) = self.all.get_mut(number) else { continue };
            if is_left_out(pair, charger) {
                self.leave_out(number);
                continue;
            }
            pair.activity.idle = 0;
            let has_work = pair.settle(guests);
            charger.charge(pair.tenants());
            if has_work {
                self.hot.push(number);
                continue;
            }
            pair.activity.hot = false;
            if pair.has_memory() {
                self.rest(number, now);
            }
        }
    }

    /// Queues a pair that is idle since `now` to release its memory.
    fn rest(&mut self, number: u32, now: Instant) {
        let Some(pair) = self.all.get_mut(number) else { return };
        let queued = match pair.activity.resting {
            Some((queued, _)) => queued,
            None => {
                self.resting.push_back((now, number));
                now
            }
        };
        pair.activity.resting = Some((queued, now));
    }

    /// Releases memory of pairs that have been idle for long enough. Returns the time until the
    /// next look. Returns `None` if no pair rests.
    pub fn trim(&mut self, guests: &GuestTable, charger: &mut Charger<'_>) -> Option<Duration> {
        let now = Instant::now();
        while let Some((queued, number)) = self.resting.front().copied() {
            let rested = now.saturating_duration_since(queued);
            if rested < REST {
                return Some(REST - rested);
            }
            self.resting.pop_front();
            let Some(pair) = self.all.get_mut(number) else { continue };
            // Otherwise the number was reused for another pair.
            let resting = pair.activity.resting.filter(|(of, _)| *of == queued);
            let Some((_, since)) = resting else { continue };
            if now.saturating_duration_since(since) < REST || is_left_out(pair, charger) {
                // The pair has worked meanwhile, or is not to be touched now: it is queued behind
                // those that are due.
                pair.activity.resting = Some((now, since));
                self.resting.push_back((now, number));
                continue;
            }
            pair.activity.resting = None;
            if !pair.activity.hot {
                pair.trim(guests);
                charger.charge(pair.tenants());
            }
        }
        None
    }
}

/// Returns whether a pair's tenants are left out.
fn is_left_out(pair: &Pair, charger: &Charger<'_>) -> bool {
    pair.tenants().is_some_and(|tenants| charger.is_left_out(tenants))
}

#[cfg(test)]
mod tests {
    use slipway_family::Stalls;
    use slipway_sgiov_spec::function::Line;

    use super::super::guest::Tenants;
    use super::super::pair::{Answerer, EndOwner};
    use super::*;
    use crate::log::Log;

    #[test]
    fn a_pair_that_is_left_out_keeps_its_memory_and_its_place_in_the_queue() {
        let tenants: Tenants = ["web".into(), "web".into()];
        let Some(before) = Instant::now().checked_sub(REST) else { return };
        let line = Line { arena: 0, stream: 0, side: 1 };
        let end = || PairEnd::new(EndOwner::Guest { guest: 1, connection: 1, line });
        let mut pair = Pair::new(end(), Answerer::Engine(0), before);
        pair.open(end(), tenants.clone());
        pair.activity.resting = Some((before, before));
        let mut pairs = Pairs::default();
        let number = pairs.insert(pair);
        pairs.resting.push_back((before, number));
        let (mut stalls, mut log) = (Stalls::<Tenants>::new(before), Log::default());
        assert!(stalls.charge(&tenants, Duration::from_secs(2)));
        let mut charger = Charger { stalls: &mut stalls, log: &mut log };
        assert_eq!(pairs.trim(&GuestTable::new(), &mut charger), Some(REST));
        assert!(pairs.all.get(number).is_some_and(|pair| pair.activity.resting.is_some()));
    }
}
