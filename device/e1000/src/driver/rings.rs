//! The driver's rings.

use slipway_e1000_spec::{
    Context, DESCRIPTOR, Data, Legacy, Receive, Transmit, command, receive_status,
};
use slipway_ram::Span;

use super::{BUFFER, DriverError};

/// Buffers by which the memory of frames is prefetched.
const AHEAD: usize = 8;
/// Receive buffers that are given back at once.
pub(super) const REFILL: u32 = 16;

/// Returns the index behind `at` in a ring.
#[inline]
fn after(at: u32, entries: u32) -> u32 {
    if at + 1 == entries { 0 } else { at + 1 }
}

/// Returns the number of steps from one index of a ring to another.
#[inline]
fn steps(from: u32, to: u32, entries: u32) -> u32 {
    if to >= from { to - from } else { to + entries - from }
}

/// The transmit ring, with a buffer for each descriptor.
pub struct Sending {
    ring: Span,
    buffers: Span,
    entries: u32,
    /// The next descriptor to fill, and the first that was not found done.
    next: u32,
    first: u32,
    /// The number of descriptors that were filled since the start.
    filled: u64,
    /// Descriptors between the two that ask for a report, by their places.
    reports: std::collections::VecDeque<u32>,
    /// Bits of the command of every frame's last descriptor.
    last: u8,
}

/// A received frame in one buffer, of which nothing was read yet.
pub struct Unread<'a> {
    buffers: &'a Span,
    at: usize,
    /// The descriptor.
    pub descriptor: Receive,
}

impl Unread<'_> {
    /// Copies the first bytes of the frame, at most 2048. Bytes behind its end are those of earlier
    /// frames.
    ///
    /// # Errors
    /// [`DriverError::Memory`].
    #[inline]
    pub fn read(&self, into: &mut [u8]) -> Result<(), DriverError> {
        if into.len() > BUFFER {
            return Err(DriverError::Memory("a buffer is shorter than that".into()));
        }
        Ok(self.buffers.read(self.at, into)?)
    }
}

/// A received frame.
pub struct Received<'a> {
    /// The frame, without check sequence.
    pub bytes: &'a [u8],
    /// The last descriptor.
    pub descriptor: Receive,
}

impl Sending {
    /// Makes the ring. With `heads`, no frame asks for a report.
    pub(super) fn new((ring, buffers): (Span, Span), entries: u32, heads: bool) -> Self {
        let report = if heads { 0 } else { command::RS };
        let last = command::EOP | command::IFCS | report;
        let reports = Default::default();
        Self { ring, buffers, entries, next: 0, first: 0, filled: 0, reports, last }
    }

    pub(super) fn address(&self) -> u64 {
        self.ring.iova()
    }

    pub(crate) fn restart(&mut self) {
        (self.next, self.first, self.filled) = (0, 0, 0);
        self.reports.clear();
    }

    /// Returns the index behind the last descriptor that was filled.
    pub fn tail(&self) -> u32 {
        self.next
    }

    /// Returns the index of the first descriptor that was not taken back.
    pub fn first(&self) -> u32 {
        self.first
    }

    /// Returns the number of descriptors that are free.
    #[inline]
    pub fn free(&self) -> u32 {
        self.entries - 1 - steps(self.first, self.next, self.entries)
    }

    /// Takes back the descriptors up to the device's head. Returns their number.
    pub(super) fn take_back(&mut self, head: u32) -> Result<u32, DriverError> {
        let count = steps(self.first, head, self.entries);
        if head >= self.entries || count > steps(self.first, self.next, self.entries) {
            return Err(DriverError::Device("its transmit head is not in the ring"));
        }
        self.first = head;
        Ok(count)
    }

