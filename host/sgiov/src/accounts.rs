//! Accounts, against which everything that the engine holds is counted.
//!
//! An [`Account`] stands for one user in one network namespace. Whatever the engine holds for a
//! program (a control connection, a family's table, an arena, a listener, an eventfd, an end of a
//! connection) has a [`ResourceHold`] of that account, and counts until the [`ResourceHold`] is
//! dropped.
//!
//! Nobody can take all of a [`Resource`], however many accounts use it:
//! - an account has at most as much as is still free, so an account alone gets half;
//! - a network namespace has at most seven times as much as is free, so all its users together get
//!   seven eighths;
//! - a user has at most seven times as much as is free in all network namespaces but the engine's
//!   own together, since a user can make network namespaces.
//!
//! The free amount shrinks while accounts take their share, so a newcomer's program always finds
//! some. The policy may set lower limits ([`Limits`]).
//!
//! A further resource is a variant of `Resource` (`RESOURCES` counts them), with the amount that
//! the engine has in `Accounts`, a field of `Limits` and its arm in `Limits::of`. Each place that
//! makes a thing of it holds a `ResourceHold` beside the thing (`broker`), and refuses with the
//! error of `hold`. The tables of `docs/sockets.md`, "Limits", say what counts against whom. Tests:
//! below, `tests/hostile_as_root.rs`, and those of `policy` for the key.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use rustix::process::{Resource as Limit, getrlimit};
use serde::Deserialize;
use slipway_peer::{Bin, MAX_FILES};

use crate::peer::{NamespaceId, Peer};

/// A resource of the engine that can run out.
///
/// A new one counts in `RESOURCES`, and has a capacity in `Accounts::with`, a field of [`Limits`]
/// with its arm in `Limits::of`, a row of the second table of `docs/sockets.md`, "Limits", and a
/// [`ResourceHold`] in whatever takes some of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resource {
    /// Numbers in the engine's table of descriptors.
    Descriptors,
    /// Mappings of the engine's process.
    Mappings,
    /// Ends of connections.
    Sockets,
}

const RESOURCES: usize = 3;
/// The multiple of the free amount that one namespace, or one user outside the engine's own
/// namespace, may have.
const TIMES: u64 = 7;
/// Descriptors that belong to no program: the standard ones, the engine's sockets, links to other
/// engines.
const OWN: u64 = 64;
/// Mappings of the engine's own: its program, libraries, heap, and threads' stacks.
const OWN_MAPPINGS: u64 = 2048;
/// Descriptors that an account itself costs: its network namespace, and the netlink socket that
/// queries that namespace.
const ACCOUNT: u64 = 2;
/// The most discarded descriptors and mappings of an account that may wait to be closed. An account
/// with more is refused.
const DISCARDED: usize = 256;

/// The policy's limits of one user in a network namespace, or of all users in one. With `None`
/// there is no limit but a share of what is free.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Limits {
    /// Descriptors of the engine's process.
    pub descriptors: Option<u64>,
    /// Mappings of the engine's process: one for a family's table, and one for an arena.
    pub mappings: Option<u64>,
    /// Ends of connections.
    pub sockets: Option<u64>,
}

impl Limits {
    fn of(&self, what: Resource) -> u64 {
        let limit = match what {
            Resource::Descriptors => self.descriptors,
            Resource::Mappings => self.mappings,
            Resource::Sockets => self.sockets,
        };
        limit.unwrap_or(u64::MAX)
    }
}

/// Limits of each user and of each network namespace.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AllLimits {
    /// Limits of one user in one network namespace.
    #[serde(default)]
    pub user: Limits,
    /// Limits of all users of one network namespace together.
    #[serde(default)]
    pub namespace: Limits,
}

/// The error for an account that has as much of a resource as it may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refused;

/// Amounts of each resource.
#[derive(Default)]
struct Count([AtomicU64; RESOURCES]);

impl Count {
    fn get(&self, what: Resource) -> u64 {
        self.0[what as usize].load(Ordering::Relaxed)
    }

    fn add(&self, what: Resource, count: u64) {
        self.0[what as usize].fetch_add(count, Ordering::Relaxed);
    }

    fn take(&self, what: Resource, count: u64) {
        self.0[what as usize].fetch_sub(count, Ordering::Relaxed);
    }
}

/// State that all accounts share.
struct Common {
    used: Count,
    capacity: [u64; RESOURCES],
    limits: RwLock<AllLimits>,
}

/// One user in one network namespace, and what the engine holds for that user. See the module's
/// head.
pub struct Account {
    /// The network namespace, held open so that no other one gets its inode number.
    pub namespace: Arc<OwnedFd>,
    /// The bin for what the engine held for the user: closed and unmapped there.
    pub bin: Bin,
    /// The bin for descriptors that the user sent: closed there.
    pub sent: Bin,
    own: Count,
    together: Arc<Count>,
    elsewhere: Option<Arc<Count>>,
    common: Arc<Common>,
}

