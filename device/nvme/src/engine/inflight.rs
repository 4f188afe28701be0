//! Commands that disks work on, by tag.

use slipway_block::Operation;
use slipway_nvme_spec::status::Status;
use slipway_ram::Span;

use crate::journal::Ticket;
use crate::prp::Run;
use crate::spares::Work;

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
}

/// A bounce buffer for message-only memory, which is not lent to a disk: the data passes through
/// the buffer.
pub(crate) struct Bounce {
    pub buffer: Span,
    pub runs: Vec<Run>,
}

/// A command in flight.
pub(crate) struct Command {
    /// The submission queue. `None` if the command's end is not to be reported: after a reset, or
    /// for the flush of a shutdown.
    pub queue: Option<u16>,
    /// CID.
    pub id: u16,
    pub kind: CommandKind,
    pub nsid: u32,
    pub lba: u64,
    /// Bytes of the disk that the command reads or changes.
    pub bytes: u64,
    /// The first error of the command's requests.
    pub status: Status,
    /// The number of disk requests that have not ended.
    pub parts: u32,
    pub bounce: Option<Box<Bounce>>,
    /// The steps that follow. `None` for nearly all commands: they end with the end of their
    /// requests.
    pub work: Option<Box<Work>>,
    /// The command's slot in the journal.
    pub ticket: Ticket,
}

/// A slab of commands. Places are reused, so that nothing is allocated in the steady state.
#[derive(Default)]
pub(crate) struct Inflight {
    slots: Vec<Option<Command>>,
    free: Vec<u32>,
    requests: u32,
    bytes: u64,
    /// The slot that was filled last, for traces.
    pub latest: Option<u32>,
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

    /// Returns whether no command is in flight.
    pub fn is_empty(&self) -> bool {
        self.requests == 0
    }

    /// Keeps `command` and returns its slot. The command has at least one request in `parts`.
    pub fn insert(&mut self, command: Command) -> u32 {
        debug_assert!(command.parts > 0);
        self.requests += command.parts;
        self.bytes += command.bytes;
        let slot = match self.free.pop() {
            Some(slot) => {
                self.slots[slot as usize] = Some(command);
                slot
            }
            None => {
                self.slots.push(Some(command));
                self.slots.len() as u32 - 1
            }
        };
        self.latest = Some(slot);
        slot
    }

    /// Returns the tag of request `part` of the command in `slot`.
    pub fn tag(slot: u32, part: u32) -> u64 {
        u64::from(part) << 32 | u64::from(slot)
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
        self.free.push(slot);
        place.take()
    }

    /// Returns the command `id` of submission queue `queue`, with its slot.
    pub fn find(&mut self, queue: u16, id: u16) -> Option<(u32, &mut Command)> {
        let named = |one: &Command| one.queue == Some(queue) && one.id == id;
        let commands = self.slots.iter_mut().zip(0..);
        let mut commands = commands.filter_map(|(slot, at)| Some((at, slot.as_mut()?)));
        commands.find(|(_, command)| named(command))
    }

    /// Returns the kind of the command that `tag` names.
    pub fn kind(&self, tag: u64) -> Option<CommandKind> {
        Some(self.slots.get(tag as u32 as usize)?.as_ref()?.kind)
    }

    /// Makes the end of every command in flight unreported.
    pub fn orphan_all(&mut self) {
        for command in self.slots.iter_mut().flatten() {
            command.queue = None;
        }
    }
}
