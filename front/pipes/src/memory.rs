//! Inputs and outputs of transforms: rings that others see, or bytes of this process.
//!
//! A peer may change a ring's bytes at any time, so a transform never has a slice of them: it
//! copies, in at most two parts, and decides on the copy.

use slipway_ram::{Fault, Span};

use crate::{Piece, Stretch};

/// The source of a transform.
#[derive(Clone, Copy)]
pub enum Input<'a> {
    /// A stretch of a ring whose memory is the span. A peer that writes there meanwhile spoils its
    /// own stream and nothing else.
    Ring(&'a Span, Stretch),
    /// Bytes of this process.
    Bytes(&'a [u8]),
}

/// The destination of a transform.
pub enum Output<'a> {
    /// A stretch of a ring whose memory is the span.
    Ring(&'a Span, Stretch),
    /// Bytes of this process.
    Bytes(&'a mut [u8]),
}

impl<'a> Input<'a> {
    /// Returns the number of bytes.
    pub fn length(&self) -> usize {
        match self {
            Self::Ring(_, at) => at.length(),
            Self::Bytes(bytes) => bytes.len(),
        }
    }

    /// Copies all bytes to the beginning of `into`, which must have room for them.
    ///
    /// # Errors
    /// If the ring's owner has taken the memory away.
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

    /// Returns the bytes as a slice. Bytes of a ring are copied to `staging`, which must have room
    /// for them.
    ///
    /// # Errors
    /// The errors of [`Input::read`].
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
    /// Returns the number of bytes that fit.
    pub fn room(&self) -> usize {
        match self {
            Self::Ring(_, at) => at.length(),
            Self::Bytes(bytes) => bytes.len(),
        }
    }

    /// Copies `from` to the output's beginning, which must have room for it.
    ///
    /// # Errors
    /// If the ring's owner has taken the memory away.
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

    /// Returns the output after its first `bytes` bytes.
    #[must_use]
    pub(crate) fn after(&mut self, bytes: usize) -> Output<'_> {
        match self {
            Self::Ring(memory, at) => Output::Ring(memory, at.after(bytes)),
            Self::Bytes(all) => Output::Bytes(&mut all[bytes..]),
        }
    }
}

/// Copies `piece`, whose source and sink have the same length, from ring to ring, in as few parts
/// as the wraps allow.
///
/// # Errors
/// If a ring's owner has taken the memory away.
pub(crate) fn copy_rings(from: &Span, to: &Span, piece: Piece) -> Result<(), Fault> {
    let (mut source, mut sink) = (piece.source, piece.sink);
    while !source.is_empty() {
        let length = source.head().min(sink.head());
        from.copy_to(source.offset(), to, sink.offset(), length)?;
        (source, sink) = (source.after(length), sink.after(length));
    }
    Ok(())
}
