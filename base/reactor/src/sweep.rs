//! Periodic checks of tasks for work ([`Task::stirs`](crate::Task::stirs)): one timer for all tasks
//! of a period.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use crate::TaskId;

/// The tasks of one period, and the time of their next check.
struct Round {
    next: Instant,
    /// Each task with its place among the reactor's tasks: searching for each would take most of a
    /// sweep.
    tasks: Vec<(TaskId, usize)>,
}

/// A task that is due for a check: its period, its number and its place.
pub(crate) type Due = (Duration, (TaskId, usize));

/// All tasks that are swept, by period.
#[derive(Default)]
pub(crate) struct Sweeps(BTreeMap<Duration, Round>);

impl Sweeps {
    /// Adds `task`, a number and a place, to be checked every `period`.
    pub(crate) fn add(&mut self, period: Duration, task: (TaskId, usize), now: Instant) {
        let round = self.0.entry(period);
        let round = round.or_insert_with(|| Round { next: now + period, tasks: Vec::new() });
        if !round.tasks.contains(&task) {
            round.tasks.push(task);
        }
    }

    /// Returns the time of the next check.
    pub(crate) fn next(&self) -> Option<Instant> {
        self.0.values().filter(|round| !round.tasks.is_empty()).map(|round| round.next).min()
    }

    /// Moves every due task to `queue`, with its period. The caller checks each one and returns it
    /// by [`Sweeps::keep`], unless the task has ended.
    pub(crate) fn take_due(&mut self, now: Instant, queue: &mut VecDeque<Due>) {
        self.0.retain(|_, round| !round.tasks.is_empty());
        for (period, round) in &mut self.0 {
            if round.next <= now {
                // A late reactor does not catch up on missed checks.
                round.next = now + *period;
                queue.extend(round.tasks.drain(..).map(|task| (*period, task)));
            }
        }
    }

    /// Puts a due task back for its next check. Its round may have been removed: a reactor that
    /// goes on in another thread takes due tasks before all earlier ones were checked.
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
        // A task that was due when its round was removed.
        let mut queue = VecDeque::new();
        sweeps.take_due(start + long * 6, &mut queue);
        sweeps.keep((long, (TaskId(3), 2)), start + long * 6);
        assert_eq!(asked(&mut sweeps, long * 7, false), [3]);
    }
}
