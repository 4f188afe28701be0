//! The right to end a command.

use crate::journal::SlotNumber;

/// A fetched command that has not ended. Its completion queue has a slot reserved for its end.
///
/// A permit is made where a command is fetched, and it is used up where the command ends or is
/// given up: no command ends twice, and none is forgotten without a trace in the code.
#[must_use]
#[derive(Debug)]
pub(crate) struct Permit {
    /// The submission queue.
    pub queue: u16,
    /// CID.
    pub id: u16,
    /// The command's slot in the journal.
    pub slot_number: SlotNumber,
}

/// The recipient of a command's end.
#[derive(Debug)]
pub(crate) enum Owner {
    /// The guest gets a completion queue entry.
    Guest(Permit),
    /// The end is not reported: after a reset, or for the flush of a shutdown. The journal slot, if
    /// any, is freed.
    Nobody(SlotNumber),
}

impl Owner {
    /// The owner of a command of the controller itself.
    pub const CONTROLLER: Self = Self::Nobody(SlotNumber::NONE);

    /// Returns whether the end is reported to the guest.
    pub fn is_guest(&self) -> bool {
        matches!(self, Self::Guest(_))
    }

    /// Returns whether this is command `id` of submission queue `queue`.
    pub fn is(&self, queue: u16, id: u16) -> bool {
        matches!(self, Self::Guest(permit) if permit.queue == queue && permit.id == id)
    }

    /// Returns the command's slot in the journal.
    pub fn slot_number(&self) -> SlotNumber {
        match self {
            Self::Guest(permit) => permit.slot_number,
            Self::Nobody(slot_number) => *slot_number,
        }
    }

    /// Makes the end unreported, since the command's queue is gone.
    pub fn orphan(&mut self) {
        *self = Self::Nobody(self.slot_number());
    }
}
