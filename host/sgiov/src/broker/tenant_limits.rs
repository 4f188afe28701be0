//! The limits that policy sets for a tenant: its endpoints, and the memory of its streams.

use std::time::{Duration, Instant};

use super::links::Party;
use super::{Broker, Errno, LIMITED};

/// The time for which the measured memory of a namespace's links counts, for each link of the
/// engine. Measuring examines all of them, in less than 1 µs each, so that it takes a tenth of the
/// engine's time at most for a tenant.
const MEASURE: Duration = Duration::from_micros(10);

impl Broker {
    /// Checks that the tenant of a namespace may have `wanted` more endpoints.
    ///
    /// # Errors
    /// [`LIMITED`] at the limit of the tenant's endpoints or memory.
    pub(super) fn check_limits(&mut self, namespace: u32, wanted: u32) -> Result<(), Errno> {
        let Some(space) = self.namespaces.get(namespace) else { return Ok(()) };
        let Some(tenant) = &space.tenant else { return Ok(()) };
        let sockets = tenant.sockets.is_none_or(|most| space.endpoints + wanted <= most);
        let limit = tenant.memory;
        let fits = sockets && limit.is_none_or(|most| self.memory_of(namespace) < most);
        fits.then_some(()).ok_or(LIMITED)
    }

    /// Returns the bytes of the arenas of the namespace's links. May be up to 10 µs x (number of
    /// links) old.
    fn memory_of(&mut self, namespace: u32) -> u64 {
        let now = Instant::now();
        let measured = self.namespaces.get(namespace).and_then(|space| space.measured);
        if let Some((bytes, _)) = measured.filter(|(_, until)| now < *until) {
            return bytes;
        }
        let (bytes, examined) = self.measure(namespace);
        if let Some(space) = self.namespaces.get_mut(namespace) {
            space.measured = Some((bytes, now + MEASURE * examined));
        }
        bytes
    }

    /// Asks the kernel for the size in bytes of a namespace's arenas. Returns the number of links
    /// that were examined as well: all of the engine's.
    fn measure(&self, namespace: u32) -> (u64, u32) {
        let is_its = |party: Party| match party {
            Party::Family(number) => {
                self.families.get(number).is_some_and(|family| family.namespace == namespace)
            }
            Party::Engine | Party::Gone => false,
        };
        self.links.iter().fold((0, 0), |(bytes, examined), (_, link)| {
            let its = link.ends.iter().any(|end| is_its(end.party));
            let stat = its.then(|| rustix::fs::fstat(&*link.file).ok()).flatten();
            let blocks = stat.map_or(0, |stat| stat.st_blocks.unsigned_abs());
            (bytes + blocks * 512, examined + 1)
        })
    }
}

#[cfg(test)]
mod tests {
    use slipway_sgiov_spec::Address;
    use slipway_sgiov_spec::control::{Reply, Request};

    use super::*;
    use crate::broker::connect::tests::{attach, listening};
    use crate::broker::{Outcome, told};
    use crate::peer::NamespaceId;
    use crate::policy::Tenant;

    fn tenant(sockets: Option<u32>, memory: Option<u64>) -> Tenant {
        let (name, netns) = ("web".into(), "web".into());
        Tenant { name, netns, sockets, memory, weight: 1.0, rate: None }
    }

    #[test]
    fn both_ends_of_a_connection_within_a_namespace_count() {
        let (mut broker, _, at) = listening();
        let client = attach(&mut broker);
        broker.namespaces.get_mut(0).unwrap().tenant = Some(tenant(Some(3), None));
        let connect = || Request::Connect { to: at, from: Address::ANY };
        let outcome = broker.request(client, connect(), Vec::new());
        assert!(matches!(outcome, Outcome::Answer(Reply::Connected { .. }, _)));
        assert_eq!(broker.namespaces.get(0).unwrap().endpoints, 2);
        let outcome = broker.request(client, connect(), Vec::new());
        let Outcome::Answer(Reply::Refused(errno), _) = outcome else { panic!("4 of 3 endpoints") };
        assert_eq!(errno, told(LIMITED));
        assert_eq!(broker.namespaces.get(0).unwrap().endpoints, 2);
    }

    #[test]
    fn memory_that_was_measured_lately_is_not_measured_again() {
        let (mut broker, client, at) = listening();
        let space = broker.namespaces.get_mut(0).unwrap();
        space.tenant = Some(tenant(None, Some(1 << 30)));
        let (lately, later) = (Instant::now(), Instant::now() + Duration::from_secs(3600));
        space.measured = Some((1 << 30, later));
        let connect = || Request::Connect { to: at, from: Address::ANY };
        let outcome = broker.request(client, connect(), Vec::new());
        assert!(matches!(outcome, Outcome::Answer(Reply::Refused(_), _)));
        broker.namespaces.get_mut(0).unwrap().measured = Some((1 << 30, lately));
        let outcome = broker.request(client, connect(), Vec::new());
        assert!(matches!(outcome, Outcome::Answer(Reply::Connected { .. }, _)));
        assert_eq!(broker.measure(0).1, 1);
    }

    #[test]
    fn a_measurement_counts_for_as_long_as_all_that_it_looked_at() {
        let (mut broker, client, at) = listening();
        let connect = Request::Connect { to: at, from: Address::ANY };
        let outcome = broker.request(client, connect, Vec::new());
        assert!(matches!(outcome, Outcome::Answer(Reply::Connected { .. }, _)));
        // Another namespace has no link, and the engine has one.
        let peer = broker.clients.get(client).unwrap().peer.clone();
        let other = crate::peer::Peer { namespace: NamespaceId(0, 1), ..peer };
        let other = broker.namespaces.enter(&other, &broker.policy);
        assert_eq!(broker.measure(other), (0, 1));
        let begun = Instant::now();
        assert_eq!(broker.memory_of(other), 0);
        let (_, until) = broker.namespaces.get(other).unwrap().measured.unwrap();
        assert!(until >= begun + MEASURE);
    }
}
