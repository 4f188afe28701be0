//! Frames that lie in the ring.

use slipway_ring::{Consumer, Descriptor};

use crate::port::Port;

/// A burst of frames that were received. Dropped, it gives their slots back.
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

    /// How many frames there are.
    pub fn len(&self) -> usize {
        self.frames
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.frames == 0
    }

    /// The frames, in the order in which they came.
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

/// The frames of a burst.
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
                if !descriptor.has_more() || self.at == self.slots {
                    break;
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

/// Whether a slot says that it holds what a slot can hold.
#[inline]
pub(crate) fn fits(descriptor: Descriptor, payload: usize) -> bool {
    (1..=payload).contains(&descriptor.len())
}

/// A frame, from its destination address on, in one slot of the ring or in several.
#[derive(Clone, Copy)]
pub struct Frame<'a> {
    input: &'a Consumer,
    payload: usize,
    first: usize,
    end: usize,
}

impl<'a> Frame<'a> {
    /// The frame's bytes, or the first part of one that is longer than a slot: see [`Frame::parts`].
    #[inline]
    pub fn bytes(&self) -> &'a [u8] {
        self.slot(self.first)
    }

    /// Whether [`Frame::bytes`] is all of it.
    #[inline]
    pub fn is_whole(&self) -> bool {
        self.end == self.first + 1
    }

    /// Its parts, one for each slot; all but the last are as long as a slot if the switch cut it.
    pub fn parts(&self) -> impl Iterator<Item = &'a [u8]> + use<'a> {
        let frame = *self;
        (frame.first..frame.end).map(move |slot| frame.slot(slot))
    }

    /// Bytes of all of it.
    pub fn len(&self) -> usize {
        self.parts().map(<[u8]>::len).sum()
    }

    /// Whether there are none; never so.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    #[inline]
    fn slot(&self, number: usize) -> &'a [u8] {
        // Whatever the descriptor says by now.
        let len = self.input.descriptor(number).len().min(self.payload);
        // SAFETY: a slot has `payload` bytes at this address, in memory that stays mapped as long as the
        // consumer, which is borrowed, and whose file cannot shrink. The switch does not write to slots
        // that it has given away and that were not given back, and they are given back when the burst
        // goes, which is borrowed for as long: the crate's head says why it is believed that.
        unsafe { std::slice::from_raw_parts(self.input.address(number), len) }
    }
}
