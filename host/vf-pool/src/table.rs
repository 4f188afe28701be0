//! The state of each VF, the queue of ready ones, and the owners. Every operation takes constant
//! time, except the taking of a VF by its number and those on a set or on the whole pool.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::ops::Range;
use std::time::{Duration, Instant};

use super::owner::Owner;

/// The state of a VF, which users read as [`VfState::word`] in `slipway vf` and in metrics.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VfState {
    /// Open, reset and scrubbed: the next owner may have it.
    Ready,
    /// An owner has it.
    Taken {
        /// The owner.
        owner: Owner,
        /// The time when it was taken, CLOCK_REALTIME, ns since the epoch.
        since_ns: u64,
    },
    /// It is being opened, reset, scrubbed or closed, or waits for that.
    Returning,
    /// An operation failed for this reason. The VF has left the pool until it is tried again.
    Failed(String),
    /// An operation has not ended in time, for this reason. The VF has left the pool, and nothing
    /// else is tried on it.
    Stuck(String),
    /// Closed, by request.
    Drained,
}

impl VfState {
    /// Returns the state in a word or two.
    pub fn word(&self) -> &'static str {
        match self {
            Self::Ready => "ready",
            Self::Taken { .. } => "taken",
            Self::Returning => "being reset",
            Self::Failed(_) => "failed",
            Self::Stuck(_) => "not answering",
            Self::Drained => "drained",
        }
    }
}

/// The state of a VF, as it is reported.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VfStatus {
    /// The VF's number in the pool, from 0.
    pub vf: u32,
    /// The number of its devset, from 0.
    pub set: u32,
    /// The state.
    pub state: VfState,
    /// It is to be closed instead of ready when it is free.
    pub is_draining: bool,
    /// How often it was taken since the pool was made.
    pub takes: u64,
    /// How often it was tried again since it failed.
    pub tries: u32,
    /// The time of the next try; `None` if none is planned.
    pub next_try: Option<Instant>,
}

/// The number of VFs in each state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Ready.
    pub ready: usize,
    /// With an owner.
    pub taken: usize,
    /// Being opened, reset, scrubbed or closed.
    pub returning: usize,
    /// Failed, or not answering.
    pub failed: usize,
    /// Drained.
    pub drained: usize,
}

impl Counts {
    /// Returns the number of all VFs.
    pub fn all(&self) -> usize {
        self.ready + self.taken + self.returning + self.failed + self.drained
    }

    /// Lists the states of VFs that are not ready, for errors: "3 are taken, 1 is being reset".
    pub fn unready(&self) -> impl fmt::Display {
        let be = |count| if count == 1 { "is" } else { "are" };
        let states = [
            (self.taken, "taken"),
            (self.returning, "being reset"),
            (self.failed, "out of service after a failure"),
            (self.drained, "drained"),
        ];
        let parts = states.iter().filter(|(count, word)| *count > 0 || *word == "being reset");
        let parts: Vec<_> =
            parts.map(|(count, word)| format!("{count} {} {word}", be(*count))).collect();
        parts.join(", ")
    }
}

/// The reason why a VF cannot be taken, returned or reset.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    Empty(Counts),
    Unready(u32, &'static str),
    Held(u32),
    NotTaken(&'static str),
    Other(Owner),
    InUse(u32, &'static str),
}

/// An operation on devices, for a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DeviceOperation {
    Open(u32),
    /// Opens a VF that failed once more.
    Retry(u32),
    Adopt(u32),
    Return(u32),
    Close(u32),
    ResetSet(u32),
}

impl DeviceOperation {
    /// Returns what the operation does, for messages to users.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Open(_) | Self::Retry(_) => "its opening and reset",
            Self::Adopt(_) => "taking it over",
            Self::Return(_) => "its reset",
            Self::Close(_) => "closing it",
            Self::ResetSet(_) => "the reset of its devset",
        }
    }
}

struct Vf {
    state: VfState,
    is_draining: bool,
    /// A worker takes over what an owner has from an earlier process, or did so too late: then the
    /// VF has failed, and the owner may have it still.
    is_adopting: bool,
    /// A thread is handing it over to its owner.
    is_taking: bool,
    /// Of a VF whose set is being reset: its state before.
    before: Option<VfState>,
    takes: u64,
    /// The tries since it failed, and the time of the next one if it has failed.
    tries: u32,
    next_try: Option<Instant>,
}

pub(crate) struct Table {
    vfs: Vec<Vf>,
    /// Exactly the VFs in state `Ready`, the longest unused one first.
    ready: VecDeque<u32>,
    /// Exactly the owners of VFs in state `Taken`.
    owners: HashMap<Owner, u32>,
    set_size: u32,
}

