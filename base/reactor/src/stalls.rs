//! Peers whose memory made a task's thread sleep, and the time for which each is left out.
//!
//! A copy from or to memory that a peer takes away at that moment sleeps in a page fault, and the
//! other peers of the task wait meanwhile. No form of a copy avoids that, and no other thread can
//! go on with the task. So the peer pays: of each sleep, what exceeds [`BURST`] costs it 32 times
//! as long without service. In the long run, a peer makes its task sleep for a 32nd of the time,
//! or all peers of a task together do ([`Stalls::charge_shared`]).
//!
//! A sleep is a time in which the thread gave up its processor by itself and had a page fault, as
//! getrusage(2) counts both, or made a call that waits as a fault does (`slipway_peer::waits`): a
//! write(2) to a file of a peer's memory has no fault that is counted. A thread that the kernel
//! takes the processor from has not slept. One that waits without either waits for no peer's memory
//! but, for example, behind all others on the machine that call membarrier(2) at that moment, which
//! any user may do without end.
//!
//! # Cost
//! To know which peer made the thread sleep, the clock is read after each peer's work, and the
//! counts after each work of [`LEAST_OF_ONE`] or more, which is too much for a peer without any. So
//! a turn is measured as a whole ([`Stalls::begin`], [`Stalls::end`]) if it takes [`LEAST`] or
//! more, and single peers ([`Stalls::slept`]) only for [`ALERT`] after a turn with a sleep. The
//! first sleep is thus nobody's.
//!
//! A page that was swapped out, or another thread that changes the process's mappings, makes the
//! thread sleep as well. For that reason a peer is left out for a time, and not hung up on.
//! `docs/decisions/waiting.md` has what else was considered.

#![allow(unsafe_code)] // getrusage(2) has no wrapper

use std::borrow::Borrow;
use std::collections::HashMap;
use std::hash::Hash;
use std::time::{Duration, Instant};

use slipway_rate::{Bucket, Rate};

/// The shortest turn that is looked at for a sleep.
const LEAST: Duration = Duration::from_micros(20);
/// The shortest work for a single peer that is looked at for a sleep. No sleep is shorter: it has a
/// page fault and two switches of the processor. A shorter sleep would be charged to the next peer
/// with longer work.
const LEAST_OF_ONE: Duration = Duration::from_micros(2);
/// The time after a sleep for which single peers are measured.
const ALERT: Duration = Duration::from_secs(60);
/// The longest sleep that is charged at once.
const LONGEST: Duration = Duration::from_secs(2);
/// The time of sleep that costs a peer nothing, after [`REFILL`] without any. In microseconds, as
/// are all units of buckets here.
const BURST: u64 = 20_000;
/// The time of sleep of all peers that share a charge, after which they pay for each other.
const BURST_OF_ALL: u64 = 10 * BURST;
/// The time of sleep per second that costs a peer nothing: a 32nd.
const PER_SECOND: u64 = 1_000_000 / 32;
/// The time in which a peer without sleeps has all of [`BURST`] again.
const REFILL: Duration = Duration::from_micros(BURST * 32);

/// Finds sleeps of the calling thread.
struct Meter {
    /// The end of the last measured time.
    at: Instant,
    /// The thread's counts at that time or earlier. `None` if it slept on purpose since.
    counts: Option<Counts>,
    /// Single peers are measured until this time.
    alert_until: Option<Instant>,
}

impl Meter {
    /// Begins a measured time at `now`, or at present if single peers are measured.
    fn begin(&mut self, now: Instant) {
        self.at = now;
        if self.counts.is_none() || self.alert_until.is_some() {
            self.counts = Some(Counts::of_thread());
            self.at = Instant::now();
        }
    }

    /// Ends a measured time and begins the next one. Returns the time if the thread slept in it. A
    /// time shorter than `least` is not looked at.
    fn measure(&mut self, least: Duration) -> Option<Duration> {
        let now = Instant::now();
        let passed = now.saturating_duration_since(std::mem::replace(&mut self.at, now));
        if passed < least {
            return None;
        }
        let counts = Counts::of_thread();
        let before = self.counts.replace(counts);
        let slept = before.is_none_or(|before| counts.has_slept_since(before));
        if slept {
            self.alert_until = Some(now + ALERT);
        }
        slept.then_some(passed)
    }
}

/// The sleeps that a peer has to pay for.
struct Debt {
    bucket: Bucket,
    /// The peer is left out until this time.
    held: Option<Instant>,
}

