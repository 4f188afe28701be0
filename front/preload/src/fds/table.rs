//! A table of objects by descriptor number. Calls read it without a lock.
//!
//! A slot has the address of an object. Since objects are never freed, a reader that loses a race
//! against a change of its slot still reads a valid object: it takes a reference and then checks
//! that the slot has not changed ([`get_slowly`]). Changes hold [`FREE`], so that the table does
//! not change while this process forks.
#![allow(unsafe_code)] // a slot's pointer becomes a reference

use std::ptr;
use std::sync::atomic::{AtomicI32, AtomicPtr, Ordering};

use libc::c_int;

use super::objects::{FREE, Object, Ref};

/// A table of the descriptor numbers below `N`.
pub struct Table<const N: usize> {
    /// The objects by number: null, or an object that [`make`](super::make) returned.
    slots: [AtomicPtr<Object>; N],
    /// One more than the highest number that was ever in the table.
    end: AtomicI32,
}

impl<const N: usize> Table<N> {
    /// Makes a table without objects.
    pub const fn empty() -> Self {
        let slots = [const { AtomicPtr::new(ptr::null_mut()) }; N];
        Self { slots, end: AtomicI32::new(0) }
    }

    /// Returns the slot of `fd`, or `None` if the table has no such number.
    #[inline]
    fn slot(&self, fd: c_int) -> Option<&AtomicPtr<Object>> {
        self.slots.get(usize::try_from(fd).ok()?)
    }

    /// Returns whether `fd` is in the table.
    #[inline]
    pub fn is_known(&self, fd: c_int) -> bool {
        self.slot(fd).is_some_and(|slot| !slot.load(Ordering::Relaxed).is_null())
    }

    /// Returns the object of `fd`, or `None` if the table does not have `fd`.
    #[inline]
    pub fn get(&self, fd: c_int) -> Option<Ref> {
        let slot = self.slot(fd)?;
        let found = slot.load(Ordering::Relaxed);
        if found.is_null() { None } else { get_slowly(slot) }
    }

    /// Puts `object` into the table at `fd`, unless `fd` is too high for the table. Returns the
    /// object that was there before if this was its last number.
    #[must_use]
    pub fn put(&self, fd: c_int, object: &Ref) -> Option<Ref> {
        let slot = self.slot(fd)?;
        let held = object.clone();
        let not_during_a_fork = FREE.hold();
        held.add_number();
        self.end.fetch_max(fd + 1, Ordering::Relaxed);
        let before = slot.swap(ptr::from_ref(held.object()).cast_mut(), Ordering::AcqRel);
        drop(not_during_a_fork);
        std::mem::forget(held);
        let_go(before)
    }

    /// Removes `fd` from the table, just before or after it is closed. Returns its object if this
    /// was its last number.
    #[must_use]
    pub fn remove(&self, fd: c_int) -> Option<Ref> {
        let slot = self.slot(fd)?;
        let not_during_a_fork = FREE.hold();
        let before = slot.swap(ptr::null_mut(), Ordering::AcqRel);
        drop(not_during_a_fork);
        let_go(before)
    }

    /// Returns the numbers in the table from `first` to `last`, with their objects.
    pub fn all(&self, first: c_int, last: c_int) -> impl Iterator<Item = (c_int, Ref)> + '_ {
        let end = last.saturating_add(1).min(self.end.load(Ordering::Relaxed));
        (first.max(0)..end).filter_map(|fd| self.get(fd).map(|object| (fd, object)))
    }

    /// Sets the reference counts of all objects to their counts of numbers. The child of a fork
    /// calls this, since it lacks the parent's other threads, whose calls had references.
    pub fn recount(&self) {
        for (_, object) in self.all(0, c_int::MAX - 1) {
            // `object` is a reference, too, until the end of this round.
            object.recount(1);
        }
    }
}

/// Returns a reference to the object in `slot`, or `None` if the slot is null. Tries again if
/// another thread changes the slot or the object's references meanwhile.
fn get_slowly(slot: &AtomicPtr<Object>) -> Option<Ref> {
    loop {
        let found = slot.load(Ordering::Acquire);
        // SAFETY: a slot has null or an object's address.
        let object = unsafe { Object::at(found) }?;
        if let Some(held) = object.try_hold()
            && slot.load(Ordering::Acquire) == found
        {
            return Some(held);
        }
    }
}

