//! A frame that the driver sends, as its descriptors describe it (section 3.3), and the reasons for
//! which one is dropped.

use slipway_ethernet_spec::{HEADER, TAG};
use slipway_switch::MAX_FRAME;

use crate::counters::{Count, Live};
use crate::offload::OffloadRequest;

/// A frame whose last descriptor has not come yet.
#[derive(Default)]
pub(crate) struct Packet {
    /// The number of descriptors with data so far.
    pub descriptors: usize,
    /// Address and bytes of each buffer.
    pub ranges: Vec<(u64, usize)>,
    /// Bytes of all buffers.
    pub len: usize,
    /// The offloads that the driver asks for.
    pub request: OffloadRequest,
    /// The first fault of the descriptors, for which the frame is dropped.
    pub fault: Option<Malformed>,
    /// `true` if the frame has too many descriptors: it is dropped, and each of its descriptors is
    /// reported as soon as it is read.
    pub overlong: bool,
}

impl Packet {
    /// Begins another frame.
    pub fn clear(&mut self) {
        self.ranges.clear();
        (self.descriptors, self.len, self.fault, self.overlong) = (0, 0, None, false);
        self.request = OffloadRequest::default();
    }

    /// Appends a buffer. A frame that becomes too long gets a fault, and is dropped at its last
    /// descriptor.
    pub fn add(&mut self, address: u64, len: usize) {
        self.len += len;
        if self.len > MAX_FRAME {
            self.fault = self.fault.or(Some(Malformed::Long));
        } else if len > 0 {
            self.ranges.push((address, len));
        }
    }

    /// Checks a complete frame, as far as its descriptors tell.
    ///
    /// # Errors
    /// The reason for which the frame is to be dropped.
    #[inline]
    pub fn check(&self) -> Result<(), Malformed> {
        if self.overlong {
            return Err(Malformed::Shape);
        }
        if let Some(fault) = self.fault {
            return Err(fault);
        }
        if self.len < HEADER {
            return Err(Malformed::Short);
        }
        let tag = self.request.tag.map_or(0, |_| TAG);
        if self.len + tag > MAX_FRAME {
            return Err(Malformed::Long);
        }
        Ok(())
    }
}

/// The reason why a frame was dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Malformed {
    /// A descriptor is of an unknown type, or the frame has too many descriptors.
    Shape,
    /// The frame is shorter than an Ethernet header.
    Short,
    /// The frame, with the tag that is inserted, is longer than [`MAX_FRAME`].
    Long,
    /// The offloads are invalid or not implemented.
    Offload,
    /// A buffer is not in memory.
    Memory,
}

impl Malformed {
    /// Returns the counter of frames that were dropped for this reason.
    pub fn counter(self, live: &Live) -> &Count {
        match self {
            Self::Shape => &live.shape,
            Self::Short => &live.short,
            Self::Long => &live.long,
            Self::Offload => &live.offload,
            Self::Memory => &live.memory,
        }
    }
}
