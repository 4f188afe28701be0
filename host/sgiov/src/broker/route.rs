//! The listener that an address means, and the source address of a connection to it.

use slipway_sgiov_spec::Address;

use super::{Broker, Errno};
use crate::namespace::Namespace;

impl Broker {
    /// Returns the listener at `to` as seen from a network namespace: in the namespace itself, or
    /// in the one other namespace that has the address. Returns `None` if there is none, or if
    /// policy does not let the namespace's programs reach it.
    pub(super) fn route(&mut self, namespace: u32, to: &Address) -> Option<u32> {
        // To a namespace its own address belongs to no other.
        let own = |space: &mut Namespace| space.has(&to.ip);
        if to.is_loopback() || self.namespaces.get_mut(namespace).is_some_and(own) {
            return self.listeners.find(namespace, to);
        }
        let owner = self.owner(to)?;
        let allowed = self.policy.allows(self.tenant(namespace), self.tenant(owner), to);
        if !allowed {
            return None;
        }
        self.listeners.find(owner, to)
    }

    /// Returns whether it is known if `to` is an address of a network namespace. If not, only the
    /// kernel knows whom a connection from there means: another namespace may have the same
    /// address.
    pub(super) fn knows(&mut self, namespace: u32, to: &Address) -> bool {
        to.is_loopback() || self.namespaces.get_mut(namespace).is_some_and(Namespace::is_known)
    }

    /// Returns the one network namespace that has the address and a listener that `to` could mean.
    /// Returns `None` if there are several: only the kernel knows which one is meant, and policy,
    /// which is asked afterwards, must not decide it by permitting one of them alone. Returns
    /// `None`, too, if the last answer about that namespace is too old, since the address may be
    /// that of another one by now.
    pub(super) fn owner(&mut self, to: &Address) -> Option<u32> {
        let mut spaces = self.listeners.namespaces(to);
        let has = |space: &mut Namespace| space.has(&to.ip);
        spaces.retain(|number| self.namespaces.get_mut(*number).is_some_and(has));
        let [one] = spaces[..] else { return None };
        self.namespaces.get_mut(one).is_some_and(Namespace::is_known).then_some(one)
    }

    /// Returns the policy's name for a network namespace. Returns `None` if it has no entry there.
    pub(super) fn tenant(&self, namespace: u32) -> Option<&str> {
        self.namespaces.get(namespace)?.tenant.as_ref().map(|tenant| tenant.name.as_str())
    }

    /// Returns whether a connection to `to` can come from `wanted`, the source that a program asks
    /// for. It must be an address of the program's namespace, since the acceptor trusts it.
    pub(super) fn may_come_from(&mut self, namespace: u32, to: &Address, wanted: &Address) -> bool {
        let Some(space) = self.namespaces.get_mut(namespace) else { return false };
        let stays = |space: &mut Namespace| to.is_loopback() || space.has(&to.ip);
        wanted.is_unspecified()
            || (wanted.is_loopback() && stays(space))
            || (!wanted.is_loopback() && space.has(&wanted.ip))
    }

