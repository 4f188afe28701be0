//! One end of a [`Link`]: frames between a burst and two packet rings.

use slipway_ring::{Broken, Consumer, Descriptor, Link, Producer, Segmentation as Cut};

use crate::{Abilities, Burst, Delivered, MAX_FRAME, Offload, Pick, Segmentation};

/// The number of slots that are prefetched ahead: about as many as the processor's outstanding
/// misses. Prefetching slots that are not about to be used would only take them from the other
/// side's cache.
const AHEAD: usize = 8;

/// One end of a link. The fields that a delivery needs are in the first cache line.
#[repr(C, align(64))]
pub struct Rings {
    pub output: Producer,
    /// Bytes that a slot holds, at most 65,536.
    payload: u32,
    /// The other end moved a counter to an impossible value. Nothing passes any more.
    pub broken: bool,
    /// The other end is this process's own: its claim that a checksum is valid holds.
    is_own: bool,
    /// The abilities of the port's peer.
    pub abilities: Abilities,
    pub input: Consumer,
    /// The number of slots of the burst taken last.
    taken: usize,
    malformed: u64,
}

impl Rings {
    /// Makes the switch's end of a link whose other end is a program's, with these abilities.
    pub fn of_program(link: &Link, abilities: Abilities) -> Self {
        Self::new(link.server(), link, abilities, false)
    }

    /// Makes the switch's end and the other end of a link within this process.
    pub fn pair(link: &Link, abilities: Abilities) -> (Self, Self) {
        let end = |sides| Self::new(sides, link, abilities, true);
        (end(link.server()), end(link.peer()))
    }

    fn new(
        (input, output): (Consumer, Producer),
        link: &Link,
        abilities: Abilities,
        is_own: bool,
    ) -> Self {
        let payload = link.geometry().payload;
        Self { output, payload, broken: false, is_own, abilities, input, taken: 0, malformed: 0 }
    }

    /// Returns the bytes that a slot holds.
    #[inline]
    fn payload(&self) -> usize {
        self.payload as usize
    }

    /// Returns the peer's counter, or marks the port as broken and returns 0.
    fn trust(&mut self, count: Result<usize, Broken>) -> usize {
        self.broken |= count.is_err();
        count.unwrap_or(0)
    }

    /// Takes the frame that begins `at` slots from the tail. Returns the number of its slots, or
    /// `None` if the frame is not complete yet.
    #[inline]
    fn take_frame(&mut self, burst: &mut Burst, at: usize, there: usize) -> Option<usize> {
        let first = self.input.descriptor(at);
        if first.has_more() {
            return self.take_long(burst, first, at, there);
        }
        let fits = (1..=self.payload()).contains(&first.len());
        let (memory, place) = (self.input.memory(), self.input.place(at));
        let offload = if first.is_plain() { Offload::NONE } else { self.offload(first) };
        if !fits || burst.push(memory, place, first.len(), offload).is_err() {
            self.malformed += 1;
        }
        Some(1)
    }

    #[cold]
    fn take_long(
        &mut self,
        burst: &mut Burst,
        first: Descriptor,
        at: usize,
        mut there: usize,
    ) -> Option<usize> {
        let mut frame = burst.begin();
        let (mut slot, mut descriptor, mut fits) = (at, first, true);
        loop {
            let len = descriptor.len();
            fits &= (1..=self.payload()).contains(&len) && frame.len() + len <= MAX_FRAME;
            if fits {
                fits = frame.append(self.input.memory(), self.input.place(slot), len).is_ok();
            }
            slot += 1;
            if !descriptor.has_more() {
                break;
            }
            if slot == there {
                there = self.input.available(there + 1).unwrap_or(there);
            }
            if slot == there {
                // The rest is yet to come, unless the frame is invalid or too long for any ring.
                let never = !fits || there - at > MAX_FRAME.div_ceil(self.payload());
                self.malformed += u64::from(never);
                return never.then_some(slot - at);
            }
            descriptor = self.input.descriptor(slot);
        }
        match fits {
            true => frame.finish(self.offload(first)),
            false => self.malformed += 1,
        }
        Some(slot - at)
    }

    /// Fills slots with a frame, `at` slots from the head. Returns their number, or `None` if the
    /// frame cannot be read.
    #[inline]
    fn fill(&self, burst: &Burst, pick: Pick, at: usize, len: usize) -> Option<usize> {
        if len > self.payload() {
            return self.fill_long(burst, pick, at, len);
        }
        match burst.whole(pick) {
            Some(bytes) => self.output.write(at, bytes),
            None => burst.copy(pick, self.output.memory(), self.output.place(at)).ok()?,
        }
        let mut descriptor = Descriptor::new(len as u32);
        if !burst.is_plain() {
            descriptor = describe(descriptor, &burst.offload_of(pick));
        }
        self.output.describe(at, descriptor);
        Some(1)
    }

