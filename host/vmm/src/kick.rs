//! Makes a thread leave KVM: a signal whose handler sets `immediate_exit`, so that KVM_RUN returns
//! at once, even if the signal comes just before it.

use std::cell::Cell;
use std::time::Duration;

use kvm_bindings::kvm_run;

use crate::{Error, Result};

thread_local! {
    /// The state that this thread's CPU shares with KVM; null if the thread runs no CPU.
    static RUN: Cell<*mut kvm_run> = const { Cell::new(std::ptr::null_mut()) };
}

/// Returns the signal of this module: the first real-time signal, which nothing else uses.
fn signal() -> libc::c_int {
    libc::SIGRTMIN()
}

extern "C" fn on_signal(_: libc::c_int) {
    // The thread-local has no destructor and needs no initialisation, so that reading it takes no
    // lock and allocates nothing.
    let run = RUN.get();
    if !run.is_null() {
        // SAFETY: `Target` keeps the pointer valid while it is set, and this handler runs on the
        // thread that set it. The kernel reads the byte when it enters the guest; a volatile store
        // is enough, since both are on this thread.
        unsafe { (&raw mut (*run).immediate_exit).write_volatile(1) };
    }
}

/// Installs the handler. To install it again changes nothing.
///
/// # Errors
/// [`Error::System`].
pub fn install() -> Result<()> {
    // SAFETY: all zeros is a valid `sigaction`; the handler makes no call that is not
    // async-signal-safe.
    let result = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = on_signal as extern "C" fn(libc::c_int) as usize;
        libc::sigaction(signal(), &raw const action, std::ptr::null_mut())
    };
    match result {
        0 => Ok(()),
        _ => Err(Error::system("sigaction")(std::io::Error::last_os_error())),
    }
}

/// Makes the signal reach this thread's CPU, until it is dropped.
pub struct Target(());

impl Target {
    /// Registers the state that the CPU of this thread shares with KVM, which must stay mapped
    /// until the value is dropped.
    pub fn new(run: *mut kvm_run) -> Self {
        RUN.set(run);
        Self(())
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        RUN.set(std::ptr::null_mut());
    }
}

/// A thread that can be kicked.
#[derive(Clone, Copy)]
pub struct Thread(libc::pthread_t);

impl Thread {
    /// Returns this thread.
    pub fn current() -> Self {
        // SAFETY: no preconditions.
        Self(unsafe { libc::pthread_self() })
    }

    /// Returns the processor time that the thread has used. The thread must not have been joined;
    /// zero if it has ended.
    pub fn time(self) -> Duration {
        let mut clock = 0;
        // SAFETY: the thread exists, by this method's contract.
        if unsafe { libc::pthread_getcpuclockid(self.0, &raw mut clock) } != 0 {
            return Duration::ZERO;
        }
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: `time` is valid for writes. The call fails if the thread has ended meanwhile.
        unsafe { libc::clock_gettime(clock, &raw mut time) };
        Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
    }

    /// Sends the signal. The thread must not have been joined.
    pub fn kick(self) {
        // SAFETY: the thread exists, by this method's contract.
        unsafe { libc::pthread_kill(self.0, signal()) };
    }
}
