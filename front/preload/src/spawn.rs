//! posix_spawn(3), and how its children get connections: see [`exec`](crate::exec).

use libc::{c_char, c_int};
use slipway_socket::lock::Lock;

use crate::exec::{Survivors, Ticket, has_ours};
use crate::libcs::{self, Actions, Strings};
use crate::numbers::{self, Numbers};
use crate::program::{self, Program};

/// Allows one ticket at a time at the number where a child finds it.
static SPAWNING: Lock<()> = Lock::new(());

/// Makes `call`, a posix_spawn(3), with a ticket for the child if the child will have the library.
/// This process cannot run code between the child's fork and its execve(2), nor read `actions`. So
/// the ticket covers all connections, and every one that the child has in the end survives.
///
/// # Safety
/// The strings of `program`, and `env`, are as execve(2) demands.
unsafe fn spawn(
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
    // SAFETY: the caller guarantees both.
    let hands_on = may && unsafe { program::takes_library(program, env) };
    if !hands_on {
        return call();
    }
    let _one = SPAWNING.hold();
    let ticket = Ticket::place_for_child(&Numbers::of(survivors.eventfds(), actions as usize));
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
    let call = || {
        libcs::SPAWN.call(|spawn| {
            // SAFETY: the caller guarantees valid arguments.
            unsafe { spawn(child, path, actions, attributes, arguments, env) }
        })
    };
    // SAFETY: the caller guarantees valid arguments.
    unsafe { spawn(Program::Path(path), actions, env, call) }
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
    let call = || {
        libcs::SPAWNP.call(|spawn| {
            // SAFETY: the caller guarantees valid arguments.
            unsafe { spawn(child, file, actions, attributes, arguments, env) }
        })
    };
    // SAFETY: the caller guarantees valid arguments.
    unsafe { spawn(Program::InPath(file), actions, env, call) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn posix_spawn_file_actions_init(actions: Actions) -> c_int {
    numbers::forget(actions as usize);
    libcs::ACTIONS_INIT.call(|init| {
        // SAFETY: the caller guarantees a valid argument.
        unsafe { init(actions) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn posix_spawn_file_actions_destroy(actions: Actions) -> c_int {
    numbers::forget(actions as usize);
    libcs::ACTIONS_DESTROY.call(|destroy| {
        // SAFETY: the caller guarantees a valid argument.
        unsafe { destroy(actions) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn posix_spawn_file_actions_adddup2(
    actions: Actions,
    fd: c_int,
    new: c_int,
) -> c_int {
    numbers::will_copy(actions as usize, fd, new);
    libcs::ACTIONS_ADDDUP2.call(|add| {
        // SAFETY: the caller guarantees valid arguments.
        unsafe { add(actions, fd, new) }
    })
}
