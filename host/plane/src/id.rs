//! Ids of endpoints and disks, and the UUIDs made of them.

use sha2::{Digest, Sha256};
use slipway_plane_api::v1;

use crate::Error;

/// Checks the id of an endpoint or the name of a disk.
///
/// # Errors
/// [`Error::Invalid`].
pub fn check_id(id: &str) -> Result<(), Error> {
    slipway_plane_api::check_id(id).map_err(Error::Invalid)
}

/// Returns the id that the UUID of `wanted`, a namespace of endpoint `id`, is made of: that of the
/// endpoint whose identity the namespace has, or else `id`.
///
/// # Errors
/// [`Error::Invalid`] if the description names an endpoint that cannot be.
pub fn identity<'a>(id: &'a str, wanted: &'a v1::Namespace) -> Result<&'a str, Error> {
    if wanted.identity.is_empty() {
        return Ok(id);
    }
    check_id(&wanted.identity)?;
    Ok(&wanted.identity)
}

/// Returns a UUID that depends on the endpoint and the namespace only, so that a guest finds its
/// disk again. It has version 8 (free form) of RFC 9562, since nothing about it is random.
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
    fn an_identity_is_an_endpoints_id() {
        let wanted =
            |identity: &str| v1::Namespace { identity: identity.into(), ..Default::default() };
        assert_eq!(identity("a", &wanted("")).unwrap(), "a");
        assert_eq!(identity("a", &wanted("saved.1")).unwrap(), "saved.1");
        for bad in ["a/b", "a b", &"x".repeat(65)] {
            assert!(matches!(identity("a", &wanted(bad)), Err(Error::Invalid(_))), "{bad:?}");
        }
    }

    #[test]
    fn uuids_are_stable_distinct_and_of_version_8() {
        let one = uuid("a", 1);
        assert_eq!(one, uuid("a", 1));
        assert_ne!(one, uuid("a", 2));
        assert_eq!((one[6] >> 4, one[8] >> 6), (8, 2));
    }
}
