//! The decision whether a process's new endpoints share eventfds
//! (`slipway_sgiov_spec::control::Request::Share`).
//!
//! An eventfd for each endpoint is the fastest, and with few endpoints the best. With many,
//! eventfds are most of an idle endpoint's cost, and a thread that waits for many at a time does
//! not mind that a few wake it together. A program with a thread for each endpoint would mind: if
//! threads sleep on shared endpoints, each on one alone, new endpoints do not share.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// The most endpoints of a process with an eventfd each, unless `SLIPWAY_SOCKET_EVENTFDS` says
/// otherwise.
const FEW: u32 = 64;
/// One in this many shared endpoints may have a thread that sleeps on it alone.
const RARE: u32 = 8;

/// The counters of one process.
#[derive(Default)]
pub struct Sharing {
    /// Endpoints that the process holds.
    held: AtomicU32,
    /// Held endpoints that share, and shared endpoints that a thread has ever slept on alone.
    shared: AtomicU32,
    alone: AtomicU32,
    /// The last value that the engine was told.
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

    /// Counts a shared endpoint on which a thread sleeps alone for the first time.
    pub fn slept_alone(&self) {
        self.alone.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns whether new endpoints should share, if the engine must be told so now.
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
