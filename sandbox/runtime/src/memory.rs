//! The memory of this host, and that of a guest as the servers of its functions know it.

use std::os::fd::OwnedFd;

use slipway_hypervisor::{GuestMemory, SharedPages, VmSpec};
use slipway_plane_api::v1 as plane_v1;

use crate::Result;
use crate::node::Node;
use crate::record::ClientMemory;
use crate::resize::ROOM_UNIT;
use crate::templates::apart;

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

/// Returns the file of a fork's memory, once the pool has copied into it what was left in the
/// template: to whoever reads the file, that would be missing.
///
/// # Errors
/// The errors of [`GuestMemory::complete`].
pub(crate) async fn complete(node: &Node, memory: ClientMemory) -> Result<OwnedFd> {
    let path = node.config.pool_socket();
    // Not in a sandbox's lane: a copy of a whole template holds up the files of others there.
    apart(move || Ok(GuestMemory::complete(&path, memory.file)?)).await
}

/// Returns the most memory that a request has to name for a machine which begins with `begin` bytes
/// and has room for `room` bytes beside them: 0 without room. Room is rounded up when it is made,
/// and may be a little more than this host has, which no request may name.
pub(crate) fn most_to_ask_for(begin: u64, room: u64) -> u64 {
    if room > 0 { begin.saturating_add(room).min(of_host()) } else { 0 }
}

/// Returns whether a host with `host` bytes of memory can give a machine that begins with `begin`
/// bytes this room beside them. Room is rounded up when it is made, so it may be a little more than
/// the rest of the host's memory.
pub(crate) fn fits(begin: u64, room: u64, host: u64) -> bool {
    let rest = host.checked_sub(begin).and_then(|rest| rest.checked_next_multiple_of(ROOM_UNIT));
    rest.is_some_and(|rest| room <= rest)
}

/// Returns the memory of this host in bytes.
pub(crate) fn of_host() -> u64 {
    let host = rustix::system::sysinfo();
    (host.totalram as u64).saturating_mul(u64::from(host.mem_unit))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::resize::of_new;

    #[test]
    fn all_that_a_new_sandbox_can_have_fits_into_its_host() {
        let host = 1000 << 20;
        for begin in [64, 256, 999, 1000].map(|mib| mib << 20) {
            let room = of_new(begin, host, host).unwrap() - begin;
            assert!(fits(begin, 0, host) && fits(begin, room, host), "{begin}");
            assert!(!fits(begin, room + ROOM_UNIT, host), "{begin}");
        }
        assert!(!fits(1001 << 20, 0, host) && !fits(u64::MAX, u64::MAX, host));
    }
}