impl Table {
    /// Makes a table of `count` VFs that are being opened, in sets of `set_size` (at least 1).
    pub(crate) fn new(count: u32, set_size: u32) -> Self {
        let vf = |_| Vf {
            state: VfState::Returning,
            is_draining: false,
            is_adopting: false,
            is_taking: false,
            before: None,
            takes: 0,
            tries: 0,
            next_try: None,
        };
        let vfs = (0..count).map(vf).collect();
        Self { vfs, ready: VecDeque::new(), owners: HashMap::new(), set_size: set_size.max(1) }
    }

    pub(crate) fn len(&self) -> usize {
        self.vfs.len()
    }

    pub(crate) fn sets(&self) -> usize {
        self.vfs.len().div_ceil(self.set_size as usize)
    }

    /// Returns the VFs of a set.
    pub(crate) fn vfs_of(&self, set: u32) -> Range<u32> {
        let end = (set + 1).saturating_mul(self.set_size);
        set * self.set_size..end.min(self.vfs.len() as u32)
    }

    /// Gives the owner a ready VF. The caller hands it over, and ends with [`taken`](Self::taken)
    /// or [`undo_take`](Self::undo_take).
    pub(crate) fn take(&mut self, owner: &Owner, since_ns: u64) -> Result<u32, Refusal> {
        if let Some(vf) = self.owners.get(owner) {
            return Err(Refusal::Held(*vf));
        }
        let Some(vf) = self.ready.pop_front() else {
            return Err(Refusal::Empty(self.counts()));
        };
        self.begin_take(vf, owner, since_ns);
        Ok(vf)
    }

    /// Gives the owner this VF, if it is ready, as [`take`](Self::take) does.
    pub(crate) fn take_one(
        &mut self,
        vf: u32,
        owner: &Owner,
        since_ns: u64,
    ) -> Result<(), Refusal> {
        if let Some(vf) = self.owners.get(owner) {
            return Err(Refusal::Held(*vf));
        }
        let Some(place) = self.ready.iter().position(|one| *one == vf) else {
            return Err(match &self.vf(vf).state {
                VfState::Taken { owner, .. } => Refusal::Other(owner.clone()),
                state => Refusal::Unready(vf, state.word()),
            });
        };
        self.ready.remove(place);
        self.begin_take(vf, owner, since_ns);
        Ok(())
    }

    fn begin_take(&mut self, vf: u32, owner: &Owner, since_ns: u64) {
        self.vf(vf).takes += 1;
        self.vf(vf).is_taking = true;
        self.occupy(vf, owner.clone(), since_ns);
    }

    /// Notes an owner who has had the VF since before this process. Returns the job. Returns `None`
    /// if the owner has another VF: then this one has no owner.
    pub(crate) fn adopt(
        &mut self,
        vf: u32,
        owner: Owner,
        since_ns: u64,
    ) -> Option<DeviceOperation> {
        if self.owners.contains_key(&owner) {
            return None;
        }
        self.vf(vf).is_adopting = true;
        self.occupy(vf, owner, since_ns);
        Some(DeviceOperation::Adopt(vf))
    }

    fn occupy(&mut self, vf: u32, owner: Owner, since_ns: u64) {
        self.owners.insert(owner.clone(), vf);
        self.vf(vf).state = VfState::Taken { owner, since_ns };
    }

    /// Returns the VF of an owner, and whether it is ready for use. Returns `None` if the owner has
    /// none.
    pub(crate) fn of(&self, owner: &Owner) -> Option<(u32, bool)> {
        let vf = *self.owners.get(owner)?;
        let entry = self.vfs.get(vf as usize)?;
        Some((vf, !entry.is_adopting && !entry.is_taking))
    }

    /// Notes that the caller of [`take`](Self::take) has attached the VF, or could not. Returns
    /// `false` if it could not or the VF was returned meanwhile: then the VF is returning, and the
    /// caller goes on with that.
    pub(crate) fn taken(&mut self, vf: u32, is_attached: bool) -> bool {
        self.vf(vf).is_taking = false;
        let is_kept = is_attached && matches!(self.vf(vf).state, VfState::Taken { .. });
        if !is_kept {
            self.vacate(vf);
        }
        is_kept
    }

    /// Returns a VF that its owner never saw: it is as good as before.
    pub(crate) fn undo_take(&mut self, vf: u32) -> Option<DeviceOperation> {
        self.vf(vf).is_taking = false;
        self.vacate(vf);
        self.done(vf, Ok(()))
    }

