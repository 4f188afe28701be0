//! Devices, their locks and their states together: the steps of which the pool's operations and its
//! workers' jobs consist.
//!
//! The order of locks: the table's mutex is never held during an operation on a device, although
//! such an operation may look at the table. A VF's state in the table says who may begin an
//! operation on its device: the taker if it was ready, the owner and the returner if it was taken,
//! one worker while it is returning. So a taker finds the locks of its VF's devset free, and waits
//! for no reset: not for one of another VF, which holds the set's lock for reading only, and not
//! for one of the set, which begins when all its VFs are in the worker's hands.

use super::device::{Device, Fault};
use super::devset::{Busy, Devset};
use super::outside::{Mutex, MutexGuard, PoisonError};
use super::owner::Owner;
use super::table::{DeviceOperation, Refusal, Table};

pub(crate) struct Shelf<D> {
    sets: Vec<Devset<D>>,
    set_size: u32,
    table: Mutex<Table>,
}

/// A VF was not taken.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum NotTaken<E> {
    Refused(Refusal),
    /// The record could not be written. The VF is ready again, or this job is to be done with it.
    Unwritten(E, Option<DeviceOperation>),
    /// The record was written, but the device of this VF had a fault, or without one the VF was
    /// returned meanwhile. It is to be reset.
    Lost(u32, Option<Fault>),
}

impl<D: Device> Shelf<D> {
    /// Puts devices into sets of `set_size` (at least 1).
    pub(crate) fn new(devices: impl IntoIterator<Item = D>, set_size: u32) -> Self {
        let set_size = set_size.max(1);
        let mut devices = devices.into_iter().peekable();
        let mut sets: Vec<Devset<D>> = Vec::new();
        while devices.peek().is_some() {
            sets.push(Devset::new(devices.by_ref().take(set_size as usize)));
        }
        let count = sets.iter().map(|set| set.len() as u32).sum();
        Self { sets, set_size, table: Mutex::new(Table::new(count, set_size)) }
    }

    pub(crate) fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives `owner` a ready VF. `write` writes the owner down before the VF is attached, and
    /// `prepare` is called on its device before the owner is let in.
    ///
    /// No lock is held during `write`. The table marks the VF as being taken: a thread that returns
    /// it meanwhile ends the ownership only, and this thread notices that and gives up the VF.
    pub(crate) fn take<E>(
        &self,
        owner: &Owner,
        now_ns: u64,
        write: impl FnOnce(u32) -> Result<(), E>,
        prepare: impl FnOnce(&mut D),
    ) -> Result<(u32, D::Access), NotTaken<E>> {
        let vf = self.table().take(owner, now_ns).map_err(NotTaken::Refused)?;
        self.hand_over(vf, write, prepare)
    }

    /// Gives `owner` this VF, if it is ready, as [`take`](Self::take) does.
    pub(crate) fn take_one<E>(
        &self,
        vf: u32,
        owner: &Owner,
        now_ns: u64,
        write: impl FnOnce(u32) -> Result<(), E>,
        prepare: impl FnOnce(&mut D),
    ) -> Result<(u32, D::Access), NotTaken<E>> {
        self.table().take_one(vf, owner, now_ns).map_err(NotTaken::Refused)?;
        self.hand_over(vf, write, prepare)
    }

    /// Hands over a VF that the table says is being taken.
    fn hand_over<E>(
        &self,
        vf: u32,
        write: impl FnOnce(u32) -> Result<(), E>,
        prepare: impl FnOnce(&mut D),
    ) -> Result<(u32, D::Access), NotTaken<E>> {
        if let Err(error) = write(vf) {
            let job = self.table().undo_take(vf);
            return Err(NotTaken::Unwritten(error, job));
        }
        let attached = self.attach(vf, prepare);
        let is_kept = self.table().taken(vf, attached.is_ok());
        match attached {
            Ok(access) if is_kept => Ok((vf, access)),
            attached => {
                self.detach(vf);
                Err(NotTaken::Lost(vf, attached.err()))
            }
        }
    }

