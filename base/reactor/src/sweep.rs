//! Tasks that are asked at regular times whether anything has stirred: one timer for all of them.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use crate::TaskId;

/// The tasks of one period.
struct Round {
    next: Instant,
    /// Each with its place among the reactor's tasks: a search for each would be most of a sweep.
    tasks: Vec<(TaskId, usize)>,
}

/// A task whose time has come: its period, its number and its place.
pub(crate) type Due = (Duration, (TaskId, usize));

/// Every task that sweeps, by its period.
#[derive(Default)]
pub(crate) struct Sweeps(BTreeMap<Duration, Round>);

impl Sweeps {
    /// From now on `task`, which is a number and a place, is asked every `period`.
    pub(crate) fn add(&mut self, period: Duration, task: (TaskId, usize), now: Instant) {
        let round = self.0.entry(period);
        let round = round.or_insert_with(|| Round { next: now + period, tasks: Vec::new() });
        if !round.tasks.contains(&task) {
            round.tasks.push(task);
        }
    }

    /// When a task is asked next.
    pub(crate) fn next(&self) -> Option<Instant> {
        self.0.values().filter(|round| !round.tasks.is_empty()).map(|round| round.next).min()
    }

    /// Moves every task whose time has come to `queue`, with its period. Each is to be asked and
    /// given back by [`Sweeps::keep`], unless it ended.
    pub(crate) fn take_due(&mut self, now: Instant, queue: &mut VecDeque<Due>) {
        self.0.retain(|_, round| !round.tasks.is_empty());
        for (period, round) in &mut self.0 {
            if round.next <= now {
                // A reactor that was late does not catch up.
                round.next = now + *period;
                queue.extend(round.tasks.drain(..).map(|task| (*period, task)));
            }
        }
    }

    /// Has a task that was due asked again after its period. Its round may have gone: a reactor
    /// that goes on in another thread looks for what is due before all of them were asked.
    pub(crate) fn keep(&mut self, (period, task): Due, now: Instant) {
        self.add(period, task, now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_period_has_its_time_and_empty_ones_go() {
        let (short, long) = (Duration::from_millis(1), Duration::from_millis(10));
        let (start, mut sweeps) = (Instant::now(), Sweeps::default());
        sweeps.add(short, (TaskId(1), 0), start);
        sweeps.add(short, (TaskId(1), 0), start);
        sweeps.add(short, (TaskId(2), 1), start);
        sweeps.add(long, (TaskId(3), 2), start);
        let asked = |sweeps: &mut Sweeps, at: Duration, keep: bool| {
            let mut queue = VecDeque::new();
            sweeps.take_due(start + at, &mut queue);
            if keep {
                queue.iter().for_each(|due| sweeps.keep(*due, start + at));
            }
            queue.into_iter().map(|(_, (task, _))| task.0).collect::<Vec<_>>()
        };
        assert_eq!(sweeps.next(), Some(start + short));
        assert_eq!(asked(&mut sweeps, Duration::ZERO, true), []);
        assert_eq!(asked(&mut sweeps, short, true), [1, 2]);
        assert_eq!(asked(&mut sweeps, short, true), []);
        assert_eq!(asked(&mut sweeps, short * 2, false), [1, 2]);
        assert_eq!(sweeps.next(), Some(start + long));
        assert_eq!(asked(&mut sweeps, long * 5, false), [3]);
        assert_eq!(sweeps.next(), None);
        // One that was due when its round went.
        let mut queue = VecDeque::new();
        sweeps.take_due(start + long * 6, &mut queue);
        sweeps.keep((long, (TaskId(3), 2)), start + long * 6);
        assert_eq!(asked(&mut sweeps, long * 7, false), [3]);
    }
}
