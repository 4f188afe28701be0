//! The UUIDs of disks.

use sha2::{Digest, Sha256};

/// Returns a UUID that depends on the endpoint `id` and the namespace's number `nsid` only, so that
/// a guest finds its disk again. It has version 8 (free form) of RFC 9562, since
/// nothing about it is random.
pub fn uuid(id: &str, nsid: u32) -> [u8; 16] {
    let digest = Sha256::new().chain_update(nsid.to_be_bytes()).chain_update(id).finalize();
    let mut bytes = [0; 16];
    bytes.copy_from_slice(&digest[..16]);
    bytes[6] = 0x80 | (bytes[6] & 0x0f);
    bytes[8] = 0x80 | (bytes[8] & 0x3f);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uuids_are_stable_distinct_and_of_version_8() {
        let one = uuid("a", 1);
        assert_eq!(one, uuid("a", 1));
        assert_ne!(one, uuid("a", 2));
        assert_eq!((one[6] >> 4, one[8] >> 6), (8, 2));
    }
}
