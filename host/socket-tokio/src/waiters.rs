//! Tasks that wait for an endpoint.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Wake, Waker};

use slipway_socket::Half;

/// Takes a lock, even a poisoned one: no holder leaves its data inconsistent.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The tasks that wait for the halves of one endpoint, which has one eventfd for both.
#[derive(Default)]
pub(crate) struct Waiters(Mutex<[Option<Waker>; 2]>);

impl Waiters {
    pub fn set(&self, half: Half, waker: &Waker) {
        let mut both = lock(&self.0);
        match &mut both[half as usize] {
            Some(known) => known.clone_from(waker),
            none => *none = Some(waker.clone()),
        }
    }

    pub fn wake_all(&self) {
        let both = std::mem::take(&mut *lock(&self.0));
        both.into_iter().flatten().for_each(Waker::wake);
    }
}

impl Wake for Waiters {
    fn wake(self: Arc<Self>) {
        self.wake_all();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.wake_all();
    }
}
