//! Network namespaces, which are the tenants, and their addresses.
//!
//! The engine asks the kernel for the addresses of a namespace (an *address query*, rtnetlink(7))
//! by a socket that it opens inside the namespace, and uses the answer for a while. The engine's
//! one thread waits for each answer, and a user can make any number of namespaces with very many
//! addresses. So queries have budgets of the thread's time (`budget`): all namespaces that one user
//! made share one, and each that root made has its own. Once a budget is used up, its namespaces
//! keep their last answers, and others are not affected.

mod budget;

use std::collections::{HashMap, HashSet};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use slipway_netlink::Netlink;
use slipway_sgiov_spec::Address;

use self::budget::{Budgets, QueryBudget};
use crate::address::octets;
use crate::peer::{NamespaceId, Peer};
use crate::policy::{Policy, Tenant};
use crate::ports::Ports;
use crate::slab::Slab;

/// The time for which the engine uses the kernel's answer to an address query.
const FRESH: Duration = Duration::from_secs(1);
/// The shortest time between two queries about a namespace, if the second one is made because an
/// address is unknown.
const PATIENCE: Duration = Duration::from_millis(100);
/// The pause after a query, as a multiple of the time that the kernel took to answer it. The pause
/// is at most [`FRESH`].
const PAUSE: u32 = 16;
/// The pause after a query that failed, or whose answer has more than [`MOST`] addresses.
const LATER: Duration = Duration::from_secs(10);
/// The age at which an answer is too old to decide which addresses a namespace has. It is longer
/// than any pause, so an answer becomes as old as this only if the budget is used up or queries
/// fail.
const STALE: Duration = Duration::from_secs(20);
/// The most addresses of a namespace that is served. CAP_NET_ADMIN in a namespace suffices to give
/// it any number.
const MOST: usize = 16_384;

/// An address and the length of its prefix in bits, of 128.
type Prefixed = ([u8; 16], u8);

/// The addresses of a network namespace other than loopback's, by the kernel's last answer.
#[derive(Default)]
struct KnownAddresses {
    /// The netlink socket for queries, opened in the namespace. `None` before the first query, and
    /// if it could not be opened.
    netlink: Option<Netlink>,
    /// All addresses in the kernel's order, the default source of connections first.
    all: Vec<Prefixed>,
    /// All addresses without their prefixes, for fast lookups: a connection to another namespace
    /// looks its destination up in each namespace with a listener, and one may have thousands of
    /// addresses.
    ips: HashSet<[u8; 16]>,
    /// The time of the last query. `None` before the first one.
    asked: Option<Instant>,
    /// The time of the last query with a usable answer. `None` if there was none, or if a later
    /// answer had more than [`MOST`] addresses.
    answered: Option<Instant>,
    /// The shortest time from the last query to the next one.
    pause: Duration,
    /// The budget for queries.
    budget: Arc<QueryBudget>,
}

impl KnownAddresses {
    fn has(&self, ip: &[u8; 16]) -> bool {
        self.ips.contains(ip)
    }

    /// Makes a query if the last one was at least `than` and the pause ago, and the budget allows
    /// it. `namespace` is the namespace's file.
    fn refresh(&mut self, namespace: &Arc<OwnedFd>, than: Duration) {
        let now = Instant::now();
        let is_fresh = self.asked.is_some_and(|asked| now - asked < than.max(self.pause));
        if is_fresh || !self.budget.is_left(now) {
            return;
        }
        self.asked = Some(now);
        self.ask(namespace);
        self.budget.spend(now, now.elapsed());
    }

    /// Asks the kernel for the addresses, and sets the pause until the next query.
    fn ask(&mut self, namespace: &Arc<OwnedFd>) {
        self.pause = FRESH;
        if self.netlink.is_none() {
            self.netlink = inside(namespace);
        }
        let Some(netlink) = &mut self.netlink else { return };
        self.pause = LATER;
        let begun = Instant::now();
        match netlink.addresses_within(MOST) {
            Ok(Some(all)) => {
                self.set(all.iter().filter_map(prefixed).collect());
                self.answered = Some(begun);
                self.pause = (begun.elapsed() * PAUSE).min(FRESH);
            }
            Ok(None) => {
                self.set(Vec::new());
                (self.answered, self.netlink) = (None, None);
                let what = "a network namespace has too many addresses: of it only loopback is \
                            served";
                tracing::warn!(most = MOST, "{what}");
            }
            Err(error) => {
                tracing::warn!(%error, "cannot ask a network namespace for its addresses")
            }
        }
    }

    /// Replaces the addresses.
    fn set(&mut self, all: Vec<Prefixed>) {
        self.ips = all.iter().map(|(ip, _)| *ip).collect();
        self.all = all;
    }
}

