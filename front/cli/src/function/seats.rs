//! Connections of a function's server, of which no client can have all.
//!
//! A client may hold up to [`SHARE`] times as many connections as are free: alone four fifths of
//! them, beside a first one that has its part four fifths of the rest. So one that holds all that
//! it can leaves some to others, without any being kept for nobody (dynamic thresholds: Choudhury
//! and Hahne, 1998).

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::watch;

use super::queue::Client;

/// The connections of a client for each free one.
const SHARE: usize = 4;

/// The connections of all clients.
pub struct Seats {
    most: usize,
    held: Mutex<HashMap<Client, usize>>,
    /// Connections of all clients together.
    all: watch::Sender<usize>,
}

impl Seats {
    /// Makes room for at most `most` connections.
    pub fn new(most: usize) -> Arc<Self> {
        Arc::new(Self { most, held: Mutex::default(), all: watch::Sender::new(0) })
    }

    /// Takes the place of one connection. Returns `None` if the client has its part.
    pub fn take(self: &Arc<Self>, client: Client) -> Option<Seat> {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        let all = held.values().sum::<usize>();
        let own = held.get(&client).copied().unwrap_or(0);
        if own >= SHARE * self.most.saturating_sub(all) {
            return None;
        }
        held.insert(client, own + 1);
        self.all.send_replace(all + 1);
        Some(Seat { seats: Arc::clone(self), client })
    }

    /// Returns once there is no connection.
    pub async fn empty(&self) {
        // Fails if the sender is gone, which this object has.
        let _ = self.all.subscribe().wait_for(|all| *all == 0).await;
    }

    fn give_back(&self, client: Client) {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        match held.get_mut(&client) {
            Some(own) if *own > 1 => *own -= 1,
            _ => {
                held.remove(&client);
            }
        }
        self.all.send_replace(held.values().sum());
    }
}

/// The place of a connection, given back on drop.
pub struct Seat {
    seats: Arc<Seats>,
    client: Client,
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.seats.give_back(self.client);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn client(last: u8) -> Client {
        Client::of([10, 0, 0, last].into())
    }

    /// Takes all that a client can have.
    fn fill(seats: &Arc<Seats>, client: Client) -> Vec<Seat> {
        std::iter::from_fn(|| seats.take(client)).collect()
    }

    #[test]
    fn a_client_that_takes_all_it_can_leaves_a_part_to_others() {
        let seats = Seats::new(100);
        let first = fill(&seats, client(1));
        assert_eq!(first.len(), 80);
        let second = fill(&seats, client(2));
        assert_eq!(second.len(), 16);
        assert!(seats.take(client(1)).is_none());
        drop(second);
        drop(first);
        assert_eq!(fill(&seats, client(3)).len(), 80);
    }

    #[test]
    fn there_are_never_more_than_all() {
        let seats = Seats::new(10);
        let all: Vec<_> = (0..=255).flat_map(|last| fill(&seats, client(last))).collect();
        assert_eq!(all.len(), 10);
        assert_eq!(*seats.all.borrow(), 10);
        drop(all);
        assert_eq!(*seats.all.borrow(), 0);
        assert!(seats.held.lock().unwrap().is_empty());
    }
}
