//! Register accesses: `VFIO_USER_REGION_READ`, `VFIO_USER_REGION_WRITE`,
//! `VFIO_USER_REGION_WRITE_MULTI`.

use std::ops::Range;
use std::time::Instant;

use rustix::io::Errno;
use slipway_pci as pci;
use slipway_vfio_user_spec::{RegionAccess, U64, WriteMulti, WriteMultiEntry, region};
use zerocopy::{FromBytes, IntoBytes};

use super::info::region_size;
use super::{Answer, BYTES_PER_COST, COST_PER_TURN, Session, Waiting, prefix};
use crate::device::Device;
use crate::stats::add;
use slipway_vfio_user_wire::MAX_DATA_XFER_SIZE;

/// The longest access to a BAR that is passed on whole; longer ones are split into [`PIECE`]s,
/// since registers have at most this width (see `slipway_pci::Function`).
const WIDEST: usize = 8;
const PIECE: usize = 4;
/// The most pieces of one access that are passed on in a turn.
const MOST_PIECES: usize = 256;

/// The rest of a message's accesses, for the next turn.
pub(super) enum PendingAccess {
    /// A long read of a BAR, of which so many bytes of the reply's data are read.
    Read { request: RegionAccess, data: Vec<u8>, done: usize },
    /// A long write to a BAR, of which so many bytes are done.
    Write { request: RegionAccess, data: Vec<u8>, done: usize },
    /// A multiple write, of which so many writes are done.
    Multi { entries: Vec<WriteMultiEntry>, done: usize },
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
        read(device, request, data, 0)
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
        let done = write(device, &request, data, 0)?;
        let data = if done < len { data.to_vec() } else { Vec::new() };
        written(device, request, data, done, now)
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
        self.multi(device, entries, next, now)
    }

    /// Does the writes from `done` on, as many as the turn has room for.
    fn multi(
        &mut self,
        device: &mut Device,
        entries: Vec<WriteMultiEntry>,
        mut done: usize,
        now: Instant,
    ) -> Result<Answer, Errno> {
        while self.cost < COST_PER_TURN
            && let Some(entry) = entries.get(done)
        {
            let request = region_access(entry);
            let data = &entry.data[..entry.count.get() as usize];
            self.cost += 1;
            add(&self.live.region_writes, 1);
            if entry.region.get() == region::CONFIG {
                device.function.config_write(entry.offset.get() as u16, data);
            } else {
                write(device, &request, data, 0)?;
            }
            done += 1;
            if let Some(kept) = &self.kept {
                kept.multi_done(done);
            }
        }
        device.poll_after_write(now);
        if done < entries.len() {
            device.pace.kick();
            return Ok(Answer::Later(Waiting::Turn(PendingAccess::Multi { entries, done })));
        }
        let done = WriteMulti { count: U64::new(entries.len() as u64) };
        Ok(Answer::Reply(done.as_bytes().to_vec()))
    }

    /// Goes on with a message's accesses.
    pub(super) fn go_on(
        &mut self,
        device: &mut Device,
        rest: PendingAccess,
        now: Instant,
    ) -> Result<Answer, Errno> {
        if !matches!(rest, PendingAccess::Multi { .. }) {
            self.cost += MOST_PIECES * PIECE / BYTES_PER_COST;
        }
        match rest {
            PendingAccess::Multi { entries, done } => self.multi(device, entries, done, now),
            PendingAccess::Read { request, data, done } => read(device, request, data, done),
            PendingAccess::Write { request, data, done } => {
                let done = write(device, &request, &data, done)?;
                written(device, request, data, done, now)
            }
        }
    }
}

/// Reads the bytes of `data` from `done` on from a BAR, at most [`MOST_PIECES`] pieces of them.
/// Answers the read once all are read, or leaves its rest for the next turn.
fn read(
    device: &mut Device,
    request: RegionAccess,
    mut data: Vec<u8>,
    mut done: usize,
) -> Result<Answer, Errno> {
    let offset = request.offset.get();
    for piece in pieces(offset, done, data.len()).take(MOST_PIECES) {
        done = piece.end;
        let at = offset + piece.start as u64;
        finished(device.function.read(request.region.get() as u8, at, &mut data[piece]))?;
    }
    if done < data.len() {
        device.pace.kick();
        return Ok(Answer::Later(Waiting::Turn(PendingAccess::Read { request, data, done })));
    }
    Ok(read_reply(&request, &data))
}

/// Writes the bytes of `data` from `done` on to a BAR, at most [`MOST_PIECES`] pieces of them.
/// Returns how many bytes are done.
fn write(
    device: &mut Device,
    request: &RegionAccess,
    data: &[u8],
    mut done: usize,
) -> Result<usize, Errno> {
    let offset = request.offset.get();
    for piece in pieces(offset, done, data.len()).take(MOST_PIECES) {
        done = piece.end;
        let at = offset + piece.start as u64;
        let outcome = device.function.write(request.region.get() as u8, at, &data[piece]);
        // Earlier pieces may have made work.
        finished(outcome).inspect_err(|_| device.pace.kick())?;
    }
    Ok(done)
}

/// Answers a write of which `done` bytes of `data` are done, or leaves its rest for the next turn.
fn written(
    device: &mut Device,
    request: RegionAccess,
    data: Vec<u8>,
    done: usize,
    now: Instant,
) -> Result<Answer, Errno> {
    device.poll_after_write(now);
    if done < data.len() {
        device.pace.kick();
        return Ok(Answer::Later(Waiting::Turn(PendingAccess::Write { request, data, done })));
    }
    Ok(Answer::Reply(request.as_bytes().to_vec()))
}

fn finished(outcome: pci::Access) -> Result<(), Errno> {
    match outcome {
        pci::Access::Done => Ok(()),
        pci::Access::Refused => Err(Errno::IO),
    }
}

/// Returns the pieces in which bytes `done..len` of an access at `offset` are passed on: the whole
/// if a register can have its width, and else naturally aligned [`PIECE`]s.
fn pieces(offset: u64, mut done: usize, len: usize) -> impl Iterator<Item = Range<usize>> {
    std::iter::from_fn(move || {
        let start = done;
        let left = len - start;
        done += if len <= WIDEST { left } else { piece(offset + start as u64, left) };
        (left > 0).then_some(start..done)
    })
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
