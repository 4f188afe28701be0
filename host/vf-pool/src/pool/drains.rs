//! Drains: VFs that are to be closed as soon as nobody has them.
//!
//! The ledger has a drain before the table has it, until it is ended: the next process goes on with
//! a drain whose VF has an owner, or was not closed yet.

use std::sync::PoisonError;

use super::{Inner, Pool};
use crate::table::DeviceOperation;
use crate::{Device, Error, Fault, Standing};

impl<D: Device> Pool<D> {
    /// Wants a VF closed as soon as nobody has it: at once, or when its owner returns it. It stays
    /// in the pool's list, drained, also after a restart.
    ///
    /// # Errors
    /// [`Error::NoVf`], [`Error::Ledger`]. The VF goes on as before then.
    pub fn drain(&self, vf: u32) -> Result<(), Error> {
        self.set_drain(vf, true)
    }

    /// Ends the drain of a VF, and gives one that failed another chance: it is opened, reset and
    /// scrubbed. Has no effect on any other VF.
    ///
    /// # Errors
    /// [`Error::NoVf`], [`Error::Ledger`]. The VF stays as it is then.
    pub fn resume(&self, vf: u32) -> Result<(), Error> {
        self.set_drain(vf, false)
    }

    fn set_drain(&self, vf: u32, is_wanted: bool) -> Result<(), Error> {
        self.check(vf)?;
        let inner = &self.inner;
        let _alone = inner.draining.lock().unwrap_or_else(PoisonError::into_inner);
        inner.ledger.set_drain(self.name(), vf, is_wanted)?;
        inner.end_adoption(vf, |table| if is_wanted { table.drain(vf) } else { table.resume(vf) });
        Ok(())
    }
}

impl<D: Device> Inner<D> {
    /// Goes on with the drains of an earlier process, after the table has the owners.
    pub(super) fn recover_drains(&self, vfs: &[u32]) {
        let count = self.shelf.table().len();
        for &vf in vfs {
            if (vf as usize) < count {
                // Returns no job: the VF has an owner, is drained, or is being opened.
                self.shelf.table().drain(vf);
            } else if let Err(error) = self.ledger.set_drain(&self.settings.name, vf, false) {
                tracing::warn!(pool = self.settings.name, vf, %error, "a drain of no VF stays");
            }
        }
    }

    /// Notes the end of a VF's closing. One that is not closed as a whole has failed, and one whose
    /// drain has ended meanwhile is opened again.
    pub(super) fn finish_close(
        &self,
        vf: u32,
        outcome: Result<(), Fault>,
    ) -> Option<DeviceOperation> {
        if outcome.is_err() {
            let outcome = self.record(vf, outcome);
            return self.shelf.table().done(vf, outcome);
        }
        self.note(vf, Some(Standing::Drained));
        let job = self.shelf.table().closed(vf);
        if job.is_some() {
            self.note(vf, Some(Standing::Returning));
        }
        job
    }
}
