//! Moving the bytes of one side of a connection.

use std::sync::atomic::{AtomicU64, Ordering};

use rustix::io::Errno;
use slipway_ring::cross::{Error, Regions};
use slipway_sgiov_spec::table::entry;

use super::{Endpoint, Half, LARGEST_FIFO, option};

/// The most bytes of a FIFO for which the program has not set a size.
const MOST: usize = 1 << 20;

/// One in this many calls that can do nothing checks whether the connection was reset.
const FRUITLESS: u32 = 64;

/// Adds to a counter of bytes.
#[inline]
fn add(word: &AtomicU64, count: usize) {
    // Only the holder of the half's lock writes this word.
    word.store(word.load(Ordering::Relaxed).wrapping_add(count as u64), Ordering::Relaxed);
}

impl Endpoint {
    /// Copies as many bytes into the FIFO as there is room for. Returns their number.
    ///
    /// # Errors
    /// `EAGAIN`: there is no room. `EPIPE`: the peer reads no more, or this side has shut its
    /// sending half. `ECONNRESET`, once after a reset; then `EPIPE`. `ENOBUFS`: there is no memory
    /// for a FIFO.
    #[inline]
    pub fn send(&self, from: &[u8]) -> Result<usize, Errno> {
        let _held = self.lock(Half::Sending)?;
        if self.family.is_dead() {
            return Err(self.reset_by(Errno::PIPE));
        }
        let words = self.words();
        let sent = self.stream().write(from, self.most(), self.regions(), || self.tell());
        match sent {
            Ok(0) if !from.is_empty() && self.seems_reset() => Err(self.reset_by(Errno::PIPE)),
            Ok(0) if !from.is_empty() => Err(Errno::AGAIN),
            Ok(count) => {
                add(&words[entry::SENT], count);
                Ok(count)
            }
            Err(Error::Shut) => Err(Errno::PIPE),
            Err(Error::NoMemory) => Err(Errno::NOBUFS),
            Err(Error::Reset | Error::Spoiled) => Err(self.reset_by(Errno::PIPE)),
        }
    }

    /// Reads bytes that have arrived. Returns their number, or 0 at the end of the stream.
    ///
    /// # Errors
    /// `EAGAIN`: there is nothing yet. `ECONNRESET`, once after a reset; then the call returns 0.
    #[inline]
    pub fn recv(&self, into: &mut [u8]) -> Result<usize, Errno> {
        let _held = self.lock(Half::Receiving)?;
        let words = self.words();
        match self.stream().read(into, || self.tell()) {
            Ok(0) if !into.is_empty() => self.why_nothing(),
            Ok(count) => {
                add(&words[entry::RECEIVED], count);
                Ok(count)
            }
            Err(_) => self.end_or_reset(),
        }
    }

    /// Reads as [`Endpoint::recv`] does, but leaves the bytes in the FIFO.
    ///
    /// # Errors
    /// The errors of [`Endpoint::recv`].
    pub fn peek(&self, into: &mut [u8]) -> Result<usize, Errno> {
        let _held = self.lock(Half::Receiving)?;
        match self.stream().peek(0, into) {
            Ok(0) if !into.is_empty() => self.why_nothing(),
            Ok(count) => Ok(count),
            Err(_) => self.end_or_reset(),
        }
    }

    /// Copies bytes that have arrived behind the first `skip`, and leaves all of them in the FIFO,
    /// for a caller that has peeked at those `skip`. Returns the number of bytes that were copied.
    pub fn peek_behind(&self, skip: usize, into: &mut [u8]) -> usize {
        let Ok(_held) = self.lock(Half::Receiving) else { return 0 };
        self.stream().peek(skip, into).unwrap_or(0)
    }

    /// Returns the result of a call that found no bytes: 0 at the end of the stream, or the error.
    fn why_nothing(&self) -> Result<usize, Errno> {
        match self.stream().available() {
            Ok((_, true)) => Ok(0),
            _ if self.has(option::NO_MORE) => Ok(0),
            Ok(_) if self.seems_reset() => self.end_or_reset(),
            Ok(_) => Err(Errno::AGAIN),
            Err(_) => self.end_or_reset(),
        }
    }

    /// Returns the error of a reset if the program was not told of it, and else 0.
    fn end_or_reset(&self) -> Result<usize, Errno> {
        match self.reset_by(Errno::PIPE) {
            Errno::PIPE => Ok(0),
            errno => Err(errno),
        }
    }

    /// Has an empty FIFO grow for `wanted` bytes that several calls of [`Endpoint::send`] will
    /// bring, as it grows for one call of so many. The next send returns any error.
    pub fn expect(&self, wanted: usize) {
        if let Ok(_held) = self.lock(Half::Sending) {
            let _ = self.stream().expect(wanted, self.most(), self.regions());
        }
    }

    /// Returns the most bytes that the sending FIFO grows to.
    #[inline]
    fn most(&self) -> usize {
        let asked = self.option(option::BUFFERS).load(Ordering::Relaxed) >> 32;
        if asked == 0 {
            MOST
        } else {
            (asked as usize).next_power_of_two().clamp(4096, LARGEST_FIFO)
        }
    }

    /// Returns the regions of the arena out of which the sending FIFO grows.
    fn regions(&self) -> Regions<'_> {
        let bits = self.family.table().regions(usize::from(self.place.link));
        Regions::new(bits, self.arena.shape())
    }

    /// Returns whether a call that could do nothing ends the connection. A peer that spoils the
    /// words of one direction alone resets the connection for poll(2), which looks at both
    /// directions, and a program would call the other direction's function again and again. Looking
    /// at both takes a cache line from the peer's processor, so only some calls do.
    fn seems_reset(&self) -> bool {
        let calls = self.fruitless.load(Ordering::Relaxed).wrapping_add(1);
        self.fruitless.store(calls, Ordering::Relaxed);
        self.family.is_dead() || (calls.is_multiple_of(FRUITLESS) && self.is_reset())
    }
}
