//! Messages between the engine's thread and the carrier of guests.

use std::sync::Arc;

use slipway_sgiov_function::Peer;
use slipway_sgiov_spec::Address;
use slipway_vfio_user::Control;

use super::claims::Claims;
use crate::policy::Policy;
use crate::remote::{Event, Line};

/// A command to the carrier.
pub enum Command {
    Add {
        guest: u32,
        peer: Peer,
        control: Control,
    },
    Remove(u32),
    /// A family whose signals the links' carrier takes.
    ClaimedFamily(u32, Arc<Claims>),
    /// An entry of a family of [`Command::ClaimedFamily`] has signalled. Without an entry, any
    /// entry of the family may have.
    Signalled(u32, Option<u32>),
    /// The signals of the family of [`Command::ClaimedFamily`] with these claims are invalid, or
    /// nobody takes them. The family may have ended since, and another one may have its number.
    Spoiled(u32, Arc<Claims>),
    /// A family of [`Command::ClaimedFamily`] has ended.
    FamilyEnded(u32),
    Policy(Policy),
    /// A program of this node connects to a guest. `guest` is `None` if no guest listens at `to`
    /// any more.
    Connect {
        connection: u32,
        guest: Option<u32>,
        from: Address,
        to: Address,
        line: Line,
    },
    /// The engine's answer to [`Event::FromGuest`].
    Answer {
        incoming: u32,
        answer: Result<(u32, Line), u32>,
    },
    /// A program of this node has closed its connection.
    Closed(u32),
}

/// A message of the carrier to the engine's thread.
pub enum News {
    Event(Event),
    /// A guest's VMM has gone.
    Gone(u32),
}