/// The peers of a task, named by `K`, that made its thread sleep. All calls come from that thread,
/// but [`Stalls::new`].
pub struct Stalls<K> {
    meter: Meter,
    debts: HashMap<K, Debt>,
    /// The sleeps of all peers that share a charge.
    all: Bucket,
    /// The time that buckets count from.
    begin: Instant,
}

impl<K: Hash + Eq> Stalls<K> {
    /// Makes a record without peers.
    pub fn new(now: Instant) -> Self {
        let meter = Meter { at: now, counts: None, alert_until: None };
        let all = Bucket::new(Rate { per_second: PER_SECOND, burst: BURST_OF_ALL });
        Self { meter, debts: HashMap::new(), all, begin: now }
    }

    /// Notes that the thread has slept on purpose since the last turn.
    pub fn woken(&mut self) {
        self.meter.counts = None;
    }

    /// Begins a turn at `now`: measures from here.
    pub fn begin(&mut self, now: Instant) {
        self.meter.begin(now);
    }

    /// Begins a turn at `now`, the present, as [`Stalls::begin`] does, on a thread that has other
    /// tasks: what the thread slept in since the last turn, on purpose or for another task, is not
    /// this turn's. Nor are the counts of a former thread of the reactor: another one has gone on
    /// with it after a longer time.
    pub fn begin_after_others(&mut self, now: Instant) {
        if now.saturating_duration_since(self.meter.at) >= LEAST {
            self.woken();
        }
        self.begin(now);
    }

    /// Returns whether single peers are measured.
    pub fn is_alert(&self) -> bool {
        self.meter.alert_until.is_some()
    }

    /// Ends the work for one peer. Returns the time since the last such call or [`Stalls::begin`]
    /// if the thread slept in it and single peers are measured: the caller charges the peer for it.
    pub fn slept(&mut self) -> Option<Duration> {
        if self.is_alert() { self.meter.measure(LEAST_OF_ONE) } else { None }
    }

    /// Ends a turn.
    pub fn end(&mut self) {
        self.meter.measure(LEAST);
        let at = self.meter.at;
        self.meter.alert_until = self.meter.alert_until.filter(|until| *until > at);
    }

    /// Charges a peer for a sleep that [`Stalls::slept`] has just returned. Returns whether the
    /// peer is left out from now on, and was not before.
    pub fn charge<Q>(&mut self, peer: &Q, slept: Duration) -> bool
    where
        K: Borrow<Q>,
        Q: ?Sized + Hash + Eq + ToOwned<Owned = K>,
    {
        self.charge_times(peer, slept, 1)
    }

    /// Charges a peer as [`Stalls::charge`] does. If all peers together sleep for more than a 32nd
    /// of the time, beyond 200 ms, the peer pays for the sleep times the number of peers
    /// whose sleeps are not paid for in full, this one included. So they share a 32nd of the time,
    /// however many there are, and short sleeps of many peers at once cost nothing.
    pub fn charge_shared<Q>(&mut self, peer: &Q, slept: Duration) -> bool
    where
        K: Borrow<Q>,
        Q: ?Sized + Hash + Eq + ToOwned<Owned = K>,
    {
        let now = self.meter.at.saturating_duration_since(self.begin);
        let others = self.debts.len() - usize::from(self.debts.contains_key(peer));
        let is_too_much = self.all.opens_at() > now;
        self.all.take(micros(slept), now);
        self.charge_times(peer, slept, if is_too_much { others as u64 + 1 } else { 1 })
    }

    fn charge_times<Q>(&mut self, peer: &Q, slept: Duration, times: u64) -> bool
    where
        K: Borrow<Q>,
        Q: ?Sized + Hash + Eq + ToOwned<Owned = K>,
    {
        let (begin, at) = (self.begin, self.meter.at);
        if !self.debts.contains_key(peer) {
            let bucket = Bucket::new(Rate { per_second: PER_SECOND, burst: BURST });
            self.debts.insert(peer.to_owned(), Debt { bucket, held: None });
        }
        let Some(debt) = self.debts.get_mut(peer) else { return false };
        debt.bucket.take(micros(slept).saturating_mul(times), at.saturating_duration_since(begin));
        let opens = begin + debt.bucket.opens_at();
        let was_held = debt.held.is_some();
        debt.held = debt.held.max((opens > at).then_some(opens));
        !was_held && debt.held.is_some()
    }

