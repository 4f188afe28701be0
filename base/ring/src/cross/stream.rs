//! One stream of an arena: reading and writing.

use std::sync::atomic::AtomicU64;

use super::arena::{Arena, Side};
use super::index::{Own, Receiving, Region, Sending, Spoiled, Tail};
use super::regions::Regions;

/// The number of bytes after which a long copy publishes its progress, so that the other side
/// copies at the same time.
const STRIDE: usize = 32 << 10;

/// The reason why nothing can be written or read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The other side reads no more.
    #[error("the other side reads no more")]
    Shut,
    /// The stream was reset.
    #[error("the stream was broken off")]
    Reset,
    /// The other side's words are invalid.
    #[error("the other side of the stream moved a counter where it cannot be")]
    Spoiled,
    /// There is no memory for the bytes to be written. A retry may succeed.
    #[error("there is no memory for the FIFO")]
    NoMemory,
}

impl From<Spoiled> for Error {
    fn from(_: Spoiled) -> Self {
        Self::Spoiled
    }
}

/// One side of a stream. It may be made for a call or kept: its state is in the words that it
/// refers to. Each direction is used by one thread at a time; the two directions are independent.
///
/// The FIFO of a direction grows and moves only while it is empty. A writer that has filled a FIFO
/// which is smaller than it may be *pinches* it: it writes nothing until the other side has read
/// all, and then takes a larger region.
pub struct Stream<'a> {
    arena: &'a Arena,
    number: u32,
    side: Side,
    /// The half that this side writes.
    pub out: Sending<'a>,
    /// The half that this side reads.
    pub into: Receiving<'a>,
}

impl<'a> Stream<'a> {
    /// Returns side `side` of stream `number`. `out` and `into` are its private words of the two
    /// directions, zeros in the beginning.
    ///
    /// # Panics
    /// If the arena has no such stream: a programmer's error.
    #[inline]
    pub fn new(arena: &'a Arena, number: u32, side: Side, out: Own<'a>, into: Own<'a>) -> Self {
        let (mine, theirs) = (arena.inbox(number, side), arena.inbox(number, side.other()));
        let (pages, across_machines) = (arena.shape().pages, arena.is_across_machines());
        Self {
            arena,
            number,
            side,
            out: Sending { mine, theirs, state: out, across_machines },
            into: Receiving { mine, theirs, state: into, pages, across_machines },
        }
    }

    /// Returns the number of bytes that [`Stream::write`] would take now: the room in the region in
    /// use, or in the region that it would begin with.
    ///
    /// # Errors
    /// [`Error`].
    pub fn space(&self) -> Result<usize, Error> {
        self.check_open()?;
        let used = self.out.refresh()?;
        let size = self.out.tail().region().unwrap_or_else(|| Regions::own(self.number)).len();
        let waits = used > 0 && self.out.is_pinched();
        Ok(if waits { 0 } else { size.saturating_sub(used as usize) })
    }

    /// Asks to be woken when there is space again: half of the region, or all of one that is to
    /// grow. Returns `true` if there is space already or never will be; the other side may not wake
    /// this one then.
    ///
    /// # Errors
    /// [`Error::Spoiled`].
    pub fn arm_space(&self) -> Result<bool, Error> {
        Ok(self.out.arm(self.wake_level())?)
    }

    /// Does the first part of [`Stream::arm_space`]: [`heavy`](super::heavy), which serves any
    /// number of streams, and [`Stream::is_space_there`] must follow.
    pub fn wish_space(&self) {
        self.out.wish(self.wake_level());
    }

    /// Does the last part of [`Stream::arm_space`], and returns its result.
    ///
    /// # Errors
    /// [`Error::Spoiled`].
    pub fn is_space_there(&self) -> Result<bool, Error> {
        Ok(self.out.is_wish_fulfilled(self.wake_level())?)
    }

    /// Returns the number of unread bytes at which a writer that waits for space is woken.
    fn wake_level(&self) -> u64 {
        if self.out.is_pinched() { 0 } else { self.out.tail().size() / 2 }
    }

    /// Asks to be woken when `least` bytes can be read, at most the size of the region. Returns
    /// `true` if they can be read already or no more will come; the other side may not wake this
    /// one then.
    ///
    /// # Errors
    /// [`Error::Spoiled`].
    pub fn arm_data(&self, least: usize) -> Result<bool, Error> {
        Ok(self.into.arm(least as u64)?)
    }

