//! execve(2) and its relatives whose arguments are an array.

use libc::{c_char, c_int};

use super::memory::text;
use crate::exec::become_program;
use crate::libcs;
use crate::program::Program;
use crate::real::sys;
use crate::strings::{List, Strings, environment};

#[unsafe(no_mangle)]
pub unsafe extern "C" fn execve(path: *const c_char, arguments: Strings, env: Strings) -> c_int {
    let call = || sys!(SYS_execve, path, arguments, env) as c_int;
    // SAFETY: the caller guarantees valid arguments.
    let program = || unsafe { Program::Path(text(path)) };
    // SAFETY: the caller guarantees valid arguments.
    become_program(program, unsafe { List::new(env) }, call)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn execv(path: *const c_char, arguments: Strings) -> c_int {
    // SAFETY: the caller guarantees valid arguments.
    unsafe { execve(path, arguments, environment()) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn execveat(
    folder: c_int,
    path: *const c_char,
    arguments: Strings,
    env: Strings,
    flags: c_int,
) -> c_int {
    let call = || sys!(SYS_execveat, folder, path, arguments, env, flags) as c_int;
    // SAFETY: the caller guarantees valid arguments.
    let program = || unsafe { Program::At(folder, text(path), flags) };
    // SAFETY: the caller guarantees valid arguments.
    become_program(program, unsafe { List::new(env) }, call)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn fexecve(file: c_int, arguments: Strings, env: Strings) -> c_int {
    // SAFETY: the caller guarantees valid arguments.
    unsafe { execveat(file, c"".as_ptr(), arguments, env, libc::AT_EMPTY_PATH) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn execvpe(file: *const c_char, arguments: Strings, env: Strings) -> c_int {
    let call = || {
        libcs::EXECVPE.call(|execvpe| {
            // SAFETY: the caller guarantees valid arguments.
            unsafe { execvpe(file, arguments, env) }
        })
    };
    // SAFETY: the caller guarantees valid arguments.
    let program = || unsafe { Program::InPath(text(file)) };
    // SAFETY: the caller guarantees valid arguments.
    become_program(program, unsafe { List::new(env) }, call)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn execvp(file: *const c_char, arguments: Strings) -> c_int {
    // SAFETY: the caller guarantees valid arguments.
    unsafe { execvpe(file, arguments, environment()) }
}
