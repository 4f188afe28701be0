//! Locks of this crate, whose data stay sound when a thread that holds one panics.

use std::sync::{Mutex, MutexGuard};

/// Locks `mutex`, also after a thread panicked while it held the lock.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}
