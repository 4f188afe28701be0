//! Saved state of the parts that every function has. A device embeds these types in its own state
//! and chooses the encoding; `restore` checks decoded values as hostile input.

use serde::{Deserialize, Serialize};

/// Version of the types in this module. A state of another version is refused.
pub const VERSION: u32 = 1;

/// A 32-bit configuration register.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Register {
    /// Byte offset in configuration space, a multiple of 4.
    pub offset: u16,
    /// All 32 bits, including read-only bits, which show whether the successor has the same shape.
    pub value: u32,
}

/// The registers of a [`ConfigSpace`](crate::ConfigSpace) that software can change.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ConfigState {
    /// [`VERSION`].
    pub version: u32,
    /// Every register with a writable bit, ascending.
    pub registers: Vec<Register>,
}

/// One entry of an MSI-X table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VectorState {
    /// Message address.
    pub address: u64,
    /// Message data.
    pub data: u32,
    /// Vector Control, Mask Bit.
    pub masked: bool,
    /// The vector's bit in the pending bit array.
    pub pending: bool,
}

/// Table and pending bits of a [`Msix`](crate::Msix). Message Control is part of the
/// configuration space.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MsixState {
    /// [`VERSION`].
    pub version: u32,
    /// One per vector, in order.
    pub vectors: Vec<VectorState>,
}
