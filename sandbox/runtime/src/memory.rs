//! The memory of this host, and that of a guest as the servers of its functions know it.

use slipway_hypervisor::{SharedPages, VmSpec};
use slipway_plane_api::v1 as plane_v1;

use crate::Result;

/// Guest memory that a VMM may have mapped at two addresses at once while it rearranges mappings.
const MAPPED_TWICE_BYTES: u64 = 16 << 20;

/// Returns the memory that a client of a function may pass: this guest's memory and, for reading,
/// the pages that it shares with others. Otherwise a VMM could pass file after file, and the
/// servers of the function would be charged for the pages that they touch.
pub(crate) fn client_memory(spec: &VmSpec) -> Result<plane_v1::ClientMemory> {
    let (device, inode) = spec.memory.identity()?;
    let shared = spec.shared.as_ref();
    let (shared_device, shared_inode) = shared.map_or((0, 0), SharedPages::identity);
    let shared_bytes = shared.map_or(0, SharedPages::bytes);
    let limit_bytes = spec.memory.bytes() + shared_bytes + MAPPED_TWICE_BYTES;
    Ok(plane_v1::ClientMemory { limit_bytes, device, inode, shared_device, shared_inode })
}

/// Returns the memory of this host in bytes.
pub(crate) fn of_host() -> u64 {
    let host = rustix::system::sysinfo();
    (host.totalram as u64).saturating_mul(u64::from(host.mem_unit))
}
