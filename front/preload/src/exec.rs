//! execve(2) and its relatives: the next image takes over connections whose descriptors survive.
//!
//! The new image's library asks the engine for this image's connections, by a *ticket*
//! ([`Family::ticket`]): a connection to the engine that survives at a number that both images know
//! ([`hidden::survivor`]). The new image finds out by itself which descriptors are which
//! connections (`inherit`), so dup2(2) in a child of vfork(2), or posix_spawn(3), may have moved
//! them.
//!
//! If the new program will not have the library (its environment does not name it, it is static,
//! for another C library, or of another user's rights), its connections end here. Each descriptor
//! is replaced by a socket whose other end is closed: it reads end-of-file, and writes fail with
//! `EPIPE`.
//!
//! All this may happen in a child of vfork(2). So nothing here allocates from the heap or changes
//! the parent's state, except for counts that are corrected when the call fails.

use std::ffi::CStr;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicPtr, Ordering};

use libc::{c_char, c_int, c_void};
use slipway_socket::hidden::{self, Survivor};

use crate::descriptors::{self, What};
use crate::fds::{self, DescriptorKind};
use crate::numbers::Numbers;
use crate::program::{self, Program};
use crate::real::{self, sys};
use crate::session;

pub type Strings = *const *const c_char;

unsafe extern "C" {
    static environ: Strings;
}

/// The most descriptors whose connections are ended or handed on.
const MOST: usize = 512;
/// The most arguments of execl(3).
const ARGUMENTS: usize = 2048;

/// Descriptors that survive execve(2) and may be ours.
#[derive(Default)]
pub struct Survivors {
    pub streams: Streams,
    listens: bool,
}

/// Descriptors of connections: an array and the number of its entries in use.
pub struct Streams([c_int; MOST], usize);

impl Default for Streams {
    fn default() -> Self {
        Self([0; MOST], 0)
    }
}

impl Streams {
    pub fn all(&self) -> &[c_int] {
        &self.0[..self.1]
    }
}

impl Survivors {
    pub fn look() -> Self {
        let mut found = Self::default();
        let borrowed = fds::is_borrowed();
        descriptors::surviving(|fd, what| match what {
            What::Eventfd => {
                let known = fds::get(fd).is_some_and(|object| object.stream().is_some());
                let Streams(places, count) = &mut found.streams;
                if (known || borrowed) && *count < MOST {
                    places[*count] = fd;
                    *count += 1;
                }
            }
            What::Listener => found.listens = true,
        });
        found
    }

    pub fn are_any(&self) -> bool {
        self.streams.1 > 0 || self.listens
    }
}

/// Returns whether this process has connections or listeners that could be handed on.
pub fn has_ours() -> bool {
    fds::all(0, c_int::MAX - 1).any(|(_, object)| {
        matches!(object.kind(), DescriptorKind::Stream(_) | DescriptorKind::Listener(_))
    })
}

/// Adds a child to each connection's count of users (`child`), or removes it again.
fn count(child: bool) {
    fds::streams_of_all(|endpoint| if child { endpoint.hold() } else { endpoint.let_go() });
}

/// A ticket at the number where the next image looks for it.
pub struct Ticket {
    number: c_int,
    /// The number of the memfd that says which descriptor is which endpoint.
    numbers: Option<c_int>,
    counted: bool,
}

impl Ticket {
    /// Places a ticket and `numbers`. `child`: another process becomes the new image, not this one.
    /// Returns `None` if there is no family or no ticket, or if the ticket's number is in use.
    pub fn new(child: bool, numbers: &Numbers) -> Option<Self> {
        let (number, _) = Survivor::Ticket.places();
        // The number is in use by the program, or by another thread's ticket for its child.
        if sys!(SYS_fcntl, number, libc::F_GETFD, 0) >= 0 {
            return None;
        }
        let ticket = session::known()?.ticket().ok()?;
        let placed = sys!(SYS_dup3, ticket.as_raw_fd(), number, 0);
        hidden::close(ticket);
        if placed < 0 {
            return None;
        }
        if child {
            count(true);
        }
        Some(Self { number, numbers: numbers.leave(), counted: child })
    }

    /// Closes this process's copies.
    pub fn close(&self) {
        real::close(self.number);
        self.numbers.into_iter().for_each(|number| _ = real::close(number));
    }

    /// Undoes [`Ticket::new`] after the call failed.
    pub fn take_back(self) {
        self.close();
        if self.counted {
            count(false);
        }
    }
}

