//! The interrupt line, which function and port share.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};

use slipway_pci::Pin;

use crate::moderation::Moderator;

/// The moderator and the pin that it drives.
///
/// The lock is taken once for each burst of frames with an event, and for each access to an
/// interrupt register. Its holder computes, and raises the pin, which never waits.
pub(crate) struct Line {
    inner: Mutex<Inner>,
    /// The moderator's deadline in nanoseconds; `u64::MAX` if there is none.
    deadline: AtomicU64,
}

struct Inner {
    moderator: Moderator,
    pin: Pin,
    /// `true` if the function may assert its pin.
    enabled: bool,
}

impl Line {
    pub fn new(pin: Pin) -> Self {
        let inner = Inner { moderator: Moderator::default(), pin, enabled: true };
        Self { inner: Mutex::new(inner), deadline: AtomicU64::new(u64::MAX) }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Changes the moderator, and drives the pin as it says.
    pub fn with<R>(&self, change: impl FnOnce(&mut Moderator) -> R) -> R {
        let mut inner = self.lock();
        let result = change(&mut inner.moderator);
        self.settle(&mut inner);
        result
    }

    /// Sets whether the function may assert its pin (Command, Interrupt Disable).
    pub fn enable(&self, enabled: bool) {
        let mut inner = self.lock();
        inner.enabled = enabled;
        self.settle(&mut inner);
    }

    fn settle(&self, inner: &mut Inner) {
        inner.pin.set(inner.enabled && inner.moderator.asserted());
        self.deadline.store(inner.moderator.deadline().unwrap_or(u64::MAX), Ordering::Release);
    }

    /// Does what is due at `now`, in nanoseconds. Costs a load if nothing is.
    #[inline]
    pub fn advance(&self, now: u64) {
        if self.deadline.load(Ordering::Acquire) <= now {
            self.with(|moderator| moderator.advance(now));
        }
    }

    /// Returns the time of the next work, in nanoseconds.
    pub fn deadline(&self) -> Option<u64> {
        let deadline = self.deadline.load(Ordering::Acquire);
        (deadline != u64::MAX).then_some(deadline)
    }
}
