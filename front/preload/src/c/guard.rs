//! The limits of calls from C: nothing unwinds into C, and nothing is written beyond a buffer whose
//! size the compiler knew.

use std::panic::{AssertUnwindSafe, catch_unwind};

use slipway_socket::Errno;

use crate::real::{fail, sys};

/// Runs `call` and returns its result, or -1 with errno set if `call` failed. A panic is `EIO`.
#[inline]
pub fn guard(call: impl FnOnce() -> Result<usize, Errno>) -> isize {
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(Ok(count)) => count as isize,
        Ok(Err(errno)) => fail(errno),
        Err(_) => fail(Errno::IO),
    }
}

/// Runs `call`, which follows what the kernel has done and so has no result.
#[inline]
pub fn guarded(call: impl FnOnce()) {
    guard(|| {
        call();
        Ok(0)
    });
}

/// Ends a program that would write beyond its buffer, as `_FORTIFY_SOURCE` promises.
pub fn assert_fits(length: usize, room: usize) {
    if length > room {
        let text = "*** buffer overflow detected ***: terminated\n";
        sys!(SYS_write, 2, text.as_ptr(), text.len());
        std::process::abort();
    }
}
