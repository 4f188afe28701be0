//! Attaches this process to the engine.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Once};

use slipway_socket::{Family, engine_path};

use crate::process;
use crate::session::{FAMILY, log};

/// Monotonic milliseconds before which no thread tries to attach again.
static NOT_BEFORE: AtomicU64 = AtomicU64::new(0);
/// Milliseconds to wait after a failed attempt to attach.
const PAUSE: u64 = 200;

fn now() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::MonotonicCoarse);
    (time.tv_sec as u64).wrapping_mul(1000).wrapping_add(time.tv_nsec as u64 / 1_000_000)
}

fn follow_forks() {
    static ONCE: Once = Once::new();
    ONCE.call_once(process::begin);
}

/// Takes over the family of this process's image before execve(2).
pub fn adopt(family: &Arc<Family>) {
    follow_forks();
    *FAMILY.hold() = Some(family.clone());
}

/// Returns the family, and attaches to the engine first if need be. Returns `None` if there is no
/// engine.
pub fn family() -> Option<Arc<Family>> {
    let mut held = FAMILY.hold();
    if let Some(family) = &*held
        && !family.is_dead()
        && !family.look()
    {
        return Some(family.clone());
    }
    *held = None;
    if now() < NOT_BEFORE.load(Ordering::Relaxed) {
        return None;
    }
    match Family::attach(&engine_path()) {
        Ok(family) => {
            follow_forks();
            *held = Some(family);
        }
        Err(error) => {
            NOT_BEFORE.store(now() + PAUSE, Ordering::Relaxed);
            let path = engine_path();
            let path = path.display();
            if error.raw_os_error() == Some(libc::EDQUOT) {
                let text = "has nothing left for this user or network namespace";
                log(format_args!("the engine at {path} {text}; the kernel's sockets do"));
            } else {
                log(format_args!("no engine at {path}: {error}; the kernel's sockets do"));
            }
        }
    }
    held.clone()
}