/// Connections that were ended, with copies of their descriptors, so that a failed call can restore
/// them.
struct Ended {
    streams: Streams,
    before: [c_int; MOST],
}

impl Ended {
    fn new(streams: Streams) -> Self {
        let mut before = [-1; MOST];
        let from = Survivor::Ticket.places().0 + 1;
        for (fd, before) in streams.all().iter().zip(&mut before) {
            let ours = !fds::is_borrowed() || descriptors::is_a_streams(*fd);
            if !ours {
                continue;
            }
            let mut pair = [-1 as c_int; 2];
            let kind = libc::SOCK_STREAM | libc::SOCK_CLOEXEC;
            if sys!(SYS_socketpair, libc::AF_UNIX, kind, 0, pair.as_mut_ptr()) < 0 {
                continue;
            }
            *before = sys!(SYS_fcntl, *fd, libc::F_DUPFD_CLOEXEC, from) as c_int;
            sys!(SYS_dup3, pair[0], *fd, 0);
            pair.into_iter().for_each(|end| _ = real::close(end));
        }
        Self { streams, before }
    }

    /// Restores the connections after the call failed.
    fn take_back(self) {
        let all = self.streams.all().iter().zip(self.before);
        for (fd, before) in all.filter(|(_, before)| *before >= 0) {
            sys!(SYS_dup3, before, *fd, 0);
            real::close(before);
        }
    }
}

/// Makes `call`, which becomes `program` or fails. Hands connections on before it, or ends them,
/// and undoes that if `call` fails.
fn become_program(
    program: Program<'_>,
    environment: Strings,
    call: impl FnOnce() -> c_int,
) -> c_int {
    if !has_ours() {
        return call();
    }
    let saved = real::errno();
    let survivors = Survivors::look();
    let takes = survivors.are_any().then(|| program::takes_library(program, environment));
    let ticket = takes.filter(|takes| *takes).and_then(|_| {
        // A ticket that another thread placed for its child may lie there.
        forget_ticket();
        Ticket::new(fds::is_borrowed(), &Numbers::of(survivors.streams.all(), 0))
    });
    let ends = takes == Some(false);
    let ended = ends.then(|| Ended::new(survivors.streams));
    real::set_errno(saved);
    let failed = call();
    let errno = real::errno();
    if let Some(ticket) = ticket {
        ticket.take_back();
    }
    if let Some(ended) = ended {
        ended.take_back();
    }
    real::set_errno(errno);
    failed
}

/// Returns libc's own function `name`, which makes its system calls directly.
pub fn function_of_libc(known: &AtomicPtr<c_void>, name: &CStr) -> *mut c_void {
    let found = known.load(Ordering::Relaxed);
    if !found.is_null() {
        return found;
    }
    // SAFETY: a C string, and the handle that means the libraries after this one.
    let found = unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) };
    known.store(found, Ordering::Relaxed);
    found
}

/// Calls libc's function `$name`, of type `$type`, with these arguments.
macro_rules! libcs {
    ($name:literal as $type:ty, ($($argument:expr),*)) => {{
        static KNOWN: std::sync::atomic::AtomicPtr<libc::c_void> =
            std::sync::atomic::AtomicPtr::new(std::ptr::null_mut());
        let found = $crate::exec::function_of_libc(&KNOWN, $name);
        if found.is_null() {
            $crate::real::fail(slipway_socket::Errno::NOSYS) as libc::c_int
        } else {
            // SAFETY: libc's function of that name has this type.
            unsafe { std::mem::transmute::<*mut libc::c_void, $type>(found)($($argument),*) }
        }
    }};
}

pub(crate) use libcs;

