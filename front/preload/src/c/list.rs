//! execl(3) and its relatives, whose arguments are a list in the call itself. They collect the
//! arguments, and call their counterparts with an array.
//!
//! A variadic function cannot be defined in Rust, so each of them has a naked entry. The entry
//! stores the arguments that came in registers, and calls a function with pointers to these and to
//! those on the stack.

use libc::{c_char, c_int};
use slipway_socket::Errno;

use super::exec::{execv, execve, execvp};
use crate::real::fail;
use crate::strings::{Strings, with_array};

/// The number of arguments after the path that come in registers.
const IN_REGISTERS: usize = if cfg!(target_arch = "x86_64") { 5 } else { 7 };

/// The arguments of a variadic function after the path: first those in registers, then those on the
/// stack.
struct Variadic {
    registers: Strings,
    stack: Strings,
}

impl Variadic {
    /// Returns an argument.
    ///
    /// # Safety
    /// The caller passed more than `at` arguments.
    unsafe fn get(&self, at: usize) -> *const c_char {
        // SAFETY: the caller passed more than `at` arguments.
        unsafe {
            match at.checked_sub(IN_REGISTERS) {
                None => *self.registers.add(at),
                Some(at) => *self.stack.add(at),
            }
        }
    }

    /// Returns the result of `call`, which is given an array of the arguments up to the null
    /// pointer, and the number of the argument after it. Returns -1, with errno `E2BIG`, if there
    /// are too many.
    ///
    /// # Safety
    /// A null pointer is among the arguments.
    unsafe fn with_array(&self, call: impl FnOnce(Strings, usize) -> c_int) -> c_int {
        // SAFETY: the arguments end with a null pointer, after which none is asked for.
        let get = |at| unsafe { self.get(at) };
        let called = with_array(get, |array| call(array.as_ptr(), array.len()));
        called.unwrap_or_else(|| fail(Errno::TOOBIG) as c_int)
    }
}

/// Carries out execl(3).
///
/// # Safety
/// `path` and the arguments, which are at `registers` and `stack`, are as execl(3) demands.
unsafe extern "C" fn with_path(path: *const c_char, registers: Strings, stack: Strings) -> c_int {
    // SAFETY: the caller guarantees valid arguments.
    unsafe { Variadic { registers, stack }.with_array(|array, _| execv(path, array)) }
}

/// Carries out execlp(3).
///
/// # Safety
/// `file` and the arguments, which are at `registers` and `stack`, are as execlp(3) demands.
unsafe extern "C" fn with_search(file: *const c_char, registers: Strings, stack: Strings) -> c_int {
    // SAFETY: the caller guarantees valid arguments.
    unsafe { Variadic { registers, stack }.with_array(|array, _| execvp(file, array)) }
}

/// Carries out execle(3).
///
/// # Safety
/// `path` and the arguments, which are at `registers` and `stack`, are as execle(3) demands: the
/// environment follows the null pointer.
unsafe extern "C" fn with_environment(
    path: *const c_char,
    registers: Strings,
    stack: Strings,
) -> c_int {
    let given = Variadic { registers, stack };
    // SAFETY: the caller guarantees valid arguments, and one more after the null pointer.
    unsafe { given.with_array(|array, next| execve(path, array, given.get(next).cast())) }
}

/// Defines the entry of a variadic function, which has `$execute` carry it out.
macro_rules! entry {
    ($name:ident, $execute:ident) => {
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
                "call {execute}",
                "add rsp, 40",
                "ret",
                execute = sym $execute,
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
                "bl {execute}",
                "ldp x29, x30, [sp], #80",
                "ret",
                execute = sym $execute,
            )
        }
    };
}

entry!(execl, with_path);
entry!(execlp, with_search);
entry!(execle, with_environment);
