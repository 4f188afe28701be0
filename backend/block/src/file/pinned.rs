//! Guest memory that a ring has registered, so that its pages are pinned once and not for each
//! request.
//!
//! Memory is registered in pieces, each when a request first touches it: memory that no request
//! uses is not pinned. A piece stays registered until [`Pinned::release`], and keeps its mapping:
//! as long as its address is known here, no other memory can appear there.

use std::collections::HashMap;
use std::ops::Range;

use io_uring::Submitter;
use slipway_ram::Span;

/// The size and alignment of a piece, in bytes.
const PIECE: usize = 2 << 20;
/// The largest number of pieces of a ring: 16 GiB.
const PIECES: usize = 8192;

/// The pieces of memory that a ring has registered.
#[derive(Default)]
pub(super) struct Pinned {
    /// Pieces by their address in units of [`PIECE`]: the addresses that the piece has in its unit,
    /// and its number in the ring's table, or `None` if the kernel refused it (as it refuses memory
    /// that cannot be written). If two mappings lie in one unit, the first to be used has it.
    numbers: HashMap<usize, (Range<usize>, Option<u16>)>,
    /// All pieces of the table.
    pieces: Vec<Span>,
    /// The result of asking the kernel for a table, which it may refuse for lack of memory or by a
    /// limit; `None` before that.
    table: Option<bool>,
}

impl Pinned {
    /// Returns the ring's number for the piece that `span` lies in, and registers the piece first
    /// if needed. Returns `None` if the request has to do without.
    pub fn number(&mut self, ring: &Submitter<'_>, span: &Span) -> Option<u16> {
        let wanted = addresses(span);
        if let Some((range, number)) = self.numbers.get(&(wanted.start / PIECE)) {
            return number.filter(|_| range.start <= wanted.start && wanted.end <= range.end);
        }
        let piece = span.around(PIECE)?;
        let has_table =
            *self.table.get_or_insert_with(|| ring.register_buffers_sparse(PIECES as u32).is_ok());
        if !has_table || self.pieces.len() == PIECES {
            return None;
        }
        let number = self.pieces.len() as u16;
        let registered = register(ring, number, &piece).then_some(number);
        self.numbers.insert(wanted.start / PIECE, (addresses(&piece), registered));
        self.pieces.push(piece);
        registered
    }

    /// Releases all memory. No request in the ring may use it.
    pub fn release(&mut self, ring: &Submitter<'_>) {
        if self.table == Some(true) {
            // This can only fail if there is no table, and then nothing is registered.
            let _ = ring.unregister_buffers();
        }
        *self = Self::default();
    }

    /// Returns the number of registered pieces.
    #[cfg(test)]
    pub fn count(&self) -> usize {
        self.numbers.values().filter(|(_, number)| number.is_some()).count()
    }
}

/// Returns the span's addresses in this process.
fn addresses(span: &Span) -> Range<usize> {
    let (base, len) = span.io_vector();
    base.addr()..base.addr() + len
}

fn register(ring: &Submitter<'_>, number: u16, piece: &Span) -> bool {
    let (base, len) = piece.io_vector();
    let vector = libc::iovec { iov_base: base.cast(), iov_len: len };
    // SAFETY: only the kernel follows the address, and pins the pages behind it: requests that name
    // the piece reach those pages and nothing else, whatever is mapped at the address later. The
    // span also keeps the mapping until `release`.
    unsafe { ring.register_buffers_update(number.into(), &[vector], None) }.is_ok()
}
