//! The table of guests, with their addresses and listeners, which both threads read.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use serde::{Deserialize, Serialize};
use slipway_sgiov_spec::Address;
use slipway_sgiov_spec::function::{ADDRESSES, Addresses, LISTENERS};

use crate::Function;
use crate::address::{ip, is_meant, octets, show};
use crate::policy::Policy;

/// A guest with a socket function.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestReport {
    /// The name that its creator gave it.
    pub name: String,
    /// Its tenant.
    pub tenant: String,
    /// Its addresses.
    pub addresses: Vec<String>,
    /// Set while the engine in the guest runs.
    pub running: bool,
    /// The addresses at which the guest's programs listen.
    pub listeners: Vec<String>,
    /// The number of open streams.
    pub streams: u64,
    /// Bytes that its programs sent.
    pub sent: u64,
    /// Bytes that its programs received.
    pub received: u64,
}

/// Counters of a guest, written by the carrier.
#[derive(Default)]
pub struct Counts {
    pub running: AtomicBool,
    pub streams: AtomicU64,
    pub sent: AtomicU64,
    pub received: AtomicU64,
}

impl Counts {
    /// Adds to a counter that only the calling thread writes.
    pub fn add(counter: &AtomicU64, by: u64) {
        counter.store(counter.load(Ordering::Relaxed).wrapping_add(by), Ordering::Relaxed);
    }
}

struct GuestEntry {
    function: Function,
    ips: Vec<[u8; 16]>,
    listeners: HashSet<Address>,
    counts: Arc<Counts>,
}

impl GuestEntry {
    /// Returns whether a program of the guest listens at `to`.
    fn serves(&self, to: &Address) -> bool {
        self.ips.contains(&to.ip) && self.listeners.iter().any(|at| is_meant(at, false, to))
    }
}

/// The table of guests.
#[derive(Default)]
pub struct Book(Mutex<HashMap<u32, GuestEntry>>);

impl Book {
    fn entries(&self) -> MutexGuard<'_, HashMap<u32, GuestEntry>> {
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Adds a guest with the addresses of its function, and without listeners.
    pub fn add(&self, guest: u32, function: Function) {
        let ips = function.addresses.iter().map(|ip| octets(*ip)).collect();
        let (listeners, counts) = Default::default();
        self.entries().insert(guest, GuestEntry { function, ips, listeners, counts });
    }

    /// Removes a guest with its listeners.
    pub fn remove(&self, guest: u32) {
        self.entries().remove(&guest);
    }

    /// Returns the guest that listens at `to` and that `tenant` may reach: a guest of the same
    /// tenant or, if policy allows it, the one other guest that has the address.
    pub fn route(&self, policy: &Policy, tenant: &str, to: &Address) -> Option<u32> {
        let entries = self.entries();
        let mut others = Vec::new();
        for (guest, entry) in entries.iter().filter(|(_, entry)| entry.serves(to)) {
            if entry.function.tenant == tenant {
                return Some(*guest);
            }
            if policy.allows(Some(tenant), Some(&entry.function.tenant), to) {
                others.push(*guest);
            }
        }
        // If two guests have the same address, it is unknown which one is meant.
        if let [one] = others[..] { Some(one) } else { None }
    }

    /// Returns the guest's tenant, or an empty text if there is no such guest.
    pub fn tenant(&self, guest: u32) -> String {
        let tenant = |entry: &GuestEntry| entry.function.tenant.clone();
        self.entries().get(&guest).map(tenant).unwrap_or_default()
    }

    /// Returns the guest's name for logs, or an empty text if there is no such guest.
    pub fn name(&self, guest: u32) -> String {
        let name = |entry: &GuestEntry| entry.function.name.clone();
        self.entries().get(&guest).map(name).unwrap_or_default()
    }

    /// Returns the counters of a guest, for the thread that writes them.
    pub fn counts(&self, guest: u32) -> Arc<Counts> {
        self.entries().get(&guest).map(|entry| entry.counts.clone()).unwrap_or_default()
    }

    /// Returns the guest's addresses as it gets them in a message.
    pub fn addresses(&self, guest: u32) -> Addresses {
        let mut ips = [[0; 16]; ADDRESSES];
        let entries = self.entries();
        let own = entries.get(&guest).map_or(&[][..], |entry| &entry.ips);
        for (place, own) in ips.iter_mut().zip(own) {
            *place = *own;
        }
        Addresses { count: own.len().min(ADDRESSES) as u32, ips }
    }

    /// Returns whether the guest has the address.
    pub fn has(&self, guest: u32, ip: &[u8; 16]) -> bool {
        self.entries().get(&guest).is_some_and(|entry| entry.ips.contains(ip))
    }

    /// Adds a listener of the guest. Returns `false` if the guest has more listeners than it may
    /// have.
    pub fn listen(&self, guest: u32, at: Address) -> bool {
        let mut entries = self.entries();
        let Some(entry) = entries.get_mut(&guest) else { return true };
        entry.listeners.insert(at);
        entry.listeners.len() <= LISTENERS
    }

    /// Removes a listener of the guest, or all of them without an address.
    pub fn unlisten(&self, guest: u32, at: Option<Address>) {
        let mut entries = self.entries();
        let Some(entry) = entries.get_mut(&guest) else { return };
        match at {
            Some(at) => drop(entry.listeners.remove(&at)),
            None => entry.listeners.clear(),
        }
    }

    /// Returns the report of all guests, by name.
    pub fn report(&self) -> Vec<GuestReport> {
        let text = |own: &[u8; 16]| ip(&Address { ip: *own, port: 0 }).to_string();
        let entries = self.entries();
        let mut all: Vec<GuestReport> = entries
            .values()
            .map(|entry| {
                let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
                let mut listeners: Vec<String> = entry.listeners.iter().map(show).collect();
                listeners.sort();
                GuestReport {
                    name: entry.function.name.clone(),
                    tenant: entry.function.tenant.clone(),
                    addresses: entry.ips.iter().map(text).collect(),
                    running: entry.counts.running.load(Ordering::Relaxed),
                    listeners,
                    streams: get(&entry.counts.streams),
                    sent: get(&entry.counts.sent),
                    received: get(&entry.counts.received),
                }
            })
            .collect();
        all.sort_by(|a, b| a.name.cmp(&b.name));
        all
    }
}
