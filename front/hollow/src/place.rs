//! Memory for a driver.

use slipway_ram::Memory;

/// The part of the guest's memory that a driver has for its queues and buffers.
#[derive(Clone)]
pub struct DriverMemory {
    /// The memory.
    pub memory: Memory,
    /// The address of the part, a multiple of the page size.
    pub base: u64,
    /// Its bytes.
    pub len: u64,
}