    /// Takes the VF from its owner. Returns the job, or `None` if one for the VF still runs or a
    /// thread is handing it over, at whose end it goes on.
    pub(crate) fn begin_return(
        &mut self,
        vf: u32,
        owner: &Owner,
    ) -> Result<Option<DeviceOperation>, Refusal> {
        match &self.vf(vf).state {
            VfState::Taken { owner: has, .. } if has == owner => {}
            VfState::Taken { owner: has, .. } => return Err(Refusal::Other(has.clone())),
            state => return Err(Refusal::NotTaken(state.word())),
        }
        self.vacate(vf);
        let is_at_rest = !self.vf(vf).is_adopting && !self.vf(vf).is_taking;
        Ok(is_at_rest.then_some(DeviceOperation::Return(vf)))
    }

    /// Notes that a worker has taken over what an owner had, or could not. Returns the next job, if
    /// the owner returned the VF meanwhile or has lost it.
    pub(crate) fn adopted(&mut self, vf: u32, is_there: bool) -> Option<DeviceOperation> {
        self.vf(vf).is_adopting = false;
        match self.vf(vf).state {
            VfState::Taken { .. } if is_there => None,
            VfState::Returning if is_there => Some(DeviceOperation::Return(vf)),
            _ => {
                self.vacate(vf);
                Some(DeviceOperation::Open(vf))
            }
        }
    }

    fn vacate(&mut self, vf: u32) {
        let state = std::mem::replace(&mut self.vf(vf).state, VfState::Returning);
        if let VfState::Taken { owner, .. } = state {
            self.owners.remove(&owner);
        }
    }

    /// Notes the end of the opening or the reset of a VF that is returning, as [`done`](Self::done)
    /// does, but a VF that is to be closed is closed whatever came of it. Returns the next job.
    pub(crate) fn cleaned(
        &mut self,
        vf: u32,
        outcome: Result<(), String>,
    ) -> Option<DeviceOperation> {
        if self.vf(vf).is_draining {
            return Some(DeviceOperation::Close(vf));
        }
        self.done(vf, outcome)
    }

    /// Plans the next try of a VF that has failed, after the pause that `pause` returns for the
    /// number of tries that it had. Returns its time, or `None` if there is to be none.
    pub(crate) fn plan_try(
        &mut self,
        vf: u32,
        now: Instant,
        pause: impl FnOnce(u32) -> Option<Duration>,
    ) -> Option<Instant> {
        let entry = self.vf(vf);
        let is_out = matches!(entry.state, VfState::Failed(_)) && !entry.is_draining;
        entry.next_try = pause(entry.tries).filter(|_| is_out).map(|pause| now + pause);
        entry.next_try
    }

    /// Begins the try that is planned for a VF. Returns the job, or `None` if none is due: somebody
    /// else has resumed, drained or reset the VF.
    pub(crate) fn begin_try(&mut self, vf: u32, now: Instant) -> Option<DeviceOperation> {
        let entry = self.vf(vf);
        let is_due = entry.next_try.is_some_and(|at| at <= now);
        if !is_due || !matches!(entry.state, VfState::Failed(_)) {
            return None;
        }
        (entry.state, entry.next_try) = (VfState::Returning, None);
        entry.tries += 1;
        Some(DeviceOperation::Retry(vf))
    }

    /// Notes the end of the last operation on a VF that is returning. Returns the next job for it.
    pub(crate) fn done(&mut self, vf: u32, outcome: Result<(), String>) -> Option<DeviceOperation> {
        match outcome {
            Err(why) => self.vf(vf).state = VfState::Failed(why),
            Ok(()) if self.vf(vf).is_draining => return Some(DeviceOperation::Close(vf)),
            Ok(()) => {
                (self.vf(vf).state, self.vf(vf).tries) = (VfState::Ready, 0);
                self.ready.push_back(vf);
            }
        }
        None
    }

    /// Notes that a VF is closed. Returns the job, if its drain has ended meanwhile.
    pub(crate) fn closed(&mut self, vf: u32) -> Option<DeviceOperation> {
        if !self.vf(vf).is_draining {
            return Some(DeviceOperation::Open(vf));
        }
        self.vf(vf).state = VfState::Drained;
        None
    }

    /// Notes that an operation has not ended in time.
    pub(crate) fn stuck(&mut self, vf: u32, why: String) {
        self.vacate(vf);
        self.vf(vf).before = None;
        self.vf(vf).state = VfState::Stuck(why);
    }