    /// Returns the connector's address with a port of its own, which is in use until
    /// [`crate::namespace::Namespaces::release`].
    pub(super) fn source(
        &mut self,
        namespace: u32,
        to: &Address,
        wanted: Address,
    ) -> Result<Address, Errno> {
        let space = self.namespaces.get_mut(namespace).ok_or(Errno::INVAL)?;
        let ip = if !wanted.is_unspecified() {
            wanted.ip
        } else if to.is_loopback() && to.as_v4().is_some() {
            Address::v4([127, 0, 0, 1], 0).ip
        } else if to.is_loopback() || space.has(&to.ip) {
            to.ip
        } else {
            space.source(to).ok_or(Errno::HOSTUNREACH)?
        };
        let from = match wanted.port {
            0 => space.ports.choose(ip, *to),
            port => Some(Address { ip, port }).filter(|from| space.ports.take(*from, *to)),
        };
        from.ok_or(Errno::ADDRNOTAVAIL)
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use slipway_sgiov_spec::control::{Reply, Request, VERSION};

    use super::*;
    use crate::broker::Outcome;
    use crate::peer::{NamespaceId, Peer};
    use crate::policy::Policy;

    const POLICY: &str = r#"
[[tenant]]
name = "db"
netns = "db"

[[allow]]
from = "*"
to = "db"
"#;

    /// Returns a broker with a listener at the address in each of two network namespaces, 0 and 1.
    /// Both have the address, and the first is the tenant of `POLICY`. Namespace 2 has neither.
    fn two_that_listen(to: Address) -> Broker {
        let (here, _there) = std::os::unix::net::UnixStream::pair().unwrap();
        let peer = crate::peer::peer(here.as_fd()).unwrap();
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("socket.toml");
        std::fs::write(&file, POLICY).unwrap();
        let mut broker = Broker::new(Policy::read(&file).unwrap(), None);
        for number in 0..3 {
            let peer = Peer { namespace: NamespaceId(0, number), ..peer.clone() };
            let (client, _) = broker.join(peer, false).unwrap();
            broker.request(client, Request::Attach { version: VERSION }, Vec::new());
            let space = broker.namespaces.get_mut(number as u32).unwrap();
            if number == 2 {
                space.set_addresses(&[]);
                break;
            }
            space.set_addresses(&[to.ip]);
            let at = Address::v4([0, 0, 0, 0], to.port);
            let listen = Request::Listen { at, backlog: 8, shared: false, v6_only: false };
            let listening = broker.request(client, listen, Vec::new());
            assert!(matches!(listening, Outcome::Answer(Reply::Listening { .. }, _)));
        }
        let tenant = broker.policy.tenants().first().cloned();
        broker.namespaces.get_mut(0).unwrap().tenant = tenant;
        broker
    }

    #[test]
    fn policy_does_not_decide_which_of_two_namespaces_is_meant() {
        let to = Address::v4([10, 1, 0, 1], 9000);
        let mut broker = two_that_listen(to);
        assert_eq!((broker.owner(&to), broker.route(2, &to)), (None, None));
        let own = [0, 1].map(|space| broker.route(space, &to));
        assert!(own[0].is_some() && own[1].is_some() && own[0] != own[1]);
        broker.namespaces.get_mut(1).unwrap().set_addresses(&[]);
        assert_eq!((broker.owner(&to), broker.route(2, &to)), (Some(0), own[0]));
    }

    /// The address may be the namespace's own, which belongs to no other then.
    #[test]
    fn a_namespace_whose_addresses_are_not_known_has_the_kernel_connect() {
        let to = Address::v4([10, 1, 0, 1], 9000);
        let mut broker = two_that_listen(to);
        broker.namespaces.get_mut(1).unwrap().set_addresses(&[]);
        assert!(broker.knows(2, &to) && broker.route(2, &to).is_some());
        broker.namespaces.get_mut(2).unwrap().overspend();
        assert!(!broker.knows(2, &to) && broker.knows(2, &Address::v4([127, 0, 0, 1], 9000)));
    }

    /// A program keeps the engine from asking, and its namespace lost the address meanwhile.
    #[test]
    fn a_namespace_has_no_address_by_an_answer_that_is_too_old() {
        let to = Address::v4([10, 1, 0, 1], 9000);
        let mut broker = two_that_listen(to);
        broker.namespaces.get_mut(1).unwrap().set_addresses(&[]);
        assert!(broker.owner(&to) == Some(0) && broker.route(2, &to).is_some());
        broker.namespaces.get_mut(0).unwrap().outdate();
        assert_eq!((broker.owner(&to), broker.route(2, &to)), (None, None));
    }

    #[test]
    fn the_one_namespace_that_has_the_address_is_reached_if_policy_permits() {
        let to = Address::v4([10, 1, 0, 1], 9000);
        let mut broker = two_that_listen(to);
        broker.namespaces.get_mut(0).unwrap().set_addresses(&[]);
        assert_eq!((broker.owner(&to), broker.route(2, &to)), (Some(1), None));
    }
}
