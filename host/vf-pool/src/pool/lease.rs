//! The functions that owners have.

use super::{Lease, Pool};
use crate::{Device, Error, Fault, Owner};

impl<D: Device> Pool<D> {
    /// Returns the VF that `owner` has, for an owner that lost the answer to its request.
    ///
    /// # Errors
    /// [`Error::NoLease`], [`Error::Adopting`].
    pub fn lease(&self, owner: &Owner) -> Result<Lease<D::Access>, Error> {
        let pool = || self.name().to_owned();
        let found = self.inner.shelf.table().of(owner);
        match found {
            Some((vf, true)) => Ok(Lease { vf, access: self.inner.shelf.access(vf) }),
            Some((vf, false)) => Err(Error::Adopting { pool: pool(), vf, owner: owner.clone() }),
            None => Err(Error::NoLease { pool: pool(), owner: owner.clone() }),
        }
    }

    /// Has the VF of `owner` let another client in, as [`take_prepared`](Self::take_prepared) does
    /// for the first.
    ///
    /// # Errors
    /// [`Error::NoLease`], [`Error::Adopting`], [`Error::Shut`]. The VF stays the owner's.
    pub fn admit(
        &self,
        owner: &Owner,
        prepare: impl FnOnce(&mut D),
    ) -> Result<Lease<D::Access>, Error> {
        let vf = self.lease(owner)?.vf;
        let pool = || self.name().to_owned();
        match self.inner.shelf.admit(vf, owner, prepare) {
            Some(Ok(access)) => Ok(Lease { vf, access }),
            Some(Err(Fault(reason))) => Err(Error::Shut { pool: pool(), vf, reason }),
            None => Err(Error::NoLease { pool: pool(), owner: owner.clone() }),
        }
    }

    /// Returns the number of the VF that `owner` has.
    ///
    /// # Errors
    /// [`Error::NoLease`].
    pub fn vf_of(&self, owner: &Owner) -> Result<u32, Error> {
        let found = self.inner.shelf.table().of(owner);
        let lacks = || Error::NoLease { pool: self.name().to_owned(), owner: owner.clone() };
        found.map(|(vf, _)| vf).ok_or_else(lacks)
    }
}