impl Account {
    /// Counts `count` more against the account.
    ///
    /// # Errors
    /// [`Refused`] if the account, its namespace or its user would have more than its share or
    /// limit, or if too much that the account discarded is not closed yet.
    pub fn hold(self: &Arc<Self>, what: Resource, count: u64) -> Result<ResourceHold, Refused> {
        let limits = *self.common.limits.read().unwrap_or_else(PoisonError::into_inner);
        let capacity = self.common.capacity[what as usize];
        let free = capacity.saturating_sub(self.common.used.get(what).saturating_add(count));
        let share = free.saturating_mul(TIMES);
        let fits = |has: &Count, most: u64| has.get(what).saturating_add(count) <= most;
        let fits = fits(&self.own, free.min(limits.user.of(what)))
            && fits(&self.together, share.min(limits.namespace.of(what)))
            && self.elsewhere.as_deref().is_none_or(|elsewhere| fits(elsewhere, share));
        let may = fits && self.bin.held() <= DISCARDED;
        may.then(|| self.count(what, count)).ok_or(Refused)
    }

    /// Counts `count` more against the administrator's account, which is never refused.
    pub fn hold_anyway(self: &Arc<Self>, what: Resource, count: u64) -> ResourceHold {
        self.count(what, count)
    }

    fn count(self: &Arc<Self>, what: Resource, count: u64) -> ResourceHold {
        self.all().for_each(|one| one.add(what, count));
        ResourceHold { account: self.clone(), what, count }
    }

    fn all(&self) -> impl Iterator<Item = &Count> {
        [&self.own, &*self.together, &self.common.used].into_iter().chain(self.elsewhere.as_deref())
    }

    /// Returns whether the account holds more than a quarter of what is free. If so, the caller
    /// should hold its things in another way where there is one.
    pub fn is_large(&self, what: Resource) -> bool {
        let free = self.common.capacity[what as usize].saturating_sub(self.common.used.get(what));
        self.own.get(what) > free / 4
    }

    /// Returns the amount that the account itself holds.
    #[cfg(test)]
    pub fn has(&self, what: Resource) -> u64 {
        self.own.get(what)
    }
}

/// An amount of a resource that counts against an account until this is dropped.
pub struct ResourceHold {
    account: Arc<Account>,
    what: Resource,
    count: u64,
}

impl ResourceHold {
    /// Returns the account that the amount counts against.
    pub fn account(&self) -> &Arc<Account> {
        &self.account
    }
}

impl Drop for ResourceHold {
    fn drop(&mut self) {
        self.account.all().for_each(|one| one.take(self.what, self.count));
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        self.all().for_each(|one| one.take(Resource::Descriptors, ACCOUNT));
    }
}

/// All accounts. See the module's head.
pub struct Accounts {
    /// Accounts by network namespace and user. Each has its own cost ([`ACCOUNT`]) counted.
    all: HashMap<(NamespaceId, u32), Arc<Account>>,
    spaces: HashMap<NamespaceId, Arc<Count>>,
    users: HashMap<u32, Arc<Count>>,
    /// The number of accounts that the last sweep left.
    swept: usize,
    common: Arc<Common>,
    own: Option<NamespaceId>,
}

impl Default for Accounts {
    fn default() -> Self {
        let files = getrlimit(Limit::Nofile).current.unwrap_or(1 << 20);
        let maps = std::fs::read_to_string("/proc/sys/vm/max_map_count");
        let maps = maps.ok().and_then(|text| text.trim().parse().ok()).unwrap_or(65_530);
        Self::with(files, maps)
    }
}

impl Accounts {
    /// Makes accounts for an engine with `files` descriptors and `maps` mappings.
    fn with(files: u64, maps: u64) -> Self {
        // One message of a program may bring as many descriptors as a message can hold.
        let descriptors = files.saturating_sub(OWN + MAX_FILES as u64);
        let mappings = maps.saturating_sub(OWN_MAPPINGS.min(maps / 4));
        let capacity = [descriptors, mappings, crate::eventfds::ends_within(files)];
        let common =
            Arc::new(Common { used: Count::default(), capacity, limits: RwLock::default() });
        let own = std::fs::File::open("/proc/self/ns/net").and_then(NamespaceId::of).ok();
        let (all, spaces, users) = Default::default();
        Self { all, spaces, users, swept: 0, common, own }
    }

    /// Sets the policy's limits for what is held from now on.
    pub fn limit(&self, limits: AllLimits) {
        *self.common.limits.write().unwrap_or_else(PoisonError::into_inner) = limits;
    }

    /// Returns the account of a process, and makes it if there is none. With `anyway` this always
    /// succeeds.
    ///
    /// # Errors
    /// [`Refused`]: the engine has no room for one more account.
    pub fn of(&mut self, peer: &Peer, anyway: bool) -> Result<Arc<Account>, Refused> {
        let key = (peer.namespace, peer.uid);
        if let Some(account) = self.all.get(&key) {
            return Ok(account.clone());
        }
        if self.all.len() > 2 * self.swept + 16 {
            self.sweep();
        }
        let is_own = self.own == Some(peer.namespace);
        let account = Arc::new(Account {
            namespace: peer.file.clone(),
            bin: Bin::new(),
            sent: Bin::new(),
            own: Count::default(),
            together: self.spaces.entry(peer.namespace).or_default().clone(),
            elsewhere: (!is_own).then(|| self.users.entry(peer.uid).or_default().clone()),
            common: self.common.clone(),
        });
        // This hold is only a check; the account's own cost counts until the account is dropped.
        let own = account.hold(Resource::Descriptors, ACCOUNT);
        account.all().for_each(|one| one.add(Resource::Descriptors, ACCOUNT));
        if !anyway {
            drop(own?);
        }
        self.all.insert(key, account.clone());
        Ok(account)
    }

