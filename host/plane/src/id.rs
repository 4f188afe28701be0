//! Ids of endpoints.

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
