//! Pipes: from a source FIFO through executors to a sink FIFO.

use slipway_ram::Span;

use crate::{Completion, Job, Moved, Pieces, Place, Rule, Stretch, TransformError, Work};

/// A FIFO that is read. Its host adapts whatever ring it has.
pub trait Source {
    /// The ring's memory, as large as the stretches say.
    fn memory(&self) -> &Span;
    /// What may be read.
    ///
    /// # Errors
    /// When the other side's index cannot be.
    fn readable(&mut self) -> Result<Stretch, BrokenFifo>;
    /// The first `bytes` of it are done with, and the writer's again.
    fn consume(&mut self, bytes: usize);
}

/// A FIFO that is written.
pub trait Sink {
    /// The ring's memory, as large as the stretches say.
    fn memory(&self) -> &Span;
    /// What may be written.
    ///
    /// # Errors
    /// When the other side's index cannot be.
    fn writable(&mut self) -> Result<Stretch, BrokenFifo>;
    /// The first `bytes` of it hold something, and are the reader's now.
    fn produce(&mut self, bytes: usize);
}

/// An index of the other side that cannot be: the stream has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("an index of a FIFO is out of range")]
pub struct BrokenFifo;

/// Makes jobs for one executor of what a source has and a sink takes, and moves both on when they end.
///
/// The executor ends a pipe's jobs in order; so a pipe keeps two sums, and nothing for each job.
#[derive(Debug)]
pub struct Pipe {
    work: Work,
    rule: Rule,
    /// Of the source and the sink, lent to jobs in flight.
    lent: (usize, usize),
    in_flight: usize,
}

impl Pipe {
    /// A pipe whose executor does `work`, by pieces that `rule` gives.
    pub fn new(work: Work, rule: Rule) -> Self {
        Self { work, rule, lent: (0, 0), in_flight: 0 }
    }

    /// With [`Sizes::Whole`](crate::Sizes) the sizes of the next record; before any job of it.
    pub fn set_rule(&mut self, rule: Rule) {
        self.rule = rule;
    }

    /// Jobs that have not ended.
    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Appends up to `limit` jobs, all named `tag`, for what source and sink have room for now; gives their
    /// number. Where sizes are not exact there is one at a time.
    ///
    /// # Errors
    /// When an index of either is broken.
    pub fn generate(
        &mut self,
        tag: u64,
        source: &mut impl Source,
        sink: &mut impl Sink,
        limit: usize,
        jobs: &mut impl Extend<Job>,
    ) -> Result<usize, BrokenFifo> {
        let (readable, writable) = (source.readable()?, sink.writable()?);
        if !self.rule.is_exact() && self.in_flight > 0 {
            return Ok(0);
        }
        let (from, to) = (readable.after(self.lent.0), writable.after(self.lent.1));
        let mut made = 0;
        for piece in Pieces::new(self.rule, from, to).take(limit) {
            self.lent.0 += piece.source.length();
            self.lent.1 += piece.sink.length();
            made += 1;
            jobs.extend(Some(Job {
                tag,
                work: self.work,
                source: Place::Ring(source.memory().clone(), piece.source),
                sink: Place::Ring(sink.memory().clone(), piece.sink),
            }));
        }
        self.in_flight += made;
        Ok(made)
    }

    /// Moves source and sink on by what the oldest job of this pipe did.
    ///
    /// # Errors
    /// When it failed, or moved less than it was lent (of the sink, where sizes are exact): the pipe is of no
    /// use then.
    pub fn completed(
        &mut self,
        completion: &Completion,
        source: &mut impl Source,
        sink: &mut impl Sink,
    ) -> Result<(), TransformError> {
        let (from, to) = (completion.job.source.length(), completion.job.sink.length());
        self.lent = (self.lent.0 - from, self.lent.1 - to);
        self.in_flight -= 1;
        let moved = completion.result?;
        // The next piece begins where this one was to end.
        let short = |done, given| Err(TransformError::Short { done, given });
        match moved {
            Moved { consumed, .. } if consumed != from => return short(consumed, from),
            Moved { produced, .. } if produced > to => return short(produced, to),
            Moved { produced, .. } if self.rule.is_exact() && produced != to => {
                return short(produced, to);
            }
            Moved { produced, .. } => {
                source.consume(from);
                sink.produce(produced);
            }
        }
        Ok(())
    }
}
