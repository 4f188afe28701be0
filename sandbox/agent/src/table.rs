//! Things by id, such as containers: an id is reserved while its thing is being made.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use tokio::sync::Notify;

use crate::lock::lock;

/// The reason why an id is not reserved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refused {
    /// The id is in use or reserved.
    Taken,
    /// The table is closed.
    Closed,
}

/// The reason why there is nothing at an id.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Missing {
    /// The id is reserved: its thing is being made.
    Reserved,
    /// The id is free.
    Unknown,
}

/// A table of things by id.
pub struct Table<T> {
    state: Mutex<TableState<T>>,
    /// Notified when an id is no longer reserved.
    settled: Notify,
}

struct TableState<T> {
    /// Things by id; `None` while the id is reserved.
    entries: HashMap<String, Option<Arc<T>>>,
    /// Set once nothing can be added any more.
    closed: bool,
}

/// An id that nothing else can have until this is dropped.
pub struct Reservation<'a, T> {
    table: &'a Table<T>,
    id: String,
    /// Set once the id has its thing, so that it stays taken.
    filled: bool,
}

impl<T> Default for Table<T> {
    fn default() -> Self {
        let state = Mutex::new(TableState { entries: HashMap::new(), closed: false });
        Table { state, settled: Notify::new() }
    }
}

impl<T> Table<T> {
    /// Reserves `id`.
    ///
    /// # Errors
    /// The id is not free, or the table is closed.
    pub fn reserve(&self, id: &str) -> Result<Reservation<'_, T>, Refused> {
        let mut state = lock(&self.state);
        if state.closed {
            return Err(Refused::Closed);
        }
        if state.entries.contains_key(id) {
            return Err(Refused::Taken);
        }
        state.entries.insert(id.to_owned(), None);
        Ok(Reservation { table: self, id: id.to_owned(), filled: false })
    }

    /// Returns what is at `id`.
    pub fn get(&self, id: &str) -> Result<Arc<T>, Missing> {
        match lock(&self.state).entries.get(id) {
            Some(Some(thing)) => Ok(thing.clone()),
            Some(None) => Err(Missing::Reserved),
            None => Err(Missing::Unknown),
        }
    }

    /// Returns what is at `id` once nothing is being made there, or `None` if the id is free.
    pub async fn settled(&self, id: &str) -> Option<Arc<T>> {
        loop {
            let settled = self.settled.notified();
            match self.get(id) {
                Ok(thing) => return Some(thing),
                Err(Missing::Unknown) => return None,
                Err(Missing::Reserved) => settled.await,
            }
        }
    }

    /// Returns everything that the table has.
    pub fn all(&self) -> Vec<Arc<T>> {
        lock(&self.state).entries.values().flatten().cloned().collect()
    }

    /// Frees `id` if `thing` is still at it. Something newer with the same id stays.
    pub fn remove_if_same(&self, id: &str, thing: &Arc<T>) {
        let mut state = lock(&self.state);
        if let Some(Some(there)) = state.entries.get(id)
            && Arc::ptr_eq(there, thing)
        {
            state.entries.remove(id);
        }
    }

    /// Drops the things for which `keep` returns `false`. Reserved ids stay reserved.
    pub fn retain(&self, keep: impl Fn(&T) -> bool) {
        lock(&self.state).entries.retain(|_, thing| thing.as_deref().is_none_or(&keep));
    }

    /// Takes everything out, each with its id. Reserved ids stay reserved.
    pub fn take(&self) -> Vec<(String, Arc<T>)> {
        let mut state = lock(&self.state);
        let all = std::mem::take(&mut state.entries);
        let mut taken = Vec::with_capacity(all.len());
        for (id, thing) in all {
            match thing {
                Some(thing) => taken.push((id, thing)),
                None => drop(state.entries.insert(id, None)),
            }
        }
        taken
    }

    /// Takes everything out, and lets nothing in any more: [`Reservation::fill`] fails for ids that
    /// are reserved now.
    pub fn close(&self) -> Vec<(String, Arc<T>)> {
        lock(&self.state).closed = true;
        self.take()
    }
}

