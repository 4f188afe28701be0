//! Reads of a frame of a burst, with the tag that a destination gets.

use slipway_ram::{Fault, Span};

/// Reads a frame from its beginning to its end, into any destination memory.
pub struct Reader<'a> {
    /// Addresses and tag, if a tag is inserted.
    pub(super) lead: [u8; 16],
    pub(super) lead_at: u8,
    pub(super) head: &'a [u8],
    pub(super) spans: &'a [Span],
    /// Bytes of the first span that have been read.
    pub(super) skip: usize,
}

impl Reader<'_> {
    /// Copies the next bytes, up to `len`, to `at` of `to`. Returns their number, which is below
    /// `len` only at the frame's end.
    ///
    /// # Errors
    /// [`Fault`] of the source's or of the destination's memory.
    ///
    /// # Panics
    /// If the range leaves `to`.
    #[inline]
    pub fn copy_to(&mut self, to: &Span, at: usize, len: usize) -> Result<usize, Fault> {
        let mut done = 0;
        while done < len {
            if self.lead_at < 16 {
                let lead = &self.lead[usize::from(self.lead_at)..];
                let part = lead.len().min(len - done);
                to.write(at + done, &lead[..part])?;
                self.lead_at += part as u8;
                done += part;
            } else if !self.head.is_empty() {
                let part = self.head.len().min(len - done);
                to.write(at + done, &self.head[..part])?;
                self.head = &self.head[part..];
                done += part;
            } else {
                let Some(span) = self.spans.first() else { break };
                let part = (span.len() - self.skip).min(len - done);
                span.copy_to(self.skip, to, at + done, part)?;
                done += part;
                self.advance(part);
            }
        }
        Ok(done)
    }

    /// Copies the next bytes into `into`. Returns their number, which is below its length only at
    /// the frame's end.
    ///
    /// # Errors
    /// [`Fault`] of the source's memory.
    pub fn read(&mut self, into: &mut [u8]) -> Result<usize, Fault> {
        let mut done = 0;
        while done < into.len() {
            let rest = &mut into[done..];
            if self.lead_at < 16 {
                let lead = &self.lead[usize::from(self.lead_at)..];
                let part = lead.len().min(rest.len());
                rest[..part].copy_from_slice(&lead[..part]);
                self.lead_at += part as u8;
                done += part;
            } else if !self.head.is_empty() {
                let part = self.head.len().min(rest.len());
                rest[..part].copy_from_slice(&self.head[..part]);
                self.head = &self.head[part..];
                done += part;
            } else {
                let Some(span) = self.spans.first() else { break };
                let part = (span.len() - self.skip).min(rest.len());
                span.read(self.skip, &mut rest[..part])?;
                done += part;
                self.advance(part);
            }
        }
        Ok(done)
    }

    /// Passes address and length of each unread piece to `add`, for a system call's I/O vectors.
    /// They are valid as long as the reader and the burst. Only the kernel may access them: it
    /// answers memory that is gone with an error.
    pub(crate) fn pieces(&self, add: &mut dyn FnMut(*const u8, usize)) {
        let lead = &self.lead[usize::from(self.lead_at)..];
        for piece in [lead, self.head].into_iter().filter(|piece| !piece.is_empty()) {
            add(piece.as_ptr(), piece.len());
        }
        let mut skip = self.skip;
        for span in self.spans {
            let (base, len) = span.io_vector();
            add(base.cast_const().wrapping_add(skip), len - skip);
            skip = 0;
        }
    }

    fn advance(&mut self, part: usize) {
        self.skip += part;
        if self.spans.first().is_some_and(|span| span.len() == self.skip) {
            self.spans = &self.spans[1..];
            self.skip = 0;
        }
    }
}
