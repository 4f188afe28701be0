//! The user ids of VMMs. Each sandbox has one of its own while it has processes.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Mutex;

use crate::lock::lock;
use crate::{Error, Result, proc};

/// The user ids that a node gives to VMMs, and which of them are taken.
pub struct Uids {
    range: Range<u32>,
    taken: Mutex<BTreeSet<u32>>,
}

impl Uids {
    /// Makes the set of the ids from `base` on, `count` of them. All are free.
    pub fn new(base: u32, count: u32) -> Self {
        Self { range: base..base.saturating_add(count), taken: Mutex::default() }
    }

    /// Takes a free id.
    ///
    /// # Errors
    /// [`Error::Full`] if all are taken.
    pub fn claim(&self) -> Result<u32> {
        let mut taken = lock(&self.taken);
        let free = self.range.clone().find(|uid| !taken.contains(uid));
        let uid = free.ok_or(Error::Full(self.range.end - self.range.start))?;
        taken.insert(uid);
        Ok(uid)
    }

    /// Takes the id of a sandbox of an earlier daemon.
    pub fn mark(&self, uid: Option<u32>) {
        lock(&self.taken).extend(uid);
    }

    /// Takes the ids that processes of the host have: VMMs of sandboxes whose records are gone or
    /// cannot be read. Reads /proc, so it takes a while on a host with many processes.
    pub fn mark_running(&self) {
        let running = proc::users().filter(|uid| self.range.contains(uid));
        lock(&self.taken).extend(running);
    }

    /// Makes an id free again. No process has it.
    pub fn give_back(&self, uid: u32) {
        lock(&self.taken).remove(&uid);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_id_is_given_once_at_a_time() {
        let uids = Uids::new(7, 2);
        uids.mark(Some(7));
        uids.mark(None);
        assert_eq!(uids.claim().unwrap(), 8);
        assert!(matches!(uids.claim(), Err(Error::Full(2))));
        uids.give_back(7);
        assert_eq!(uids.claim().unwrap(), 7);
    }

    #[test]
    fn an_id_that_a_process_has_is_not_given() {
        // This process stands for a VMM without a record.
        let own = rustix::process::getuid().as_raw();
        let uids = Uids::new(own, 1);
        uids.mark_running();
        assert!(matches!(uids.claim(), Err(Error::Full(1))));
    }
}