    /// Forgets a peer that has ended, with its sleeps.
    pub fn forget<Q>(&mut self, peer: &Q)
    where
        K: Borrow<Q>,
        Q: ?Sized + Hash + Eq,
    {
        self.debts.remove(peer);
    }

    /// Returns until when a peer is left out. Returns `None` if it is served.
    pub fn until<Q>(&self, peer: &Q) -> Option<Instant>
    where
        K: Borrow<Q>,
        Q: ?Sized + Hash + Eq,
    {
        self.debts.get(peer)?.held
    }

    /// Has the peers served again that have paid by `now`. Returns whether there were any.
    pub fn settle(&mut self, now: Instant) -> bool {
        let (mut some, begin) = (false, self.begin);
        self.debts.retain(|_, debt| {
            some |= debt.held.take_if(|until| *until <= now).is_some();
            debt.held.is_some() || begin + debt.bucket.opens_at() + REFILL > now
        });
        some
    }

    /// Returns when the next peer has paid. Returns `None` if none is left out.
    pub fn due(&self) -> Option<Instant> {
        self.debts.values().filter_map(|debt| debt.held).min()
    }
}

/// Returns the microseconds of a sleep that are charged.
fn micros(slept: Duration) -> u64 {
    u64::try_from(slept.min(LONGEST).as_micros()).unwrap_or(u64::MAX)
}

/// Counts of a thread, which the kernel only raises.
#[derive(Clone, Copy)]
struct Counts {
    /// How often the thread gave up its processor by itself.
    switches: i64,
    /// The page faults, and the calls that may wait as they do.
    faults: i64,
}

