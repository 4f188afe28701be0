//! execve(2) and its relatives: the next image takes over connections whose descriptors survive.
//!
//! The new image's library asks the engine for this image's connections, by a *ticket*
//! ([`Family::ticket`](slipway_socket::Family::ticket)): a connection to the engine that survives
//! at a number that both images know ([`Survivor`]). The new image finds out by itself which
//! descriptors are which connections (`inherit`), so dup2(2) in a child of vfork(2), or
//! posix_spawn(3), may have moved them.
//!
//! If the new program will not have the library (its environment does not name it, it is static,
//! for another C library, or of another user's rights), its connections end here: see `ended`. So
//! do those that cannot be handed on: all of them without a ticket (the engine is gone, or the
//! program's limit of descriptors is below its number), and those of a shared eventfd that have no
//! place in the list of numbers.
//!
//! All this may happen in a child of vfork(2). So nothing here allocates from the heap, takes a
//! lock of the loader's ([`libcs`]) or changes the parent's state, except for counts that are
//! corrected when the call fails.

mod ended;
mod streams;
mod survivors;
mod ticket;

use libc::c_int;
use slipway_socket::hidden::Survivor;

use self::ended::Ended;
use self::streams::Streams;
pub use self::survivors::{Survivors, has_ours};
pub use self::ticket::{Ticket, forget_ticket};
use crate::fds;
use crate::numbers::{self, Numbers};
use crate::program::{self, Program};
use crate::real;
use crate::strings::List;

/// The preparations for a call of execve(2), which are undone if the call fails.
#[allow(clippy::large_enum_variant)] // on the stack, for one call: a box would be on the heap
enum Prepared {
    /// No connection or listener survives.
    Nothing,
    /// The next image takes over what survives. Connections that it could not tell from each other
    /// have ended.
    HandedOn(Ticket, Option<Ended>),
    /// The connections that survive have ended.
    Ended(Ended),
}

impl Prepared {
    /// Hands connections on to `program`, or ends them.
    fn new(program: Program<'_>, environment: List<'_>) -> Self {
        let survivors = Survivors::look();
        if !survivors.are_any() {
            return Self::Nothing;
        }
        if !program::takes_library(program, environment) {
            return Self::Ended(end(survivors.connections()));
        }
        // A ticket that another thread placed for its child may lie there.
        forget_ticket();
        let numbers = Numbers::of(survivors.eventfds(), 0);
        let ticket = if fds::in_vfork_child() {
            Ticket::place_for_child(&numbers)
        } else {
            Ticket::place(&numbers)
        };
        // Without a ticket the next image would have bare eventfds.
        let Some(ticket) = ticket else { return Self::Ended(end(survivors.connections())) };
        let is_listed = |fd| ticket.has_numbers() && numbers.entry(fd).is_some();
        let is_left_out = |fd| numbers::is_shared(fd) && !is_listed(fd);
        let are_some = survivors.eventfds().any(is_left_out);
        let ended = are_some.then(|| end(survivors.connections().filter(is_left_out)));
        Self::HandedOn(ticket, ended)
    }

    /// Undoes the preparations after the call failed.
    fn take_back(self) {
        match self {
            Self::Nothing => {}
            Self::HandedOn(ticket, ended) => {
                ticket.take_back();
                ended.into_iter().for_each(Ended::take_back);
            }
            Self::Ended(ended) => ended.take_back(),
        }
    }
}

/// Ends connections. Copies go above the ticket's number, in the range hidden from the program.
fn end(connections: Streams) -> Ended {
    Ended::new(connections, Survivor::Ticket.places().0 + 1)
}

/// Makes `call`, which becomes `program` or fails. Hands connections on before it, or ends them,
/// and undoes that if `call` fails.
pub fn become_program<'a>(
    program: impl FnOnce() -> Program<'a>,
    environment: List<'a>,
    call: impl FnOnce() -> c_int,
) -> c_int {
    if !has_ours() {
        return call();
    }
    let saved = real::errno();
    let prepared = Prepared::new(program(), environment);
    real::set_errno(saved);
    let failed = call();
    let errno = real::errno();
    prepared.take_back();
    real::set_errno(errno);
    failed
}
