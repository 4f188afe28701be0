//! posix_spawn(3), and how its children get connections: see [`exec`](crate::exec).

use libc::c_int;
use slipway_socket::lock::Lock;

use crate::exec::{Survivors, Ticket, has_ours};
use crate::numbers::Numbers;
use crate::program::{self, Program};
use crate::strings::List;

/// Allows one ticket at a time at the number where a child finds it.
static SPAWNING: Lock<()> = Lock::new(());

/// Makes `call`, a posix_spawn(3), with a ticket for the child if the child will have the library.
/// `actions` is the address of the call's list of actions, or 0. This process cannot run code
/// between the child's fork and its execve(2), nor read the list. So the ticket covers all
/// connections, and every one that the child has in the end survives.
pub fn spawn<'a>(
    program: impl FnOnce() -> Program<'a>,
    actions: usize,
    env: List<'a>,
    call: impl FnOnce() -> c_int,
) -> c_int {
    if !has_ours() {
        return call();
    }
    let survivors = Survivors::look();
    let may = actions != 0 || survivors.are_any();
    if !may || !program::takes_library(program(), env) {
        return call();
    }
    let _one = SPAWNING.hold();
    let ticket = Ticket::place_for_child(&Numbers::of(survivors.eventfds(), actions));
    let error = call();
    if let Some(ticket) = ticket {
        if error == 0 {
            // The child has its own copy.
            ticket.close();
        } else {
            ticket.take_back();
        }
    }
    error
}
