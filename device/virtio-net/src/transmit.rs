//! Frames from the driver (section 5.1.6.2).

use slipway_ram::{Access, Fault, Span};
use slipway_switch::{Burst, MAX_FRAME};
use slipway_virtio::Virtqueue;
use slipway_virtio::queue::{BATCH, Broken, Chain};
use slipway_virtio_spec::net::{HEADER, Header};
use zerocopy::IntoBytes;

use crate::common::Common;
use crate::counters::Count;
use crate::header::{MIN_FRAME, offload};
use crate::slots::Slot;

/// A transmit queue.
pub(crate) struct Transmitter {
    pub virtqueue: Virtqueue,
    chain: Chain,
    /// The chains of one batch. All are pinned and prefetched before the first is read.
    slots: Vec<Slot>,
    /// The number of invalid frames since the last [`Transmitter::take_malformed`].
    malformed: u64,
}

impl Transmitter {
    pub fn new(virtqueue: Virtqueue) -> Self {
        let slots = (0..BATCH).map(|_| Slot::default()).collect();
        Self { virtqueue, chain: Chain::default(), slots, malformed: 0 }
    }

    /// Appends up to `limit` frames to `burst`, and returns whether more wait. `number` is the
    /// number of this queue.
    #[inline]
    pub fn take(
        &mut self,
        common: &mut Common,
        number: u8,
        burst: &mut Burst,
        limit: usize,
    ) -> Result<bool, Broken> {
        if self.virtqueue.queue.look(&common.memory)? == 0 {
            return Ok(false);
        }
        self.virtqueue.queue.stay_awake(&common.memory)?;
        let steers = common.rules.pairs > 1;
        let began = burst.len();
        let mut left = limit;
        while left > 0 {
            let count = self.gather(common, left)?;
            if count == 0 {
                break;
            }
            for index in 0..count {
                if self.push(common, index, burst) && steers {
                    common.steering.learn(burst.head(burst.len() - 1), number);
                }
                let head = self.slots[index].head;
                self.virtqueue.queue.report(&common.memory, head, 0)?;
            }
            left -= count;
        }
        if burst.len() == began {
            // The switch releases only bursts with frames, so these chains are published here.
            common.publish(&mut self.virtqueue)?;
        }
        Ok(self.virtqueue.queue.waiting() > 0)
    }

    /// Reads up to `most` chains into slots, and prefetches their frames.
    #[inline]
    fn gather(&mut self, common: &mut Common, most: usize) -> Result<usize, Broken> {
        let mut heads = [0; BATCH];
        let queue = &mut self.virtqueue.queue;
        let count = queue.heads(&common.memory, &mut heads[..most.min(BATCH)])?;
        let mut read = 0;
        for (&head, slot) in heads[..count].iter().zip(&mut self.slots) {
            queue.walk(&common.memory, head, &mut self.chain)?;
            slot.head = head;
            match check(&self.chain, common) {
                Err(cause) => {
                    slot.len = 0;
                    cause.add(1);
                    self.malformed += 1;
                }
                Ok(()) => {
                    let ranges = &self.chain.readable;
                    match slot.pin(&mut common.view, head, ranges, Access::Read) {
                        Ok(()) => slot.prefetch(),
                        // The frame is read when its memory is zeroed.
                        Err(Fault::Busy { .. }) => break,
                        Err(_) => {
                            slot.len = 0;
                            slot.spans.clear();
                            common.live.memory.add(1);
                            self.malformed += 1;
                        }
                    }
                }
            }
            read += 1;
        }
        queue.advance(read as u16);
        Ok(read)
    }

    /// Puts the frame of a slot into the burst. Returns whether it did: the slot may have no frame,
    /// or an invalid one.
    #[inline]
    fn push(&mut self, common: &Common, index: usize, burst: &mut Burst) -> bool {
        let slot = &self.slots[index];
        if slot.len == 0 {
            return false;
        }
        let mut header = Header::default();
        let live = &common.live;
        if gather_header(&slot.spans, &mut header).is_err() {
            live.memory.add(1);
            self.malformed += 1;
            return false;
        }
        let len = slot.len - HEADER;
        let Some(offload) = offload(&header, len, common.rules.features) else {
            live.header.add(1);
            self.malformed += 1;
            return false;
        };
        let pushed = match slot.spans.as_slice() {
            [span] => burst.push(span, HEADER, len, offload),
            spans => scatter(spans, burst, offload),
        };
        if pushed.is_err() {
            live.memory.add(1);
            self.malformed += 1;
        }
        pushed.is_ok()
    }

    /// Gives back the chains of frames that the switch has released.
    #[inline]
    pub fn release(&mut self, common: &Common) -> Result<(), Broken> {
        common.publish(&mut self.virtqueue)
    }

    /// Returns the number of invalid frames since the last call.
    pub fn take_malformed(&mut self) -> u64 {
        std::mem::take(&mut self.malformed)
    }

    /// Releases all memory.
    pub fn rest(&mut self) {
        self.virtqueue.queue.release_memory();
        self.slots.iter_mut().for_each(|slot| slot.spans.clear());
    }
}

/// Checks whether a chain may be a frame. The error is the counter of the cause.
#[inline]
fn check<'a>(chain: &Chain, common: &'a Common) -> Result<(), &'a Count> {
    let live = &common.live;
    if !chain.writable.is_empty() {
        return Err(&live.shape);
    }
    let len: u64 = chain.readable.iter().map(|(_, len)| u64::from(*len)).sum();
    if len < (HEADER + MIN_FRAME) as u64 {
        return Err(&live.short);
    }
    if len > (HEADER + MAX_FRAME) as u64 {
        return Err(&live.long);
    }
    Ok(())
}

#[inline]
fn gather_header(spans: &[Span], header: &mut Header) -> Result<(), Fault> {
    let bytes = header.as_mut_bytes();
    let mut done = 0;
    for span in spans {
        let part = span.len().min(HEADER - done);
        span.read(0, &mut bytes[done..done + part])?;
        done += part;
        if done == HEADER {
            break;
        }
    }
    Ok(())
}

/// Appends a frame in several pieces, which begin with the header.
fn scatter(
    spans: &[Span],
    burst: &mut Burst,
    offload: slipway_switch::Offload,
) -> Result<(), Fault> {
    let mut frame = burst.begin();
    let mut skip = HEADER;
    for span in spans {
        let skipped = skip.min(span.len());
        skip -= skipped;
        if span.len() > skipped {
            frame.append(span, skipped, span.len() - skipped)?;
        }
    }
    frame.finish(offload);
    Ok(())
}