    #[cold]
    fn fill_long(&self, burst: &Burst, pick: Pick, at: usize, len: usize) -> Option<usize> {
        let mut reader = burst.read(pick);
        let count = len.div_ceil(self.payload());
        for number in 0..count {
            let part = self.payload().min(len - number * self.payload());
            reader.copy_to(self.output.memory(), self.output.place(at + number), part).ok()?;
            let mut descriptor = Descriptor::new(part as u32);
            if number == 0 {
                descriptor = describe(descriptor, &burst.offload_of(pick));
            }
            if number + 1 < count {
                descriptor = descriptor.and_more();
            }
            self.output.describe(at + number, descriptor);
        }
        Some(count)
    }

    /// As [`Port::take`](crate::Port::take).
    #[inline]
    pub fn take(&mut self, burst: &mut Burst, limit: usize) -> bool {
        let limit = limit.min(burst.room());
        let there = self.input.available(limit);
        let there = self.trust(there);
        let frames = burst.len();
        let mut at = 0;
        while at < there && burst.len() - frames < limit {
            if at + AHEAD < there {
                self.input.fetch(at + AHEAD);
            }
            let Some(slots) = self.take_frame(burst, at, there) else { break };
            at += slots;
        }
        self.taken = at;
        there > at && at > 0
    }

    /// As [`Port::release`](crate::Port::release). Returns whether any slot was given back.
    #[inline]
    pub fn release(&mut self) -> bool {
        let taken = std::mem::take(&mut self.taken);
        if taken > 0 {
            self.input.release(taken);
        }
        taken > 0
    }

    /// As [`Port::deliver`](crate::Port::deliver).
    #[inline]
    pub fn deliver(&mut self, burst: &Burst, picks: &[Pick]) -> Delivered {
        let mut delivered = Delivered::default();
        let mut at = 0;
        let free = self.output.free(picks.len());
        let mut free = self.trust(free);
        for pick in picks {
            let len = burst.len_of(*pick);
            let slots = if len <= self.payload() { 1 } else { len.div_ceil(self.payload()) };
            if at + slots > free {
                let more = self.output.free(at + slots);
                free = self.trust(more);
                if at + slots > free {
                    delivered.full = picks.len() as u32 - delivered.frames - delivered.refused;
                    break;
                }
            }
            if at + AHEAD < picks.len() {
                self.output.fetch(at + AHEAD);
            }
            match self.fill(burst, *pick, at, len) {
                Some(filled) => {
                    at += filled;
                    delivered.frames += 1;
                    delivered.bytes += len as u64;
                }
                None => delivered.refused += 1,
            }
        }
        if at > 0 {
            self.output.publish(at);
        }
        delivered
    }

    /// As [`Port::prepare`](crate::Port::prepare).
    #[inline]
    pub fn prepare(&self, frames: usize) {
        self.output.fetch_next(frames.min(AHEAD));
    }

    fn offload(&self, descriptor: Descriptor) -> Offload {
        Offload {
            checksum: descriptor.checksum(),
            valid: self.is_own && descriptor.is_checked(),
            segmentation: match descriptor.segmentation() {
                Cut::None => Segmentation::None,
                Cut::Tcp4 => Segmentation::Tcp4,
                Cut::Tcp6 => Segmentation::Tcp6,
                Cut::Udp => Segmentation::Udp,
            },
            segment: descriptor.segment(),
            ecn: descriptor.ecn(),
        }
    }

    /// Returns the number of malformed frames since the last call.
    pub fn malformed(&mut self) -> u64 {
        std::mem::take(&mut self.malformed)
    }
}

fn describe(mut descriptor: Descriptor, offload: &Offload) -> Descriptor {
    if let Some((start, offset)) = offload.checksum {
        // A place that the descriptor cannot hold is beyond any header: leave the frame without a
        // checksum.
        descriptor = descriptor.unsummed(start, offset).unwrap_or(descriptor);
    }
    if offload.valid {
        descriptor = descriptor.checked();
    }
    let cut = match offload.segmentation {
        Segmentation::None => return descriptor,
        Segmentation::Tcp4 => Cut::Tcp4,
        Segmentation::Tcp6 => Cut::Tcp6,
        Segmentation::Udp => Cut::Udp,
    };
    descriptor.uncut(cut, offload.segment, offload.ecn)
}