impl Counts {
    /// Returns the counts of the calling thread.
    fn of_thread() -> Self {
        // SAFETY: all zeros is a valid `rusage`, which the call may write.
        let usage = unsafe {
            let mut usage: libc::rusage = std::mem::zeroed();
            libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage);
            usage
        };
        let faults = usage.ru_minflt.wrapping_add(usage.ru_majflt);
        let faults = faults.wrapping_add(slipway_peer::waits::count());
        Self { switches: usage.ru_nvcsw, faults }
    }

    /// Returns whether the thread, with these counts now, has slept in a page fault since `before`,
    /// or in a call that waits as a fault does.
    fn has_slept_since(self, before: Self) -> bool {
        self.switches != before.switches && self.faults != before.faults
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A sleep that is long enough to be paid for.
    const SLEEP: Duration = Duration::from_millis(50);

    /// Sleeps, and has a page fault beside that.
    fn sleep() {
        // Memory of such a size that nobody had before. It stays, so that the next one is new, too.
        std::hint::black_box(vec![1_u8; 4 << 20].leak());
        std::thread::sleep(SLEEP);
    }

    #[test]
    fn a_peer_in_whose_work_the_thread_slept_is_left_out_until_that_is_paid_for() {
        let mut stalls = Stalls::<String>::new(Instant::now());
        stalls.begin(Instant::now());
        sleep();
        assert_eq!(stalls.slept(), None, "single peers are not measured yet");
        stalls.end();
        assert!(stalls.is_alert());
        stalls.begin(Instant::now());
        sleep();
        let slept = stalls.slept().unwrap();
        assert!(slept >= SLEEP);
        assert!(stalls.charge("one", slept));
        assert!(!stalls.charge("one", slept), "it is left out already");
        let until = stalls.until("one").unwrap();
        assert!(until - stalls.meter.at >= (2 * SLEEP - Duration::from_micros(BURST)) * 32);
        assert_eq!((stalls.until("two"), stalls.due()), (None, Some(until)));
        assert!(!stalls.settle(until - Duration::from_nanos(1)));
        assert!(stalls.settle(until));
        assert_eq!((stalls.until("one"), stalls.due()), (None, None));
        assert_eq!(stalls.debts.len(), 1, "its next sleep costs it all of its length");
        stalls.settle(until + REFILL);
        assert!(stalls.debts.is_empty());
    }

    /// Keeps the processor for so long.
    fn work(time: Duration) {
        let begun = Instant::now();
        while begun.elapsed() < time {
            std::hint::spin_loop();
        }
    }

    /// Another task of the thread sleeps, or the reactor without work.
    #[test]
    fn a_sleep_between_two_turns_is_nobodys() {
        let mut stalls = Stalls::<String>::new(Instant::now());
        stalls.begin_after_others(Instant::now());
        stalls.end();
        sleep();
        stalls.begin_after_others(Instant::now());
        work(LEAST);
        stalls.end();
        assert!(!stalls.is_alert());
        stalls.begin_after_others(Instant::now());
        sleep();
        stalls.end();
        assert!(stalls.is_alert());
    }

    #[test]
    fn sleeps_on_purpose_and_times_without_sleep_are_nobodys() {
        let mut stalls = Stalls::<String>::new(Instant::now());
        stalls.begin(Instant::now());
        stalls.end();
        sleep();
        stalls.woken();
        stalls.begin(Instant::now());
        work(SLEEP);
        stalls.end();
        assert!(!stalls.is_alert());
    }

    /// The thread waits behind other users of the machine.
    #[test]
    fn a_sleep_without_a_page_fault_is_nobodys() {
        let before = Counts { switches: 1, faults: 1 };
        let after = |switches, faults| Counts { switches, faults }.has_slept_since(before);
        assert!(after(2, 2) && !after(2, 1) && !after(1, 2) && !after(1, 1));
    }

    #[test]
    fn a_call_that_may_wait_for_a_peers_memory_counts_as_a_page_fault() {
        const CALLS: i64 = 1_000_000;
        let before = Counts::of_thread();
        (0..CALLS).for_each(|_| slipway_peer::waits::note());
        let after = Counts::of_thread();
        assert!(after.faults >= before.faults + CALLS);
    }

    /// The thread sleeps for a moment in the work for a peer, and then works for another one.
    #[test]
    fn a_short_sleep_is_not_charged_to_the_next_peer() {
        let mut stalls = Stalls::<String>::new(Instant::now());
        stalls.begin(Instant::now());
        stalls.meter.alert_until = Some(Instant::now() + ALERT);
        stalls.begin(Instant::now());
        let begun = Instant::now();
        while begun.elapsed() < LEAST_OF_ONE {
            std::hint::spin_loop();
        }
        // As if the thread had slept in that time.
        stalls.meter.counts = Some(Counts { switches: -1, faults: -1 });
        assert!(stalls.slept().is_some());
        let counts = stalls.meter.counts.unwrap();
        assert!(counts.switches >= 0 && counts.faults >= 0, "the next one pays for that sleep");
    }

    /// Each of many peers sleeps as soon as it may.
    #[test]
    fn peers_that_share_a_charge_make_the_thread_sleep_for_a_32nd_together() {
        const PEERS: u16 = 16;
        let (sleep, start) = (Duration::from_millis(10), Instant::now());
        let (mut stalls, mut slept) = (Stalls::<u16>::new(start), Duration::ZERO);
        stalls.meter.at = start;
        while stalls.meter.at < start + Duration::from_secs(1000) {
            stalls.settle(stalls.meter.at);
            match (0..PEERS).find(|peer| stalls.until(peer).is_none()) {
                Some(peer) => {
                    slept += sleep;
                    stalls.meter.at += sleep;
                    stalls.charge_shared(&peer, sleep);
                }
                None => stalls.meter.at = stalls.due().unwrap(),
            }
        }
        let share = (stalls.meter.at - start) / 32;
        let bursts = Duration::from_micros(BURST) * u32::from(PEERS);
        assert!(slept > share * 9 / 10 && slept < share * 11 / 10 + bursts, "{slept:?}");
        stalls.forget(&0_u16);
        assert_eq!(stalls.until(&0_u16), None);
    }

    /// Many guests begin at once, and have pages that are touched for the first time.
    #[test]
    fn short_sleeps_of_many_peers_at_once_cost_nothing() {
        let (sleep, start) = (Duration::from_millis(1), Instant::now());
        let mut stalls = Stalls::<u16>::new(start);
        stalls.meter.at = start;
        for peer in (0..50_u16).cycle().take(150) {
            stalls.meter.at += sleep;
            assert!(!stalls.charge_shared(&peer, sleep), "{peer}");
        }
    }

    /// Short sleeps, as of a page that was swapped out, cost nothing.
    #[test]
    fn a_peer_may_make_the_thread_sleep_for_a_32nd_of_the_time() {
        let start = Instant::now();
        let mut stalls = Stalls::<String>::new(start);
        for second in 1..100 {
            stalls.meter.at = start + Duration::from_secs(second);
            stalls.settle(stalls.meter.at);
            assert!(!stalls.charge("one", Duration::from_micros(BURST - 1)), "{second}");
        }
        assert!(stalls.charge("one", Duration::from_micros(BURST)));
    }
}
