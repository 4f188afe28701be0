//! Tasks that are asked at regular times whether anything has stirred: one timer for all of them.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::TaskId;

/// The tasks of one period.
struct Round {
    next: Instant,
    /// Each with its place among the reactor's tasks: a search for each would be most of a sweep.
    tasks: Vec<(TaskId, usize)>,
}

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
        self.0.values().map(|round| round.next).min()
    }

    /// Calls `ask` for every task whose time has come; false takes the task out.
    pub(crate) fn run(
        &mut self,
        now: Instant,
        mut ask: impl FnMut(Duration, (TaskId, usize)) -> bool,
    ) {
        self.0.retain(|period, round| {
            if round.next <= now {
                // A reactor that was late does not catch up.
                round.next = now + *period;
                round.tasks.retain(|task| ask(*period, *task));
            }
            !round.tasks.is_empty()
        });
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
            let mut asked = Vec::new();
            sweeps.run(start + at, |_, (task, _)| {
                asked.push(task.0);
                keep
            });
            asked
        };
        assert_eq!(sweeps.next(), Some(start + short));
        assert_eq!(asked(&mut sweeps, Duration::ZERO, true), []);
        assert_eq!(asked(&mut sweeps, short, true), [1, 2]);
        assert_eq!(asked(&mut sweeps, short, true), []);
        assert_eq!(asked(&mut sweeps, short * 2, false), [1, 2]);
        assert_eq!(sweeps.next(), Some(start + long));
        assert_eq!(asked(&mut sweeps, long * 5, false), [3]);
        assert_eq!(sweeps.next(), None);
    }
}
