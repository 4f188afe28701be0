//! Whether a process's endpoints share eventfds (`slipway_sgiov_spec::control::Request::Share`).
//!
//! An eventfd for each endpoint is the fastest, and with few endpoints the best. With many, eventfds are most of what idle
//! ones cost, and who waits for many at a time does not mind that a few wake together. A thread for each endpoint
//! would mind: where threads sleep on shared ones, each alone, new ones are not shared.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// Endpoints of a process that have an eventfd each, where `SLIPWAY_SOCKET_EVENTFDS` does not say.
const FEW: u32 = 64;
/// One in so many shared ones may be slept on alone.
const RARE: u32 = 8;

/// Of one process.
#[derive(Default)]
pub struct Sharing {
    /// Endpoints that the process has.
    held: AtomicU32,
    /// Those of them that share, and those that a thread has slept on.
    shared: AtomicU32,
    alone: AtomicU32,
    /// What the engine was told.
    told: AtomicBool,
}

fn few() -> u32 {
    static SET: OnceLock<u32> = OnceLock::new();
    *SET.get_or_init(|| {
        let set = std::env::var("SLIPWAY_SOCKET_EVENTFDS");
        set.ok().and_then(|text| text.parse().ok()).unwrap_or(FEW)
    })
}

impl Sharing {
    pub fn opened(&self, shared: bool) {
        self.held.fetch_add(1, Ordering::Relaxed);
        self.shared.fetch_add(shared.into(), Ordering::Relaxed);
    }

    pub fn closed(&self, shared: bool) {
        self.held.fetch_sub(1, Ordering::Relaxed);
        self.shared.fetch_sub(shared.into(), Ordering::Relaxed);
    }

    /// A thread sleeps on a shared endpoint for the first time.
    pub fn slept_alone(&self) {
        self.alone.fetch_add(1, Ordering::Relaxed);
    }

    /// What the engine is to be told now, if it is something new.
    pub fn changes(&self) -> Option<bool> {
        let word = |word: &AtomicU32| word.load(Ordering::Relaxed);
        let few = few();
        let is_used_alone = few > 0 && word(&self.alone) > word(&self.shared) / RARE + RARE;
        let on = word(&self.held) >= few && !is_used_alone;
        (self.told.swap(on, Ordering::Relaxed) != on).then_some(on)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_share_unless_threads_sleep_on_them() {
        let sharing = Sharing::default();
        for _ in 0..few() - 1 {
            sharing.opened(false);
            assert_eq!(sharing.changes(), None);
        }
        sharing.opened(false);
        assert_eq!(sharing.changes(), Some(true));
        assert_eq!(sharing.changes(), None);
        for _ in 0..RARE {
            sharing.opened(true);
            sharing.slept_alone();
            assert_eq!(sharing.changes(), None, "a few may be");
        }
        sharing.opened(true);
        sharing.slept_alone();
        sharing.slept_alone();
        assert_eq!(sharing.changes(), Some(false));
        for _ in 0..100 {
            sharing.opened(true);
        }
        assert_eq!(sharing.changes(), Some(true), "they are few of many");
    }
}