    /// Forgets accounts for which nothing is held. An account with descriptors that are not closed
    /// yet stays, so that its user cannot start over with an empty account.
    fn sweep(&mut self) {
        self.all.retain(|_, account| {
            Arc::strong_count(account) > 1 || account.bin.held() + account.sent.held() > 0
        });
        self.spaces.retain(|_, count| Arc::strong_count(count) > 1);
        self.users.retain(|_, count| Arc::strong_count(count) > 1);
        self.swept = self.all.len();
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    const WHAT: Resource = Resource::Descriptors;
    const FILES: u64 = 1000 + OWN + MAX_FILES as u64;

    /// A user in the network namespace of the given number.
    fn peer(namespace: u64, uid: u32) -> Peer {
        let file = Arc::new(rustix::stdio::stdin().as_fd().try_clone_to_owned().unwrap());
        Peer { uid, pid: 1, namespace: NamespaceId(0, namespace), file, mounts: NamespaceId(0, 0) }
    }

    /// Has an account take as much as it can, one at a time.
    fn take_all(account: &Arc<Account>) -> Vec<ResourceHold> {
        std::iter::from_fn(|| account.hold(WHAT, 1).ok()).collect()
    }

    #[test]
    fn an_account_that_takes_all_it_can_leaves_some_for_others() {
        let mut accounts = Accounts::with(FILES, 1000);
        let hog = accounts.of(&peer(1, 1000), false).unwrap();
        let first = take_all(&hog);
        assert!((490..=500).contains(&first.len()), "{}", first.len());
        // User 1000 in other namespaces, and other users of namespace 1: together they leave an
        // eighth.
        let mut all = Vec::new();
        for other in 2..40 {
            let accounts = [
                accounts.of(&peer(other, 1000), false),
                accounts.of(&peer(1, 1000 + other as u32), false),
            ];
            all.extend(accounts.into_iter().flatten().map(|one| take_all(&one)));
        }
        let taken = first.len() + all.iter().map(Vec::len).sum::<usize>();
        assert!((800..=1000).contains(&taken), "{taken}");
        let victim = accounts.of(&peer(100, 2000), false).unwrap();
        assert!(take_all(&victim).len() > 5);
        drop((first, all));
        assert!(take_all(&victim).len() > 300);
    }

    #[test]
    fn dropped_holds_and_accounts_are_free_again() {
        let mut accounts = Accounts::with(FILES, 1000);
        for user in 0..2000 {
            let account = accounts.of(&peer(u64::from(user), user), false).unwrap();
            let held = account.hold(WHAT, 20).unwrap();
            assert_eq!(account.has(WHAT), 20 + ACCOUNT);
            drop(held);
        }
        accounts.sweep();
        assert!(accounts.all.is_empty() && accounts.spaces.is_empty() && accounts.users.is_empty());
        assert_eq!(accounts.common.used.get(WHAT), 0);
    }

    #[test]
    fn limits_of_the_policy_hold() {
        let mut accounts = Accounts::with(FILES, 1000);
        let user = Limits { descriptors: Some(10), ..Limits::default() };
        let namespace = Limits { descriptors: Some(15), ..Limits::default() };
        accounts.limit(AllLimits { user, namespace });
        let (one, other) =
            (accounts.of(&peer(1, 1), false).unwrap(), accounts.of(&peer(1, 2), false).unwrap());
        let held = take_all(&one);
        assert_eq!(held.len() as u64, 10 - ACCOUNT);
        assert_eq!(take_all(&other).len() as u64, 15 - 10 - ACCOUNT);
        assert!(one.hold(Resource::Sockets, 1000).is_ok());
    }

    #[test]
    fn an_account_with_too_much_discarded_gets_nothing_more() {
        struct Sleeps(std::sync::mpsc::Receiver<()>);
        impl Drop for Sleeps {
            fn drop(&mut self) {
                let _ = self.0.recv();
            }
        }
        let mut accounts = Accounts::with(FILES, 1000);
        let account = accounts.of(&peer(1, 1), false).unwrap();
        let (wake, told) = std::sync::mpsc::channel();
        account.bin.discard_value(Sleeps(told));
        (0..DISCARDED).for_each(|_| account.bin.discard_value(()));
        assert_eq!(account.hold(WHAT, 1).err(), Some(Refused));
        drop(account);
        accounts.sweep();
        assert_eq!(accounts.all.len(), 1, "a user that comes back has the same account");
        drop(wake);
    }
}
