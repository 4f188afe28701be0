//! Register accesses: `VFIO_USER_REGION_READ`, `VFIO_USER_REGION_WRITE`,
//! `VFIO_USER_REGION_WRITE_MULTI`.

use std::time::Instant;

use rustix::io::Errno;
use slipway_pci as pci;
use slipway_vfio_user_spec::{RegionAccess, U64, WriteMulti, WriteMultiEntry, region};
use zerocopy::{FromBytes, IntoBytes};

use super::info::region_size;
use super::{Answer, BYTES_PER_COST, COST_PER_TURN, Session, Waiting, prefix};
use crate::device::Device;
use crate::stats::add;
use crate::wire::MAX_DATA_XFER_SIZE;

/// The longest access to a BAR that is passed on whole; longer ones are split into [`PIECE`]s,
/// since registers have at most this width (see `slipway_pci::Function`).
const WIDEST: usize = 8;
const PIECE: usize = 4;
/// The most pieces of one access that are passed on in a turn.
const MOST_PIECES: usize = 256;

/// An access to a BAR that the function has not finished.
pub(super) struct Access {
    bar: u8,
    offset: u64,
    /// Data to write, or the buffer to read into.
    data: Vec<u8>,
    /// The number of bytes that have been transferred.
    done: usize,
    /// The device's progress counter when the function deferred the access. The access is retried
    /// once the counter has changed.
    asked_at: Option<u64>,
    kind: AccessKind,
}

enum AccessKind {
    Read(RegionAccess),
    Write(RegionAccess),
    /// A multiple write, of which the writes from `next` on follow after this access.
    Multi {
        entries: Vec<WriteMultiEntry>,
        next: usize,
    },
}

impl Session {
    pub(super) fn region_read(
        &mut self,
        device: &mut Device,
        payload: &[u8],
    ) -> Result<Answer, Errno> {
        let (request, rest): (RegionAccess, _) = prefix(payload)?;
        if !rest.is_empty() {
            return Err(Errno::INVAL);
        }
        let len = check(device, &request)?;
        add(&self.live.region_reads, 1);
        self.cost += len / BYTES_PER_COST;
        let mut data = vec![0; len];
        if request.region.get() == region::CONFIG {
            device.function.config_read(request.offset.get() as u16, &mut data);
            return Ok(read_reply(&request, &data));
        }
        let access = Access::new(&request, data, AccessKind::Read(request));
        self.resume_access(device, access, Instant::now(), false)
    }

    pub(super) fn region_write(
        &mut self,
        device: &mut Device,
        payload: &[u8],
        now: Instant,
    ) -> Result<Answer, Errno> {
        let (request, data): (RegionAccess, _) = prefix(payload)?;
        let len = check(device, &request)?;
        if data.len() != len {
            return Err(Errno::INVAL);
        }
        add(&self.live.region_writes, 1);
        self.cost += len / BYTES_PER_COST;
        if request.region.get() == region::CONFIG {
            device.function.config_write(request.offset.get() as u16, data);
            device.poll_after_write(now);
            return Ok(Answer::Reply(request.as_bytes().to_vec()));
        }
        let access = Access::new(&request, data.to_vec(), AccessKind::Write(request));
        self.resume_access(device, access, now, false)
    }

    /// Does several writes. All are checked before the first one is done.
    pub(super) fn region_write_multi(
        &mut self,
        device: &mut Device,
        payload: &[u8],
        now: Instant,
    ) -> Result<Answer, Errno> {
        if !self.negotiated.is_some_and(|agreed| agreed.write_multiple) {
            return Err(Errno::NOTSUP);
        }
        let (request, rest): (WriteMulti, _) = prefix(payload)?;
        let entries: Vec<WriteMultiEntry> = rest
            .chunks(size_of::<WriteMultiEntry>())
            .map(|chunk| WriteMultiEntry::read_from_bytes(chunk).map_err(|_| Errno::INVAL))
            .collect::<Result<_, _>>()?;
        if entries.is_empty() || request.count.get() != entries.len() as u64 {
            return Err(Errno::INVAL);
        }
        for entry in &entries {
            if check(device, &region_access(entry))? > entry.data.len() {
                return Err(Errno::INVAL);
            }
        }
        let next = self.kept.as_ref().map_or(0, |kept| kept.begin_multi());
        self.multi(device, entries, next, now, false)
    }