/// Returns an address and its prefix as IPv6 has them, or `None` for a loopback address.
fn prefixed(own: &slipway_netlink::Address) -> Option<Prefixed> {
    let above = if own.address.is_ipv4() { 96 } else { 0 };
    let known = (octets(own.address), own.prefix.saturating_add(above));
    (!own.address.is_loopback()).then_some(known)
}

/// A network namespace that has families.
pub struct Namespace {
    /// The namespace's identity, which stays valid while `file` is open.
    pub id: NamespaceId,
    file: Arc<OwnedFd>,
    /// The name and limits that the policy gives the namespace, if it has an entry.
    pub tenant: Option<Tenant>,
    addresses: KnownAddresses,
    /// Bytes sent and received by families that have ended.
    pub past: (u64, u64),
    /// The number of families in the namespace.
    pub families: u32,
    /// The number of endpoints that the namespace's families have.
    pub endpoints: u32,
    /// The size in bytes of the arenas that the namespace's families share, and the time until
    /// which that number counts. `None` until it is measured.
    pub measured: Option<(u64, Instant)>,
    /// The ports of the connections from the namespace.
    pub ports: Ports,
}

impl Namespace {
    /// Returns the namespace's name: the policy's, or else the kernel's.
    pub fn name(&self) -> String {
        let own = || format!("net:[{}]", self.id.1);
        self.tenant.as_ref().map_or_else(own, |tenant| tenant.name.clone())
    }

    /// Returns whether `ip` is an address of the namespace other than loopback's, which other
    /// namespaces may know.
    pub fn has(&mut self, ip: &[u8; 16]) -> bool {
        self.addresses.refresh(&self.file, FRESH);
        if self.addresses.has(ip) {
            return true;
        }
        self.addresses.refresh(&self.file, PATIENCE);
        self.addresses.has(ip)
    }

    /// Returns whether an answer about the namespace is at hand that is younger than [`STALE`]. It
    /// is not while the budget is used up, if the namespace has more than [`MOST`]
    /// addresses, or if the engine cannot enter it.
    pub fn is_known(&mut self) -> bool {
        self.addresses.refresh(&self.file, FRESH);
        self.addresses.answered.is_some_and(|answered| answered.elapsed() < STALE)
    }

    /// Returns the source address for a connection to `to` in another namespace: the first own
    /// address whose network contains `to`, else the first of the same IP version, if there is one.
    pub fn source(&mut self, to: &Address) -> Option<[u8; 16]> {
        self.addresses.refresh(&self.file, FRESH);
        let same = |own: &&Prefixed| {
            Address { ip: own.0, port: 0 }.as_v4().is_some() == to.as_v4().is_some()
        };
        let near = |own: &&Prefixed| share(&own.0, &to.ip) >= own.1;
        let candidates = || self.addresses.all.iter().filter(same);
        candidates().find(near).or_else(|| candidates().next()).map(|own| own.0)
    }

    /// Returns all addresses but loopback's, as the kernel told them last, for people to read. The
    /// kernel is asked only if it was not before: a report has all namespaces, and questions about
    /// each would take the time that connections of the same users need.
    pub fn addresses(&mut self) -> impl Iterator<Item = &[u8; 16]> {
        if self.addresses.asked.is_none() {
            self.addresses.refresh(&self.file, FRESH);
        }
        self.addresses.all.iter().map(|own| &own.0)
    }

    /// Forgets the addresses, and uses up the budget for queries.
    #[cfg(test)]
    pub fn overspend(&mut self) {
        self.addresses =
            KnownAddresses { budget: self.addresses.budget.clone(), ..KnownAddresses::default() };
        self.addresses.budget.use_up();
    }

    /// Makes the last answer so old that it decides nothing any more.
    #[cfg(test)]
    pub fn outdate(&mut self) {
        self.addresses.answered = Instant::now().checked_sub(STALE);
    }

    /// Gives the namespace these addresses, whatever the kernel says.
    #[cfg(test)]
    pub fn set_addresses(&mut self, all: &[[u8; 16]]) {
        self.addresses.set(all.iter().map(|ip| (*ip, 128)).collect());
        // The kernel is not asked before an hour has passed.
        let later = Some(Instant::now() + Duration::from_secs(3600));
        (self.addresses.asked, self.addresses.answered) = (later, later);
    }
}

/// Returns the number of leading bits in which two addresses agree.
fn share(a: &[u8; 16], b: &[u8; 16]) -> u8 {
    (u128::from_be_bytes(*a) ^ u128::from_be_bytes(*b)).leading_zeros() as u8
}