    /// Does the first part of [`Stream::arm_data`]: [`heavy`](super::heavy), which serves any
    /// number of streams, and [`Stream::is_data_there`] must follow.
    pub fn wish_data(&self, least: usize) {
        self.into.wish(least as u64);
    }

    /// Does the last part of [`Stream::arm_data`], and returns its result.
    ///
    /// # Errors
    /// [`Error::Spoiled`].
    pub fn is_data_there(&self, least: usize) -> Result<bool, Error> {
        Ok(self.into.is_wish_fulfilled(least as u64)?)
    }

    /// Checks that this side may write.
    ///
    /// # Errors
    /// [`Error::Reset`], [`Error::Shut`].
    fn check_open(&self) -> Result<(), Error> {
        if self.out.tail().is_reset() || self.out.is_reset() {
            Err(Error::Reset)
        } else if self.out.tail().is_end() || self.out.is_shut() {
            Err(Error::Shut)
        } else {
            Ok(())
        }
    }

    /// Makes room for `wanted` bytes that several writes will bring: an empty FIFO grows for them
    /// as for one write of so many, up to `most` bytes, out of `regions`.
    ///
    /// # Errors
    /// [`Error`].
    pub fn expect(&self, wanted: usize, most: usize, regions: Regions<'_>) -> Result<(), Error> {
        self.check_open()?;
        let used = self.out.refresh()?;
        if self.out.tail().size() - used < wanted as u64 {
            self.fit(used, wanted, most, regions);
        }
        Ok(())
    }

    /// Writes as many bytes as there is room for, from all pieces of `from` in turn. An empty FIFO
    /// grows for it, up to `most` bytes, out of `regions`. `tell` is called when the other side is
    /// to be woken, possibly more than once.
    ///
    /// # Errors
    /// [`Error`]; nothing was written then.
    pub fn write(
        &self,
        from: &[u8],
        most: usize,
        regions: Regions<'_>,
        mut tell: impl FnMut(),
    ) -> Result<usize, Error> {
        self.check_open()?;
        let mut done = 0;
        while done < from.len() {
            match self.write_some(&from[done..], most, regions, &mut tell) {
                Ok(0) => break,
                // Bytes were written already: the error shows at the next call.
                Err(_) if done > 0 => break,
                Ok(count) => done += count,
                Err(error) => return Err(error),
            }
        }
        Ok(done)
    }

