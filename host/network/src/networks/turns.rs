//! Locks by name: one operation at a time on each attachment, or on each network's leases.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::OwnedMutexGuard;

type Locks = BTreeMap<String, Arc<tokio::sync::Mutex<()>>>;

/// The names on which an operation runs or waits.
#[derive(Default)]
pub struct NamedLocks(Mutex<Locks>);

/// The right to work on what has a name; it ends when this is dropped.
pub struct NamedLock<'a> {
    turns: &'a NamedLocks,
    id: &'a str,
    guard: Option<OwnedMutexGuard<()>>,
}

impl NamedLocks {
    fn lock(&self) -> MutexGuard<'_, Locks> {
        // The map is changed in single calls: a panic leaves it consistent.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until no other operation works on what has the name `id`.
    pub async fn take<'a>(&'a self, id: &'a str) -> NamedLock<'a> {
        let lock = Arc::clone(self.lock().entry(id.to_owned()).or_default());
        NamedLock { turns: self, id, guard: Some(lock.lock_owned().await) }
    }
}

impl Drop for NamedLock<'_> {
    fn drop(&mut self) {
        let mut locks = self.turns.lock();
        drop(self.guard.take());
        // One for the map: nobody else holds it or waits.
        if locks.get(self.id).is_some_and(|lock| Arc::strong_count(lock) == 1) {
            locks.remove(self.id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn operations_on_one_name_wait_for_each_other() {
        let turns = NamedLocks::default();
        let first = turns.take("a").await;
        drop(turns.take("b").await);
        let mut second = Box::pin(turns.take("a"));
        tokio::select! {
            biased;
            _ = &mut second => panic!("two at once"),
            () = async {} => {}
        }
        drop(first);
        drop(second.await);
        assert!(turns.lock().is_empty());
    }
}