/// Opens a netlink socket in a namespace. A socket stays in the namespace in which it was opened,
/// so a short-lived thread enters the namespace to open it.
fn inside(file: &Arc<OwnedFd>) -> Option<Netlink> {
    let file = file.clone();
    let own = std::fs::File::open("/proc/self/ns/net").and_then(NamespaceId::of).ok();
    let elsewhere = own != NamespaceId::of(&file).ok();
    let open = move || -> std::io::Result<Netlink> {
        if elsewhere {
            move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network))?;
        }
        Netlink::open()
    };
    let opened = std::thread::Builder::new().name("slipway-netns".into()).spawn(open);
    let opened = opened.and_then(|thread| {
        thread.join().unwrap_or_else(|_| Err(std::io::Error::other("the thread failed")))
    });
    opened
        .inspect_err(|error| {
            let what = "cannot enter a network namespace: of it only loopback is served";
            tracing::warn!(%error, "{what}");
        })
        .ok()
}

/// The namespaces that have families.
#[derive(Default)]
pub struct Namespaces {
    all: Slab<Namespace>,
    by_id: HashMap<NamespaceId, u32>,
    /// The budgets for address queries.
    budgets: Budgets,
    /// Bytes sent and received by families of namespaces that are gone.
    gone: (u64, u64),
}

/// Adds bytes sent and received. They are the programs' own numbers, which may wrap around.
fn sum(one: (u64, u64), other: (u64, u64)) -> (u64, u64) {
    (one.0.wrapping_add(other.0), one.1.wrapping_add(other.1))
}

impl Namespaces {
    /// Counts one more family in the peer's namespace. Returns the namespace's number.
    pub fn enter(&mut self, peer: &Peer, policy: &Policy) -> u32 {
        let number = *self.by_id.entry(peer.namespace).or_insert_with(|| {
            let budget = self.budgets.of(peer);
            self.all.insert(Namespace {
                id: peer.namespace,
                file: peer.file.clone(),
                tenant: policy.tenant_of(peer.namespace).cloned(),
                addresses: KnownAddresses { budget, ..KnownAddresses::default() },
                past: (0, 0),
                families: 0,
                endpoints: 0,
                measured: None,
                ports: Ports::default(),
            })
        });
        if let Some(namespace) = self.all.get_mut(number) {
            namespace.families += 1;
        }
        number
    }

    /// Gives the namespaces the names and limits of another policy.
    pub fn renew(&mut self, policy: &Policy) {
        for number in self.by_id.values() {
            if let Some(namespace) = self.all.get_mut(*number) {
                namespace.tenant = policy.tenant_of(namespace.id).cloned();
            }
        }
    }

    /// Counts one family less in a namespace. The namespace goes with its last family.
    pub fn leave(&mut self, number: u32) {
        let Some(namespace) = self.all.get_mut(number) else { return };
        namespace.families -= 1;
        if namespace.families == 0 {
            self.gone = sum(self.gone, namespace.past);
            self.by_id.remove(&namespace.id);
            self.all.remove(number);
            self.budgets.forget_unused();
        }
    }

    /// Returns the bytes sent and received by all families that have ended, also of namespaces that
    /// are gone.
    pub fn past(&self) -> (u64, u64) {
        self.all.iter().fold(self.gone, |all, (_, space)| sum(all, space.past))
    }

    /// Returns whether no namespace has a family.
    #[cfg(any(test, feature = "fuzz"))]
    pub fn is_empty(&self) -> bool {
        self.all.len() == 0
    }

    /// Frees a connection's port, if the namespace is still there.
    pub fn release(&mut self, id: NamespaceId, from: Address, to: Address) {
        let number = self.by_id.get(&id);
        if let Some(space) = number.and_then(|number| self.all.get_mut(*number)) {
            space.ports.release(from, to);
        }
    }

    /// Returns the number of the namespace that the policy calls `tenant`, or `None` if no family
    /// is in it. The kernel's names of the others do not count: other nodes have the same ones.
    pub fn named(&self, tenant: &str) -> Option<u32> {
        let is = |space: &Namespace| space.tenant.as_ref().is_some_and(|own| own.name == tenant);
        self.all.iter().find(|(_, space)| is(space)).map(|(number, _)| number)
    }

    /// Returns the namespace of a number of [`Namespaces::enter`].
    pub fn get(&self, number: u32) -> Option<&Namespace> {
        self.all.get(number)
    }

