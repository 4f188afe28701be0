//! Assigns endpoints to reactors: the least loaded reactor gets the next endpoint, and a busy
//! reactor hands over to an idle one.
//!
//! A reactor counts the time for which its tasks had work ([`Handle::busy`]), an endpoint the polls
//! that found work for its function ([`Control::busy_polls`]). An endpoint's share of a reactor's
//! time is estimated as its share of those polls: functions that share a thread have turns of one
//! size (`slipway_pci::TurnLength`). Both are counted anyway, so that measuring costs nothing.
//!
//! An endpoint moves if that makes the busier of the two reactors clearly less busy ([`GAIN`]),
//! several times in a row ([`CONFIRMED`]). It then stays for a while ([`STAYS`]), so that load that
//! comes and goes does not move endpoints to and fro. A move costs the endpoint a few microseconds.
//!
//! [`Control::busy_polls`]: slipway_vfio_user::Control::busy_polls

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use slipway_reactor::Handle;

use crate::table::{Endpoints, Slot};

/// The time between two measurements.
const PERIOD: Duration = Duration::from_millis(250);
/// The share of a period above which a reactor is busy. A less busy reactor hands nothing over:
/// nothing waits there.
const BUSY: f64 = 0.5;
/// The share of a thread's time by which a move has to relieve the busier reactor.
const GAIN: f64 = 0.2;
/// The number of measurements in a row that have to find the same move good.
const CONFIRMED: u32 = 4;
/// The number of measurements after which an endpoint that has moved may move again.
const STAYS: u64 = 40;

/// The part of the last period in which each reactor had work, in millionths.
pub struct Loads(Vec<AtomicU32>);

impl Loads {
    pub fn new(reactors: usize) -> Self {
        Self((0..reactors).map(|_| AtomicU32::new(0)).collect())
    }

    /// Returns the reactor for the next endpoint: the reactor with the fewest endpoints, and of
    /// several the least busy. `counts` has the number of endpoints of each reactor.
    pub fn least(&self, counts: &[usize]) -> usize {
        let load = |at: usize| self.0.get(at).map_or(0, |load| load.load(Ordering::Relaxed));
        (0..counts.len()).min_by_key(|at| (counts[*at], load(*at))).unwrap_or(0)
    }

    /// Returns `many` different reactors, or all if there are fewer, the least loaded first.
    /// `counts` has the number of endpoints of each reactor.
    pub fn choose(&self, mut counts: Vec<usize>, many: usize) -> Vec<usize> {
        let next = |_| {
            let chosen = self.least(&counts);
            counts[chosen] = usize::MAX;
            chosen
        };
        (0..many.min(self.0.len())).map(next).collect()
    }

    /// Stores the shares of the last period, each from 0 to 1.
    fn set(&self, shares: &[f64]) {
        for (load, share) in self.0.iter().zip(shares) {
            load.store((share * 1e6) as u32, Ordering::Relaxed);
        }
    }
}

/// The properties of an endpoint that decide whether it moves.
struct Candidate<'a> {
    id: &'a str,
    reactor: usize,
    /// The number of polls with work in the last period.
    polls: u64,
    /// Set if the endpoint may move.
    moves: bool,
}

/// Returns the endpoint to move and its new reactor, or `None` if no move is worth it. `shares`
/// says how busy each reactor is, from 0 to 1.
fn choose<'a, 'b>(
    shares: &[f64],
    endpoints: &'b [Candidate<'a>],
) -> Option<(&'b Candidate<'a>, usize)> {
    let by_share = |a: &usize, b: &usize| shares[*a].total_cmp(&shares[*b]);
    let from = (0..shares.len()).max_by(by_share)?;
    let to = (0..shares.len()).min_by(by_share)?;
    if shares[from] < BUSY {
        return None;
    }
    let there = || endpoints.iter().filter(|one| one.reactor == from);
    let polls: u64 = there().map(|one| one.polls).sum();
    let after = |one: &Candidate<'_>| {
        let part = shares[from] * one.polls as f64 / polls.max(1) as f64;
        (shares[from] - part).max(shares[to] + part)
    };
    let best = there().filter(|one| one.moves).min_by(|a, b| after(a).total_cmp(&after(b)))?;
    (after(best) <= shares[from] - GAIN).then_some((best, to))
}

