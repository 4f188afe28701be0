//! Network namespaces: tenants. Which addresses one has is asked of the kernel, in the namespace itself.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use slipway_netlink::Netlink;
use slipway_sgiov_spec::Address;

use crate::address::octets;
use crate::peer::{NamespaceId, Peer};
use crate::policy::{Policy, Tenant};
use crate::slab::Slab;

/// How long what the kernel said holds.
const FRESH: Duration = Duration::from_secs(1);
/// How often an address that is not known is asked for at most.
const PATIENCE: Duration = Duration::from_millis(100);

/// An address and the length of its prefix in bits, of 128.
type Prefixed = ([u8; 16], u8);

/// One network namespace with families in it.
pub struct Namespace {
    pub id: NamespaceId,
    pub file: Arc<OwnedFd>,
    /// What the policy calls it, and allows it.
    pub tenant: Option<Tenant>,
    netlink: Option<Netlink>,
    addresses: Vec<Prefixed>,
    asked: Option<Instant>,
    /// Bytes sent and received by families that have ended.
    pub past: (u64, u64),
    /// Families in it.
    pub families: u32,
    /// Endpoints of its families.
    pub endpoints: u32,
    /// Where the search for a free port goes on.
    pub next_port: u16,
    /// Connections under way from an address of it to another, by both.
    pub taken: std::collections::HashSet<(Address, Address)>,
}

impl Namespace {
    /// Its name: the policy's, or the kernel's.
    pub fn name(&self) -> String {
        let own = || format!("net:[{}]", self.id.1);
        self.tenant.as_ref().map_or_else(own, |tenant| tenant.name.clone())
    }

    /// Whether `ip` is an address of it that other namespaces may know, too.
    pub fn has(&mut self, ip: &[u8; 16]) -> bool {
        let known = |all: &[Prefixed]| all.iter().any(|(own, _)| own == ip);
        self.refresh(FRESH);
        if known(&self.addresses) {
            return true;
        }
        self.refresh(PATIENCE);
        known(&self.addresses)
    }

    /// The own address that goes with one of another namespace: the one whose network has it, or the first
    /// of its family.
    pub fn source(&mut self, to: &Address) -> Option<[u8; 16]> {
        self.refresh(FRESH);
        let same = |own: &&Prefixed| {
            Address { ip: own.0, port: 0 }.as_v4().is_some() == to.as_v4().is_some()
        };
        let near = |own: &&Prefixed| share(&own.0, &to.ip) >= own.1;
        let candidates = || self.addresses.iter().filter(same);
        candidates().find(near).or_else(|| candidates().next()).map(|own| own.0)
    }

    /// All addresses but loopback's, for people to read.
    pub fn addresses(&mut self) -> Vec<[u8; 16]> {
        self.refresh(FRESH);
        self.addresses.iter().map(|own| own.0).collect()
    }

    fn refresh(&mut self, than: Duration) {
        let now = Instant::now();
        if self.asked.is_some_and(|asked| now - asked < than) {
            return;
        }
        self.asked = Some(now);
        if self.netlink.is_none() {
            self.netlink = inside(&self.file);
        }
        let Some(netlink) = &mut self.netlink else { return };
        match netlink.addresses() {
            Ok(all) => {
                self.addresses.clear();
                for own in all.iter().filter(|own| !own.address.is_loopback()) {
                    let above = if own.address.is_ipv4() { 96 } else { 0 };
                    self.addresses.push((octets(own.address), own.prefix.saturating_add(above)));
                }
            }
            Err(error) => {
                tracing::warn!(%error, "cannot ask a network namespace for its addresses")
            }
        }
    }
}

/// Bits in which two addresses agree from the beginning.
fn share(a: &[u8; 16], b: &[u8; 16]) -> u8 {
    (u128::from_be_bytes(*a) ^ u128::from_be_bytes(*b)).leading_zeros() as u8
}

/// A netlink socket of a namespace. A socket stays in the one that it was made in, so a thread enters it for
/// that, and ends.
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
            tracing::warn!(%error, "cannot enter a network namespace: of it only loopback is served");
        })
        .ok()
}

/// The namespaces that have families.
#[derive(Default)]
pub struct Namespaces {
    all: Slab<Namespace>,
    by_id: HashMap<NamespaceId, u32>,
}

impl Namespaces {
    /// One more family of the peer's namespace.
    pub fn enter(&mut self, peer: &Peer, policy: &Policy) -> u32 {
        let number = *self.by_id.entry(peer.namespace).or_insert_with(|| {
            self.all.insert(Namespace {
                id: peer.namespace,
                file: peer.file.clone(),
                tenant: policy.tenant_of(peer.namespace).cloned(),
                netlink: None,
                addresses: Vec::new(),
                asked: None,
                past: (0, 0),
                families: 0,
                endpoints: 0,
                next_port: 0,
                taken: std::collections::HashSet::new(),
            })
        });
        if let Some(namespace) = self.all.get_mut(number) {
            namespace.families += 1;
        }
        number
    }

    /// What another policy calls them, and allows them.
    pub fn renew(&mut self, policy: &Policy) {
        for number in self.by_id.values() {
            if let Some(namespace) = self.all.get_mut(*number) {
                namespace.tenant = policy.tenant_of(namespace.id).cloned();
            }
        }
    }

    /// A family has ended.
    pub fn leave(&mut self, number: u32) {
        let Some(namespace) = self.all.get_mut(number) else { return };
        namespace.families -= 1;
        if namespace.families == 0 {
            self.by_id.remove(&namespace.id);
            self.all.remove(number);
        }
    }

    /// Whether no family is in any.
    #[cfg(any(test, feature = "fuzz"))]
    pub fn is_empty(&self) -> bool {
        self.all.len() == 0
    }

    /// A connection's port is free again, if the namespace is there still.
    pub fn release(&mut self, id: NamespaceId, from: Address, to: Address) {
        let number = self.by_id.get(&id);
        if let Some(space) = number.and_then(|number| self.all.get_mut(*number)) {
            space.taken.remove(&(from, to));
        }
    }

    /// The namespace of a tenant that the policy knows, if a family is in it.
    pub fn named(&self, tenant: &str) -> Option<u32> {
        let mut all = self.all.iter();
        all.find(|(_, space)| space.name() == tenant).map(|(number, _)| number)
    }

    pub fn get(&self, number: u32) -> Option<&Namespace> {
        self.all.get(number)
    }

    pub fn get_mut(&mut self, number: u32) -> Option<&mut Namespace> {
        self.all.get_mut(number)
    }
}