/// Ends the reference of a descriptor number to the object at `object`, which is null or was in a
/// slot. Returns the object if this was its last number.
fn let_go(object: *mut Object) -> Option<Ref> {
    // SAFETY: the pointer was in a slot, which has null or an object's address.
    let (held, is_last) = unsafe { Object::at(object) }?.remove_number();
    is_last.then_some(held)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::super::objects::tests::{fresh, refs};
    use super::super::objects::{DescriptorKind, make};
    use super::*;

    fn plain() -> Ref {
        make(DescriptorKind::Plain)
    }

    fn is(found: Option<Ref>, object: &Ref) -> bool {
        found.is_some_and(|found| ptr::eq(found.object(), object.object()))
    }

    fn numbers(table: &Table<8>, first: c_int, last: c_int) -> Vec<c_int> {
        table.all(first, last).map(|(fd, _)| fd).collect()
    }

    #[test]
    fn a_number_has_the_object_that_was_put_there() {
        let (table, object) = (Table::<8>::empty(), plain());
        assert!(!table.is_known(3) && table.get(3).is_none());
        assert!(table.put(3, &object).is_none());
        assert!(table.is_known(3) && is(table.get(3), &object));
        assert!(table.get(2).is_none() && table.get(4).is_none());
    }

    #[test]
    fn a_replaced_object_is_returned_with_its_last_number() {
        let (table, first, second) = (Table::<8>::empty(), plain(), plain());
        assert!(table.put(0, &first).is_none());
        assert!(is(table.put(0, &second), &first));
        assert!(is(table.get(0), &second));
        // dup2(2) of a number to itself puts its object there again.
        assert!(table.put(0, &second).is_none());
        assert!(is(table.remove(0), &second));
    }

    #[test]
    fn an_object_stays_until_its_last_copy_is_closed() {
        let (table, object) = (Table::<8>::empty(), plain());
        for fd in [1, 5, 7] {
            assert!(table.put(fd, &object).is_none());
        }
        assert!(table.remove(5).is_none());
        assert!(table.remove(5).is_none(), "it is closed already");
        assert!(table.remove(1).is_none());
        assert!(is(table.get(7), &object));
        assert!(is(table.remove(7), &object));
        assert!(!table.is_known(7));
    }

    #[test]
    fn numbers_beyond_the_table_are_the_kernels() {
        let (table, object) = (Table::<8>::empty(), plain());
        for fd in [-1, 8, c_int::MIN, c_int::MAX] {
            assert!(table.put(fd, &object).is_none());
            assert!(!table.is_known(fd) && table.get(fd).is_none());
            assert!(table.remove(fd).is_none());
        }
        assert!(numbers(&table, 0, c_int::MAX).is_empty());
        assert!(table.put(7, &object).is_none());
        assert!(is(table.get(7), &object), "the last number of the table");
        assert!(is(table.remove(7), &object));
    }

    #[test]
    fn a_range_has_both_of_its_ends() {
        let (table, object) = (Table::<8>::empty(), plain());
        for fd in [0, 2, 3, 6] {
            assert!(table.put(fd, &object).is_none());
        }
        assert_eq!(numbers(&table, 2, 3), [2, 3]);
        assert_eq!(numbers(&table, c_int::MIN, c_int::MAX), [0, 2, 3, 6]);
        assert!(numbers(&table, 4, 5).is_empty() && numbers(&table, 3, 2).is_empty());
        assert!(table.remove(2).is_none());
        assert_eq!(numbers(&table, 0, 2), [0]);
    }

    #[test]
    fn a_forks_child_has_the_references_of_numbers_only() {
        let (table, object) = (Table::<8>::empty(), fresh());
        assert!(table.put(1, &object).is_none() && table.put(2, &object).is_none());
        // Another thread's call has a reference.
        std::mem::forget(object.clone());
        table.recount();
        assert_eq!(refs(&object), 2);
        // This reference stands for another thread's call, too, so it is not dropped.
        std::mem::forget(object);
        assert!(table.remove(1).is_none());
        assert!(table.remove(2).is_some_and(|last| refs(&last) == 1));
    }

    #[test]
    fn a_call_never_gets_an_object_that_its_number_did_not_have() {
        static TABLE: Table<2> = Table::empty();
        static STOP: AtomicBool = AtomicBool::new(false);
        let readers: Vec<_> = (0..2)
            .map(|_| {
                std::thread::spawn(|| {
                    while !STOP.load(Ordering::Relaxed) {
                        if let Some(object) = TABLE.get(0) {
                            assert_eq!(object.sets.hold().first(), Some(&(0, 0)));
                        }
                    }
                })
            })
            .collect();
        for _ in 0..2000 {
            let object = plain();
            object.sets.hold().push((0, 0));
            drop(TABLE.put(0, &object));
            let other = plain();
            other.sets.hold().push((1, 1));
            drop(TABLE.put(1, &other));
            drop((TABLE.remove(0), TABLE.remove(1)));
        }
        STOP.store(true, Ordering::Relaxed);
        for reader in readers {
            reader.join().unwrap();
        }
    }
}
