//! Mutexes whose data stays valid after a panic.

use std::sync::{Mutex, MutexGuard};

/// Locks a mutex, poisoned or not: a panic while it was held leaves plain data that is still valid.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}