    /// Writes up to [`STRIDE`] bytes, up to the region's end. Returns their number; 0 if the FIFO
    /// has no room.
    ///
    /// # Errors
    /// [`Error::Spoiled`], [`Error::NoMemory`]; nothing was written then.
    fn write_some(
        &self,
        from: &[u8],
        most: usize,
        regions: Regions<'_>,
        tell: &mut impl FnMut(),
    ) -> Result<usize, Error> {
        let mut used = self.out.used();
        let wanted = from.len().min(STRIDE) as u64;
        if self.out.tail().size() - used < wanted || self.out.is_pinched() {
            used = self.out.refresh()?;
            self.fit(used, from.len(), most, regions);
        }
        let tail = self.out.tail();
        let region = tail.region().ok_or(Error::NoMemory)?;
        let at = tail.position() as usize & (region.len() - 1);
        let room = if self.out.is_pinched() { 0 } else { region.len() - used as usize };
        let count = room.min(region.len() - at).min(from.len()).min(STRIDE);
        if count > 0 {
            let to = self.arena.address(self.side, region).wrapping_add(at);
            // SAFETY: `address` checked the region, `at + count` lies within it, and the arena,
            // whose file is sealed against shrinking, is mapped for as long as `self`. A peer that
            // writes there as well spoils bytes of its own stream.
            unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to, count) };
            if self.out.publish(count as u64) {
                tell();
            }
        }
        Ok(count)
    }

    /// Gives the FIFO a larger region if its own is too small for the bytes to be written: at once
    /// if the FIFO is empty, else once it has been drained. Until then nothing is written to a full
    /// FIFO that is smaller than it may be.
    ///
    /// A FIFO gets no larger region than it needs: a FIFO goes through all of its region in turn,
    /// and with thousands of streams the capacity of the caches decides how fast all of them are.
    fn fit(&self, used: u64, wanted: usize, most: usize, regions: Regions<'_>) {
        let size = self.out.tail().size();
        if used == 0 {
            let pinched = if self.out.is_pinched() { size as usize * 2 } else { 0 };
            self.grow(wanted.max(pinched).min(most), regions);
            self.out.pinch(false);
        } else if used == size && (size as usize) < most {
            self.out.pinch(true);
        }
    }

    /// Moves an empty FIFO to a region of at least `target` bytes, if it has a smaller one and
    /// `regions` has one left. A FIFO without a region gets at least the stream's own page.
    #[cold]
    fn grow(&self, target: usize, regions: Regions<'_>) {
        let now = self.out.tail().region();
        if now.is_some_and(|region| region.len() >= target) {
            return;
        }
        let own = Regions::own(self.number);
        let larger = || regions.take(target, now);
        let new = if now.is_none() && target <= own.len() { Some(own) } else { larger() };
        let Some(new) = new.or(now.is_none().then_some(own)) else { return };
        // If there is no memory for the region, there may be some for a page.
        if !self.move_to(new, now, regions) && now.is_none() && new != own {
            self.move_to(own, now, regions);
        }
    }

    /// Moves the FIFO to region `new`. Returns `false` if there is no memory for it.
    fn move_to(&self, new: Region, now: Option<Region>, regions: Regions<'_>) -> bool {
        if self.arena.reserve(self.side, new).is_err() {
            regions.give(new);
            return false;
        }
        if self.out.place(Some(new))
            && let Some(old) = now
        {
            regions.give(old);
        }
        true
    }

    /// Returns the number of bytes that can be read; 0 with `true` if no more will come. If some
    /// are known already, it does not look for more.
    ///
    /// # Errors
    /// [`Error`]. [`Error::Reset`] comes after all bytes before the reset were read.
    pub fn available(&self) -> Result<(usize, bool), Error> {
        let known = self.into.known();
        let count = if known > 0 { known } else { self.into.refresh()? } as usize;
        let tail = self.into.tail();
        match count {
            0 if tail.is_reset() => Err(Error::Reset),
            _ => Ok((count, tail.is_end())),
        }
    }

    /// Copies bytes that can be read, from `skip` bytes on, and leaves them in the stream.
    ///
    /// # Errors
    /// As for [`Stream::available`].
    pub fn peek(&self, skip: usize, into: &mut [u8]) -> Result<usize, Error> {
        let (known, _) = self.available()?;
        if known < skip + into.len() {
            self.into.refresh()?;
        }
        let count = (self.into.known() as usize).saturating_sub(skip).min(into.len());
        self.copy_out(skip, &mut into[..count]);
        Ok(count)
    }

    /// Reads bytes. `tell` is called when the other side is to be woken. Returns 0 as
    /// [`Stream::available`] does.
    ///
    /// # Errors
    /// As for [`Stream::available`].
    pub fn read(&self, into: &mut [u8], mut tell: impl FnMut()) -> Result<usize, Error> {
        let mut done = 0;
        while done < into.len() {
            let piece = (into.len() - done).min(STRIDE);
            let count = if done == 0 {
                self.peek(0, &mut into[..piece])?
            } else {
                // Bytes were read already: the error shows at the next call.
                self.peek(0, &mut into[done..done + piece]).unwrap_or(0)
            };
            if count == 0 {
                break;
            }
            done += count;
            if self.into.release(count as u64) {
                tell();
            }
        }
        Ok(done)
    }

    /// Copies bytes that are known to be there, from `skip` bytes behind the head on.
    fn copy_out(&self, skip: usize, into: &mut [u8]) {
        let Some(region) = self.into.tail().region() else { return };
        let from = self.arena.address(self.side.other(), region);
        let mask = region.len() - 1;
        let at = (self.into.position() as usize).wrapping_add(skip) & mask;
        let first = into.len().min(region.len() - at);
        let (begin, rest) = into.split_at_mut(first);
        // SAFETY: as in `write_some`; a region of the other side was checked by
        // `Receiving::refresh`, and again by `address`; `into` is no longer than the region, as
        // `known` is not.
        unsafe {
            std::ptr::copy_nonoverlapping(from.wrapping_add(at), begin.as_mut_ptr(), begin.len());
            std::ptr::copy_nonoverlapping(from, rest.as_mut_ptr(), rest.len());
        }
    }

    /// Returns the one or two stretches of memory that hold the next bytes to read, as `(address,
    /// length)`, for an engine that works on them in place and releases them with `into.release`.
    /// The other side may change the bytes.
    ///
    /// # Errors
    /// As for [`Stream::available`].
    pub fn readable(&self) -> Result<[(*const u8, usize); 2], Error> {
        self.available()?;
        let tail: Tail = self.into.tail();
        let Some(region) = tail.region() else { return Ok([(std::ptr::null(), 0); 2]) };
        let from = self.arena.address(self.side.other(), region).cast_const();
        let at = self.into.position() as usize & (region.len() - 1);
        let known = self.into.known() as usize;
        let first = known.min(region.len() - at);
        Ok([(from.wrapping_add(at), first), (from, known - first)])
    }

    /// Returns the one or two stretches of memory that the next bytes go to, after making room in
    /// the FIFO for `wanted` bytes, up to `most`, if possible. The caller publishes the bytes with
    /// `out.publish`.
    ///
    /// # Errors
    /// [`Error`].
    pub fn writable(
        &self,
        wanted: usize,
        most: usize,
        regions: Regions<'_>,
    ) -> Result<[(*mut u8, usize); 2], Error> {
        self.check_open()?;
        let used = self.out.refresh()?;
        if self.out.tail().size() - used < wanted as u64 || self.out.is_pinched() {
            self.fit(used, wanted, most, regions);
        }
        let tail = self.out.tail();
        let Some(region) = tail.region() else { return Ok([(std::ptr::null_mut(), 0); 2]) };
        let to = self.arena.address(self.side, region);
        let at = tail.position() as usize & (region.len() - 1);
        let room = if self.out.is_pinched() { 0 } else { region.len() - used as usize };
        let first = room.min(region.len() - at);
        Ok([(to.wrapping_add(at), first), (to, room - first)])
    }

    /// Prefetches the next bytes to read, at most `bytes`, as far as they are contiguous. For a
    /// caller that has just seen that there are some, and will read them soon. The other side's
    /// words are used for the address of the prefetch only, which needs no check.
    #[inline]
    pub fn fetch_data(&self, bytes: usize) {
        if let Some((at, room)) = self.next_data() {
            super::fetch(at, bytes.min(room));
        }
    }

    /// Returns the address of the next bytes to read, according to the other side, and the number
    /// of bytes up to the end of the region. For [`fetch`](super::fetch) only.
    #[inline]
    pub fn next_data(&self) -> Option<(*const u8, usize)> {
        let tail = Tail(self.into.mine.tail.load(std::sync::atomic::Ordering::Relaxed));
        let region = tail.region().filter(|region| self.into.fits(*region))?;
        let at = self.into.position() as usize & (region.len() - 1);
        let from = self.arena.address(self.side.other(), region);
        Some((from.wrapping_add(at).cast_const(), region.len() - at))
    }

    /// Returns the address to which the next bytes would be written, if the FIFO is not moved
    /// before. For [`fetch_to_write`](super::fetch_to_write) only; null if there is no region.
    #[inline]
    pub fn next_room(&self) -> *const u8 {
        let tail = self.out.tail();
        let region = tail.region().filter(|region| self.into.fits(*region));
        region.map_or(std::ptr::null(), |region| {
            let at = tail.position() as usize & (region.len() - 1);
            self.arena.address(self.side, region).wrapping_add(at).cast_const()
        })
    }

    /// Takes an empty FIFO's region from it. Returns `None` if the FIFO is not empty or has no
    /// region. The next write takes a new one, which may be the stream's own page again. The caller
    /// releases the region's pages ([`Arena::punch`]), and then the region ([`Regions::give`]).
    pub fn untie(&self) -> Option<Region> {
        let region = self.out.tail().region()?;
        (self.out.refresh() == Ok(0) && self.out.place(None)).then_some(region)
    }

    /// Releases an empty FIFO's region, for the writer of the stream. The stream's own page stays,
    /// since a write may go into it before its pages are released. `bits` are those of [`Regions`].
    /// Returns `false` if there is no such region.
    pub fn trim<B: AsRef<[AtomicU64]> + Send + 'static>(&self, bits: B) -> bool {
        if self.out.tail().region().is_none_or(|region| region == Regions::own(self.number)) {
            return false;
        }
        let Some(region) = self.untie() else { return false };
        let shape = self.arena.shape();
        self.arena
            .punch(self.side, region, move || Regions::new(bits.as_ref(), shape).give(region));
        true
    }
}
