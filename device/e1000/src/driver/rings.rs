//! The driver's rings.

use slipway_e1000_spec::{
    Context, DESCRIPTOR, Data, Legacy, Receive, Transmit, command, receive_status,
};
use slipway_ram::Span;

use super::{BUFFER, DriverError};

/// Receive buffers that are given back at once.
pub(super) const REFILL: u32 = 16;

/// The transmit ring, with a buffer for each descriptor.
pub struct Sending {
    ring: Span,
    buffers: Span,
    entries: u32,
    /// The next descriptor to fill, and the first that was not found done.
    next: u32,
    first: u32,
    /// Descriptors between the two that ask for a report, by their places.
    reports: std::collections::VecDeque<u32>,
}

/// A received frame.
pub struct Received<'a> {
    /// The frame, without check sequence.
    pub bytes: &'a [u8],
    /// The last descriptor.
    pub descriptor: Receive,
}

impl Sending {
    pub(super) fn new(ring: Span, buffers: Span, entries: u32) -> Self {
        Self { ring, buffers, entries, next: 0, first: 0, reports: Default::default() }
    }

    pub(super) fn address(&self) -> u64 {
        self.ring.iova()
    }

    pub(crate) fn restart(&mut self) {
        (self.next, self.first) = (0, 0);
        self.reports.clear();
    }

    /// Returns the index behind the last descriptor that was filled.
    pub fn tail(&self) -> u32 {
        self.next
    }

    /// Returns the number of descriptors that are free.
    pub fn free(&self) -> u32 {
        let used = (self.next + self.entries - self.first) % self.entries;
        self.entries - 1 - used
    }

    /// Writes a descriptor. Returns `false` if the ring is full.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn push(&mut self, descriptor: &Transmit) -> Result<bool, DriverError> {
        if self.free() == 0 {
            return Ok(false);
        }
        self.ring.write(self.next as usize * DESCRIPTOR, &descriptor.bytes())?;
        if descriptor.command() & command::RS != 0 {
            self.reports.push_back(self.next);
        }
        self.next = (self.next + 1) % self.entries;
        Ok(true)
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
        let command = command::EOP | command::IFCS | command::RS | more;
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
            self.first = (at + 1) % self.entries;
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
    frame: Vec<u8>,
}

impl Receiving {
    pub(super) fn new(ring: Span, buffers: Span, entries: u32) -> Self {
        Self { ring, buffers, entries, next: 0, used: 0, frame: Vec::new() }
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

    /// Gives used buffers back. Returns the new tail.
    pub(super) fn give_back(&mut self) -> Result<u32, DriverError> {
        let first = (self.next + self.entries - self.used) % self.entries;
        for step in 0..self.used {
            self.renew((first + step) % self.entries)?;
        }
        self.used = 0;
        Ok((self.next + self.entries - 1) % self.entries)
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
            (at, count) = ((at + 1) % self.entries, count + 1);
            if descriptor.status & receive_status::EOP != 0 {
                let len = self.frame.len().saturating_sub(slipway_e1000_spec::FCS);
                take(Received { bytes: &self.frame[..len], descriptor });
                (self.next, self.used) = (at, self.used + count);
                return Ok(true);
            }
        }
    }
}
