//! posix_spawn(3), and how its children get connections: see [`exec`](crate::exec).

use libc::{c_char, c_int};
use slipway_socket::lock::Lock;

use crate::exec::{Strings, Survivors, Ticket, has_ours, libcs};
use crate::numbers::{self, Numbers};
use crate::program::{self, Program};

/// Allows one ticket at a time at the number where a child finds it.
static SPAWNING: Lock<()> = Lock::new(());

type Spawn = unsafe extern "C" fn(
    *mut libc::pid_t,
    *const c_char,
    *const libc::posix_spawn_file_actions_t,
    *const libc::posix_spawnattr_t,
    Strings,
    Strings,
) -> c_int;

/// Makes `call`, a posix_spawn(3), with a ticket for the child if the child will have the library.
/// This process cannot run code between the child's fork and its execve(2), nor read `actions`. So
/// the ticket covers all connections, and every one that the child has in the end survives.
fn spawn(
    program: Program<'_>,
    actions: *const libc::posix_spawn_file_actions_t,
    env: Strings,
    call: impl FnOnce() -> c_int,
) -> c_int {
    if !has_ours() {
        return call();
    }
    let survivors = Survivors::look();
    let may = !actions.is_null() || survivors.are_any();
    if !may || !program::takes_library(program, env) {
        return call();
    }
    let _one = SPAWNING.hold();
    let ticket = Ticket::new(true, &Numbers::of(survivors.streams.all(), actions as usize));
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

#[unsafe(no_mangle)]
pub unsafe extern "C" fn posix_spawn(
    child: *mut libc::pid_t,
    path: *const c_char,
    actions: *const libc::posix_spawn_file_actions_t,
    attributes: *const libc::posix_spawnattr_t,
    arguments: Strings,
    env: Strings,
) -> c_int {
    spawn(Program::Path(path), actions, env, || {
        libcs!(c"posix_spawn" as Spawn, (child, path, actions, attributes, arguments, env))
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn posix_spawnp(
    child: *mut libc::pid_t,
    file: *const c_char,
    actions: *const libc::posix_spawn_file_actions_t,
    attributes: *const libc::posix_spawnattr_t,
    arguments: Strings,
    env: Strings,
) -> c_int {
    spawn(Program::InPath(file), actions, env, || {
        libcs!(c"posix_spawnp" as Spawn, (child, file, actions, attributes, arguments, env))
    })
}

type Actions = *mut libc::posix_spawn_file_actions_t;

#[unsafe(no_mangle)]
pub unsafe extern "C" fn posix_spawn_file_actions_init(actions: Actions) -> c_int {
    numbers::forget(actions as usize);
    libcs!(c"posix_spawn_file_actions_init" as unsafe extern "C" fn(Actions) -> c_int, (actions))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn posix_spawn_file_actions_destroy(actions: Actions) -> c_int {
    numbers::forget(actions as usize);
    libcs!(c"posix_spawn_file_actions_destroy" as unsafe extern "C" fn(Actions) -> c_int, (actions))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn posix_spawn_file_actions_adddup2(
    actions: Actions,
    fd: c_int,
    new: c_int,
) -> c_int {
    numbers::will_copy(actions as usize, fd, new);
    libcs!(
        c"posix_spawn_file_actions_adddup2" as unsafe extern "C" fn(Actions, c_int, c_int) -> c_int,
        (actions, fd, new)
    )
}