impl<T> Reservation<'_, T> {
    /// Puts `thing` at the id.
    ///
    /// # Errors
    /// The table was closed meanwhile. The caller has `thing` back and ends it.
    pub fn fill(mut self, thing: Arc<T>) -> Result<(), Arc<T>> {
        let mut state = lock(&self.table.state);
        if state.closed {
            return Err(thing);
        }
        state.entries.insert(self.id.clone(), Some(thing));
        self.filled = true;
        Ok(())
    }
}

impl<T> Drop for Reservation<'_, T> {
    fn drop(&mut self) {
        if !self.filled {
            lock(&self.table.state).entries.remove(&self.id);
        }
        self.table.settled.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_two_that_make_the_same_id_one_is_refused() {
        let table: Table<u32> = Table::default();
        let first = table.reserve("a").unwrap();
        assert_eq!(table.reserve("a").err(), Some(Refused::Taken));
        assert_eq!(table.get("a"), Err(Missing::Reserved));
        first.fill(Arc::new(1)).unwrap();
        assert_eq!(table.reserve("a").err(), Some(Refused::Taken));
        assert_eq!((table.get("a"), table.all()), (Ok(Arc::new(1)), vec![Arc::new(1)]));
    }

    #[test]
    fn a_reservation_that_is_dropped_frees_its_id() {
        let table: Table<u32> = Table::default();
        drop(table.reserve("a").unwrap());
        assert_eq!(table.get("a"), Err(Missing::Unknown));
        table.reserve("a").unwrap().fill(Arc::new(1)).unwrap();
        assert_eq!(table.get("a"), Ok(Arc::new(1)));
    }

    #[tokio::test]
    async fn one_that_waits_for_an_id_has_what_was_made_there() {
        let table: Table<u32> = Table::default();
        assert_eq!(table.settled("a").await, None);
        for made in [Some(Arc::new(1)), None] {
            let reserved = table.reserve("a").unwrap();
            let finish = async {
                tokio::task::yield_now().await;
                match made.clone() {
                    Some(thing) => reserved.fill(thing).unwrap(),
                    None => drop(reserved),
                }
            };
            let (found, ()) = tokio::join!(table.settled("a"), finish);
            assert_eq!(found, made);
            table.retain(|_| false);
        }
    }

    #[test]
    fn nothing_gets_into_a_closed_table() {
        let table: Table<u32> = Table::default();
        table.reserve("there").unwrap().fill(Arc::new(1)).unwrap();
        let making = table.reserve("making").unwrap();
        assert_eq!(table.close(), [("there".to_owned(), Arc::new(1))]);
        assert_eq!(making.fill(Arc::new(2)), Err(Arc::new(2)));
        assert_eq!(table.reserve("new").err(), Some(Refused::Closed));
        assert!(table.all().is_empty() && table.close().is_empty());
    }

    #[test]
    fn a_late_removal_leaves_what_has_the_id_now() {
        let table: Table<u32> = Table::default();
        let (old, new) = (Arc::new(1), Arc::new(1));
        table.reserve("a").unwrap().fill(old.clone()).unwrap();
        table.remove_if_same("a", &old);
        table.remove_if_same("a", &old);
        table.reserve("a").unwrap().fill(new.clone()).unwrap();
        table.remove_if_same("a", &old);
        assert!(Arc::ptr_eq(&table.get("a").unwrap(), &new));
        table.remove_if_same("a", &new);
        assert_eq!(table.get("a"), Err(Missing::Unknown));
    }

    #[test]
    fn reserved_ids_stay_when_others_are_dropped_or_taken() {
        let table: Table<u32> = Table::default();
        for (id, thing) in [("a", 1), ("b", 2)] {
            table.reserve(id).unwrap().fill(Arc::new(thing)).unwrap();
        }
        let making = table.reserve("c").unwrap();
        table.retain(|thing| *thing != 1);
        assert_eq!(table.get("a"), Err(Missing::Unknown));
        assert_eq!(table.take(), [("b".to_owned(), Arc::new(2))]);
        assert_eq!(table.get("c"), Err(Missing::Reserved));
        making.fill(Arc::new(3)).unwrap();
        assert_eq!(table.get("c"), Ok(Arc::new(3)));
    }
}
