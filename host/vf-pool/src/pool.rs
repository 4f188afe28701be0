//! The pool.

mod drains;
mod lease;
mod retries;

pub use retries::Retries;

use std::cmp::Reverse;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::shelf::{NotTaken, Shelf};
use crate::table::{Counts, DeviceOperation, Refusal, VfState, VfStatus};
use crate::workers::{OperationHandler, Queue, Workers};
use crate::{Device, Error, Fault, Ledger, Owner, Record, Standing};

/// The configuration of a pool.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The pool's name, for the ledger and for messages.
    pub name: String,
    /// The number of VFs in a devset, at least 1.
    pub set_size: u32,
    /// The number of VFs that are opened, reset and scrubbed at once, at least 1.
    pub workers: u32,
    /// The longest time for opening, reset and scrub of one VF together. A VF that takes longer
    /// leaves the pool.
    pub deadline: Duration,
    /// The tries of a VF that has failed.
    pub retries: Retries,
}

/// A VF and its owner's handle to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lease<A> {
    /// The VF's number in the pool, from 0.
    pub vf: u32,
    /// The handle.
    pub access: A,
}

/// The result of [`Pool::reconcile`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reconciled {
    /// VFs whose owners live.
    pub kept: Vec<(u32, Owner)>,
    /// VFs that were taken from owners that are gone. They are being reset.
    pub returned: Vec<(u32, Owner)>,
}

/// Counters of a pool since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Health {
    /// Resets and scrubs that ended well.
    pub resets: u64,
    /// Operations that failed or did not end in time.
    pub failures: u64,
    /// Changes that the ledger did not take, apart from those of VFs that were refused for it.
    /// After a restart such VFs are reset once more.
    pub unwritten: u64,
    /// Requests for a VF that got none, for any reason.
    pub refusals: u64,
    /// Tries of VFs that had failed.
    pub retries: u64,
}

#[derive(Default)]
struct Counters {
    resets: AtomicU64,
    failures: AtomicU64,
    unwritten: AtomicU64,
    refusals: AtomicU64,
    retries: AtomicU64,
}

struct Inner<D> {
    settings: Settings,
    shelf: Shelf<D>,
    ledger: Ledger,
    queue: Arc<Queue>,
    /// Held while a drain begins or ends, so that the ledger and the table have the same last word.
    draining: Mutex<()>,
    /// The last VF that was returning is no longer. Waits with the table's mutex.
    settled: Condvar,
    counters: Counters,
}

/// A pool of VFs. Clones share it. When the last clone is dropped the threads end; the devices stay
/// open, and the ledger keeps their owners.
pub struct Pool<D: Device> {
    inner: Arc<Inner<D>>,
    _workers: Arc<Workers>,
}

impl<D: Device> Clone for Pool<D> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), _workers: self._workers.clone() }
    }
}

impl<D: Device> Pool<D> {
    /// Makes a pool of `devices`, whose numbers are their places. They are opened, reset and
    /// scrubbed in the background, except those that have an owner by the ledger, which are taken
    /// over as they are; see [`reconcile`](Self::reconcile).
    ///
    /// # Errors
    /// [`Error::Ledger`], [`Error::Threads`].
    pub fn new(
        settings: Settings,
        devices: impl IntoIterator<Item = D>,
        ledger: Ledger,
    ) -> Result<Self, Error> {
        let (records, drains) = (ledger.records(&settings.name)?, ledger.drains(&settings.name)?);
        let shelf = Shelf::new(devices, settings.set_size);
        let queue = Arc::new(Queue::new(settings.deadline));
        let (draining, settled, counters) = (Mutex::new(()), Condvar::new(), Counters::default());
        let inner = Inner { settings, shelf, ledger, queue, draining, settled, counters };
        let inner = Arc::new(inner);
        let jobs = inner.recover(records);
        inner.recover_drains(&drains);
        let workers = Workers::start(&inner, &inner.queue, inner.settings.workers);
        let name = || inner.settings.name.clone();
        let workers = workers.map_err(|source| Error::Threads { pool: name(), source })?;
        inner.queue.push(jobs);
        Ok(Self { inner, _workers: Arc::new(workers) })
    }

