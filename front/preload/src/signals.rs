//! Signals, as far as calls depend on them.

use crate::real::{self, sys};

/// Returns whether the last system call of this thread was interrupted by a signal.
pub fn interrupted() -> bool {
    real::errno() == libc::EINTR
}

/// Returns whether an interrupted call is restarted (signal(7)): every installed handler has
/// `SA_RESTART`. The kernel does not tell which signal interrupted the call.
pub fn restarts() -> bool {
    (1..=64).all(|signal| {
        // The kernel's `struct sigaction`: handler, flags, restorer, mask.
        let mut action = [0u64; 4];
        let got = sys!(SYS_rt_sigaction, signal, 0, action.as_mut_ptr(), 8);
        let handled = got == 0 && action[0] > 1;
        !handled || action[1] & libc::SA_RESTART as u64 != 0
    })
}

/// Sends `SIGPIPE` to this thread, as the kernel does on a write to a closed connection.
#[cold]
pub fn sigpipe() {
    let thread = rustix::thread::gettid().as_raw_nonzero().get();
    let process = rustix::process::getpid().as_raw_nonzero().get();
    sys!(SYS_tgkill, process, thread, libc::SIGPIPE);
}
