//! Ids of endpoints, and identities of records.

use std::sync::atomic::{AtomicU64, Ordering};

use slipway_plane_api::v1;

use crate::Error;

/// Checks the id of an endpoint.
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

/// The identity of a record of an endpoint or a namespace. No other record of the process has it,
/// also none that is made later with the same id or number: a caller that waited knows by it
/// whether the record that it finds is the one that it left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordId(u64);

impl RecordId {
    /// Returns a new identity.
    pub fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
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
}
