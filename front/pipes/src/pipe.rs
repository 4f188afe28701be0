//! Pipes: from a source FIFO through executors to a sink FIFO.

use slipway_ram::Span;

use crate::{Completion, Job, JobEnd, Moved, Pieces, Rule, Stretch, TransformError, Work};

/// The reader's side of a FIFO. A host implements it for its own kind of ring.
pub trait Source {
    /// Returns the ring's memory, whose size is that of the stretches.
    fn memory(&self) -> &Span;
    /// Returns the stretch that may be read.
    ///
    /// # Errors
    /// If the peer's index is out of range.
    fn readable(&mut self) -> Result<Stretch, BrokenFifo>;
    /// Releases the first `bytes` of the readable stretch to the writer.
    fn consume(&mut self, bytes: usize);
}

/// The writer's side of a FIFO.
pub trait Sink {
    /// Returns the ring's memory, whose size is that of the stretches.
    fn memory(&self) -> &Span;
    /// Returns the stretch that may be written.
    ///
    /// # Errors
    /// If the peer's index is out of range.
    fn writable(&mut self) -> Result<Stretch, BrokenFifo>;
    /// Passes the first `bytes` of the writable stretch, which have been written, to the reader.
    fn produce(&mut self, bytes: usize);
}

/// The peer's index of a FIFO is out of range, which ends the stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("an index of a FIFO is out of range")]
pub struct BrokenFifo;

/// Makes jobs for one executor from a source's bytes and a sink's room, and moves both on when the
/// jobs end.
///
/// The executor completes a pipe's jobs in order, so a pipe keeps two sums and no state for each
/// job.
#[derive(Debug)]
pub struct Pipe {
    work: Work,
    rule: Rule,
    /// Bytes of the source and of the sink that are lent to jobs in flight.
    lent: (usize, usize),
    in_flight: usize,
}

impl Pipe {
    /// Creates a pipe whose executor does `work`, in pieces that `rule` cuts.
    pub fn new(work: Work, rule: Rule) -> Self {
        Self { work, rule, lent: (0, 0), in_flight: 0 }
    }

    /// Replaces the rule. With [`Sizes::Whole`](crate::Sizes) the caller sets each record's sizes
    /// before that record's job is made.
    pub fn set_rule(&mut self, rule: Rule) {
        self.rule = rule;
    }

    /// Returns the number of jobs that have not ended.
    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Appends up to `limit` jobs, all tagged `tag`, for the bytes that `source` has and `sink` has
    /// room for, and returns their number. A rule whose sizes are not exact has one job in flight
    /// at a time.
    ///
    /// # Errors
    /// If an index of the source or the sink is broken.
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
                source: JobEnd::Ring(source.memory().clone(), piece.source),
                sink: JobEnd::Ring(sink.memory().clone(), piece.sink),
            }));
        }
        self.in_flight += made;
        Ok(made)
    }

    /// Moves source and sink on after the oldest job of this pipe.
    ///
    /// # Errors
    /// If the job failed or consumed less than its source, or, where sizes are exact, produced less
    /// than its sink. The pipe must not be used after an error.
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
        // The next piece begins where this one was to end, so a short job breaks the stream.
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
