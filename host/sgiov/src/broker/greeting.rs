//! Clients that have connected and not attached yet.
//!
//! Such a client costs the engine a descriptor and has given no reason for it. It is disconnected
//! after [`PATIENCE`], and earlier if more than [`WAITING`] clients of its account wait: the oldest
//! one is disconnected then.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::accounts::Account;

/// The time that a process may take to attach.
const PATIENCE: Duration = Duration::from_secs(5);
/// The number of processes of an account that may wait at a time.
const WAITING: usize = 256;

/// The waiting clients, in the order in which they came.
#[derive(Default)]
pub struct Greetings {
    next: u64,
    all: BTreeMap<u64, (Instant, u32, usize)>,
    /// The waiting clients of each account. An account is identified by its address in memory,
    /// which is unique as long as one of its processes is connected.
    of: HashMap<usize, BTreeSet<u64>>,
}

impl Greetings {
    /// Adds a waiting client. Returns a number for [`Greetings::done`], and another client of the
    /// same account that is to be disconnected in exchange, if there are too many.
    pub fn wait(&mut self, client: u32, account: &Arc<Account>) -> (u64, Option<u32>) {
        let (number, account) = (self.next, Arc::as_ptr(account).addr());
        self.next += 1;
        self.all.insert(number, (Instant::now() + PATIENCE, client, account));
        let waiting = self.of.entry(account).or_default();
        waiting.insert(number);
        let oldest = waiting.first().filter(|_| waiting.len() > WAITING);
        let surplus = oldest.and_then(|oldest| self.all.get(oldest)).map(|(_, client, _)| *client);
        (number, surplus)
    }

    /// Removes a client that has attached or gone.
    pub fn done(&mut self, number: u64) {
        let Some((_, _, account)) = self.all.remove(&number) else { return };
        if let Some(waiting) = self.of.get_mut(&account) {
            waiting.remove(&number);
            if waiting.is_empty() {
                self.of.remove(&account);
            }
        }
    }

    /// Returns the time at which the oldest client is to be disconnected.
    pub fn next(&self) -> Option<Instant> {
        self.all.first_key_value().map(|(_, (until, ..))| *until)
    }

    /// Returns a client that has waited for too long.
    pub fn overdue(&self) -> Option<u32> {
        let (_, (until, client, _)) = self.all.first_key_value()?;
        (*until <= Instant::now()).then_some(*client)
    }
}