    /// Notes that an operation which had not ended in time has ended after all.
    pub(crate) fn late(&mut self, vf: u32) {
        if let VfState::Stuck(why) = &self.vf(vf).state {
            let why = format!("{why}, and answered later");
            self.vf(vf).state = VfState::Failed(why);
        }
    }

    /// Takes a VF off its owner if it has failed since that one was adopted too late. Returns
    /// `false` for any other VF.
    pub(crate) fn end_adoption(&mut self, vf: u32) -> bool {
        let entry = self.vf(vf);
        matches!(entry.state, VfState::Failed(_)) && std::mem::take(&mut entry.is_adopting)
    }

    /// Wants the VF closed as soon as nobody has it. Returns the job, if it can begin now.
    pub(crate) fn drain(&mut self, vf: u32) -> Option<DeviceOperation> {
        self.vf(vf).is_draining = true;
        match self.vf(vf).state {
            VfState::Ready => self.ready.retain(|one| *one != vf),
            VfState::Failed(_) => {}
            _ => return None,
        }
        (self.vf(vf).state, self.vf(vf).next_try) = (VfState::Returning, None);
        Some(DeviceOperation::Close(vf))
    }

    /// Ends a drain, and gives a VF that failed another chance. Returns the job, if one is needed.
    pub(crate) fn resume(&mut self, vf: u32) -> Option<DeviceOperation> {
        let entry = self.vf(vf);
        entry.is_draining = false;
        match entry.state {
            VfState::Drained | VfState::Failed(_) => {
                entry.state = VfState::Returning;
                (entry.tries, entry.next_try) = (0, None);
                Some(DeviceOperation::Open(vf))
            }
            _ => None,
        }
    }

    /// Takes all VFs of a set out of the pool for a reset of the set.
    pub(crate) fn claim_set(&mut self, set: u32) -> Result<DeviceOperation, Refusal> {
        let vfs = self.vfs_of(set);
        let is_free = |Vf { state, is_adopting, .. }: &Vf| {
            !is_adopting && matches!(state, VfState::Ready | VfState::Failed(_) | VfState::Drained)
        };
        if let Some(vf) = vfs.clone().find(|vf| !self.vfs.get(*vf as usize).is_some_and(is_free)) {
            return Err(Refusal::InUse(vf, self.vf(vf).state.word()));
        }
        self.ready.retain(|vf| !vfs.contains(vf));
        for vf in vfs {
            let vf = self.vf(vf);
            vf.before = Some(std::mem::replace(&mut vf.state, VfState::Returning));
            (vf.tries, vf.next_try) = (0, None);
        }
        Ok(DeviceOperation::ResetSet(set))
    }

    /// Notes the end of a set's reset. A VF that was ready is as clean as before, a drained one
    /// stays closed, and one that had failed is opened anew. Returns the jobs.
    pub(crate) fn release_set(
        &mut self,
        set: u32,
        outcome: &Result<(), String>,
    ) -> Vec<DeviceOperation> {
        let mut jobs = Vec::new();
        for vf in self.vfs_of(set) {
            jobs.extend(match (self.vf(vf).before.take(), outcome) {
                (Some(VfState::Drained), _) => self.closed(vf),
                (_, Err(why)) => self.cleaned(vf, Err(why.clone())),
                (Some(VfState::Ready), Ok(())) => self.done(vf, Ok(())),
                _ => Some(DeviceOperation::Open(vf)),
            });
        }
        jobs
    }

    pub(crate) fn counts(&self) -> Counts {
        let mut counts = Counts::default();
        for vf in &self.vfs {
            *match vf.state {
                VfState::Ready => &mut counts.ready,
                VfState::Taken { .. } => &mut counts.taken,
                VfState::Returning => &mut counts.returning,
                VfState::Failed(_) | VfState::Stuck(_) => &mut counts.failed,
                VfState::Drained => &mut counts.drained,
            } += 1;
        }
        counts
    }

    pub(crate) fn status(&self) -> Vec<VfStatus> {
        let status = |(vf, entry): (u32, &Vf)| VfStatus {
            vf,
            set: vf / self.set_size,
            state: entry.state.clone(),
            is_draining: entry.is_draining,
            takes: entry.takes,
            tries: entry.tries,
            next_try: entry.next_try,
        };
        (0..).zip(&self.vfs).map(status).collect()
    }

    /// Numbers of VFs come from this table or were compared with its length.
    fn vf(&mut self, vf: u32) -> &mut Vf {
        &mut self.vfs[vf as usize]
    }
}