    /// Returns whether `other` is a clone of this pool.
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }

    /// Returns the pool's name.
    pub fn name(&self) -> &str {
        &self.inner.settings.name
    }

    /// Gives `owner` a ready VF, in constant time. Waits for the ledger to be written, and for the
    /// device to let the owner in.
    ///
    /// # Errors
    /// [`Error::Empty`], [`Error::Held`], [`Error::Ledger`], [`Error::Withdrawn`],
    /// [`Error::Unfit`]. The owner has nothing new then.
    pub fn take(&self, owner: &Owner) -> Result<Lease<D::Access>, Error> {
        self.take_prepared(owner, None, |_| {})
    }

    /// Gives `owner` a ready VF as [`take`](Self::take) does, or the one that `number` names.
    /// Before the owner is let in, `prepare` tells the device what is particular to this owner, for
    /// its next [`Device::admit`] alone; it must neither block nor panic.
    ///
    /// # Errors
    /// The errors of [`take`](Self::take), with [`Error::NoVf`], [`Error::Taken`] and
    /// [`Error::Unready`] in place of [`Error::Empty`] for a VF that is named.
    pub fn take_prepared(
        &self,
        owner: &Owner,
        number: Option<u32>,
        prepare: impl FnOnce(&mut D),
    ) -> Result<Lease<D::Access>, Error> {
        self.try_take(owner, number, prepare).inspect_err(|_| {
            self.inner.counters.refusals.fetch_add(1, Ordering::Relaxed);
        })
    }

    fn try_take(
        &self,
        owner: &Owner,
        number: Option<u32>,
        prepare: impl FnOnce(&mut D),
    ) -> Result<Lease<D::Access>, Error> {
        let inner = &self.inner;
        let now = now_ns();
        let record = Record { standing: Standing::Taken { owner: owner.clone() }, since_ns: now };
        let write = |vf| inner.ledger.write(self.name(), vf, Some(&record));
        number.map_or(Ok(()), |vf| self.check(vf))?;
        let taken = match number {
            Some(vf) => inner.shelf.take_one(vf, owner, now, write, prepare),
            None => inner.shelf.take(owner, now, write, prepare),
        };
        match taken {
            Ok((vf, access)) => Ok(Lease { vf, access }),
            Err(NotTaken::Refused(refusal)) => Err(self.error(number.unwrap_or(0), owner, refusal)),
            Err(NotTaken::Unwritten(error, job)) => {
                inner.queue.push(job);
                inner.settled.notify_all();
                Err(error.into())
            }
            Err(NotTaken::Lost(vf, fault)) => {
                inner.note(vf, Some(Standing::Returning));
                inner.queue.push([DeviceOperation::Return(vf)]);
                let pool = self.name().to_owned();
                Err(match fault {
                    Some(Fault(reason)) => Error::Unfit { pool, vf, reason },
                    None => Error::Withdrawn { pool, vf, owner: owner.clone() },
                })
            }
        }
    }

    /// Takes a VF back from `owner`, who must not use it any more. It is reset and scrubbed in the
    /// background.
    ///
    /// # Errors
    /// [`Error::NoVf`], [`Error::NotTaken`], [`Error::Taken`] (by another owner).
    pub fn give_back(&self, vf: u32, owner: &Owner) -> Result<(), Error> {
        self.check(vf)?;
        let job = self.inner.shelf.begin_return(vf, owner);
        let job = job.map_err(|refusal| self.error(vf, owner, refusal))?;
        // Without a job, a worker has the VF, or the thread that takes it, and writes for it. Until
        // then the record names the owner, and the next process reconciles that.
        if job.is_some() {
            self.inner.note(vf, Some(Standing::Returning));
        }
        self.inner.queue.push(job);
        Ok(())
    }

    /// Takes back the VFs of owners for which `lives` returns `false`. Called after a restart, when
    /// it is known which owners still run.
    pub fn reconcile(&self, lives: impl Fn(&Owner) -> bool) -> Reconciled {
        let mut result = Reconciled::default();
        for status in self.status() {
            let VfState::Taken { owner, .. } = status.state else { continue };
            if lives(&owner) {
                result.kept.push((status.vf, owner));
            } else if self.give_back(status.vf, &owner).is_ok() {
                // An error: it was returned meanwhile.
                result.returned.push((status.vf, owner));
            }
        }
        result
    }

    /// Resets a devset as a whole, in the background, and gives its VFs that failed another chance.
    ///
    /// # Errors
    /// [`Error::NoSet`], [`Error::SetInUse`].
    pub fn reset_set(&self, set: u32) -> Result<(), Error> {
        let mut table = self.inner.shelf.table();
        let count = table.sets();
        let pool = self.name().to_owned();
        if set as usize >= count {
            return Err(Error::NoSet { pool, set, count });
        }
        let job = table.claim_set(set);
        drop(table);
        match job {
            Ok(job) => self.inner.queue.push([job]),
            Err(Refusal::InUse(vf, state)) => return Err(Error::SetInUse { pool, set, vf, state }),
            Err(refusal) => unreachable!("a set is refused for {refusal:?}"),
        }
        Ok(())
    }

    /// Returns the state of each VF, ascending by number. Never waits for a device.
    pub fn status(&self) -> Vec<VfStatus> {
        self.inner.shelf.table().status()
    }

    /// Returns the number of VFs in each state.
    pub fn counts(&self) -> Counts {
        self.inner.shelf.table().counts()
    }

    /// Returns the pool's counters.
    pub fn health(&self) -> Health {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let Counters { resets, failures, unwritten, refusals, retries } = &self.inner.counters;
        Health {
            resets: of(resets),
            failures: of(failures),
            unwritten: of(unwritten),
            refusals: of(refusals),
            retries: of(retries),
        }
    }

    /// Waits until no VF is being opened, reset, scrubbed or closed. Returns `false` if that takes
    /// longer than `patience`.
    pub fn settle(&self, patience: Duration) -> bool {
        let deadline = Instant::now() + patience;
        let mut table = self.inner.shelf.table();
        loop {
            if table.counts().returning == 0 {
                return true;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            let waited = self.inner.settled.wait_timeout(table, left);
            table = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn check(&self, vf: u32) -> Result<(), Error> {
        let count = self.inner.shelf.table().len();
        let pool = || self.name().to_owned();
        if (vf as usize) < count { Ok(()) } else { Err(Error::NoVf { pool: pool(), vf, count }) }
    }

    fn error(&self, vf: u32, owner: &Owner, refusal: Refusal) -> Error {
        let pool = self.name().to_owned();
        match refusal {
            Refusal::Empty(counts) => Error::Empty { pool, counts },
            Refusal::Unready(vf, state) => Error::Unready { pool, vf, state },
            Refusal::Held(vf) => Error::Held { pool, owner: owner.clone(), vf },
            Refusal::NotTaken(state) | Refusal::InUse(_, state) => {
                Error::NotTaken { pool, vf, state }
            }
            Refusal::Other(owner) => Error::Taken { pool, vf, owner },
        }
    }
}

impl<D: Device> Inner<D> {
    /// Brings the table to what the ledger says. Returns the jobs.
    fn recover(&self, mut records: Vec<(u32, Record)>) -> Vec<DeviceOperation> {
        // An owner that took a VF after it had lost another one, whose record still names it, has
        // the later one.
        records.sort_by_key(|(_, record)| Reverse(record.since_ns));
        let count = self.shelf.table().len() as u32;
        let mut jobs: Vec<Option<DeviceOperation>> =
            (0..count).map(|vf| Some(DeviceOperation::Open(vf))).collect();
        for (vf, Record { standing, since_ns }) in records {
            let Some(job) = jobs.get_mut(vf as usize) else {
                tracing::warn!(
                    pool = self.settings.name,
                    vf,
                    ?standing,
                    "the pool has no such VF any more"
                );
                self.note(vf, None);
                continue;
            };
            match standing {
                Standing::Taken { owner } => {
                    let adopt = self.shelf.table().adopt(vf, owner, since_ns);
                    if adopt.is_some() {
                        self.shelf.attach_unopened(vf);
                        *job = adopt;
                    }
                }
                Standing::Drained => {
                    let mut table = self.shelf.table();
                    table.drain(vf);
                    *job = table.closed(vf);
                }
                // Another process may get it to work.
                Standing::Returning | Standing::Failed { .. } => {}
            }
        }
        jobs.into_iter().flatten().collect()
    }

    /// Changes a VF's record. If that fails, the next process resets the VF once more, or learns
    /// from its owner that it is taken.
    fn note(&self, vf: u32, standing: Option<Standing>) {
        let record = standing.map(|standing| Record { standing, since_ns: now_ns() });
        if let Err(error) = self.ledger.write(&self.settings.name, vf, record.as_ref()) {
            self.counters.unwritten.fetch_add(1, Ordering::Relaxed);
            tracing::error!(pool = self.settings.name, vf, %error, "the ledger lacks a change");
        }
    }

    fn fault(&self, vf: u32, why: &str) {
        self.counters.failures.fetch_add(1, Ordering::Relaxed);
        tracing::error!(pool = self.settings.name, vf, why, "a VF has left the pool");
    }

    /// Counts and records the end of an operation, while no other thread has the VF.
    fn record(&self, vf: u32, outcome: Result<(), Fault>) -> Result<(), String> {
        let outcome = outcome.map_err(|Fault(why)| why);
        match &outcome {
            Ok(()) => {
                self.counters.resets.fetch_add(1, Ordering::Relaxed);
                self.note(vf, None);
            }
            Err(why) => {
                self.fault(vf, why);
                self.note(vf, Some(Standing::Failed { reason: why.clone() }));
            }
        }
        outcome
    }

    /// Notes the end of a VF's opening or reset.
    fn finish_vf(&self, vf: u32, outcome: Result<(), Fault>) -> Option<DeviceOperation> {
        let outcome = self.record(vf, outcome);
        let job = self.shelf.table().cleaned(vf, outcome);
        self.plan_try(vf);
        job
    }

    fn finish_adoption(&self, vf: u32, outcome: Result<(), Fault>) -> Option<DeviceOperation> {
        if let Err(Fault(why)) = &outcome {
            tracing::warn!(pool = self.settings.name, vf, why, "a VF was lost to its owner");
        }
        let job = self.shelf.table().adopted(vf, outcome.is_ok());
        if job.is_some() {
            self.shelf.detach(vf);
            self.note(vf, Some(Standing::Returning));
        }
        job
    }

    fn finish_set(&self, set: u32, outcome: Result<(), Fault>) -> Vec<DeviceOperation> {
        let outcome = outcome.map_err(|Fault(why)| format!("the reset of its devset: {why}"));
        if let Err(why) = &outcome {
            for vf in self.shelf.vfs_of(DeviceOperation::ResetSet(set)) {
                self.fault(vf, why);
            }
        }
        let jobs = self.shelf.table().release_set(set, &outcome);
        // One whose drain has ended meanwhile is not drained any more for the next process, either.
        for job in &jobs {
            if let DeviceOperation::Open(vf) = job {
                self.note(*vf, Some(Standing::Returning));
            }
        }
        self.shelf.vfs_of(DeviceOperation::ResetSet(set)).for_each(|vf| self.plan_try(vf));
        jobs
    }
}

impl<D: Device> OperationHandler for Inner<D> {
    fn operate(&self, job: DeviceOperation) -> Result<(), Fault> {
        self.shelf.operate(job)
    }

    fn finish(&self, job: DeviceOperation, outcome: Result<(), Fault>) {
        match job {
            DeviceOperation::Open(vf)
            | DeviceOperation::Retry(vf)
            | DeviceOperation::Return(vf) => self.queue.push(self.finish_vf(vf, outcome)),
            DeviceOperation::Adopt(vf) => self.queue.push(self.finish_adoption(vf, outcome)),
            DeviceOperation::ResetSet(set) => self.queue.push(self.finish_set(set, outcome)),
            DeviceOperation::Close(vf) => self.queue.push(self.finish_close(vf, outcome)),
        }
        self.settled.notify_all();
    }

    fn give_up(&self, job: DeviceOperation) {
        let limit = self.settings.deadline;
        for vf in self.shelf.vfs_of(job) {
            let why = format!("{} did not end within {limit:?}", job.name());
            self.fault(vf, &why);
            self.shelf.table().stuck(vf, why);
        }
        self.settled.notify_all();
    }

    fn late(&self, job: DeviceOperation) {
        for vf in self.shelf.vfs_of(job) {
            self.shelf.table().late(vf);
            // A VF that was adopted late may be in use, and its record names the owner: no try
            // cuts that owner off. The next daemon adopts it, or somebody resumes it.
            if !matches!(job, DeviceOperation::Adopt(_)) {
                self.plan_try(vf);
            }
        }
    }

    fn begin_try(&self, vf: u32) -> Option<DeviceOperation> {
        let job = self.shelf.table().begin_try(vf, Instant::now());
        self.counters.retries.fetch_add(job.is_some().into(), Ordering::Relaxed);
        job
    }
}

/// CLOCK_REALTIME in ns since the epoch.
fn now_ns() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}
