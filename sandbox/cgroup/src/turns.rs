//! Turns of requests for groups, in the order of their arrival.
//!
//! The kernel has few locks for all control groups of a host. Many threads that make, limit and
//! enter groups at once wait there and for a CPU, in no order: the mean time of a request is what
//! it would be in a queue, but some requests are overtaken again and again. With turns, no more
//! requests are at work than CPUs can carry out, and each of the others is overtaken by nobody.
//! Turns make no request cheaper: the median grows to the mean, and the longest waits shrink to it.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard};
use std::thread::Thread;
use std::time::{Duration, Instant};

/// The longest wait for a turn. Holders whose system calls do not return delay others by no more.
const PATIENCE: Duration = Duration::from_secs(1);

/// A number of places, and the threads that wait for one.
#[derive(Debug)]
pub(crate) struct SlotQueue {
    places: usize,
    patience: Duration,
    state: Mutex<QueueState>,
}

#[derive(Debug, Default)]
struct QueueState {
    /// Places that are taken. No thread waits while one is free.
    taken: usize,
    /// Waiting threads, by their tickets, in the order of arrival.
    waiting: VecDeque<(u64, Thread)>,
    /// The ticket of the next thread that waits.
    next: u64,
}

/// A turn, which ends when this value is dropped, also by a panic.
#[derive(Debug)]
#[must_use = "the turn ends when this value is dropped"]
pub struct Slot<'a> {
    /// The place that the turn has. `None` after a wait of [`PATIENCE`]: the turn has no place.
    place: Option<&'a SlotQueue>,
}

impl SlotQueue {
    /// Makes as many places as the process has CPUs, and two at least: one holder that waits for
    /// the kernel leaves a place for others.
    pub(crate) fn of_host() -> Self {
        let cpus = std::thread::available_parallelism().map_or(2, |cpus| cpus.get());
        Self::new(cpus.max(2), PATIENCE)
    }

    fn new(places: usize, patience: Duration) -> Self {
        Self { places, patience, state: Mutex::default() }
    }

    /// Waits for the turns of all earlier requests to begin and for one of them to end, or for the
    /// longest wait of all.
    pub(crate) fn take(&self) -> Slot<'_> {
        let mut state = self.lock();
        if state.taken < self.places {
            state.taken += 1;
            return Slot { place: Some(self) };
        }
        let ticket = state.next;
        state.next += 1;
        state.waiting.push_back((ticket, std::thread::current()));
        drop(state);
        self.wait(ticket)
    }

    /// Returns whether a thread has a turn with a place. None waits for a turn otherwise.
    pub(crate) fn is_busy(&self) -> bool {
        self.lock().taken > 0
    }

    /// Waits until no thread waits with `ticket`: then its place is the calling thread's.
    fn wait(&self, ticket: u64) -> Slot<'_> {
        let begun = Instant::now();
        loop {
            // Returns early now and then, for no reason or for one of somebody else's.
            std::thread::park_timeout(self.patience.saturating_sub(begun.elapsed()));
            let mut state = self.lock();
            let found = state.waiting.binary_search_by_key(&ticket, |(ticket, _)| *ticket);
            let Ok(index) = found else { return Slot { place: Some(self) } };
            if begun.elapsed() >= self.patience {
                state.waiting.remove(index);
                return Slot { place: None };
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, QueueState> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl Drop for Slot<'_> {
    fn drop(&mut self) {
        let Some(turns) = self.place else { return };
        let mut state = turns.lock();
        // The place goes to the thread that waits longest and is never free meanwhile, so nobody
        // who comes later takes it.
        let next = state.waiting.pop_front();
        if next.is_none() {
            state.taken -= 1;
        }
        drop(state);
        if let Some((_, thread)) = next {
            thread.unpark();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
    use std::sync::mpsc::channel;

    use super::*;

    /// A wait that no test sees the end of.
    const LONG: Duration = Duration::from_secs(100_000);

    fn wait_for(turns: &SlotQueue, waiting: usize) {
        while turns.lock().waiting.len() != waiting {
            std::thread::yield_now();
        }
    }

    #[test]
    fn turns_come_in_the_order_of_arrival() {
        let turns = SlotQueue::new(1, LONG);
        let seen = Mutex::new(Vec::new());
        assert!(!turns.is_busy());
        let held = turns.take();
        assert!(turns.is_busy(), "nobody waits, and a turn is held");
        std::thread::scope(|scope| {
            for number in 0..20 {
                let (turns, seen) = (&turns, &seen);
                scope.spawn(move || {
                    let _turn = turns.take();
                    seen.lock().unwrap().push(number);
                });
                wait_for(turns, number + 1);
            }
            assert!(seen.lock().unwrap().is_empty(), "the one place is taken");
            drop(held);
        });
        assert!(!turns.is_busy());
        assert_eq!(*seen.lock().unwrap(), (0..20).collect::<Vec<_>>());
        assert_eq!(turns.lock().taken, 0);
    }

    #[test]
    fn no_more_turns_run_than_there_are_places() {
        let turns = SlotQueue::new(3, LONG);
        let running = Mutex::new((0_usize, 0_usize));
        let (turns, running) = (&turns, &running);
        std::thread::scope(|scope| {
            for _ in 0..12 {
                scope.spawn(move || {
                    for _ in 0..50 {
                        let _turn = turns.take();
                        {
                            let mut running = running.lock().unwrap();
                            running.0 += 1;
                            running.1 = running.0.max(running.1);
                        }
                        std::thread::yield_now();
                        running.lock().unwrap().0 -= 1;
                    }
                });
            }
        });
        let (left, most) = *running.lock().unwrap();
        assert!(left == 0 && (1..=3).contains(&most), "{most} at once");
        let state = turns.lock();
        assert_eq!((state.taken, state.waiting.len()), (0, 0));
    }

    #[test]
    fn a_panic_ends_a_turn() {
        let turns = SlotQueue::new(1, LONG);
        let panics = || {
            let _turn = turns.take();
            resume_unwind(Box::new("on purpose"));
        };
        assert!(catch_unwind(AssertUnwindSafe(panics)).is_err());
        assert!(turns.take().place.is_some());
    }

    /// Two holders that do not come back delay the others, and do not stop them.
    #[test]
    fn a_holder_that_hangs_stops_nobody() {
        let turns = SlotQueue::new(2, Duration::from_millis(10));
        let held = [turns.take(), turns.take()];
        let (done, outcome) = channel();
        std::thread::scope(|scope| {
            for _ in 0..5 {
                let (turns, done) = (&turns, done.clone());
                scope.spawn(move || done.send(turns.take().place.is_some()).unwrap());
            }
            for _ in 0..5 {
                assert!(!outcome.recv().unwrap(), "it goes on without a place");
            }
        });
        assert_eq!(turns.lock().waiting.len(), 0);
        drop(held);
        assert_eq!(turns.lock().taken, 0, "turns without a place gave none back");
        assert!(turns.take().place.is_some());
    }
}
