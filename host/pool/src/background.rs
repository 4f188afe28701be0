//! Zeroing ahead of the first use, when a CPU has nothing else to do. Memory of a sandbox that had
//! hardware does not wait for an idle CPU.
#![allow(unsafe_code)] // sched_setscheduler(2)

use std::sync::{Arc, Weak};

use crate::shared::{BackgroundWork, Shared};

/// The number of granules between two looks at the work: a tenth of a millisecond's writing.
const BATCH: usize = 16;

/// Starts the thread. It ends with the pool.
pub(crate) fn start(shared: &Arc<Shared>) -> std::io::Result<()> {
    let weak = Arc::downgrade(shared);
    std::thread::Builder::new().name("pool-zeros".into()).spawn(move || run(&weak))?;
    Ok(())
}

fn run(shared: &Weak<Shared>) {
    while let Some(pool) = shared.upgrade() {
        let Some(job) = pool.next_job(BATCH) else { return };
        if !job.is_urgent {
            wait_for_idle_cpu();
        }
        pool.count_zeroed(zero(&job));
        if let Some(done) = job.done {
            done.ring();
        }
    }
}

/// Waits for an idle CPU. The thread has idle priority only during this wait. At idle priority it
/// may lose its CPU for long, which it must not do with a lock, or with a granule half zeroed that
/// a device waits for. So it works at the default priority for a moment, and waits again.
pub(crate) fn wait_for_idle_cpu() {
    idle(true);
    std::thread::yield_now();
    idle(false);
}

/// Returns the number of granules that were zeroed.
fn zero(job: &BackgroundWork) -> u64 {
    let mut zeroed = 0;
    for granule in job.granules.clone() {
        if job.populate && job.memory.populate(granule).is_err() {
            // The host has no memory left: the kernel makes the page when it is needed.
            continue;
        }
        // A page that is gone stays dirty, and is looked at again by its first user.
        zeroed += u64::from(job.memory.zero_ahead(granule).unwrap_or(false));
    }
    zeroed
}

/// Sets the calling thread's scheduling policy: only idle CPUs, or the default. Leaving the former
/// needs the right to raise priorities (CAP_SYS_NICE); without it, the thread stays as it is.
fn idle(only: bool) {
    let policy = if only { libc::SCHED_IDLE } else { libc::SCHED_OTHER };
    let parameter = libc::sched_param { sched_priority: 0 };
    // SAFETY: the kernel reads the structure during the call; 0 is the calling thread.
    let _ = unsafe { libc::sched_setscheduler(0, policy, &raw const parameter) };
}