    /// Writes a descriptor. Returns `false` if the ring is full.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn push(&mut self, descriptor: &Transmit) -> Result<bool, DriverError> {
        if self.free() == 0 {
            return Ok(false);
        }
        let bits = u128::from_le_bytes(descriptor.bytes());
        self.ring.publish(self.next as usize * DESCRIPTOR, bits)?;
        if descriptor.command() & command::RS != 0 {
            self.reports.push_back(self.next);
        }
        self.next = after(self.next, self.entries);
        self.filled += 1;
        Ok(true)
    }

    /// Returns the number of descriptors that were filled since the start.
    pub(super) fn filled(&self) -> u64 {
        self.filled
    }

    /// Returns how many of those a device with this head has done.
    pub(super) fn done(&self, head: u32) -> u64 {
        match head < self.entries {
            true => self.filled.saturating_sub(steps(head, self.next, self.entries).into()),
            false => 0,
        }
    }

    /// Copies `bytes`, at most 2048, into the buffer of the next descriptor. Returns its address.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn fill(&mut self, bytes: &[u8]) -> Result<u64, DriverError> {
        let at = self.next as usize * BUFFER;
        if bytes.len() > BUFFER {
            return Err(DriverError::Memory("a piece is longer than a buffer".into()));
        }
        self.buffers.prefetch_to_write(at + AHEAD * BUFFER);
        self.buffers.write(at, bytes)?;
        Ok(self.buffers.iova() + at as u64)
    }

    /// Queues a frame in one legacy descriptor with these further bits of its command. Returns
    /// `false` if the ring is full.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn queue(&mut self, frame: &[u8], more: u8) -> Result<bool, DriverError> {
        if self.free() == 0 {
            return Ok(false);
        }
        let address = self.fill(frame)?;
        let command = self.last | more;
        let length = frame.len() as u16;
        self.push(&Transmit::Legacy(Legacy { address, length, command, ..Legacy::default() }))
    }

    /// Queues a context and a frame in data descriptors of `piece` bytes, with these bits of their
    /// commands and options. Returns `false` if the ring has no room.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn queue_offloaded(
        &mut self,
        frame: &[u8],
        piece: usize,
        context: Context,
        (more, options, special): (u8, u8, u16),
    ) -> Result<bool, DriverError> {
        let count = frame.len().div_ceil(piece.max(1));
        if (self.free() as usize) < count + 1 {
            return Ok(false);
        }
        self.push(&Transmit::Context(context))?;
        for (number, part) in frame.chunks(piece.max(1)).enumerate() {
            let last = number + 1 == count;
            let end = if last { command::EOP | command::RS } else { 0 };
            let address = self.fill(part)?;
            self.push(&Transmit::Data(Data {
                address,
                length: part.len() as u32,
                command: command::DEXT | command::IFCS | end | more,
                options,
                special,
            }))?;
        }
        Ok(true)
    }

    /// Takes back the descriptors that are done. Returns the number of reports.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn clean(&mut self) -> Result<u32, DriverError> {
        let mut count = 0;
        while let Some(&at) = self.reports.front() {
            let mut bytes = [0; DESCRIPTOR];
            self.ring.read(at as usize * DESCRIPTOR, &mut bytes)?;
            if !Transmit::is_done(&bytes) {
                break;
            }
            self.reports.pop_front();
            self.first = after(at, self.entries);
            count += 1;
        }
        Ok(count)
    }
}

/// The receive ring, with a buffer for each descriptor.
pub struct Receiving {
    ring: Span,
    buffers: Span,
    entries: u32,
    /// The next descriptor to look at.
    next: u32,
    /// Descriptors that were used and not given back.
    used: u32,
    /// Frames are found by the device's head, not by their descriptors' status.
    heads: bool,
    frame: Vec<u8>,
}

impl Receiving {
    pub(super) fn new((ring, buffers): (Span, Span), entries: u32, heads: bool) -> Self {
        Self { ring, buffers, entries, next: 0, used: 0, heads, frame: Vec::new() }
    }

    pub(super) fn address(&self) -> u64 {
        self.ring.iova()
    }

    /// Gives all buffers to the device. Returns the tail.
    pub(super) fn fill(&mut self) -> Result<u32, DriverError> {
        (self.next, self.used) = (0, 0);
        for at in 0..self.entries {
            self.renew(at)?;
        }
        Ok(self.entries - 1)
    }

