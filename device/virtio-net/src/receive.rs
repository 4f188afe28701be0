//! Frames to the driver (Virtio 1.3, sections 5.1.6.3 and 5.1.6.4).
//!
//! The driver's buffers are read and pinned ahead of their frames ([`Receiver::fill`]). A frame is
//! copied into as many of them as it needs ([`Receiver::put`]), and these are reported as used. A
//! frame that has no room leaves its buffers for the next one.

use slipway_ethernet_spec::EthernetFrame;
use slipway_ram::{Access, Fault};
use slipway_switch::{Burst, Delivered, MAX_FRAME, Pick, Segmentation};
use slipway_virtio::Virtqueue;
use slipway_virtio::queue::{BATCH, Broken, Chain};
use slipway_virtio_spec::net::{Features, HEADER};
use zerocopy::IntoBytes;

use crate::common::Common;
use crate::header::header;
use crate::slots::{Cursor, Slot};

/// The number of buffers that are read and pinned ahead of their frames; a power of two.
const AHEAD: usize = 2 * BATCH;
/// The most buffers that one frame may fill: a frame of 64 KiB with its header, in buffers of a
/// kilobyte each.
const MOST: usize = BATCH + 1;

/// A receive queue.
pub(crate) struct Receiver {
    pub virtqueue: Virtqueue,
    chain: Chain,
    /// Buffers of the driver, in order: a ring of `ready` buffers from `first` on.
    slots: Vec<Slot>,
    first: usize,
    ready: usize,
}

/// The outcome of a frame.
enum Outcome {
    Done,
    /// The driver has no buffers.
    Full,
    /// The frame is larger than the driver's buffers for it, or memory is gone.
    Refused,
}

impl Receiver {
    /// Makes a receiver on a queue, without buffers.
    pub fn new(virtqueue: Virtqueue) -> Self {
        let slots = (0..AHEAD).map(|_| Slot::default()).collect();
        Self { virtqueue, chain: Chain::default(), slots, first: 0, ready: 0 }
    }

    /// Implements [`slipway_switch::Port::deliver`].
    #[inline]
    pub fn deliver(
        &mut self,
        common: &mut Common,
        burst: &Burst,
        picks: &[Pick],
    ) -> Result<Delivered, Broken> {
        let mut delivered = Delivered::default();
        let mut filtered = 0;
        for (index, &pick) in picks.iter().enumerate() {
            if !wants(common, burst, pick) {
                filtered += 1;
                delivered.bytes += burst.len_of(pick) as u64;
                continue;
            }
            if self.ready == 0 {
                self.fill(common, picks.len() - index)?;
            }
            match self.put(common, burst, pick)? {
                Outcome::Done => {
                    delivered.frames += 1;
                    delivered.bytes += burst.len_of(pick) as u64;
                }
                Outcome::Refused => delivered.refused += 1,
                Outcome::Full => {
                    delivered.full = (picks.len() - index) as u32;
                    break;
                }
            }
        }
        if filtered > 0 {
            // For the switch, filtered frames count as delivered.
            delivered.frames += filtered;
            common.live.filtered.add(filtered.into());
        }
        common.publish(&mut self.virtqueue)?;
        Ok(delivered)
    }

    /// Reads and pins further buffers: up to `wanted` of them, at most [`BATCH`], as far as the
    /// driver has made buffers available and `slots` has room.
    ///
    /// # Errors
    /// [`Broken`] if the queue or a buffer is invalid.
    #[inline]
    fn fill(&mut self, common: &mut Common, wanted: usize) -> Result<(), Broken> {
        let mut heads = [0; BATCH];
        let queue = &mut self.virtqueue.queue;
        if usize::from(queue.waiting()) < wanted {
            queue.look(&common.memory)?;
            // The driver is never asked for notifications of receive buffers; this renews the
            // request when avail_event must move on.
            queue.stay_awake(&common.memory)?;
        }
        let most = wanted.min(BATCH).min(AHEAD - self.ready);
        let count = queue.heads(&common.memory, &mut heads[..most])?;
        for &head in &heads[..count] {
            queue.walk(&common.memory, head, &mut self.chain)?;
            let slot = &mut self.slots[(self.first + self.ready) % AHEAD];
            let ranges = &self.chain.writable;
            let len: u64 = ranges.iter().map(|(_, len)| u64::from(*len)).sum();
            // A buffer without bytes would make frames vanish; an excessively long one is a mistake
            // of the driver.
            if len == 0 || len > u64::from(u32::MAX) {
                return Err(Broken::Chain);
            }
            match slot.pin(&mut common.view, head, ranges, Access::Write) {
                Ok(()) => {}
                // The buffer is used when its memory is zeroed, and frames wait for it.
                Err(Fault::Busy { .. }) => break,
                Err(fault) => return Err(fault.into()),
            }
            slot.spans[0].prefetch_to_write(0);
            slot.spans[0].prefetch_to_write(64);
            queue.advance(1);
            self.ready += 1;
        }
        Ok(())
    }