    /// Does the writes from `next` on.
    fn multi(
        &mut self,
        device: &mut Device,
        entries: Vec<WriteMultiEntry>,
        mut next: usize,
        now: Instant,
        expired: bool,
    ) -> Result<Answer, Errno> {
        while let Some(entry) = entries.get(next) {
            let request = region_access(entry);
            if self.cost >= COST_PER_TURN {
                // The rest is done in the next turn.
                device.pace.kick();
                let rest = AccessKind::Multi { entries, next };
                return Ok(Answer::Later(Waiting::Access(Access::new(&request, Vec::new(), rest))));
            }
            let data = &entry.data[..entry.count.get() as usize];
            self.cost += 1;
            add(&self.live.region_writes, 1);
            if entry.region.get() == region::CONFIG {
                device.function.config_write(entry.offset.get() as u16, data);
            } else {
                let mut access = Access::new(&request, data.to_vec(), AccessKind::Write(request));
                if !access.go_on(device, now)? {
                    access.kind = AccessKind::Multi { entries, next: next + 1 };
                    return access.later(expired);
                }
            }
            next += 1;
            if let Some(kept) = &self.kept {
                kept.multi_done(next);
            }
        }
        device.poll_after_write(now);
        let done = WriteMulti { count: U64::new(entries.len() as u64) };
        Ok(Answer::Reply(done.as_bytes().to_vec()))
    }

    /// Resumes an access that the function deferred.
    pub(super) fn resume_access(
        &mut self,
        device: &mut Device,
        mut access: Access,
        now: Instant,
        expired: bool,
    ) -> Result<Answer, Errno> {
        if !access.go_on(device, now)? {
            return access.later(expired);
        }
        match access.kind {
            AccessKind::Read(request) => Ok(read_reply(&request, &access.data)),
            AccessKind::Write(request) => {
                device.poll_after_write(now);
                Ok(Answer::Reply(request.as_bytes().to_vec()))
            }
            AccessKind::Multi { entries, next } => self.multi(device, entries, next, now, expired),
        }
    }
}

impl Access {
    fn new(request: &RegionAccess, data: Vec<u8>, kind: AccessKind) -> Self {
        // The region was checked to be a BAR, so its number fits.
        let bar = request.region.get() as u8;
        Self { bar, offset: request.offset.get(), data, done: 0, asked_at: None, kind }
    }

    /// Continues the access as far as the function permits, and by at most [`MOST_PIECES`] pieces.
    /// Returns whether it is complete.
    fn go_on(&mut self, device: &mut Device, now: Instant) -> Result<bool, Errno> {
        if self.asked_at == Some(device.pace.progress()) {
            return Ok(false);
        }
        let whole = self.data.len() <= WIDEST;
        let is_read = matches!(self.kind, AccessKind::Read(_));
        let mut pieces = 0;
        while self.done < self.data.len() {
            if pieces == MOST_PIECES {
                // The rest is done in the next turn.
                device.pace.kick();
                return Ok(false);
            }
            pieces += 1;
            let at = self.offset + self.done as u64;
            let len = if whole { self.data.len() } else { piece(at, self.data.len() - self.done) };
            let part = &mut self.data[self.done..self.done + len];
            let outcome = if is_read {
                device.function.read(self.bar, at, part)
            } else {
                device.function.write(self.bar, at, part)
            };
            self.asked_at = (outcome == pci::Access::Deferred).then(|| device.pace.progress());
            match outcome {
                pci::Access::Done => self.done += len,
                pci::Access::Refused => return Err(Errno::IO),
                pci::Access::Deferred => {
                    device.poll_after_write(now);
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }

    fn later(self, expired: bool) -> Result<Answer, Errno> {
        // An access that the function has not deferred goes on in the next turn.
        let deferred = self.asked_at.is_some();
        match expired && deferred {
            true => Err(Errno::TIMEDOUT),
            false => Ok(Answer::Later(Waiting::Access(self))),
        }
    }
}

/// Returns the length of the naturally aligned piece at `at`, at most `left`.
fn piece(at: u64, left: usize) -> usize {
    let to_boundary = PIECE - (at % PIECE as u64) as usize;
    left.min(to_boundary)
}

/// Returns the number of bytes to transfer, or `EINVAL` if the access is not within its region.
fn check(device: &Device, request: &RegionAccess) -> Result<usize, Errno> {
    let size = region_size(device, request.region.get());
    let count = request.count.get() as usize;
    let end = request.offset.get().checked_add(count as u64);
    let inside = end.is_some_and(|end| end <= size);
    (inside && count > 0 && count <= MAX_DATA_XFER_SIZE).then_some(count).ok_or(Errno::INVAL)
}

fn region_access(entry: &WriteMultiEntry) -> RegionAccess {
    RegionAccess { offset: entry.offset, region: entry.region, count: entry.count }
}

fn read_reply(request: &RegionAccess, data: &[u8]) -> Answer {
    Answer::Reply([request.as_bytes(), data].concat())
}
