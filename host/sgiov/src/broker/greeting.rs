//! Processes that have connected and not attached yet.
//!
//! Such a one holds a descriptor of the engine's and has said nothing that explains it. It is hung
//! up on after [`PATIENCE`], and sooner if so many of the same account's come after it that more
//! than [`WAITING`] wait: then the one goes that has waited longest.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::accounts::Account;

/// How long a process may take to attach.
const PATIENCE: Duration = Duration::from_secs(5);
/// Processes of an account that may wait at a time.
const WAITING: usize = 256;

/// Those that wait, by the order in which they came.
#[derive(Default)]
pub struct Greetings {
    next: u64,
    all: BTreeMap<u64, (Instant, u32, usize)>,
    /// By account: its address is its own for as long as one of its processes is here.
    of: HashMap<usize, BTreeSet<u64>>,
}

impl Greetings {
    /// A client waits from now on. The first number is for [`Greetings::done`]; the second one is
    /// another client of the same account, to be hung up on for it.
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

    /// It has attached, or gone.
    pub fn done(&mut self, number: u64) {
        let Some((_, _, account)) = self.all.remove(&number) else { return };
        if let Some(waiting) = self.of.get_mut(&account) {
            waiting.remove(&number);
            if waiting.is_empty() {
                self.of.remove(&account);
            }
        }
    }

    /// When the patience with the one ends that has waited longest.
    pub fn next(&self) -> Option<Instant> {
        self.all.first_key_value().map(|(_, (until, ..))| *until)
    }

    /// A client that has waited for too long.
    pub fn overdue(&self) -> Option<u32> {
        let (_, (until, client, _)) = self.all.first_key_value()?;
        (*until <= Instant::now()).then_some(*client)
    }
}
