//! Fair shares of a limited number: a client that takes many leaves some for the others.
//!
//! A client may take one more while it has fewer than are left (the dynamic threshold of A.
//! Choudhury and E. Hahne, *Dynamic Queue Length Thresholds for Shared-Memory Packet Switches*,
//! 1998). So one client alone gets half, two get a third each, and a new client always gets
//! something.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A limited number of something, and how many each client has.
pub struct Shares {
    total: usize,
    taken: Mutex<TakenShares>,
}

#[derive(Default)]
struct TakenShares {
    all: usize,
    /// Clients that have any.
    by: HashMap<IpAddr, usize>,
}

/// One unit of a client, given back when it is dropped.
pub struct Share {
    of: Arc<Shares>,
    client: IpAddr,
}

/// Returns the address that stands for the client at `address`. An IPv4 client of a dual-stack
/// socket is the same client. All loopback addresses are one, since each program of the host can
/// use any of them.
pub fn client_at(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V4(own) if own.is_loopback() => Ipv4Addr::LOCALHOST.into(),
        other => other,
    }
}

impl Shares {
    /// Makes `total` units, all of them free.
    pub fn new(total: usize) -> Arc<Self> {
        Arc::new(Self { total, taken: Mutex::default() })
    }

    fn lock(&self) -> MutexGuard<'_, TakenShares> {
        // A panic between the two updates leaves the counts one apart: they are still bounded.
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes one unit for the client at `address` ([`client_at`]). Returns `None` if the client has
    /// as many as it may.
    pub fn take(self: &Arc<Self>, address: IpAddr) -> Option<Share> {
        let client = client_at(address);
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

    #[test]
    fn loopback_addresses_are_one_client() {
        let shares = Shares::new(64);
        let addresses = (0..=255_u8).map(|last| IpAddr::from([127, 3, 0, last]));
        let taken: Vec<_> = addresses.filter_map(|address| shares.take(address)).collect();
        assert_eq!(taken.len(), 32);
        assert!(shares.take("::ffff:127.0.0.1".parse().unwrap()).is_none());
        assert!(shares.take([10, 0, 0, 1].into()).is_some());
    }
}