/// The state of the balancing: earlier measurements and moves.
struct Balance {
    reactors: Vec<Handle>,
    /// The time for which each reactor had work until `read_at`.
    busy: Vec<Duration>,
    /// The time of the last measurement.
    read_at: Instant,
    /// The number of polls at the last measurement, by endpoint id. Empty while no reactor is busy,
    /// since it is not needed then.
    polls: BTreeMap<String, u64>,
    /// The measurement before which an endpoint that has moved stays, by endpoint id.
    stays: BTreeMap<String, u64>,
    /// The reactors from and to which a move was last found good, and for how many measurements in
    /// a row.
    wanted: Option<(usize, usize, u32)>,
    /// The number of measurements so far.
    looks: u64,
}

impl Balance {
    fn new(reactors: Vec<Handle>) -> Self {
        Self {
            busy: reactors.iter().map(Handle::busy).collect(),
            reactors,
            read_at: Instant::now(),
            polls: BTreeMap::new(),
            stays: BTreeMap::new(),
            wanted: None,
            looks: 0,
        }
    }

    /// Returns how busy each reactor was since the last measurement, from 0 to 1.
    fn shares(&mut self) -> Vec<f64> {
        let now = Instant::now();
        let period = now.duration_since(std::mem::replace(&mut self.read_at, now));
        let readings = self.busy.iter_mut().zip(&self.reactors);
        let spent = readings.map(|(before, reactor)| {
            let busy = reactor.busy();
            busy.saturating_sub(std::mem::replace(before, busy))
        });
        spent.map(|spent| (spent.as_secs_f64() / period.as_secs_f64()).clamp(0.0, 1.0)).collect()
    }

    /// Measures, and moves an endpoint if the last measurements agree that it should.
    fn look(&mut self, endpoints: &Endpoints, loads: &Loads) {
        self.looks += 1;
        let shares = self.shares();
        loads.set(&shares);
        let looks = self.looks;
        self.stays.retain(|_, until| looks < *until);
        if shares.iter().all(|share| *share < BUSY) {
            self.polls.clear();
            self.wanted = None;
            return;
        }
        let mut all = endpoints.lock();
        let candidates = self.candidates(&all);
        let chosen = choose(&shares, &candidates);
        let chosen = chosen.map(|(one, to)| (one.id.to_owned(), one.reactor, to));
        let between = chosen.as_ref().map(|(_, from, to)| (*from, *to));
        let Some((id, from, to)) = chosen.filter(|_| self.confirm(between)) else { return };
        if let Some(Slot::Served(served)) = all.get_mut(&id) {
            tracing::info!(id, from, to, "an endpoint moves to an idle thread");
            served.relocate(to, &self.reactors[to]);
        }
        self.stays.insert(id, self.looks + STAYS);
    }

    /// Returns the endpoints with the work that each has had since the last measurement. An
    /// endpoint that was added since counts as having had none.
    fn candidates<'a>(&mut self, all: &'a BTreeMap<String, Slot>) -> Vec<Candidate<'a>> {
        let mut seen = BTreeMap::new();
        let mut candidates = Vec::new();
        for (id, slot) in all {
            let Slot::Served(served) = slot else { continue };
            // Hardware has a thread of its own.
            let Some(reactor) = served.reactors().first().copied() else { continue };
            let control = served.control();
            let polls = control.busy_polls();
            let before = self.polls.get(id).copied().unwrap_or(polls);
            seen.insert(id.clone(), polls);
            candidates.push(Candidate {
                id,
                reactor,
                polls: if control.is_private() { 0 } else { polls.wrapping_sub(before) },
                // An endpoint that is spread over reactors already has its share of several.
                moves: served.reactors().len() == 1 && !self.stays.contains_key(id),
            });
        }
        self.polls = seen;
        candidates
    }

    /// Counts a measurement that found a move between these two reactors good, of any endpoint, or
    /// no move. Returns whether [`CONFIRMED`] measurements in a row have found the same two.
    fn confirm(&mut self, between: Option<(usize, usize)>) -> bool {
        let before = self.wanted.take();
        let Some((from, to)) = between else { return false };
        let same = before.filter(|(source, target, _)| (*source, *target) == (from, to));
        let times = same.map_or(0, |(.., times)| times) + 1;
        if times < CONFIRMED {
            self.wanted = Some((from, to, times));
        }
        times >= CONFIRMED
    }
}

