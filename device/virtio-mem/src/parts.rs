//! The parts that a host hands to the device, and the host's side of the memory.

use std::ops::Range;

use slipway_pci::Interrupt;
use slipway_ram::Memory;
use slipway_virtio::InterruptCount;

/// The bytes that one poll gives back: 2 MiB, some 100 us of the kernel's time.
pub const PIECE: u64 = 2 << 20;
/// The smallest block in bytes: a huge page of x86-64, so that blocks are given back whole.
pub const MIN_BLOCK: u64 = 2 << 20;
/// The most blocks of a region.
pub const MAX_BLOCKS: u64 = 1 << 16;

/// The host of a region's memory. Ranges are offsets in the region, multiples of
/// [`PIECE`]. No call waits for a peer, but [`MemoryHost::reveal`].
pub trait MemoryHost: Send {
    /// Lets the guest's devices reach the region from its start up to byte `end`, further than
    /// before: blocks are plugged there from now on. Called for what the host asks for, and never
    /// for a driver's request. May wait for those who serve the devices.
    ///
    /// # Errors
    /// [`Refused`]: a device does not reach all of it. No block is plugged behind the earlier end.
    fn reveal(&mut self, end: u64) -> Result<(), Refused>;

    /// Makes an unplugged range accessible to the guest.
    ///
    /// # Errors
    /// [`Refused`]: nothing has changed, and the driver may try again.
    fn plug(&mut self, range: Range<u64>) -> Result<(), Refused>;

    /// Takes the access to a range away from the guest. Parts of it may be unplugged already.
    ///
    /// # Errors
    /// [`Refused`]: nothing has changed, and the driver may try again.
    fn unplug(&mut self, range: Range<u64>) -> Result<(), Refused>;

    /// Gives back the pages of [`PIECE`] bytes to which the guest has no access.
    ///
    /// # Errors
    /// [`Refused`]: nothing has changed, and the driver may try again.
    fn discard(&mut self, piece: Range<u64>) -> Result<(), Refused>;
}

/// The host cannot change a range now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refused;

/// The place of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// The guest-physical address of the first byte, a multiple of the block.
    pub address: u64,
    /// The bytes of the region, a multiple of the block; 1 to [`MAX_BLOCKS`] blocks.
    pub bytes: u64,
    /// The bytes of a block: a power of two, at least [`MIN_BLOCK`].
    pub block: u64,
    /// The bytes by which the part of the region grows in which blocks can be plugged, a multiple
    /// of the block: a block of the guest's own memory hot plug, of which a guest uses whole ones.
    pub unit: u64,
    /// The region's NUMA node: a proximity domain of the guest's ACPI tables.
    pub node: u16,
}

impl Geometry {
    /// Returns whether a device can have this geometry.
    pub(crate) fn is_sound(&self) -> bool {
        let Self { address, bytes, block, unit, .. } = *self;
        block.is_power_of_two()
            && block >= MIN_BLOCK
            && address.is_multiple_of(block)
            && (unit >= block && unit.is_multiple_of(block))
            && bytes.is_multiple_of(block)
            && (1..=MAX_BLOCKS).contains(&(bytes / block))
            && address.checked_add(bytes).is_some()
    }
}

/// The parts that a host hands to [`Mem::new`](crate::Mem::new).
pub struct Parts {
    /// The guest's memory, by guest-physical addresses: where the queue is.
    pub memory: Memory,
    /// One handle per MSI-X vector, in order, 1 to 256; [`VECTORS`](crate::VECTORS) suffice.
    pub interrupts: Vec<Interrupt>,
    /// The place of the region.
    pub geometry: Geometry,
    /// The host of the region's memory, in which nothing is plugged.
    pub host: Box<dyn MemoryHost>,
}

/// A mistake in the parts, made by the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PartsError {
    /// The number of interrupts is out of range.
    #[error(transparent)]
    Interrupts(#[from] InterruptCount),
    /// The region is not made of whole blocks, or of too many, or does not grow by whole blocks.
    #[error("a memory device needs a region of 1 to 65536 whole blocks of at least 2 MiB")]
    Geometry,
}

/// The reason why a device cannot ask for a size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// The region is smaller: it has this number of bytes.
    #[error("the region has {0} bytes")]
    TooLarge(u64),
    /// The size is not a number of whole blocks, which have this number of bytes.
    #[error("the size is no multiple of the block's, {0} bytes")]
    PartOfABlock(u64),
    /// A device of the guest does not reach so much of the region.
    #[error("the server of a function does not map the memory")]
    Unreachable,
}
