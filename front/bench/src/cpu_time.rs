//! Processor time of processes, read from their clocks, which do not lag by a tick as files in
//! /proc do.

use std::time::Duration;

use anyhow::{Result, ensure};

/// Returns the processor time that all threads of this process have used.
pub(crate) fn own_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::try_from(time).unwrap_or_default()
}

/// Returns the processor time of process `id` in ns, in user space and in the kernel, with that of
/// its guest and of threads that have ended.
///
/// # Errors
/// The process is gone.
pub(crate) fn process_cpu_ns(id: u32) -> Result<u64> {
    let (mut clock, pid) = (0, libc::pid_t::try_from(id)?);
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    #[allow(unsafe_code)] // rustix has the clock of another process in no safe form
    // SAFETY: both functions write only to the valid places that they are given.
    let is_read = unsafe {
        libc::clock_getcpuclockid(pid, &raw mut clock) == 0
            && libc::clock_gettime(clock, &raw mut time) == 0
    };
    ensure!(is_read, "process {id} has no clock: it is gone");
    Ok(time.tv_sec.unsigned_abs() * 1_000_000_000 + time.tv_nsec.unsigned_abs())
}
