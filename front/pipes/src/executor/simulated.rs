//! A simulated accelerator, for tests and benches.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use slipway_telemetry::Clock;
use slipway_warp::Class;

use super::Executor;
use crate::{Completion, Job, Needs};

/// Does its jobs by another executor, but ends each no sooner than hardware of a set rate would:
/// one after the other, each taking its source's bytes at that rate. The bytes are right and the
/// times are the clock's, so tests and benches see the effect of an accelerator on everything
/// around it.
pub struct Simulated<E> {
    inner: E,
    class: Class,
    needs: Needs,
    clock: Arc<dyn Clock>,
    /// Bytes per second, at least 1.
    rate: u64,
    /// The largest number of jobs that it holds.
    depth: usize,
    /// The time at which the last of its jobs ends.
    free_at: Duration,
    flying: VecDeque<(Duration, Completion)>,
    /// The one job on its way to `inner`.
    handed: VecDeque<Job>,
    ended: Vec<Completion>,
}

impl<E: Executor> Simulated<E> {
    /// Creates an accelerator of `class` with `rate` bytes per second that takes up to `depth`
    /// jobs. `inner` computes the results, and must end each job within its submission.
    pub fn new(inner: E, class: Class, rate: u64, depth: usize, clock: Arc<dyn Clock>) -> Self {
        let (rate, depth) = (rate.max(1), depth.max(1));
        let needs = Needs { source: true, sink: true };
        let (flying, handed) = (VecDeque::with_capacity(depth), VecDeque::with_capacity(1));
        let (free_at, ended) = (Duration::ZERO, Vec::with_capacity(1));
        Self { inner, class, needs, clock, rate, depth, free_at, flying, handed, ended }
    }

    /// Returns the executor that computes the results.
    pub fn inner(&mut self) -> &mut E {
        &mut self.inner
    }

    fn time_of(&self, bytes: usize) -> Duration {
        let nanos = (bytes as u128 * 1_000_000_000).div_ceil(u128::from(self.rate));
        Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
    }
}

impl<E: Executor> Executor for Simulated<E> {
    fn class(&self) -> Class {
        self.class
    }

    fn needs(&self) -> Needs {
        self.needs
    }

    fn room(&self) -> usize {
        self.depth - self.flying.len()
    }

    fn submit(&mut self, jobs: &mut VecDeque<Job>, _: &mut Vec<Completion>) {
        let now = self.clock.now();
        while self.room() > 0 && !jobs.is_empty() {
            self.handed.extend(jobs.pop_front());
            self.inner.submit(&mut self.handed, &mut self.ended);
            debug_assert!(
                self.handed.is_empty(),
                "the inner executor ends what it is given at once"
            );
            while let Some(mut completion) = self.ended.pop() {
                let busy = self.time_of(completion.job.source.length());
                completion.busy = busy;
                self.free_at = self.free_at.max(now) + busy;
                self.flying.push_back((self.free_at, completion));
            }
        }
    }

    fn poll(&mut self, completions: &mut Vec<Completion>) {
        let now = self.clock.now();
        while let Some((_, completion)) = self.flying.pop_front_if(|(at, _)| *at <= now) {
            completions.push(completion);
        }
    }

    fn due(&self) -> Option<Duration> {
        self.flying.front().map(|(at, _)| *at)
    }
}
