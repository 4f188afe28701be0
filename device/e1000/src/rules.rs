//! The rules of the data path, which the registers determine.

use std::sync::Arc;

use crate::filter::Filter;

/// A descriptor ring, as its registers describe it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub(crate) struct RingRules {
    /// The transmitter or receiver is enabled, and the device may use memory.
    pub enabled: bool,
    /// Address of the first descriptor.
    pub base: u64,
    /// Descriptors in the ring.
    pub entries: u32,
    /// The head that the ring begins with.
    pub head: u32,
    /// Changes with each write to a register of the ring other than the tail: the ring then begins
    /// anew, with its `head`.
    pub epoch: u32,
}

/// The rules that the registers make for the data path. They may change while frames move.
#[derive(Clone)]
pub(crate) struct Rules {
    pub transmit: RingRules,
    pub receive: RingRules,
    /// Address of the communication status block, if it is in use.
    pub csb: Option<u64>,
    /// Received frames have a header, and may have work left ([`slipway_e1000_spec::csb`]).
    pub offloads: bool,
    pub rctl: u32,
    pub rxcsum: u32,
    /// Bytes of the longest small packet (RSRPD).
    pub small: u16,
    /// Tags are stripped and inserted (CTRL.VME).
    pub vlans: bool,
    /// The type of tags (VET).
    pub tag: u16,
    /// Frames that are sent come back.
    pub loops: bool,
    pub filter: Arc<Filter>,
}

impl Rules {
    /// Returns the bytes of a receive buffer (RCTL.BSIZE and RCTL.BSEX). The reserved size is that
    /// of 2048 bytes.
    pub fn buffer(&self) -> usize {
        use slipway_e1000_spec::rctl;
        let size = 2048 >> (self.rctl >> rctl::BSIZE & 0b11);
        let extended = self.rctl & rctl::BSEX != 0 && size < 2048;
        if extended { 16 * size } else { size }
    }

    /// Returns the bytes of the header in front of a received frame.
    pub fn header(&self) -> usize {
        if self.offloads { slipway_e1000_spec::csb::HEADER } else { 0 }
    }

    /// Returns the bytes of a received frame's check sequence: 0 if it is stripped.
    pub fn fcs(&self) -> usize {
        match self.rctl & slipway_e1000_spec::rctl::SECRC {
            0 => slipway_e1000_spec::FCS,
            _ => 0,
        }
    }
}
