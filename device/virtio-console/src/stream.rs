//! The bytes of queues: chains that are read or written piece by piece.

use slipway_ram::Memory;
use slipway_virtio::Virtqueue;
use slipway_virtio::queue::{Broken, Chain, reachable};

/// Most chains that one call begins.
pub(crate) const CHAINS: usize = 16;

/// A transmit queue's chain that is read piece by piece.
#[derive(Default)]
pub(crate) struct Source {
    chain: Chain,
    /// The head of the chain in hand.
    head: Option<u16>,
    /// The range in the chain, and the offset in the range, of the next byte.
    range: usize,
    offset: u32,
    /// The bytes of the chain in hand that were read. Without a chain in hand: the bytes of the
    /// next chain that a predecessor has read.
    taken: u64,
}

impl Source {
    /// Makes a source whose first chain was read up to byte `taken` by a predecessor.
    pub fn resume(taken: u64) -> Self {
        Self { taken, ..Self::default() }
    }

    /// Returns how many bytes of the oldest chain that was not given back were read.
    pub fn taken(&self) -> u64 {
        self.taken
    }

    /// Returns whether a chain is in hand.
    pub fn holds(&self) -> bool {
        self.head.is_some()
    }

    /// Takes the next chain in hand if there is none. Returns `false` if the queue has none.
    fn begin(&mut self, memory: &Memory, queue: &mut Virtqueue) -> Result<bool, Broken> {
        if self.head.is_none() {
            self.head = queue.queue.take_readable(memory, &mut self.chain)?;
            (self.range, self.offset) = (0, 0);
            if self.head.is_some() {
                let skipped = std::mem::take(&mut self.taken);
                self.skip(skipped);
            }
        }
        Ok(self.head.is_some())
    }

    /// Counts up to `bytes` bytes of the chain as read.
    fn skip(&mut self, mut bytes: u64) {
        while let (true, Some((_, len))) = (bytes > 0, self.chain.readable.get(self.range)) {
            let part = bytes.min(u64::from(len - self.offset));
            self.passed(part as u32);
            bytes -= part;
            if part == 0 {
                (self.range, self.offset) = (self.range + 1, 0);
            }
        }
    }

    fn passed(&mut self, bytes: u32) {
        self.offset += bytes;
        self.taken += u64::from(bytes);
    }

    /// Copies bytes of the chain in hand. Returns how many. Gives the chain back after its last
    /// byte.
    fn copy(
        &mut self,
        memory: &Memory,
        queue: &mut Virtqueue,
        into: &mut [u8],
    ) -> Result<usize, Broken> {
        let mut done = 0;
        while let Some(&(at, len)) = self.chain.readable.get(self.range) {
            let part = ((len - self.offset) as usize).min(into.len() - done);
            if part > 0 {
                let at = at.checked_add(self.offset.into()).ok_or(Broken::Memory)?;
                reachable(memory, at, part)?;
                memory.read(at, &mut into[done..done + part])?;
                self.passed(part as u32);
                done += part;
            }
            if self.offset < len {
                return Ok(done);
            }
            (self.range, self.offset) = (self.range + 1, 0);
        }
        self.finish(memory, queue)?;
        Ok(done)
    }

    /// Gives the chain in hand back.
    fn finish(&mut self, memory: &Memory, queue: &mut Virtqueue) -> Result<(), Broken> {
        self.taken = 0;
        match self.head.take() {
            Some(head) => queue.queue.report(memory, head, 0),
            None => Ok(()),
        }
    }

    /// Copies the driver's next bytes. Returns how many, and whether more may wait although `into`
    /// is not full. Otherwise, if `into` is not full, the driver will notify of the next chain.
    pub fn read(
        &mut self,
        memory: &Memory,
        queue: &mut Virtqueue,
        into: &mut [u8],
    ) -> Result<(usize, bool), Broken> {
        let (mut done, mut more) = (0, true);
        for _ in 0..CHAINS {
            more = done < into.len() && self.begin(memory, queue)?;
            if !more {
                break;
            }
            done += self.copy(memory, queue, &mut into[done..])?;
        }
        queue.publish(memory)?;
        Ok((done, more && done < into.len()))
    }

    /// Drops the bytes of chains. Returns whether more may wait. If not, the driver will notify of
    /// the next chain.
    pub fn discard(&mut self, memory: &Memory, queue: &mut Virtqueue) -> Result<bool, Broken> {
        let mut more = true;
        for _ in 0..CHAINS {
            more = self.begin(memory, queue)?;
            if !more {
                break;
            }
            self.finish(memory, queue)?;
        }
        queue.publish(memory)?;
        Ok(more)
    }
}
