//! Pieces for an executor, from a stretch of the source's ring and one of the sink's.
//!
//! There are eight cases: the source wraps or not, the sink wraps or not, the size changes or not. One
//! rule makes them few: *what cannot be done in one piece is made smaller at one wrap, and asked again*.
//! The smaller question has one wrap less, so it ends after two steps at most.
//!
//! - The size stays. Every byte can be done alone: cut where the source wraps, then where the sink does.
//! - The size changes. What comes out is a *record*, which an executor writes in one go. Where the source
//!   wraps, two records may do, the first of which ends there; where the sink wraps, a smaller record may
//!   end just there. Each costs its overhead, so none of less than [`Rule::least`] bytes is cut off:
//!   instead the piece goes through a bounce buffer, gathered before the executor or scattered behind it.
//! - A whole record comes in, and what is inside of it goes out. Neither can be cut: bounce.
//!
//! An executor that reads or writes both parts of a ring by itself says so in its [`Needs`], and nothing
//! is cut or bounced for its sake.

use crate::Stretch;

/// How many bytes come out of how many.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sizes {
    /// As many as go in; any byte can be done alone.
    Same,
    /// Up to `most` bytes go into a record, which has at most `overhead` bytes more.
    Record {
        /// Bytes of input that a record may have; at least 1.
        most: usize,
        /// Header, tag, and whatever else is added.
        overhead: usize,
        /// Every record has exactly so many bytes more. Otherwise it may have less (compression), and
        /// where the next begins is known when it is done.
        exact: bool,
    },
    /// A record of `input` bytes becomes `output` bytes.
    Whole {
        /// Bytes of the record.
        input: usize,
        /// Bytes of what is inside.
        output: usize,
    },
}

/// What an executor cannot take in two parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Needs {
    /// The source of a piece is contiguous, or gathered first.
    pub source: bool,
    /// The sink of a piece is contiguous, or scattered afterwards.
    pub sink: bool,
}

/// How to cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rule {
    /// How sizes change.
    pub sizes: Sizes,
    /// What the executor needs contiguous.
    pub needs: Needs,
    /// Bytes of input below which a record of its own is worth less than a copy; at least 1.
    pub least: usize,
}

/// Something for an executor to do in one go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// All of this is consumed.
    pub source: Stretch,
    /// Up to all of this is produced, from its beginning.
    pub sink: Stretch,
    /// The source wraps and the executor cannot: through a bounce buffer.
    pub gather: bool,
    /// The sink wraps and the executor cannot: through a bounce buffer.
    pub scatter: bool,
}

impl Rule {
    /// The first piece. None when the source has nothing (or no whole record), or the sink no room for
    /// what the least of it becomes.
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

    /// Whether a record of the first `length` bytes is worth having, and one of the others.
    fn worth_cutting(&self, source: Stretch, length: usize) -> bool {
        let least = self.least.max(1);
        length >= least && source.length() - length >= least
    }

    fn uncut(&self, source: Stretch, sink: Stretch) -> Piece {
        let gather = self.needs.source && source.wraps();
        let scatter = self.needs.sink && sink.wraps();
        Piece { source, sink, gather, scatter }
    }

    /// Whether a piece produces exactly its sink.
    pub(crate) fn is_exact(&self) -> bool {
        !matches!(self.sizes, Sizes::Record { exact: false, .. })
    }
}

/// The pieces of a stretch, one after the other.
#[derive(Clone, Debug)]
pub struct Pieces {
    rule: Rule,
    source: Stretch,
    sink: Stretch,
    /// A piece is under way whose end in the sink nobody knows yet.
    open: bool,
}

impl Pieces {
    /// The pieces of `source` that go into `sink`.
    pub fn new(rule: Rule, source: Stretch, sink: Stretch) -> Self {
        Self { rule, source, sink, open: false }
    }

    /// The last piece, given just before, produced `bytes`: needed where sizes are not exact, before the
    /// next piece can be told.
    pub fn ended(&mut self, bytes: usize) {
        if self.open {
            self.sink = self.sink.after(bytes);
            self.open = false;
        }
    }

    /// What is left of the source and of the sink.
    pub fn rest(&self) -> (Stretch, Stretch) {
        (self.source, self.sink)
    }
}

impl Iterator for Pieces {
    type Item = Piece;

    /// None at the end, and until [`Pieces::ended`] where that is needed.
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
