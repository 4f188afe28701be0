//! Commands that disks work on, by tag.
//!
//! - [`Command`] is a command in flight, with the work that follows when its requests have ended
//!   ([`WorkArea`], [`NextStep`]).
//! - [`Inflight`] is the table. A request's tag has the number of its command's slot, and the
//!   request's own number within the command.

use slipway_block::{Operation, Request};
use slipway_nvme_spec::status::Status;
use slipway_ram::Span;

use crate::health::Moved;
use crate::permit::{Owner, Permit};
use crate::prp::Run;

/// The kind of a command, as far as completing it is concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CommandKind {
    Read,
    Write,
    /// Reads into a buffer of the controller, to be compared with the host's data.
    Compare,
    /// Reads into a buffer of the controller: Verify, and the reading half of Copy.
    Scan,
    /// Flush, Write Zeroes, Dataset Management: changes blocks or nothing, and moves no data.
    Other,
}

impl CommandKind {
    /// Returns the disk operation of a Read's or Write's request.
    pub fn operation(self) -> Operation {
        if self == Self::Write { Operation::Write } else { Operation::Read }
    }

    /// Returns whether the command reads the disk.
    pub fn reads(self) -> bool {
        matches!(self, Self::Read | Self::Compare | Self::Scan)
    }

    /// Returns what the command counts as in the SMART / Health log (section 5.14.1.2): Verify and
    /// Compare count as data that the host read, Verify does not count as a command.
    pub fn moved(self) -> Moved {
        match self {
            Self::Scan => Moved::Scanned,
            Self::Read | Self::Compare => Moved::Read,
            Self::Write => Moved::Written,
            Self::Other => Moved::Nothing,
        }
    }
}

/// A bounce buffer for message-only memory, which is not lent to a disk: the data passes through
/// the buffer.
pub(crate) struct Bounce {
    pub buffer: Span,
    pub runs: Vec<Run>,
}

/// A command in flight.
pub(crate) struct Command {
    pub owner: Owner,
    pub kind: CommandKind,
    pub nsid: u32,
    pub lba: u64,
    /// Bytes of the disk that the command reads or changes.
    pub bytes: u64,
    /// The number of pieces of memory that the command keeps: spans that the disk was lent, places
    /// of the host's data.
    pub pieces: u32,
    /// The first error of the command's requests.
    pub status: Status,
    /// The number of disk requests that have not ended.
    pub parts: u32,
    pub bounce: Option<Box<Bounce>>,
    /// The steps that follow. `None` for nearly all commands: they end with the end of their
    /// requests.
    pub work: Option<Box<WorkArea>>,
}

impl Command {
    /// Makes a command of one request, which has no owner yet.
    pub fn new(kind: CommandKind, nsid: u32, lba: u64) -> Self {
        Self {
            owner: Owner::CONTROLLER,
            kind,
            nsid,
            lba,
            bytes: 0,
            pieces: 0,
            status: Status::SUCCESS,
            parts: 1,
            bounce: None,
            work: None,
        }
    }
}

/// The work area of a command of several steps.
pub(crate) struct WorkArea {
    pub step: NextStep,
    /// The buffer, at least as large as asked for. It may hold data that earlier commands of the
    /// same controller read.
    pub buffer: Span,
    /// The places of the host's data, for Compare.
    pub runs: Vec<Run>,
    /// The source ranges of a Copy: first block, number of blocks.
    pub ranges: Vec<(u64, u32)>,
    /// The write that is fused to a Compare.
    pub write: Option<FusedWrite>,
}

/// The step that follows when a command's request has ended.
pub(crate) enum NextStep {
    /// Compares the blocks in the buffer with the host's data.
    Compare,
    /// Reads the next blocks and drops them.
    Verify { next: u64, left: u32, bytes: u64 },
    /// Ends the second half of a fused pair, which is in flight.
    FusedWrite,
    /// Reads pieces of the source ranges and writes them one after the other.
    Copy(CopyStep),
}

/// The second command of a fused pair, ready to run.
pub(crate) struct FusedWrite {
    pub command: Command,
    pub request: Request,
}

/// The progress of a Copy.
pub(crate) struct CopyStep {
    /// The most blocks of a piece.
    pub most: u32,
    /// The range that is being copied, and how many of its blocks are done.
    pub range: usize,
    pub done: u32,
    /// The destination of the next piece.
    pub to: u64,
    /// `true` while the piece in the buffer is being written, `false` while it is being read.
    pub writing: bool,
    pub durable: bool,
}

impl WorkArea {
    /// Returns whether the command can be aborted after its present step, which then has no effect
    /// or only part of it.
    pub fn stops(&self) -> bool {
        !matches!(self.step, NextStep::FusedWrite)
    }
}

impl CopyStep {
    /// Returns the present piece of the source: first block and number of blocks. Returns `None`
    /// after the last piece.
    pub fn piece(&self, ranges: &[(u64, u32)]) -> Option<(u64, u32)> {
        let (lba, blocks) = ranges.get(self.range)?;
        Some((lba + u64::from(self.done), (blocks - self.done).min(self.most)))
    }

