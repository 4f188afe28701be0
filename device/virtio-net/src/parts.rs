//! The parts of a device.

use std::sync::Arc;

use slipway_pci::Interrupt;
use slipway_ram::{Lasting, Memory};
use slipway_switch::Mac;
use slipway_telemetry::Clock;

/// Most queue pairs.
pub const MAX_PAIRS: u16 = 64;
/// Most entries of a queue.
pub const MAX_QUEUE: u16 = 1024;
/// Bytes of an Ethernet header with a tag: the part of a frame that does not count for its MTU.
pub(crate) const FRAME_OVERHEAD: usize = 18;

/// The parts that a host hands to [`Device::new`](crate::Device::new).
pub struct Parts {
    /// The guest's memory.
    pub memory: Memory,
    /// One handle per MSI-X vector, in order, 1 to 256. [`vectors`] handles give every queue a
    /// vector of its own.
    pub interrupts: Vec<Interrupt>,
    /// The clock that times waiting for the switch's thread.
    pub clock: Arc<dyn Clock>,
    /// The settings that the driver is offered.
    pub settings: Settings,
    /// Memory of [`journal_len`] bytes that outlives the process, if a successor shall be able to
    /// [`recover`](crate::Device::recover) the device.
    pub journal: Option<Lasting>,
}

/// The properties of a device that its driver is offered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// The device's first MAC address, a unicast one. The host may give it another one later, by
    /// [`Control::set_mac`](crate::Control::set_mac).
    pub mac: Mac,
    /// The MTU of the link, in bytes after the Ethernet header: 68 to 65,535.
    pub mtu: u16,
    /// Queue pairs, 1 to [`MAX_PAIRS`].
    pub pairs: u16,
    /// Most entries of a queue, a power of two, 2 to [`MAX_QUEUE`].
    pub queue_size: u16,
    /// `true` if checksum and segmentation offloads are offered.
    pub offloads: bool,
}

impl Settings {
    /// Returns settings with one queue pair of 256 entries, MTU 1500 and offloads.
    pub const fn new(mac: Mac) -> Self {
        Self { mac, mtu: 1500, pairs: 1, queue_size: 256, offloads: true }
    }
}

/// Returns the number of vectors for a device with `pairs` queue pairs: one for each queue, one for
/// the control queue, one for changes of the configuration.
pub const fn vectors(pairs: u16) -> u16 {
    2 * pairs + 2
}

/// Returns how many bytes the journal of a device with `pairs` queue pairs takes.
pub const fn journal_len(pairs: u16) -> usize {
    // Two copies of the state.
    2 * max_state(pairs)
}

/// Returns the length in bytes of the longest state of a device with `pairs` queue pairs. The
/// longest state of the tests has a third of it.
pub(crate) const fn max_state(pairs: u16) -> usize {
    65_536 + 1024 * pairs as usize
}

/// A mistake in the parts, made by the program or its configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PartsError {
    /// The address is not that of a single interface.
    #[error("{0} is no address of one interface")]
    Mac(Mac),
    /// The MTU is out of range.
    #[error("an MTU is 68 to 65535, not {0}")]
    Mtu(u16),
    /// The number of queue pairs is out of range.
    #[error("a network device has 1 to 64 queue pairs, not {0}")]
    Pairs(u16),
    /// The queue size is out of range, or no power of two.
    #[error("a queue has 2 to 1024 entries, a power of two, not {0}")]
    QueueSize(u16),
    /// There is no interrupt, or there are more than the MSI-X table has room for.
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
