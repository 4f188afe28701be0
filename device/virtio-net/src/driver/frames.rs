//! Frames on rings.

use slipway_ram::Span;
use slipway_virtio_spec::net::{HEADER, Header};
use zerocopy::{FromBytes, IntoBytes};

use super::{Arena, Buffer, DriverError, Ring};

/// A transmit queue. Each frame lies in memory of its own until the device has used it.
pub struct Sending {
    /// The queue.
    pub ring: Ring,
    /// Memory of the frames in flight, by ID.
    buffers: Vec<Option<Span>>,
    spare: Vec<Span>,
}

impl Sending {
    pub(super) fn new(ring: Ring) -> Self {
        let buffers = (0..ring.entries()).map(|_| None).collect();
        Self { ring, buffers, spare: Vec::new() }
    }

    /// Puts a frame into the queue, cut into pieces that end at `cuts` (bytes from the header's
    /// start, ascending). [`super::Driver::flush`] makes it visible to the device.
    ///
    /// # Errors
    /// [`DriverError::Memory`] when the queue or the arena is full.
    pub fn push(
        &mut self,
        arena: &mut Arena,
        header: &Header,
        frame: &[u8],
        cuts: &[usize],
    ) -> Result<(), DriverError> {
        self.reap()?;
        let len = HEADER + frame.len();
        let fits = self.spare.iter().position(|span| span.len() >= len);
        let span = match fits {
            Some(at) => self.spare.swap_remove(at),
            None => arena.allocate_span(len.max(2048))?,
        };
        span.write(0, header.as_bytes())?;
        span.write(HEADER, frame)?;
        let ends = cuts.iter().copied().filter(|cut| *cut < len).chain([len]);
        let mut from = 0;
        let mut pieces = Vec::new();
        for end in ends {
            pieces.push(Buffer::readable(span.iova() + from as u64, (end - from) as u32));
            from = end;
        }
        match self.ring.push(&pieces) {
            Ok(id) => self.buffers[usize::from(id)] = Some(span),
            Err(error) => {
                self.spare.push(span);
                return Err(error);
            }
        }
        Ok(())
    }

    /// Takes back the frames that the device has used. Returns how many are still in flight.
    ///
    /// # Errors
    /// The memory cannot be reached.
    pub fn reap(&mut self) -> Result<usize, DriverError> {
        while let Some(used) = self.ring.pop()? {
            let place = self.buffers.get_mut(usize::from(used.id)).and_then(Option::take);
            self.spare.extend(place);
        }
        Ok(self.buffers.iter().flatten().count())
    }
}

/// A receive queue, full of buffers.
pub struct Receiving {
    /// The queue.
    pub ring: Ring,
    buffers: Vec<Option<Span>>,
    merges: bool,
}

/// A received frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Received {
    /// The frame's header.
    pub header: Header,
    /// The frame's bytes.
    pub frame: Vec<u8>,
}

impl Receiving {
    /// Fills `ring` with buffers of `buffer` bytes.
    ///
    /// # Errors
    /// [`DriverError::Memory`] when the arena is full.
    pub fn new(
        ring: Ring,
        arena: &mut Arena,
        buffer: u32,
        merges: bool,
    ) -> Result<Self, DriverError> {
        let buffers = (0..ring.entries()).map(|_| None).collect();
        let mut queue = Self { ring, buffers, merges };
        while queue.ring.room() > 0 {
            let span = arena.allocate_span(buffer as usize)?;
            queue.give(span)?;
        }
        queue.ring.publish()?;
        Ok(queue)
    }

    /// Returns the place of each buffer, by ID, for callers that take and give buffers themselves.
    pub fn places(&self) -> Vec<Span> {
        self.buffers.iter().flatten().cloned().collect()
    }

    fn give(&mut self, span: Span) -> Result<(), DriverError> {
        let id = self.ring.push(&[Buffer::writable(span.iova(), span.len() as u32)])?;
        self.buffers[usize::from(id)] = Some(span);
        Ok(())
    }

    /// Takes the next buffer's bytes and gives the buffer to the device again.
    fn piece(&mut self, into: &mut Vec<u8>) -> Result<bool, DriverError> {
        let Some(used) = self.ring.pop()? else { return Ok(false) };
        let span = self.buffers.get_mut(usize::from(used.id)).and_then(Option::take);
        let span = span.ok_or(DriverError::Memory)?;
        let from = into.len();
        if used.len as usize > span.len() {
            return Err(DriverError::Memory);
        }
        into.resize(from + used.len as usize, 0);
        span.read(0, &mut into[from..])?;
        self.give(span)?;
        Ok(true)
    }

    /// Returns the next frame, if there is one. All of its buffers are there then (section
    /// 5.1.6.4.1).
    ///
    /// # Errors
    /// [`DriverError::Memory`] if what the device says is invalid.
    pub fn pop(&mut self) -> Result<Option<Received>, DriverError> {
        let mut bytes = Vec::new();
        if !self.piece(&mut bytes)? {
            return Ok(None);
        }
        let (header, _) = Header::read_from_prefix(&bytes).map_err(|_| DriverError::Memory)?;
        let buffers = header.num_buffers.get();
        if buffers == 0 || (buffers > 1 && !self.merges) {
            return Err(DriverError::Memory);
        }
        for _ in 1..buffers {
            if !self.piece(&mut bytes)? {
                return Err(DriverError::Memory);
            }
        }
        self.ring.publish()?;
        Ok(Some(Received { header, frame: bytes.split_off(HEADER) }))
    }
}