    /// Attaches a VF that the table says is taken, and lets its owner in.
    fn attach(&self, vf: u32, prepare: impl FnOnce(&mut D)) -> Result<D::Access, Fault> {
        let (set, index) = self.place(vf);
        let attached = set.attach(index, |device| {
            prepare(device);
            device.admit().map(|()| device.access())
        });
        attached.unwrap_or_else(|_| Err(Fault("it is still attached".into())))
    }

    /// Lets another client of a VF's owner in, for which `prepare` is called on its device before.
    /// Returns `None` if the owner does not have the VF any more.
    pub(crate) fn admit(
        &self,
        vf: u32,
        owner: &Owner,
        prepare: impl FnOnce(&mut D),
    ) -> Option<Result<D::Access, Fault>> {
        self.with(vf, |device| {
            // Whoever returns the VF from now on expels the client after this.
            let is_its = self.table().of(owner) == Some((vf, true));
            is_its.then(|| {
                prepare(device);
                device.admit().map(|()| device.access())
            })
        })
    }

    /// Takes a VF from its owner, who no longer uses it. Returns the job with which the caller goes
    /// on, or `None` if a job for the VF still runs or a thread is taking it, at whose end it goes
    /// on.
    pub(crate) fn begin_return(
        &self,
        vf: u32,
        owner: &Owner,
    ) -> Result<Option<DeviceOperation>, Refusal> {
        let job = self.table().begin_return(vf, owner)?;
        if job.is_some() {
            self.detach(vf);
        }
        Ok(job)
    }

    /// Attaches a VF that an owner has from an earlier process, before its device is adopted.
    pub(crate) fn attach_unopened(&self, vf: u32) {
        let (set, index) = self.place(vf);
        if set.attach(index, |_| Ok::<_, std::convert::Infallible>(())).is_err() {
            unreachable!("VF {vf} was attached twice");
        }
    }

    /// Lets nobody use a VF that no owner has any more, and detaches it.
    pub(crate) fn detach(&self, vf: u32) {
        let (set, index) = self.place(vf);
        set.with(index, D::expel);
        set.detach(index);
    }

    /// Returns the handle of a taken VF.
    pub(crate) fn access(&self, vf: u32) -> D::Access {
        self.with(vf, |device| device.access())
    }

    /// Runs an operation on a VF's device.
    pub(crate) fn with<R>(&self, vf: u32, operation: impl FnOnce(&mut D) -> R) -> R {
        let (set, index) = self.place(vf);
        set.with(index, operation)
    }

    /// Does the operations of a job on its devices, which may take any time.
    pub(crate) fn operate(&self, job: DeviceOperation) -> Result<(), Fault> {
        match job {
            DeviceOperation::Open(vf) | DeviceOperation::Retry(vf) => {
                self.with(vf, |device| device.open().and_then(|()| clean(device)))
            }
            DeviceOperation::Return(vf) => self.with(vf, clean),
            DeviceOperation::Close(vf) => self.with(vf, D::close),
            DeviceOperation::Adopt(vf) => self.with(vf, |device| device.adopt()),
            DeviceOperation::ResetSet(set) => self.reset_set(set),
        }
    }

    fn reset_set(&self, set: u32) -> Result<(), Fault> {
        let busy = |busy| match busy {
            Busy::Attached(index) => Fault(format!("VF {index} of its devset is attached")),
            Busy::Operation => Fault("another operation on its devset has not ended".into()),
        };
        self.sets[set as usize].try_all(D::reset_set).map_err(busy)?
    }

    /// Returns the VFs that a job is about.
    pub(crate) fn vfs_of(&self, job: DeviceOperation) -> std::ops::Range<u32> {
        match job {
            DeviceOperation::Open(vf)
            | DeviceOperation::Retry(vf)
            | DeviceOperation::Adopt(vf)
            | DeviceOperation::Return(vf)
            | DeviceOperation::Close(vf) => vf..vf + 1,
            DeviceOperation::ResetSet(set) => self.table().vfs_of(set),
        }
    }

    fn place(&self, vf: u32) -> (&Devset<D>, usize) {
        (&self.sets[(vf / self.set_size) as usize], (vf % self.set_size) as usize)
    }
}

fn clean<D: Device>(device: &mut D) -> Result<(), Fault> {
    device.reset()?;
    device.scrub()
}
