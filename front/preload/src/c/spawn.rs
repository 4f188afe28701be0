//! posix_spawn(3), and the lists of actions of its children.

use libc::{c_char, c_int};

use super::memory::text;
use crate::libcs::{self, Actions};
use crate::program::Program;
use crate::strings::{List, Strings};
use crate::{numbers, spawn};

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
    let program = || unsafe { Program::Path(text(path)) };
    // SAFETY: the caller guarantees valid arguments.
    spawn::spawn(program, actions as usize, unsafe { List::new(env) }, call)
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
    let program = || unsafe { Program::InPath(text(file)) };
    // SAFETY: the caller guarantees valid arguments.
    spawn::spawn(program, actions as usize, unsafe { List::new(env) }, call)
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