/// Looks up libc's functions early, so that no child of vfork(2) has to.
pub fn begin() {
    for name in [c"execvpe", c"posix_spawn", c"posix_spawnp"] {
        // SAFETY: a C string and a valid handle. The result is not used: the loader resolves the
        // symbol now.
        unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) };
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn execve(path: *const c_char, arguments: Strings, env: Strings) -> c_int {
    become_program(Program::Path(path), env, || sys!(SYS_execve, path, arguments, env) as c_int)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn execv(path: *const c_char, arguments: Strings) -> c_int {
    // SAFETY: `environ` is libc's own variable; the caller vouches for the rest.
    unsafe { execve(path, arguments, environ) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn execveat(
    folder: c_int,
    path: *const c_char,
    arguments: Strings,
    env: Strings,
    flags: c_int,
) -> c_int {
    become_program(Program::At(folder, path, flags), env, || {
        sys!(SYS_execveat, folder, path, arguments, env, flags) as c_int
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn fexecve(file: c_int, arguments: Strings, env: Strings) -> c_int {
    // SAFETY: the caller guarantees valid arguments.
    unsafe { execveat(file, c"".as_ptr(), arguments, env, libc::AT_EMPTY_PATH) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn execvpe(file: *const c_char, arguments: Strings, env: Strings) -> c_int {
    // libc searches for the program, and runs a script without `#!` by a shell.
    become_program(Program::InPath(file), env, || {
        libcs!(
            c"execvpe" as unsafe extern "C" fn(*const c_char, Strings, Strings) -> c_int,
            (file, arguments, env)
        )
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn execvp(file: *const c_char, arguments: Strings) -> c_int {
    // SAFETY: `environ` is libc's own variable; the caller vouches for the rest.
    unsafe { execvpe(file, arguments, environ) }
}

/// Closes a ticket and a list of numbers that another thread placed for its own child.
pub fn forget_ticket() {
    let (file, _) = Survivor::Numbers.places();
    if descriptors::are_numbers(file) {
        real::close(file);
    }
    let (number, _) = Survivor::Ticket.places();
    if descriptors::is_ticket(number) {
        // SAFETY: nothing else in this process knows the number.
        hidden::close(unsafe { OwnedFd::from_raw_fd(number) });
    }
}

/// The function of execl(3)'s family that was called.
#[derive(Clone, Copy)]
enum List {
    Path = 0,
    Search = 1,
    Environment = 2,
}

/// The arguments of a variadic function: first those in registers, then those on the stack.
struct Variadic {
    registers: Strings,
    count: usize,
    stack: Strings,
}

impl Variadic {
    /// # Safety
    /// The caller passed more than `at` arguments.
    unsafe fn get(&self, at: usize) -> *const c_char {
        // SAFETY: the caller passed more than `at` arguments.
        unsafe {
            if at < self.count { *self.registers.add(at) } else { *self.stack.add(at - self.count) }
        }
    }
}

/// Collects the arguments of a function of execl(3)'s family and calls its execv(3) counterpart.
/// The naked entries below jump here.
unsafe extern "C" fn execute_list(
    path: *const c_char,
    registers: Strings,
    stack: Strings,
    which: usize,
) -> c_int {
    let count = if cfg!(target_arch = "x86_64") { 5 } else { 7 };
    let given = Variadic { registers, count, stack };
    let mut arguments = [std::ptr::null::<c_char>(); ARGUMENTS];
    for at in 0..ARGUMENTS {
        // SAFETY: the list ends with a null pointer, and so does this loop.
        let one = unsafe { given.get(at) };
        arguments[at] = one;
        if !one.is_null() {
            continue;
        }
        let list = arguments.as_ptr();
        // SAFETY: the caller vouches for the arguments; execle's environment follows the null
        // pointer that ends its list.
        return unsafe {
            match which {
                which if which == List::Search as usize => execvp(path, list),
                which if which == List::Environment as usize => {
                    execve(path, list, given.get(at + 1).cast())
                }
                _ => execv(path, list),
            }
        };
    }
    real::fail(slipway_socket::Errno::TOOBIG) as c_int
}

/// Defines the entry of a variadic function, which stores its register arguments in memory.
macro_rules! list {
    ($name:ident, $which:expr) => {
        #[cfg(target_arch = "x86_64")]
        #[unsafe(naked)]
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name() {
            // Five words are pushed; with the return address they are six, so the stack is aligned
            // for the call.
            std::arch::naked_asm!(
                "push r9", "push r8", "push rcx", "push rdx", "push rsi",
                "mov rsi, rsp",
                "lea rdx, [rsp + 48]",
                "mov ecx, {which}",
                "call {execute}",
                "add rsp, 40",
                "ret",
                which = const $which as usize,
                execute = sym execute_list,
            )
        }

        #[cfg(target_arch = "aarch64")]
        #[unsafe(naked)]
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name() {
            std::arch::naked_asm!(
                "stp x29, x30, [sp, #-80]!",
                "mov x29, sp",
                "stp x1, x2, [sp, #16]",
                "stp x3, x4, [sp, #32]",
                "stp x5, x6, [sp, #48]",
                "str x7, [sp, #64]",
                "add x1, sp, #16",
                "add x2, sp, #80",
                "mov x3, {which}",
                "bl {execute}",
                "ldp x29, x30, [sp], #80",
                "ret",
                which = const $which as usize,
                execute = sym execute_list,
            )
        }
    };
}

list!(execl, List::Path);
list!(execlp, List::Search);
list!(execle, List::Environment);
