//! libc's own functions behind those that this library exports under the same names.
//!
//! They are looked up when the library is loaded ([`begin`]). A child of vfork(2) must not look
//! them up: dlsym(3) takes the loader's locks, and another thread of the parent may have them.
#![allow(unsafe_code)] // an address that dlsym(3) found becomes a function

use std::ffi::CStr;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicPtr, Ordering};

use libc::{c_char, c_int, c_void};
use slipway_socket::Errno;

use crate::real::fail;
use crate::strings::Strings;

/// The list of actions of a posix_spawn(3).
pub type Actions = *mut libc::posix_spawn_file_actions_t;

type Execvpe = unsafe extern "C" fn(*const c_char, Strings, Strings) -> c_int;
type Spawn = unsafe extern "C" fn(
    *mut libc::pid_t,
    *const c_char,
    *const libc::posix_spawn_file_actions_t,
    *const libc::posix_spawnattr_t,
    Strings,
    Strings,
) -> c_int;
type OnActions = unsafe extern "C" fn(Actions) -> c_int;
type AddDup2 = unsafe extern "C" fn(Actions, c_int, c_int) -> c_int;

/// execvpe(3), which searches for a program, and runs a script without `#!` by a shell.
pub static EXECVPE: Function<Execvpe> = Function::new(c"execvpe");
/// posix_spawn(3).
pub static SPAWN: Function<Spawn> = Function::new(c"posix_spawn");
/// posix_spawnp(3), which searches for a program.
pub static SPAWNP: Function<Spawn> = Function::new(c"posix_spawnp");
/// posix_spawn_file_actions_init(3).
pub static ACTIONS_INIT: Function<OnActions> = Function::new(c"posix_spawn_file_actions_init");
/// posix_spawn_file_actions_destroy(3).
pub static ACTIONS_DESTROY: Function<OnActions> =
    Function::new(c"posix_spawn_file_actions_destroy");
/// posix_spawn_file_actions_adddup2(3).
pub static ACTIONS_ADDDUP2: Function<AddDup2> = Function::new(c"posix_spawn_file_actions_adddup2");

/// Looks up all of the functions.
pub fn begin() {
    EXECVPE.find();
    SPAWN.find();
    SPAWNP.find();
    ACTIONS_INIT.find();
    ACTIONS_DESTROY.find();
    ACTIONS_ADDDUP2.find();
}

/// A function of libc, to which `F` is a pointer.
pub struct Function<F> {
    name: &'static CStr,
    /// The function's address, or null before it was looked up.
    found: AtomicPtr<c_void>,
    pointer: PhantomData<F>,
}

impl<F: Copy> Function<F> {
    /// Names a function. `F` is a pointer to a function of its type: [`Function::call`] relies on
    /// that, so only this module calls `new`.
    const fn new(name: &'static CStr) -> Self {
        Self { name, found: AtomicPtr::new(std::ptr::null_mut()), pointer: PhantomData }
    }

    /// Returns the result of `call`, which is given the function. Returns -1, with errno `ENOSYS`,
    /// if libc has no such function.
    pub fn call(&self, call: impl FnOnce(F) -> c_int) -> c_int {
        const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
        let found = self.find();
        if found.is_null() {
            return fail(Errno::NOSYS) as c_int;
        }
        // SAFETY: the address of the function `name`, to which `F` is a pointer (`new`).
        call(unsafe { std::mem::transmute_copy::<*mut c_void, F>(&found) })
    }

    /// Returns the function's address, or null if libc has no such function.
    fn find(&self) -> *mut c_void {
        let known = self.found.load(Ordering::Relaxed);
        if !known.is_null() {
            return known;
        }
        // SAFETY: a C string, and the handle that means the libraries after this one.
        let found = unsafe { libc::dlsym(libc::RTLD_NEXT, self.name.as_ptr()) };
        self.found.store(found, Ordering::Relaxed);
        found
    }
}
