//! The transfer from one stream into another, with one copy, for an engine between two parties.

use super::regions::Regions;
use super::stream::{Error, Stream};

/// The error of a transfer, by the stream that it came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// An error of the stream that is read.
    From(Error),
    /// An error of the stream that is written.
    Into(Error),
}

impl Stream<'_> {
    /// Copies up to `limit` bytes that can be read here into `into`, whose FIFO may grow up to
    /// `most` bytes out of `regions`. `tells` are called when the other side of this stream, or
    /// that of `into`, is to be woken. Returns the number of bytes, which is 0 if there is nothing
    /// to read ([`Stream::available`]) or no room.
    ///
    /// # Errors
    /// [`Fault`]; nothing was copied then.
    pub fn transfer(
        &self,
        into: &Self,
        limit: usize,
        most: usize,
        regions: Regions<'_>,
        tells: (impl FnMut(), impl FnMut()),
    ) -> Result<usize, Fault> {
        let (mut tell_from, mut tell_into) = tells;
        let (known, _) = self.available().map_err(Fault::From)?;
        if known == 0 {
            return Ok(0);
        }
        let from = self.readable().map_err(Fault::From)?;
        let wanted = known.min(limit);
        let to = into.writable(wanted, most, regions).map_err(Fault::Into)?;
        let room = to[0].1 + to[1].1;
        let count = wanted.min(room);
        let mut done = 0;
        while done < count {
            let ((source, readable), (target, writable)) = (part(&from, done), part(&to, done));
            let piece = readable.min(writable).min(count - done);
            // SAFETY: `readable` and `writable` checked that the stretches lie within their arenas,
            // which are mapped as long as the streams, and `part` stays within them. Two arenas, or
            // areas of one that two sides write, do not overlap in this process's addresses; where
            // two mappings are of the same memory, a party that made it so finds any mix of bytes.
            unsafe { std::ptr::copy(source, target, piece) };
            done += piece;
        }
        if done > 0 {
            if into.out.publish(done as u64) {
                tell_into();
            }
            if self.into.release(done as u64) {
                tell_from();
            }
        }
        Ok(done)
    }
}

/// Returns the rest of two stretches behind their first `done` bytes, up to the end of the stretch
/// that the rest begins in.
fn part<P: Copy + Advance>(stretches: &[(P, usize); 2], done: usize) -> (P, usize) {
    let [(first, held), (second, more)] = *stretches;
    if done < held {
        (first.advance(done), held - done)
    } else {
        (second.advance(done - held), more.saturating_sub(done - held))
    }
}

trait Advance {
    fn advance(self, by: usize) -> Self;
}

impl Advance for *const u8 {
    fn advance(self, by: usize) -> Self {
        self.wrapping_add(by)
    }
}

impl Advance for *mut u8 {
    fn advance(self, by: usize) -> Self {
        self.wrapping_add(by)
    }
}