    /// Returns the buffer that is `index` places behind the next one to fill.
    #[inline]
    fn slot(&self, index: usize) -> &Slot {
        &self.slots[(self.first + index) % AHEAD]
    }

    /// Copies one frame into as many buffers as it needs.
    #[inline]
    fn put(&mut self, common: &mut Common, burst: &Burst, pick: Pick) -> Result<Outcome, Broken> {
        let merges = common.rules.features.contains(Features::MRG_RXBUF);
        let len = burst.len_of(pick);
        let whole = burst.offload_of(pick).segmentation == Segmentation::None;
        if len > MAX_FRAME + 4 || (whole && len > common.rules.longest) {
            return Ok(Outcome::Refused);
        }
        let total = HEADER + len;
        let most = if merges { MOST } else { 1 };
        let (mut buffers, mut room) = (0, 0);
        while room < total && buffers < most {
            if buffers == self.ready {
                self.fill(common, BATCH)?;
                if buffers == self.ready {
                    return Ok(Outcome::Full);
                }
            }
            room += self.slot(buffers).len;
            buffers += 1;
        }
        if room < total || !self.copy(common, burst, pick, buffers) {
            return Ok(Outcome::Refused);
        }
        self.report(common, total, buffers)?;
        Ok(Outcome::Done)
    }

    /// Copies a frame into `buffers` buffers. Returns `false` if memory of one side is gone;
    /// nothing is reported then, so the buffers are used again.
    #[inline]
    fn copy(&self, common: &Common, burst: &Burst, pick: Pick, buffers: usize) -> bool {
        let mut offload = burst.offload_of(pick);
        offload.ecn &= common.rules.features.contains(Features::GUEST_ECN);
        // Flags are 0 for a driver that did not negotiate them (section 5.1.6.4.1).
        offload.valid &= common.rules.features.contains(Features::GUEST_CSUM);
        let header = header(&offload, buffers as u16);
        let mut reader = burst.read(pick);
        let slot = self.slot(0);
        if let ([span], 1) = (slot.spans.as_slice(), buffers) {
            let len = burst.len_of(pick);
            return span.write(0, header.as_bytes()).is_ok()
                && reader.copy_to(span, HEADER, len).is_ok_and(|copied| copied == len);
        }
        let end = (self.first + buffers).min(AHEAD);
        let wrapped = self.first + buffers - end;
        let mut cursor = Cursor::new(&self.slots[self.first..end], &self.slots[..wrapped]);
        cursor.write(header.as_bytes()).is_ok() && cursor.fill(&mut reader).is_ok()
    }

    /// Reports the next `buffers` buffers as used, by `total` bytes together.
    #[inline]
    fn report(&mut self, common: &Common, total: usize, buffers: usize) -> Result<(), Broken> {
        let mut left = total;
        for index in 0..buffers {
            let (head, len) = (self.slot(index).head, self.slot(index).len.min(left));
            left -= len;
            self.virtqueue.queue.report(&common.memory, head, len as u32)?;
        }
        self.first = (self.first + buffers) % AHEAD;
        self.ready -= buffers;
        Ok(())
    }

    /// Releases all memory. Buffers that were read ahead are given back.
    pub fn rest(&mut self) {
        self.virtqueue.queue.rewind(self.ready as u16);
        (self.first, self.ready) = (0, 0);
        self.virtqueue.queue.release_memory();
        self.slots.iter_mut().for_each(|slot| slot.spans.clear());
    }
}

/// Returns whether the driver's filter lets a frame pass, by destination and VLAN.
#[inline]
fn wants(common: &Common, burst: &Burst, pick: Pick) -> bool {
    let filter = &common.rules.filter;
    if filter.promiscuous && filter.vlans.is_none() {
        return true;
    }
    // The switch drops frames without a whole header.
    let head = EthernetFrame::new_unchecked(burst.head(usize::from(pick.frame)));
    let vlan = match (&filter.vlans, pick.tci) {
        (None, _) => None,
        (Some(_), 0) => head.vlan(),
        (Some(_), tci) => Some(tci & slipway_ethernet_spec::tci::VLAN),
    };
    filter.wants(head.destination(), vlan)
}
