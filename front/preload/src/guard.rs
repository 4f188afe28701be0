//! Nothing unwinds into C.

use std::panic::{AssertUnwindSafe, catch_unwind};

use slipway_socket::Errno;

use crate::real::fail;

/// Runs `call` and returns its result, or -1 with errno set if `call` failed. A panic is `EIO`.
#[inline]
pub fn guard(call: impl FnOnce() -> Result<usize, Errno>) -> isize {
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(Ok(count)) => count as isize,
        Ok(Err(errno)) => fail(errno),
        Err(_) => fail(Errno::IO),
    }
}
