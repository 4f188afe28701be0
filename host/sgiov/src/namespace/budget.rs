//! Budgets of the engine's time for address queries.
//!
//! A user can make any number of network namespaces in user namespaces, so all of them share a
//! budget. Namespaces in the engine's own user namespace are made by root alone, for containers of
//! different tenants, and a container may give its own as many addresses as it likes. So each of
//! these has a budget of its own, and they share the time that one user has evenly.

use std::collections::HashMap;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use crate::peer::{Maker, NamespaceId, Peer, maker};

/// The divisor of a user's share: queries about one user's namespaces may take a sixteenth of the
/// thread's time.
const SHARE: u32 = 16;
/// The burst that a budget allows, in the time after which it is paid back: `AHEAD / SHARE`, 250 ms
/// of the thread's time, at once. That suffices for the first queries about a thousand namespaces
/// with few addresses.
const AHEAD: Duration = Duration::from_secs(4);

/// The budget of a [`Payer`] for address queries: the thread's time that they may take.
///
/// It holds the time at which all queries so far are paid back. A query that took some time moves
/// it [`SHARE`] times as far into the future, and as many times as far as the share has payers.
/// `None` before the first query.
#[derive(Default)]
pub struct QueryBudget {
    paid: Mutex<Option<Instant>>,
    /// The payers of the same share have clones of this, one each.
    sharers: Arc<()>,
}

impl QueryBudget {
    /// Returns the time until all queries so far are paid back; 0 if they are.
    fn ahead(&self, now: Instant) -> Duration {
        let paid = *self.paid.lock().unwrap_or_else(PoisonError::into_inner);
        paid.map_or(Duration::ZERO, |paid| paid.saturating_duration_since(now))
    }

    /// Returns whether the budget allows one more query.
    pub fn is_left(&self, now: Instant) -> bool {
        self.ahead(now) < AHEAD
    }

    /// Charges a query that began at `now` and took the time `took`.
    pub fn spend(&self, now: Instant, took: Duration) {
        let sharers = u32::try_from(Arc::strong_count(&self.sharers)).unwrap_or(u32::MAX);
        let paid = now + self.ahead(now) + took * SHARE.saturating_mul(sharers);
        *self.paid.lock().unwrap_or_else(PoisonError::into_inner) = Some(paid);
    }

    /// Uses the budget up.
    #[cfg(test)]
    pub fn use_up(&self) {
        self.spend(Instant::now(), AHEAD);
    }
}

/// The party whose budget pays for queries about a network namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Payer {
    /// The user who made the namespace, or the first user in it if the kernel does not tell. A user
    /// who merely has the first family in a namespace that somebody else made, as in the host's, is
    /// not charged for it: such a user could use up the budget of all others there.
    User(u32),
    /// The namespace itself.
    Namespace(NamespaceId),
}

impl Payer {
    fn of(peer: &Peer) -> Self {
        match maker(peer.file.as_fd()) {
            Some(Maker::Root) => Self::Namespace(peer.namespace),
            Some(Maker::User(user)) => Self::User(user),
            None => Self::User(peer.uid),
        }
    }
}

/// All budgets that are in use or not paid back.
#[derive(Default)]
pub struct Budgets {
    all: HashMap<Payer, Arc<QueryBudget>>,
    /// The share of all namespaces that pay for themselves.
    sharers: Weak<()>,
}

impl Budgets {
    /// Returns the budget for queries about the peer's namespace.
    pub fn of(&mut self, peer: &Peer) -> Arc<QueryBudget> {
        let payer = Payer::of(peer);
        let sharers = match payer {
            Payer::User(_) => Arc::default(),
            Payer::Namespace(_) => self.sharers.upgrade().unwrap_or_default(),
        };
        if matches!(payer, Payer::Namespace(_)) {
            self.sharers = Arc::downgrade(&sharers);
        }
        let new = || Arc::new(QueryBudget { sharers, ..QueryBudget::default() });
        self.all.entry(payer).or_insert_with(new).clone()
    }

    /// Forgets budgets that no namespace has. One that is not paid back stays: a user can leave a
    /// namespace and come again.
    pub fn forget_unused(&mut self) {
        let now = Instant::now();
        self.all.retain(|_, one| Arc::strong_count(one) > 1 || !one.ahead(now).is_zero());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_is_paid_back() {
        let (budget, now) = (QueryBudget::default(), Instant::now());
        for _ in 0..16 {
            assert!(budget.is_left(now));
            budget.spend(now, AHEAD / SHARE / 16);
        }
        assert!(!budget.is_left(now) && budget.ahead(now) == AHEAD);
        assert!(budget.is_left(now + AHEAD / 16));
        budget.spend(now + AHEAD * 2, AHEAD / SHARE);
        assert!(!budget.is_left(now + AHEAD * 2) && budget.ahead(now + AHEAD * 3).is_zero());
    }

    #[test]
    fn namespaces_that_share_a_users_time_have_even_parts_of_it() {
        let (now, took) = (Instant::now(), Duration::from_millis(1));
        let one = QueryBudget::default();
        let new = || QueryBudget { sharers: one.sharers.clone(), ..QueryBudget::default() };
        let others = [new(), new()];
        one.spend(now, took);
        assert_eq!(one.ahead(now), took * SHARE * 3);
        assert!(others.iter().all(|other| other.ahead(now).is_zero()));
        drop(others);
        one.spend(now, took);
        assert_eq!(one.ahead(now), took * SHARE * 4, "it has the share alone");
    }

    #[test]
    fn the_budgets_of_namespaces_are_forgotten_once_they_are_paid_back() {
        let (here, _there) = std::os::unix::net::UnixStream::pair().unwrap();
        let peer = crate::peer::peer(here.as_fd()).unwrap();
        let mut budgets = Budgets::default();
        let budget = budgets.of(&peer);
        assert!(Arc::ptr_eq(&budget, &budgets.of(&peer)));
        assert_eq!(Arc::strong_count(&budget.sharers), 1);
        drop(budget);
        budgets.forget_unused();
        assert!(budgets.all.is_empty());
        budgets.of(&peer).use_up();
        budgets.forget_unused();
        assert_eq!(budgets.all.len(), 1);
    }
}