/// The thread that balances. Dropping this ends it.
pub struct Balancer {
    end: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Balancer {
    /// Starts the thread. It moves endpoints of `endpoints` between `reactors`, and writes `loads`.
    ///
    /// # Errors
    /// The errors of starting a thread.
    pub fn start(
        reactors: Vec<Handle>,
        endpoints: Arc<Endpoints>,
        loads: Arc<Loads>,
    ) -> std::io::Result<Self> {
        let (end, ended) = channel();
        let run = move || {
            let mut balance = Balance::new(reactors);
            while ended.recv_timeout(PERIOD) == Err(RecvTimeoutError::Timeout) {
                balance.look(&endpoints, &loads);
            }
        };
        let thread = std::thread::Builder::new().name("balancer".into()).spawn(run)?;
        Ok(Self { end: Some(end), thread: Some(thread) })
    }
}

impl Drop for Balancer {
    fn drop(&mut self) {
        self.end = None;
        if let Some(thread) = self.thread.take() {
            // A panic of the thread was printed already.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen<'a>(shares: &[f64], endpoints: &[Candidate<'a>]) -> Option<(&'a str, usize)> {
        choose(shares, endpoints).map(|(one, to)| (one.id, to))
    }

    fn candidate(id: &str, reactor: usize, polls: u64) -> Candidate<'_> {
        Candidate { id, reactor, polls, moves: true }
    }

    #[test]
    fn one_of_two_goes_to_where_nothing_is() {
        let all = [candidate("a", 0, 50), candidate("b", 0, 50), candidate("c", 1, 0)];
        assert_eq!(chosen(&[1.0, 0.0], &all), Some(("a", 1)));
        let stays = Candidate { moves: false, ..candidate("a", 0, 50) };
        assert_eq!(chosen(&[1.0, 0.0], &[stays, candidate("b", 0, 50)]), Some(("b", 1)));
    }

    #[test]
    fn what_relieves_nobody_stays() {
        // Moving the only busy endpoint would only move its load along.
        assert_eq!(chosen(&[1.0, 0.0], &[candidate("a", 0, 9), candidate("b", 0, 0)]), None);
        // The other reactor is as busy.
        assert_eq!(chosen(&[1.0, 0.9], &[candidate("a", 0, 9), candidate("b", 0, 9)]), None);
        // No reactor is busy enough.
        assert_eq!(chosen(&[0.4, 0.0], &[candidate("a", 0, 9), candidate("b", 0, 9)]), None);
        // The gain is too small.
        assert_eq!(chosen(&[1.0, 0.0], &[candidate("a", 0, 95), candidate("b", 0, 5)]), None);
        assert_eq!(chosen(&[], &[]), None);
    }

    #[test]
    fn the_one_that_evens_it_out_best_goes() {
        let all = [candidate("a", 0, 60), candidate("b", 0, 30), candidate("c", 0, 10)];
        assert_eq!(chosen(&[1.0, 0.0], &all), Some(("a", 1)));
        assert_eq!(chosen(&[1.0, 0.3], &all), Some(("b", 1)));
        assert_eq!(
            chosen(&[0.2, 1.0, 0.0], &[candidate("a", 1, 1), candidate("b", 1, 1)]),
            Some(("a", 2))
        );
    }

    #[test]
    fn a_move_is_confirmed_and_one_that_changes_is_not() {
        let mut balance = Balance::new(Vec::new());
        for look in 1..=2 * CONFIRMED {
            assert_eq!(balance.confirm(Some((0, 1))), look.is_multiple_of(CONFIRMED));
        }
        let changing = [Some((0, 1)), Some((0, 2)), None, Some((0, 1)), Some((1, 0))];
        for between in changing.iter().cycle().take(10 * CONFIRMED as usize) {
            assert!(!balance.confirm(*between));
        }
    }

    #[test]
    fn the_next_endpoint_goes_where_the_fewest_are_and_then_where_least_is_done() {
        let loads = Loads::new(3);
        assert_eq!(loads.least(&[0, 0, 0]), 0);
        loads.set(&[0.5, 0.2, 0.9]);
        assert_eq!(loads.least(&[1, 1, 1]), 1);
        assert_eq!(loads.least(&[1, 1, 0]), 2);
        assert_eq!(loads.choose(vec![1, 1, 0], 2), [2, 1]);
        assert_eq!(loads.choose(vec![0, 0, 0], 9), [1, 0, 2]);
    }
}
