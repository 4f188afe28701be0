//! A lock that a fork can be held off with: in the child it can be opened by who did not take it.

use std::cell::UnsafeCell;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, Ordering};

/// Guards what is touched for a moment: who finds it taken yields.
#[derive(Default)]
pub struct Lock<T> {
    taken: AtomicBool,
    value: UnsafeCell<T>,
}

// SAFETY: the value is reached by one holder at a time.
unsafe impl<T: Send> Sync for Lock<T> {}

/// A lock, held.
pub struct Held<'a, T>(&'a Lock<T>);

impl<T> Lock<T> {
    /// Around `value`.
    pub const fn new(value: T) -> Self {
        Self { taken: AtomicBool::new(false), value: UnsafeCell::new(value) }
    }

    /// Takes it until the guard goes.
    pub fn hold(&self) -> Held<'_, T> {
        self.take();
        Held(self)
    }

    /// Takes it without a guard: before fork(2).
    pub fn take(&self) {
        while self
            .taken
            .compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed)
            .is_err()
        {
            rustix::thread::sched_yield();
        }
    }

    /// The value, for who took it without a guard.
    ///
    /// # Safety
    /// The caller has taken it.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn peek(&self) -> &mut T {
        // SAFETY: the caller's duty.
        unsafe { &mut *self.value.get() }
    }

    /// After fork(2), for who took it, or its child.
    pub fn release(&self) {
        self.taken.store(false, Ordering::Release);
    }
}

impl<T> Deref for Held<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: held.
        unsafe { &*self.0.value.get() }
    }
}

impl<T> DerefMut for Held<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: held, and only once.
        unsafe { &mut *self.0.value.get() }
    }
}

impl<T> Drop for Held<'_, T> {
    fn drop(&mut self) {
        self.0.release();
    }
}
