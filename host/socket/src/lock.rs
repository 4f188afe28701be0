//! A lock that can be held across fork(2): in the child, a thread that did not take it can release
//! it.

use std::cell::UnsafeCell;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, Ordering};

/// A lock for short critical sections: a thread that finds it taken yields.
#[derive(Default)]
pub struct Lock<T> {
    taken: AtomicBool,
    value: UnsafeCell<T>,
}

// SAFETY: the value is reached by one holder at a time.
unsafe impl<T: Send> Sync for Lock<T> {}

/// Guard of a [`Lock`].
pub struct LockGuard<'a, T>(&'a Lock<T>);

impl<T> Lock<T> {
    /// Makes a lock around `value`.
    pub const fn new(value: T) -> Self {
        Self { taken: AtomicBool::new(false), value: UnsafeCell::new(value) }
    }

    /// Takes the lock until the guard is dropped.
    pub fn hold(&self) -> LockGuard<'_, T> {
        self.take();
        LockGuard(self)
    }

    /// Takes the lock without a guard: before fork(2).
    pub fn take(&self) {
        while self
            .taken
            .compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed)
            .is_err()
        {
            rustix::thread::sched_yield();
        }
    }

    /// Returns the value to a thread that took the lock without a guard.
    ///
    /// # Safety
    /// The caller has taken the lock.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn peek(&self) -> &mut T {
        // SAFETY: the caller's duty.
        unsafe { &mut *self.value.get() }
    }

    /// Releases the lock after fork(2), in the parent or in the child.
    pub fn release(&self) {
        self.taken.store(false, Ordering::Release);
    }
}

impl<T> Deref for LockGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: held.
        unsafe { &*self.0.value.get() }
    }
}

impl<T> DerefMut for LockGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: held, and only once.
        unsafe { &mut *self.0.value.get() }
    }
}

impl<T> Drop for LockGuard<'_, T> {
    fn drop(&mut self) {
        self.0.release();
    }
}
