//! Little-endian numbers and addresses in messages.

use crate::Address;

/// Returns the number at `at`, or `None` if the message is too short, as the functions below do.
pub(crate) fn word32(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

pub(crate) fn word64(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}

/// Returns the address in 24 bytes from `at` on: 16 of the address, 2 of the port, and 6 that are
/// ignored.
pub(crate) fn address(bytes: &[u8], at: usize) -> Option<Address> {
    let ip = bytes.get(at..at + 16)?.try_into().ok()?;
    let port = u16::from_le_bytes(bytes.get(at + 16..at + 18)?.try_into().ok()?);
    Some(Address { ip, port })
}

/// Puts an address into the first 18 of 24 bytes.
pub(crate) fn put_address(to: &mut [u8], address: Address) {
    to[..16].copy_from_slice(&address.ip);
    to[16..18].copy_from_slice(&address.port.to_le_bytes());
}
