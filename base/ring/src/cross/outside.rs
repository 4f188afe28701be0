//! The atomics and barriers that `index` uses. Its loom test puts loom's atomics and full barriers
//! in their place.
//!
//! A sleeper and the side that wakes it need a barrier each. The waking side's is on the path of
//! every message, the sleeper's is not. So the sleeper pays for both: membarrier(2) makes every
//! processor that runs a process of this kind pass a full barrier, and the waking side then needs a
//! barrier against the compiler only. A process registers for that with its first arena. Where the
//! kernel or a seccomp filter refuses, the process wakes others with full barriers, and cannot rely
//! on being woken by them: [`is_told_surely`].

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, compiler_fence};
pub(crate) use std::sync::atomic::{AtomicU64, Ordering, fence};

use rustix::thread::{MembarrierCommand, MembarrierQuery, membarrier, membarrier_query};

static IS_REGISTERED: AtomicBool = AtomicBool::new(false);

/// Registers this process, once.
pub(crate) fn register() -> bool {
    static DONE: OnceLock<bool> = OnceLock::new();
    *DONE.get_or_init(|| {
        let needed = MembarrierQuery::GLOBAL_EXPEDITED;
        let done = membarrier_query().contains(needed)
            && membarrier(MembarrierCommand::RegisterGlobalExpedited).is_ok();
        IS_REGISTERED.store(done, Ordering::Relaxed);
        done
    })
}

/// Returns whether a sleeper in this process is woken reliably. If not, it must not sleep longer
/// than a millisecond or so before it looks again.
pub fn is_told_surely() -> bool {
    register()
}

/// Returns monotonic nanoseconds. The kernel's function reads the processor's counter after all
/// instructions before it.
pub(crate) fn now() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    (time.tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(time.tv_nsec as u64)
}

/// The teller's barrier, between its counter and its look at a wish.
#[inline]
pub(crate) fn light(across_machines: bool) {
    if across_machines || !IS_REGISTERED.load(Ordering::Relaxed) {
        fence(Ordering::SeqCst);
    } else {
        compiler_fence(Ordering::SeqCst);
    }
}

/// The sleeper's barrier, between its wishes, of any number of streams, and its look at the
/// counters.
pub fn heavy() {
    fence(Ordering::SeqCst);
    if register() {
        // Cannot fail: it was asked whether there is such a command.
        let _ = membarrier(MembarrierCommand::GlobalExpedited);
    }
}
