//! The host's own core as an executor.

use std::collections::VecDeque;
use std::sync::Arc;

use slipway_telemetry::Clock;
use slipway_warp::{Class, Opener, Sealer};

use super::Executor;
use crate::TransformError;
use crate::memory::{Input, Output};
use crate::transform::Worker;
use crate::{Completion, Job, KeyId, Moved, Work};

/// The key for one direction.
enum Key {
    Seal(Box<Sealer>),
    Open(Box<Opener>),
}

/// The calling thread's core: every job ends within its submission.
pub struct Core {
    class: Class,
    clock: Arc<dyn Clock>,
    worker: Worker,
    keys: Vec<Option<Key>>,
    /// Jobs that one submission takes, after which the thread returns to its other work.
    burst: usize,
}

impl Core {
    /// The number of jobs that one submission takes.
    pub const BURST: usize = 16;

    /// Creates an executor of class `class` on the calling thread's core.
    pub fn new(class: Class, clock: Arc<dyn Clock>) -> Self {
        Self { class, clock, worker: Worker::new(), keys: Vec::new(), burst: Self::BURST }
    }

    /// Returns the transforms, for callers that need no jobs.
    pub fn worker(&mut self) -> &mut Worker {
        &mut self.worker
    }

    /// Takes over a key for [`Work::Seal`].
    pub fn add_sealer(&mut self, sealer: Sealer) -> KeyId {
        self.add(Key::Seal(Box::new(sealer)))
    }

    /// Takes over a key for [`Work::Open`].
    pub fn add_opener(&mut self, opener: Opener) -> KeyId {
        self.add(Key::Open(Box::new(opener)))
    }

    fn add(&mut self, key: Key) -> KeyId {
        let free = self.keys.iter().position(Option::is_none);
        let slot = free.unwrap_or(self.keys.len());
        match free {
            Some(slot) => self.keys[slot] = Some(key),
            None => self.keys.push(Some(key)),
        }
        KeyId(slot as u32)
    }

    /// Forgets a key. Jobs that name it fail with [`TransformError::NoKey`], until the id is given
    /// to another key.
    pub fn remove_key(&mut self, id: KeyId) {
        if let Some(slot) = self.keys.get_mut(id.0 as usize) {
            *slot = None;
        }
    }

    /// Returns the sealer of `id`, so that the caller can begin its next generation. Returns `None`
    /// if `id` names no sealer.
    pub fn sealer(&mut self, id: KeyId) -> Option<&mut Sealer> {
        sealer(&mut self.keys, id).ok()
    }

    /// Does `work` now, without a job.
    ///
    /// # Errors
    /// The errors of the [`Worker`]'s transforms, and [`TransformError::NoKey`].
    pub fn perform(
        &mut self,
        work: Work,
        input: &Input<'_>,
        output: &mut Output<'_>,
    ) -> Result<Moved, TransformError> {
        let (worker, keys) = (&mut self.worker, &mut self.keys);
        let (produced, checksum) = match work {
            Work::Pass => (input.length(), None),
            Work::Copy => (worker.copy(input, output)?, None),
            Work::CopyChecked => {
                let (length, checksum) = worker.copy_checked(input, output)?;
                (length, Some(checksum))
            }
            Work::Seal(key, options) => {
                let sealer = key.map(|id| sealer(keys, id)).transpose()?;
                (worker.seal(sealer, options, input, output)?, None)
            }
            Work::Open(key) => {
                let opener = key.map(|id| opener(keys, id)).transpose()?;
                (worker.open_from(opener, input, output)?, None)
            }
        };
        let consumed = match work {
            Work::Copy | Work::CopyChecked => produced,
            Work::Pass | Work::Seal(..) | Work::Open(_) => input.length(),
        };
        Ok(Moved { consumed, produced, checksum })
    }
}

fn sealer(keys: &mut [Option<Key>], id: KeyId) -> Result<&mut Sealer, TransformError> {
    match keys.get_mut(id.0 as usize) {
        Some(Some(Key::Seal(sealer))) => Ok(sealer),
        _ => Err(TransformError::NoKey),
    }
}

fn opener(keys: &mut [Option<Key>], id: KeyId) -> Result<&mut Opener, TransformError> {
    match keys.get_mut(id.0 as usize) {
        Some(Some(Key::Open(opener))) => Ok(opener),
        _ => Err(TransformError::NoKey),
    }
}

impl Executor for Core {
    fn class(&self) -> Class {
        self.class
    }

    fn room(&self) -> usize {
        self.burst
    }

    fn submit(&mut self, jobs: &mut VecDeque<Job>, completions: &mut Vec<Completion>) {
        let mut began = self.clock.now();
        for _ in 0..self.burst.min(jobs.len()) {
            let Some(mut job) = jobs.pop_front() else { break };
            let result = self.perform(job.work, &job.source.input(), &mut job.sink.output());
            let ended = self.clock.now();
            completions.push(Completion { job, result, busy: ended.saturating_sub(began) });
            began = ended;
        }
    }

    fn poll(&mut self, _: &mut Vec<Completion>) {}
}
