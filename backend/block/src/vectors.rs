//! I/O vectors for the kernel: raw addresses of spans and buffers.

use slipway_ram::{Fault, Span};

/// The largest number of vectors in one call (`UIO_MAXIOV`). A request with more continues as after
/// a short transfer.
const MAX_VECTORS: usize = 1024;

/// The I/O vectors of one submission: raw addresses that only the kernel follows.
#[derive(Default)]
pub(crate) struct IoVectors(Vec<libc::iovec>);

// SAFETY: the addresses are not followed here; the spans and buffers behind them are `Send`.
unsafe impl Send for IoVectors {}

impl IoVectors {
    /// Removes all vectors and keeps the capacity.
    pub fn clear(&mut self) {
        self.0.clear();
    }

    /// Appends one vector. The memory must stay valid until the kernel has answered.
    pub fn push(&mut self, (base, len): (*mut u8, usize)) {
        self.0.push(libc::iovec { iov_base: base.cast(), iov_len: len });
    }

    pub fn as_slice(&self) -> &[libc::iovec] {
        &self.0
    }

    /// Returns whether there are as many vectors as one call takes.
    pub fn is_full(&self) -> bool {
        self.0.len() == MAX_VECTORS
    }

    /// Appends `bytes` bytes by repeating `buffer`, as far as one call takes the vectors. Returns
    /// the number of bytes.
    pub fn repeat(&mut self, buffer: &mut [u8], bytes: u64) -> u64 {
        let mut left = bytes;
        while left > 0 && !self.is_full() {
            let part = left.min(buffer.len() as u64);
            self.push((buffer.as_mut_ptr(), part as usize));
            left -= part;
        }
        bytes - left
    }
}

/// Appends the vectors of up to `most` bytes of the spans from byte `skip` on, as far as one call
/// takes them. Returns the number of bytes.
pub(crate) fn gather(spans: &[Span], mut skip: u64, most: u64, vectors: &mut IoVectors) -> u64 {
    let mut left = most;
    for span in spans {
        let (base, len) = span.io_vector();
        if skip >= len as u64 {
            skip -= len as u64;
            continue;
        }
        if left == 0 || vectors.is_full() {
            break;
        }
        // `skip` lies within the span, so the address does.
        let part = (len as u64 - skip).min(left);
        vectors.push((base.wrapping_add(skip as usize), part as usize));
        left -= part;
        skip = 0;
    }
    most - left
}

/// Copies bytes of the spans, from byte `skip` on, to all of `into`.
///
/// # Errors
/// If the spans' memory is gone.
pub(crate) fn copy_in(spans: &[Span], skip: u64, into: &mut [u8]) -> Result<(), Fault> {
    for_pieces(spans, skip, into.len(), |span, offset, at, len| {
        span.read(offset, &mut into[at..at + len])
    })
}

/// Copies all of `from` to the spans, from byte `skip` on.
///
/// # Errors
/// If the spans' memory is gone.
pub(crate) fn copy_out(spans: &[Span], skip: u64, from: &[u8]) -> Result<(), Fault> {
    for_pieces(spans, skip, from.len(), |span, offset, at, len| {
        span.write(offset, &from[at..at + len])
    })
}

/// Visits `len` bytes of the spans from byte `skip` on. `visit` gets the span, the offset in it,
/// the offset in the `len` bytes, and the length.
fn for_pieces(
    spans: &[Span],
    mut skip: u64,
    len: usize,
    mut visit: impl FnMut(&Span, usize, usize, usize) -> Result<(), Fault>,
) -> Result<(), Fault> {
    let mut at = 0;
    for span in spans {
        if skip >= span.len() as u64 {
            skip -= span.len() as u64;
            continue;
        }
        let piece = (span.len() - skip as usize).min(len - at);
        visit(span, skip as usize, at, piece)?;
        at += piece;
        skip = 0;
        if at == len {
            break;
        }
    }
    Ok(())
}
