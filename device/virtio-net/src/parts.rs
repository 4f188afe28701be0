//! What a device is made of.

use std::sync::Arc;

use slipway_pci::Interrupt;
use slipway_ram::{Lasting, Memory};
use slipway_switch::Mac;
use slipway_telemetry::Clock;

/// Most queue pairs.
pub const MAX_PAIRS: u16 = 64;
/// Most entries of a queue.
pub const MAX_QUEUE: u16 = 1024;
/// Bytes of an Ethernet header with a tag: what a frame has beyond its MTU.
pub(crate) const FRAME_OVERHEAD: usize = 18;

/// What a host hands to [`Device::new`](crate::Device::new).
pub struct Parts {
    /// The guest's memory.
    pub memory: Memory,
    /// One handle per MSI-X vector, in order, 1 to 256; [`vectors`] give every queue one of its own.
    pub interrupts: Vec<Interrupt>,
    /// For waiting on the switch's thread.
    pub clock: Arc<dyn Clock>,
    /// What the driver is offered.
    pub settings: Settings,
    /// Memory that outlives the process, [`journal_len`] bytes, for a device that a successor shall
    /// [`recover`](crate::Device::recover).
    pub journal: Option<Lasting>,
}

/// What a driver is offered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// The address that it begins with, a unicast one.
    pub mac: Mac,
    /// The largest packet of its link, bytes above Ethernet's header: 68 to 65,535.
    pub mtu: u16,
    /// Queue pairs, 1 to [`MAX_PAIRS`].
    pub pairs: u16,
    /// Most entries of a queue, a power of two, 2 to [`MAX_QUEUE`].
    pub queue_size: u16,
    /// Offers checksum and segmentation offloads.
    pub offloads: bool,
}

impl Settings {
    /// One queue pair of 256 entries, MTU 1500, offloads.
    pub const fn new(mac: Mac) -> Self {
        Self { mac, mtu: 1500, pairs: 1, queue_size: 256, offloads: true }
    }
}

/// Vectors for a device with `pairs` queue pairs: one for each queue, one for the control queue, one
/// for changes of the configuration.
pub const fn vectors(pairs: u16) -> u16 {
    2 * pairs + 2
}

/// Bytes that a device with `pairs` queue pairs needs to be kept in.
pub const fn journal_len(pairs: u16) -> usize {
    // Two copies of its state; the longest that the tests make has a third of that.
    2 * (65_536 + 1024 * pairs as usize)
}

/// What is wrong with the parts: a mistake of the program or of its configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PartsError {
    /// Not one interface's address.
    #[error("{0} is no address of one interface")]
    Mac(Mac),
    /// Out of range.
    #[error("an MTU is 68 to 65535, not {0}")]
    Mtu(u16),
    /// Out of range.
    #[error("a network device has 1 to 64 queue pairs, not {0}")]
    Pairs(u16),
    /// Out of range.
    #[error("a queue has 2 to 1024 entries, a power of two, not {0}")]
    QueueSize(u16),
    /// No interrupt, or more than there is room for in the MSI-X table.
    #[error("a network device needs 1 to 256 interrupts")]
    Interrupts,
    /// The journal's memory is too short.
    #[error("the journal is too short")]
    Journal,
}

impl Parts {
    pub(crate) fn check(&self) -> Result<(), PartsError> {
        let Settings { mac, mtu, pairs, queue_size, .. } = self.settings;
        if !mac.is_unicast() {
            return Err(PartsError::Mac(mac));
        }
        if mtu < 68 {
            return Err(PartsError::Mtu(mtu));
        }
        if !(1..=MAX_PAIRS).contains(&pairs) {
            return Err(PartsError::Pairs(pairs));
        }
        if !queue_size.is_power_of_two() || !(2..=MAX_QUEUE).contains(&queue_size) {
            return Err(PartsError::QueueSize(queue_size));
        }
        if !(1..=256).contains(&self.interrupts.len()) {
            return Err(PartsError::Interrupts);
        }
        if self.journal.as_ref().is_some_and(|journal| journal.len() < journal_len(pairs)) {
            return Err(PartsError::Journal);
        }
        Ok(())
    }
}
