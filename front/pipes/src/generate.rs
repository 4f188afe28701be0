//! Cuts a stretch of the source's ring and one of the sink's into pieces for an executor.
//!
//! There are eight cases: the source wraps or not, the sink wraps or not, the size changes or not.
//! One recursive rule covers them: *a piece that the executor cannot do is cut at one wrap, and the
//! rule is applied to the shorter piece*. That piece has one wrap less, so the recursion ends after
//! two steps at most.
//!
//! - The size stays. Every byte can be done alone: cut where the source wraps, then where the sink
//!   does.
//! - The size changes. The output is a *record*, which an executor writes in one go. Where the
//!   source wraps, two records may do, the first of which ends there; where the sink wraps, a
//!   smaller record may end exactly there. Each record costs its overhead, so none of less than
//!   [`Rule::least`] bytes is cut off: instead the piece goes through a bounce buffer, gathered
//!   before the executor or scattered after it.
//! - A whole record is opened. Neither it nor its payload can be cut: bounce.
//!
//! An executor that reads or writes both parts of a ring by itself says so in its [`Needs`];
//! nothing is then cut or bounced for it.

use crate::Stretch;

/// The relation between the sizes of input and output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sizes {
    /// The output has as many bytes as the input, and any byte can be done alone.
    Same,
    /// Up to `most` bytes go into a record, which has at most `overhead` bytes more.
    Record {
        /// The largest number of input bytes in a record; at least 1.
        most: usize,
        /// Bytes of header, tag, and other additions.
        overhead: usize,
        /// Every record has exactly `overhead` bytes more than its input. Otherwise it may have
        /// fewer (compression), and the next record's beginning is known only when this one is
        /// done.
        exact: bool,
    },
    /// A record of `input` bytes becomes `output` bytes.
    Whole {
        /// Bytes of the record.
        input: usize,
        /// Bytes of its payload.
        output: usize,
    },
}

/// The sides of a piece that must be contiguous for an executor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Needs {
    /// The source must be contiguous, or gathered first.
    pub source: bool,
    /// The sink must be contiguous, or scattered afterwards.
    pub sink: bool,
}

/// A rule for cutting stretches into pieces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rule {
    /// The relation between the sizes of input and output.
    pub sizes: Sizes,
    /// The sides that must be contiguous for the executor.
    pub needs: Needs,
    /// Bytes of input below which a separate record costs more than a copy; at least 1.
    pub least: usize,
}

/// A part of the source and of the sink that an executor does in one go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The bytes to consume: all of them.
    pub source: Stretch,
    /// The room for the output, which is written from its beginning and may be shorter.
    pub sink: Stretch,
    /// The source wraps and the executor needs it contiguous: use a bounce buffer.
    pub gather: bool,
    /// The sink wraps and the executor needs it contiguous: use a bounce buffer.
    pub scatter: bool,
}

impl Rule {
    /// Returns the first piece. Returns `None` if the source is empty or has no whole record, or if
    /// the sink has no room for the smallest possible output.
    pub fn piece(&self, source: Stretch, sink: Stretch) -> Option<Piece> {
        match self.sizes {
            Sizes::Same => self.same(source, sink),
            Sizes::Record { most, overhead, .. } => self.record(source.first(most), sink, overhead),
            Sizes::Whole { input, output } => self.whole(source, sink, input, output),
        }
    }

    fn same(&self, source: Stretch, sink: Stretch) -> Option<Piece> {
        let length = source.length().min(sink.length());
        let (source, sink) = (source.first(length), sink.first(length));
        match length {
            0 => None,
            _ if self.needs.source && source.wraps() => {
                self.same(source.first(source.head()), sink)
            }
            _ if self.needs.sink && sink.wraps() => self.same(source, sink.first(sink.head())),
            _ => Some(Piece { source, sink, gather: false, scatter: false }),
        }
    }

    fn record(&self, source: Stretch, sink: Stretch, overhead: usize) -> Option<Piece> {
        let room = sink.length().checked_sub(overhead)?;
        let source = source.first(room);
        if source.is_empty() {
            return None;
        }
        if self.needs.source && self.worth_cutting(source, source.head()) {
            return self.record(source.first(source.head()), sink, overhead);
        }
        let record = sink.first(source.length() + overhead);
        let fits = record.head().saturating_sub(overhead);
        if self.needs.sink && record.wraps() && self.worth_cutting(source, fits) {
            return self.record(source.first(fits), record.first(record.head()), overhead);
        }
        Some(self.uncut(source, record))
    }

    fn whole(&self, source: Stretch, sink: Stretch, input: usize, output: usize) -> Option<Piece> {
        let there = source.length() >= input && sink.length() >= output && input > 0;
        there.then(|| self.uncut(source.first(input), sink.first(output)))
    }

    /// Returns whether the first `length` bytes and the rest are each large enough for a record.
    fn worth_cutting(&self, source: Stretch, length: usize) -> bool {
        let least = self.least.max(1);
        length >= least && source.length() - length >= least
    }

    fn uncut(&self, source: Stretch, sink: Stretch) -> Piece {
        let gather = self.needs.source && source.wraps();
        let scatter = self.needs.sink && sink.wraps();
        Piece { source, sink, gather, scatter }
    }

    /// Returns whether every piece produces exactly as many bytes as its sink has.
    pub(crate) fn is_exact(&self) -> bool {
        !matches!(self.sizes, Sizes::Record { exact: false, .. })
    }
}

/// An iterator over the pieces of a stretch, in order.
#[derive(Clone, Debug)]
pub struct Pieces {
    rule: Rule,
    source: Stretch,
    sink: Stretch,
    /// A piece is in flight whose end in the sink is not known yet.
    open: bool,
}

impl Pieces {
    /// Creates an iterator over the pieces of `source` that fit into `sink`.
    pub fn new(rule: Rule, source: Stretch, sink: Stretch) -> Self {
        Self { rule, source, sink, open: false }
    }

    /// Reports that the last piece produced `bytes`. Where sizes are not exact, the caller must do
    /// this before the next piece.
    pub fn ended(&mut self, bytes: usize) {
        if self.open {
            self.sink = self.sink.after(bytes);
            self.open = false;
        }
    }

    /// Returns the rest of the source and of the sink.
    pub fn rest(&self) -> (Stretch, Stretch) {
        (self.source, self.sink)
    }
}

impl Iterator for Pieces {
    type Item = Piece;

    /// Returns the next piece. Returns `None` at the end, and until [`Pieces::ended`] where sizes
    /// are not exact.
    fn next(&mut self) -> Option<Piece> {
        if self.open {
            return None;
        }
        let piece = self.rule.piece(self.source, self.sink)?;
        self.source = self.source.after(piece.source.length());
        match self.rule.is_exact() {
            true => self.sink = self.sink.after(piece.sink.length()),
            false => self.open = true,
        }
        Some(piece)
    }
}