    fn renew(&mut self, at: u32) -> Result<(), DriverError> {
        let address = self.buffers.iova() + u64::from(at) * BUFFER as u64;
        let descriptor = Receive { address, ..Receive::default() };
        Ok(self.ring.publish(at as usize * DESCRIPTOR, descriptor.bits())?)
    }

    /// Returns the number of descriptors that were used and not given back.
    pub(super) fn used(&self) -> u32 {
        self.used
    }

    /// Gives used buffers back. Returns the new tail. Descriptors whose status nobody looks at need
    /// not be written anew: each keeps its buffer.
    pub(super) fn give_back(&mut self) -> Result<u32, DriverError> {
        if !self.heads {
            let mut at = steps(self.used, self.next, self.entries);
            for _ in 0..self.used {
                self.renew(at)?;
                at = after(at, self.entries);
            }
        }
        self.used = 0;
        Ok(steps(1, self.next, self.entries))
    }

    /// Returns the number of descriptors up to the device's head that were not looked at.
    pub(super) fn arrived(&self, head: u32) -> Result<usize, DriverError> {
        if head >= self.entries {
            return Err(DriverError::Device("its receive head is not in the ring"));
        }
        Ok(steps(self.next, head, self.entries) as usize)
    }

    /// Passes the next frame to `take`, unread. Returns `false` if none has come. With heads, the
    /// caller knows that one has.
    #[inline]
    pub(super) fn next_unread(
        &mut self,
        take: &mut impl FnMut(Unread<'_>) -> Result<(), DriverError>,
    ) -> Result<bool, DriverError> {
        let offset = self.next as usize * DESCRIPTOR;
        // The status first, with acquire ordering: the device writes it last.
        let is_done = |word: u32| self.heads || word & u32::from(receive_status::DD) != 0;
        if self.used >= self.entries - 1 || !is_done(self.ring.load_u32(offset + DESCRIPTOR - 4)?) {
            return Ok(false);
        }
        let mut bytes = [0; DESCRIPTOR];
        self.ring.read(offset, &mut bytes)?;
        let descriptor = Receive::read(&bytes);
        if descriptor.status & receive_status::EOP == 0 {
            return Err(DriverError::Device("a frame is in several buffers"));
        }
        self.buffers.prefetch((self.next as usize + AHEAD) * BUFFER);
        take(Unread { buffers: &self.buffers, at: self.next as usize * BUFFER, descriptor })?;
        (self.next, self.used) = (after(self.next, self.entries), self.used + 1);
        Ok(true)
    }

    /// Passes the next frame to `take`. Returns `false` if none has come.
    pub(super) fn next(
        &mut self,
        take: &mut impl FnMut(Received<'_>),
    ) -> Result<bool, DriverError> {
        self.frame.clear();
        let (mut at, mut count) = (self.next, 0);
        loop {
            let offset = at as usize * DESCRIPTOR;
            // The status first, with acquire ordering: the device writes it last.
            if self.used + count >= self.entries - 1
                || self.ring.load_u32(offset + DESCRIPTOR - 4)? & u32::from(receive_status::DD) == 0
            {
                return Ok(false);
            }
            let mut bytes = [0; DESCRIPTOR];
            self.ring.read(offset, &mut bytes)?;
            let descriptor = Receive::read(&bytes);
            let (from, len) = (self.frame.len(), usize::from(descriptor.length));
            self.frame.resize(from + len.min(BUFFER), 0);
            self.buffers.read(at as usize * BUFFER, &mut self.frame[from..])?;
            (at, count) = (after(at, self.entries), count + 1);
            if descriptor.status & receive_status::EOP != 0 {
                let len = self.frame.len().saturating_sub(slipway_e1000_spec::FCS);
                take(Received { bytes: &self.frame[..len], descriptor });
                (self.next, self.used) = (at, self.used + count);
                return Ok(true);
            }
        }
    }
}