    /// Moves on after a step that has succeeded.
    pub fn advance(&mut self, ranges: &[(u64, u32)]) {
        if self.writing {
            let (_, piece) = self.piece(ranges).unwrap_or_default();
            self.done += piece;
            self.to += u64::from(piece);
            if ranges.get(self.range).is_some_and(|(_, blocks)| self.done == *blocks) {
                (self.range, self.done) = (self.range + 1, 0);
            }
        }
        self.writing = !self.writing;
    }

    /// Returns the kind of the present step: reading, or writing.
    pub fn kind(&self) -> CommandKind {
        if self.writing { CommandKind::Other } else { CommandKind::Scan }
    }
}

/// A place in the in-flight table that was just filled. The command gets its owner when its slot is
/// handed over ([`Inflight::own`]).
#[must_use]
#[derive(Debug)]
pub(crate) struct Slot(u32);

impl Slot {
    /// Returns the tag of the command's request number `part`.
    pub fn tag(&self, part: u32) -> u64 {
        u64::from(part) << 32 | u64::from(self.0)
    }

    /// Returns the slot's index, for traces.
    pub fn index(&self) -> u32 {
        self.0
    }
}

/// A slab of commands. Places are reused, so that nothing is allocated in the steady state.
#[derive(Default)]
pub(crate) struct Inflight {
    slots: Vec<Option<Command>>,
    free: Vec<u32>,
    requests: u32,
    bytes: u64,
    pieces: u64,
}

impl Inflight {
    /// Returns the number of disk requests in flight.
    pub fn requests(&self) -> u32 {
        self.requests
    }

    /// Returns how many bytes the commands in flight read or change. They bound what bounce buffers
    /// may hold and what a poll may still copy.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the number of pieces of memory that the commands in flight keep.
    pub fn pieces(&self) -> u64 {
        self.pieces
    }

    /// Returns whether no command is in flight.
    pub fn is_empty(&self) -> bool {
        self.requests == 0
    }

    /// Keeps `command` and returns its slot. The command has at least one request in `parts`.
    pub fn insert(&mut self, command: Command) -> Slot {
        debug_assert!(command.parts > 0);
        self.requests += command.parts;
        self.bytes += command.bytes;
        self.pieces += u64::from(command.pieces);
        Slot(match self.free.pop() {
            Some(slot) => {
                self.slots[slot as usize] = Some(command);
                slot
            }
            None => {
                self.slots.push(Some(command));
                self.slots.len() as u32 - 1
            }
        })
    }

    /// Keeps `command`, which has its owner already, for its next request. Returns the tag of the
    /// request.
    pub fn resume(&mut self, command: Command) -> u64 {
        self.insert(Command { parts: 1, ..command }).tag(0)
    }

    /// Makes `owner` the recipient of the end of the command in `slot`.
    pub fn own(&mut self, Slot(slot): Slot, owner: Owner) {
        if let Some(command) = self.slots.get_mut(slot as usize).and_then(Option::as_mut) {
            command.owner = owner;
        }
    }

    /// Gives the command in `slot`, a fused Compare, and its Write their owners.
    pub fn own_pair(&mut self, slot: Slot, first: Permit, second: Permit) {
        let command = self.slots.get_mut(slot.0 as usize).and_then(Option::as_mut);
        let work = command.and_then(|command| command.work.as_mut());
        if let Some(write) = work.and_then(|work| work.write.as_mut()) {
            write.command.owner = Owner::Guest(second);
        }
        self.own(slot, Owner::Guest(first));
    }

    /// Ends one request of the command that `tag` names, with `status`. Returns the command with
    /// its last request, and `None` before that or for a tag that is not in flight.
    pub fn end_part(&mut self, tag: u64, status: Status) -> Option<Command> {
        let slot = tag as u32;
        let place = self.slots.get_mut(slot as usize)?;
        let command = place.as_mut()?;
        command.parts -= 1;
        self.requests -= 1;
        if command.status.is_success() {
            command.status = status;
        }
        if command.parts > 0 {
            return None;
        }
        self.bytes -= command.bytes;
        self.pieces -= u64::from(command.pieces);
        self.free.push(slot);
        place.take()
    }

    /// Returns the command `id` of submission queue `queue`, with the tag of its first request.
    pub fn find(&mut self, queue: u16, id: u16) -> Option<(u64, &mut Command)> {
        let commands = self.slots.iter_mut().zip(0..);
        let mut commands = commands.filter_map(|(slot, at)| Some((at, slot.as_mut()?)));
        commands.find(|(_, command)| command.owner.is(queue, id))
    }

    /// Returns the kind of the command that `tag` names.
    pub fn kind(&self, tag: u64) -> Option<CommandKind> {
        Some(self.slots.get(tag as u32 as usize)?.as_ref()?.kind)
    }

    /// Makes the end of every command in flight unreported.
    pub fn orphan_all(&mut self) {
        self.slots.iter_mut().flatten().for_each(|command| command.owner.orphan());
    }
}
