//! Ports of programs on this host: packet rings in memory that the switch and a program share.
//!
//! The switch trusts the program only with the program's own packets: see `slipway_ring`.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use slipway_ring::{Broken, Consumer, Descriptor, Link, Producer, Segmentation as Cut};

use crate::{Abilities, Burst, Delivered, MAX_FRAME, Offload, Pick, Port, Segmentation};

/// The number of slots that are prefetched ahead: about as many as the processor's outstanding
/// misses. Prefetching slots that are not about to be used would only take them from the other
/// side's cache.
const AHEAD: usize = 8;

/// Two eventfds, by which each side wakes the other.
#[derive(Debug)]
pub struct Tell {
    /// The program writes to this one while the switch sleeps.
    pub server: OwnedFd,
    /// The switch writes to this one while the program sleeps.
    pub peer: OwnedFd,
}

impl Tell {
    /// Creates two eventfds.
    ///
    /// # Errors
    /// If no descriptors are left.
    pub fn new() -> std::io::Result<Self> {
        use rustix::event::{EventfdFlags, eventfd};
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        Ok(Self { server: eventfd(0, flags)?, peer: eventfd(0, flags)? })
    }
}

/// A port whose peer is a program with a [`Link`]. The fields that a delivery needs are in the
/// first cache line.
#[repr(C, align(64))]
pub struct MemoryPort {
    output: Producer,
    /// Bytes that a slot holds, at most 65,536.
    payload: u32,
    abilities: Abilities,
    broken: bool,
    input: Consumer,
    tell: Tell,
    /// The number of slots of the burst taken last.
    taken: usize,
    malformed: u64,
}

impl MemoryPort {
    /// Creates the switch's side of `link`. `abilities` are the program's. Only a thread that [can
    /// raise eventfds](slipway_peer::eventfd::can_raise) can wake a program that sleeps.
    pub fn new(link: &Link, tell: Tell, abilities: Abilities) -> Self {
        let (input, output) = link.server();
        let payload = link.geometry().payload;
        Self { input, output, payload, tell, abilities, taken: 0, malformed: 0, broken: false }
    }

    /// Returns whether the link is broken: the program moved a counter to an impossible value, or
    /// cannot be woken. Nothing passes any more.
    pub fn is_broken(&self) -> bool {
        self.broken
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
        let offload = if first.is_plain() { Offload::NONE } else { offload(first) };
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
            true => frame.finish(offload(first)),
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
}

impl Port for MemoryPort {
    fn abilities(&self) -> Abilities {
        self.abilities
    }

    fn is_up(&self) -> bool {
        !self.broken
    }

    #[inline]
    fn take(&mut self, burst: &mut Burst, limit: usize) -> bool {
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

    #[inline]
    fn release(&mut self) {
        let taken = std::mem::take(&mut self.taken);
        if taken > 0 {
            self.input.release(taken);
        }
    }

    #[inline]
    fn deliver(&mut self, burst: &Burst, picks: &[Pick]) -> Delivered {
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

    #[inline]
    fn notify(&mut self) {
        // The program shares the eventfd's open file description, so it could make a write block
        // for ever.
        if self.output.must_tell() && !slipway_peer::eventfd::raise(self.tell.peer.as_fd()) {
            self.broken = true;
        }
    }

    #[inline]
    fn prepare(&self, frames: usize) {
        self.output.fetch_next(frames.min(AHEAD));
    }

    fn arm(&mut self) -> bool {
        // Clear the eventfd first, so that no later wake-up is lost.
        slipway_peer::eventfd::drain(self.tell.server.as_fd());
        !self.broken && self.input.arm()
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.tell.server.as_fd())
    }

    fn malformed(&mut self) -> u64 {
        std::mem::take(&mut self.malformed)
    }
}

fn offload(descriptor: Descriptor) -> Offload {
    Offload {
        checksum: descriptor.checksum(),
        // A program's claim that a checksum is valid is not trusted.
        valid: false,
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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use rustix::event::{EventfdFlags, eventfd};
    use slipway_ring::Geometry;

    use super::*;

    /// A pipe instead of an eventfd stands for a thread that cannot raise eventfds.
    #[test]
    fn a_program_that_cannot_be_told_has_a_broken_port() {
        let link = Link::new(Geometry { slots: 16, payload: 64 }).unwrap();
        let (_reader, writer) = rustix::pipe::pipe().unwrap();
        let server = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let tell = Tell { server, peer: writer };
        let mut port = MemoryPort::new(&link, tell, Abilities::NONE);
        port.notify();
        assert!(port.is_up(), "the program is awake");
        let (mut input, _) = link.peer();
        assert!(!input.arm());
        let mut burst = Burst::new();
        burst.begin().finish(Offload::NONE);
        assert_eq!(port.deliver(&burst, &[Pick::default()]).frames, 1);
        port.notify();
        assert!(port.is_broken() && !port.is_up());
    }

    /// A program shares the open file descriptions: it may make them blocking, and fill a counter.
    #[test]
    fn a_program_has_the_switch_wait_for_nothing() {
        let (done, is_done) = channel();
        std::thread::spawn(move || {
            let link = Link::new(Geometry { slots: 16, payload: 64 }).unwrap();
            let waits = || eventfd(0, EventfdFlags::CLOEXEC).unwrap();
            let tell = Tell { server: waits(), peer: waits() };
            rustix::io::write(&tell.peer, &(u64::MAX - 1).to_ne_bytes()).unwrap();
            let mut port = MemoryPort::new(&link, tell, Abilities::NONE);
            let (mut input, _) = link.peer();
            assert!(!port.arm(), "nothing is there");
            assert!(!input.arm(), "nothing either: the program sleeps");
            let mut burst = Burst::new();
            burst.begin().finish(Offload::NONE);
            assert_eq!(port.deliver(&burst, &[Pick::default()]).frames, 1);
            port.notify();
            done.send(()).unwrap();
        });
        is_done.recv_timeout(Duration::from_secs(60)).unwrap();
    }
}
