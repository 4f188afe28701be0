//! The memory of a guest, as the servers of its functions know it.

use slipway_hypervisor::GuestMemory;
use slipway_plane_api::v1 as plane_v1;

use crate::Result;

/// Guest memory that a VMM may have mapped at two addresses at once while it rearranges mappings.
const MAPPED_TWICE_BYTES: u64 = 16 << 20;

/// Returns the memory that a client of a function may pass: this guest's memory only. Otherwise a
/// VMM could pass file after file, and the servers of the function would be charged for the pages
/// that they touch.
pub(crate) fn client_memory(memory: &GuestMemory) -> Result<plane_v1::ClientMemory> {
    let (device, inode) = memory.identity()?;
    let limit_bytes = memory.bytes() + MAPPED_TWICE_BYTES;
    Ok(plane_v1::ClientMemory { limit_bytes, device, inode, ..Default::default() })
}
