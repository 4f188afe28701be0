//! Guest memory that a ring has registered: its pages are found and pinned once, not for each request.
//!
//! In pieces, each when a request is the first to touch it: what nothing is read into or written from
//! stays what it is. A piece stays registered until memory is to be let go of ([`Pinned::release`]),
//! and keeps its mapping: as long as its address is known here, no other memory comes to be there.

use std::collections::HashMap;
use std::ops::Range;

use io_uring::Submitter;
use slipway_ram::Span;

/// Bytes of a piece, and what its address is a multiple of.
const PIECE: usize = 2 << 20;
/// Most pieces that a ring has: 16 GiB.
const PIECES: usize = 8192;

/// What a ring has registered.
#[derive(Default)]
pub(super) struct Pinned {
    /// Pieces by where they are, in units of [`PIECE`]: the addresses that a piece has of its unit, and its
    /// number in the ring's table; None for what the kernel refuses, as memory that cannot be written to.
    /// Of two mappings in a unit the first to be used has it.
    numbers: HashMap<usize, (Range<usize>, Option<u16>)>,
    /// All of them.
    pieces: Vec<Span>,
    /// The ring has a table, or the kernel refused that: no memory, or a limit.
    table: Option<bool>,
}

impl Pinned {
    /// The number under which the ring has the piece that `span` is in; registers it if need be. None:
    /// the request has to go without.
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

    /// Lets go of all memory. The ring has no request that uses it.
    pub fn release(&mut self, ring: &Submitter<'_>) {
        if self.table == Some(true) {
            // Without a table there is nothing to let go of.
            let _ = ring.unregister_buffers();
        }
        *self = Self::default();
    }

    /// Pieces that are registered.
    #[cfg(test)]
    pub fn count(&self) -> usize {
        self.numbers.values().filter(|(_, number)| number.is_some()).count()
    }
}

/// Where it is in this process.
fn addresses(span: &Span) -> Range<usize> {
    let (base, len) = span.io_vector();
    base.addr()..base.addr() + len
}

fn register(ring: &Submitter<'_>, number: u16, piece: &Span) -> bool {
    let (base, len) = piece.io_vector();
    let vector = libc::iovec { iov_base: base.cast(), iov_len: len };
    // SAFETY: only the kernel follows the address, and pins the pages behind it: requests that name the
    // piece reach those and nothing else, whatever comes to be at the address. The span keeps the mapping
    // until `release` anyhow.
    unsafe { ring.register_buffers_update(number.into(), &[vector], None) }.is_ok()
}
