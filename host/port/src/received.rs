//! Frames that lie in the ring.

use slipway_ring::{Consumer, Descriptor};

use crate::port::Port;

/// A burst of received frames. Dropping it gives their slots back.
pub struct Received<'a> {
    port: &'a mut Port,
    /// Slots of whole frames.
    slots: usize,
    frames: usize,
}

impl<'a> Received<'a> {
    pub(crate) fn new(port: &'a mut Port, slots: usize, frames: usize) -> Self {
        Self { port, slots, frames }
    }

    /// Returns the number of frames.
    pub fn len(&self) -> usize {
        self.frames
    }

    /// Returns whether there are no frames.
    pub fn is_empty(&self) -> bool {
        self.frames == 0
    }

    /// Returns the frames, in the order in which they came.
    pub fn iter(&self) -> Frames<'_> {
        let (input, payload) = self.port.input();
        Frames { input, payload, at: 0, slots: self.slots }
    }
}

impl Drop for Received<'_> {
    fn drop(&mut self) {
        self.port.give_back(self.slots);
    }
}

impl<'a> IntoIterator for &'a Received<'_> {
    type Item = Frame<'a>;
    type IntoIter = Frames<'a>;

    fn into_iter(self) -> Frames<'a> {
        self.iter()
    }
}

/// An iterator over the frames of a burst.
pub struct Frames<'a> {
    input: &'a Consumer,
    payload: usize,
    at: usize,
    slots: usize,
}

impl<'a> Iterator for Frames<'a> {
    type Item = Frame<'a>;

    #[inline]
    fn next(&mut self) -> Option<Frame<'a>> {
        while self.at < self.slots {
            let first = self.at;
            let mut good = true;
            loop {
                let descriptor = self.input.descriptor(self.at);
                good &= fits(descriptor, self.payload);
                self.at += 1;
                if !descriptor.has_more() {
                    break;
                }
                if self.at == self.slots {
                    // A frame that never ends: the port has counted it as malformed.
                    return None;
                }
            }
            if good {
                let (input, payload) = (self.input, self.payload);
                return Some(Frame { input, payload, first, end: self.at });
            }
        }
        None
    }
}

/// Returns whether a descriptor's length is possible for a slot.
#[inline]
pub(crate) fn fits(descriptor: Descriptor, payload: usize) -> bool {
    (1..=payload).contains(&descriptor.len())
}

/// A frame, beginning with its destination address, in one or several slots of the ring.
#[derive(Clone, Copy)]
pub struct Frame<'a> {
    input: &'a Consumer,
    payload: usize,
    first: usize,
    end: usize,
}

impl<'a> Frame<'a> {
    /// Returns the frame's bytes, or the first part of a frame that is longer than a slot: see
    /// [`Frame::parts`].
    #[inline]
    pub fn bytes(&self) -> &'a [u8] {
        self.slot(self.first)
    }

    /// Returns whether [`Frame::bytes`] is the whole frame.
    #[inline]
    pub fn is_whole(&self) -> bool {
        self.end == self.first + 1
    }

    /// Returns the parts of the frame, one for each slot; all but the last are as long as a slot if
    /// the switch cut the frame.
    pub fn parts(&self) -> impl Iterator<Item = &'a [u8]> + use<'a> {
        let frame = *self;
        (frame.first..frame.end).map(move |slot| frame.slot(slot))
    }

    /// Returns the number of bytes of the whole frame.
    pub fn len(&self) -> usize {
        self.parts().map(<[u8]>::len).sum()
    }

    /// Returns whether the frame has no bytes, which is never so.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    #[inline]
    fn slot(&self, number: usize) -> &'a [u8] {
        // The descriptor may have changed since it was checked.
        let len = self.input.descriptor(number).len().min(self.payload);
        // SAFETY: a slot has `payload` bytes at this address, in memory whose file cannot shrink
        // and that stays mapped as long as the consumer, which is borrowed. The switch does not
        // write to slots that it has given away and that were not given back (the crate's head says
        // why it is trusted in that), and they are given back when the burst is dropped, which is
        // borrowed for as long.
        unsafe { std::slice::from_raw_parts(self.input.address(number), len) }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a failed unwrap is the report of what failed
mod tests {
    use rustix::event::{EventfdFlags, eventfd};
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
    use slipway_ring::{Geometry, Link, Producer};

    use super::*;
    use crate::attach::Attached;

    const PAYLOAD: usize = 64;

    /// Returns a port and the switch's end of its ring.
    fn port() -> (Port, Producer) {
        let (socket, _) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
                .unwrap();
        let bell = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        let link = Link::new(Geometry { slots: 2048, payload: PAYLOAD as u32 }).unwrap();
        let (_, output) = link.server();
        let attached = Attached { socket, link, tell: bell(), told: bell(), mac: [0; 6] };
        (Port::new("port".into(), attached), output)
    }

    /// Publishes a frame of `slots` full slots; without `ends` the last one has a successor.
    fn publish(output: &mut Producer, slots: usize, ends: bool) {
        assert!(output.free(slots).unwrap() >= slots);
        for at in 0..slots {
            let descriptor = Descriptor::new(PAYLOAD as u32);
            let last = ends && at + 1 == slots;
            output.describe(at, if last { descriptor } else { descriptor.and_more() });
        }
        output.publish(slots);
    }

    fn lengths(received: &Received<'_>) -> Vec<usize> {
        received.iter().map(|frame| frame.len()).collect()
    }

    #[test]
    fn a_frame_that_never_ends_is_none() {
        let (mut port, mut output) = port();
        publish(&mut output, 2, true);
        publish(&mut output, crate::port::MAX_FRAME.div_ceil(PAYLOAD) + 1, false);
        let received = port.receive(64).unwrap();
        assert_eq!((received.len(), lengths(&received)), (1, vec![2 * PAYLOAD]));
        drop(received);
        assert_eq!((port.statistics().frames_in, port.statistics().malformed), (1, 1));
        // Its slots were given back.
        publish(&mut output, 1000, true);
        let received = port.receive(64).unwrap();
        assert_eq!((received.len(), lengths(&received)), (1, vec![1000 * PAYLOAD]));
    }
}