    /// Does what [`Namespaces::get`] does, for changes.
    pub fn get_mut(&mut self, number: u32) -> Option<&mut Namespace> {
        self.all.get_mut(number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::peer::{Maker, maker};

    #[test]
    fn a_namespace_without_a_name_in_the_policy_is_no_tenant_of_another_node() {
        let (here, _there) = std::os::unix::net::UnixStream::pair().unwrap();
        let peer = crate::peer::peer(here.as_fd()).unwrap();
        let mut namespaces = Namespaces::default();
        let number = namespaces.enter(&peer, &Policy::default());
        let name = namespaces.get(number).unwrap().name();
        assert!(name.starts_with("net:["), "{name}");
        assert_eq!(namespaces.named(&name), None);
    }

    /// A user's namespaces, of which each has many addresses, take a part of the engine's time
    /// together, and other users' namespaces are asked about all the same.
    #[test]
    fn queries_about_the_namespaces_of_one_user_share_a_budget() {
        let (here, _there) = std::os::unix::net::UnixStream::pair().unwrap();
        let own = crate::peer::peer(here.as_fd()).unwrap();
        // Nobody made what is no namespace: the user who is the first in it counts.
        let none: Arc<OwnedFd> = Arc::new(std::fs::File::open("/dev/null").unwrap().into());
        let of = |namespace, uid, file: &Arc<OwnedFd>| Peer {
            namespace: NamespaceId(0, namespace),
            uid,
            file: file.clone(),
            ..own.clone()
        };
        let peer = |namespace, uid| of(namespace, uid, &none);
        let mut namespaces = Namespaces::default();
        let mut is_asked = |peer: &Peer, took: Duration| {
            let number = namespaces.enter(peer, &Policy::default());
            let space = namespaces.get_mut(number).unwrap();
            assert!(!space.has(&[1; 16]));
            let is_asked = space.addresses.asked.is_some();
            // As if the kernel had needed so long for its answer.
            space.addresses.budget.spend(Instant::now(), took);
            namespaces.leave(number);
            is_asked
        };
        assert!(is_asked(&peer(1, 1000), Duration::from_secs(3600)));
        assert!(!is_asked(&peer(2, 1000), Duration::ZERO), "although the first has ended");
        assert!(is_asked(&peer(3, 1001), Duration::ZERO));
        // The kernel tells the maker, unless the test itself is in another user namespace.
        let made = maker(own.file.as_fd());
        assert!(is_asked(&of(4, 1002, &own.file), Duration::from_secs(3600)));
        assert_eq!(is_asked(&of(4, 1003, &own.file), Duration::ZERO), made.is_none());
        // Namespaces that root made belong to different tenants.
        let is_users = matches!(made, Some(Maker::User(_)));
        assert_eq!(is_asked(&of(5, 1004, &own.file), Duration::ZERO), !is_users);
        assert!(is_asked(&peer(6, 1004), Duration::ZERO), "who was in it has not paid");
    }

    /// A namespace of which the kernel has told no addresses may have any.
    #[test]
    fn a_namespace_that_cannot_be_entered_is_not_known() {
        let (here, _there) = std::os::unix::net::UnixStream::pair().unwrap();
        let own = crate::peer::peer(here.as_fd()).unwrap();
        let file: Arc<OwnedFd> = Arc::new(std::fs::File::open("/dev/null").unwrap().into());
        let closed = Peer { namespace: NamespaceId::of(&file).unwrap(), file, ..own.clone() };
        let mut namespaces = Namespaces::default();
        for (peer, is_known) in [(own, true), (closed, false)] {
            let number = namespaces.enter(&peer, &Policy::default());
            let space = namespaces.get_mut(number).unwrap();
            assert_eq!((space.is_known(), space.addresses.asked.is_some()), (is_known, true));
        }
    }

    /// Metrics, which any user may ask for, are made of reports.
    #[test]
    fn a_report_takes_no_time_that_connections_need() {
        let (here, _there) = std::os::unix::net::UnixStream::pair().unwrap();
        let peer = crate::peer::peer(here.as_fd()).unwrap();
        let mut namespaces = Namespaces::default();
        let number = namespaces.enter(&peer, &Policy::default());
        let space = namespaces.get_mut(number).unwrap();
        let told = space.addresses().count();
        assert!(space.addresses.asked.is_some(), "a first report has addresses");
        // As if the answer were old enough for another question.
        let asked = Instant::now().checked_sub(FRESH * 2);
        (space.addresses.asked, space.addresses.pause) = (asked, Duration::ZERO);
        assert_eq!(space.addresses().count(), told);
        assert_eq!(space.addresses.asked, asked);
    }

    #[test]
    fn bytes_of_namespaces_that_are_gone_count() {
        let (here, _there) = std::os::unix::net::UnixStream::pair().unwrap();
        let peer = crate::peer::peer(here.as_fd()).unwrap();
        let mut namespaces = Namespaces::default();
        for past in [(3, 4), (3, 4), (6, 8)] {
            let number = namespaces.enter(&peer, &Policy::default());
            namespaces.get_mut(number).unwrap().past = past;
            let with = namespaces.past();
            namespaces.leave(number);
            assert!(namespaces.is_empty());
            assert_eq!(namespaces.past(), with, "none counts twice, and none is lost");
        }
        assert_eq!(namespaces.past(), (12, 16));
    }
}
