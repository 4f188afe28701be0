//! What a transform reads from and writes to: a ring that others see, or bytes of our own.
//!
//! A ring's bytes may change under us, so a transform never has a slice of them: it copies, in at most
//! two parts, and decides on the copy.

use slipway_ram::{Fault, Span};

use crate::{Piece, Stretch};

/// Where bytes come from.
#[derive(Clone, Copy)]
pub enum Input<'a> {
    /// A stretch of a ring whose memory is the span. What a peer writes there meanwhile spoils its own
    /// stream and nothing else.
    Ring(&'a Span, Stretch),
    /// Bytes of this process.
    Bytes(&'a [u8]),
}

/// Where bytes go.
pub enum Output<'a> {
    /// A stretch of a ring whose memory is the span.
    Ring(&'a Span, Stretch),
    /// Bytes of this process.
    Bytes(&'a mut [u8]),
}

impl<'a> Input<'a> {
    /// Bytes.
    pub fn length(&self) -> usize {
        match self {
            Self::Ring(_, at) => at.length(),
            Self::Bytes(bytes) => bytes.len(),
        }
    }

    /// All of it, copied into the beginning of `into`, which has room for it.
    ///
    /// # Errors
    /// When the ring's owner took the memory away.
    pub fn read(&self, into: &mut [u8]) -> Result<(), Fault> {
        match self {
            Self::Ring(memory, at) => {
                let [first, second] = at.ranges();
                let (head, tail) = into[..at.length()].split_at_mut(first.len());
                memory.read(first.start, head)?;
                if second.is_empty() { Ok(()) } else { memory.read(0, tail) }
            }
            Self::Bytes(bytes) => {
                into[..bytes.len()].copy_from_slice(bytes);
                Ok(())
            }
        }
    }

    /// Its bytes as a slice: as they are, or copied to `staging`, which has room for them.
    ///
    /// # Errors
    /// As for [`Input::read`].
    pub(crate) fn slice<'b>(&self, staging: &'b mut [u8]) -> Result<&'b [u8], Fault>
    where
        'a: 'b,
    {
        match *self {
            Self::Bytes(bytes) => Ok(bytes),
            Self::Ring(_, at) => {
                self.read(staging)?;
                Ok(&staging[..at.length()])
            }
        }
    }
}

impl Output<'_> {
    /// Bytes that there is room for.
    pub fn room(&self) -> usize {
        match self {
            Self::Ring(_, at) => at.length(),
            Self::Bytes(bytes) => bytes.len(),
        }
    }

    /// `from` copied to its beginning, which has room for it.
    ///
    /// # Errors
    /// When the ring's owner took the memory away.
    pub fn write(&mut self, from: &[u8]) -> Result<(), Fault> {
        match self {
            Self::Ring(memory, at) => {
                let [first, second] = at.first(from.len()).ranges();
                let (head, tail) = from.split_at(first.len());
                memory.write(first.start, head)?;
                if second.is_empty() { Ok(()) } else { memory.write(0, tail) }
            }
            Self::Bytes(bytes) => {
                bytes[..from.len()].copy_from_slice(from);
                Ok(())
            }
        }
    }

    /// What remains behind the first `bytes`.
    #[must_use]
    pub(crate) fn after(&mut self, bytes: usize) -> Output<'_> {
        match self {
            Self::Ring(memory, at) => Output::Ring(memory, at.after(bytes)),
            Self::Bytes(all) => Output::Bytes(&mut all[bytes..]),
        }
    }
}

/// Copies `piece`, whose sizes are the same, from one ring to another in as few parts as there are wraps.
///
/// # Errors
/// When a ring's owner took the memory away.
pub(crate) fn copy_rings(from: &Span, to: &Span, piece: Piece) -> Result<(), Fault> {
    let (mut source, mut sink) = (piece.source, piece.sink);
    while !source.is_empty() {
        let length = source.head().min(sink.head());
        from.copy_to(source.offset(), to, sink.offset(), length)?;
        (source, sink) = (source.after(length), sink.after(length));
    }
    Ok(())
}
