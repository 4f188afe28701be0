//! Fair shares of a limited number: a client that takes many leaves some for the others.
//!
//! A client may take one more while it has fewer than are left (the dynamic threshold of A.
//! Choudhury and E. Hahne, *Dynamic Queue Length Thresholds for Shared-Memory Packet Switches*,
//! 1998). So one client alone gets half, two get a third each, and a new client always gets
//! something.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A limited number of something, and how many each client has.
pub struct Shares {
    total: usize,
    taken: Mutex<Taken>,
}

#[derive(Default)]
struct Taken {
    all: usize,
    /// Clients that have any.
    by: HashMap<IpAddr, usize>,
}

/// One unit of a client, given back when it is dropped.
pub struct Share {
    of: Arc<Shares>,
    client: IpAddr,
}

impl Shares {
    /// Makes `total` units, all of them free.
    pub fn new(total: usize) -> Arc<Self> {
        Arc::new(Self { total, taken: Mutex::default() })
    }

    fn lock(&self) -> MutexGuard<'_, Taken> {
        // A panic between the two updates leaves the counts one apart: they are still bounded.
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes one unit for `client`. Returns `None` if the client has as many as it may.
    pub fn take(self: &Arc<Self>, client: IpAddr) -> Option<Share> {
        // An IPv4 client of a dual-stack socket is the same client.
        let client = client.to_canonical();
        let mut taken = self.lock();
        let has = taken.by.get(&client).copied().unwrap_or(0);
        if has >= self.total.saturating_sub(taken.all) {
            return None;
        }
        taken.all += 1;
        taken.by.insert(client, has + 1);
        Some(Share { of: Arc::clone(self), client })
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        let mut taken = self.of.lock();
        taken.all = taken.all.saturating_sub(1);
        match taken.by.get_mut(&self.client) {
            Some(has) if *has > 1 => *has -= 1,
            _ => drop(taken.by.remove(&self.client)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(shares: &Arc<Shares>, client: u8) -> Vec<Share> {
        std::iter::from_fn(|| shares.take([10, 0, 0, client].into())).collect()
    }

    #[test]
    fn whoever_takes_much_leaves_something() {
        let shares = Shares::new(64);
        let first = all(&shares, 1);
        let second = all(&shares, 2);
        let third = all(&shares, 3);
        assert_eq!([first.len(), second.len(), third.len()], [32, 16, 8]);
        // If three greedy clients take turns, they get the same, and leave as much.
        drop((first, second, third));
        let mut taken = Vec::new();
        for round in 0..64 {
            taken.extend((1..=3).filter_map(|client| shares.take([10, 0, 0, client].into())));
            assert!(taken.len() <= 3 * (round + 1));
        }
        assert_eq!(taken.len(), 48);
        drop(taken);
        assert_eq!(all(&shares, 4).len(), 32);
        assert!(shares.lock().by.is_empty() && shares.lock().all == 0);
        assert!(Shares::new(0).take([10, 0, 0, 1].into()).is_none());
    }
}
