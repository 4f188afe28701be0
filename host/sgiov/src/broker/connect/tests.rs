//! Connections at the limits of accounts and tenants.

use std::os::fd::AsFd;

use slipway_sgiov_spec::control::{Request, VERSION};

use super::*;
use crate::accounts::{AllLimits, Limits};
use crate::broker::{LIMITED, told};
use crate::policy::Tenant;

/// Returns a broker with one client, which listens at the address.
fn listening() -> (Broker, u32, Address) {
    let (here, _there) = std::os::unix::net::UnixStream::pair().unwrap();
    let peer = crate::peer::peer(here.as_fd()).unwrap();
    let (mut broker, at) = (Broker::default(), Address::v4([127, 0, 0, 1], 9000));
    let (client, _) = broker.join(peer, false).unwrap();
    broker.request(client, Request::Attach { version: VERSION }, Vec::new());
    let listen = Request::Listen { at, backlog: 8, shared: false, v6_only: false };
    let listening = broker.request(client, listen, Vec::new());
    assert!(matches!(listening, Outcome::Answer(Reply::Listening { .. }, _)));
    (broker, client, at)
}

#[test]
fn a_connection_that_fails_half_way_leaves_nothing() {
    let (mut broker, client, at) = listening();
    let account = broker.clients.get(client).unwrap().account.clone();
    let has = account.has(Resource::Descriptors);
    // Two eventfds, and a link.
    let needs = 2 + links::DESCRIPTORS;
    let connect = || Request::Connect { to: at, from: Address::ANY };
    for spare in 0..needs {
        let user = Limits { descriptors: Some(has + spare), ..Limits::default() };
        broker.accounts.limit(AllLimits { user, ..AllLimits::default() });
        let outcome = broker.request(client, connect(), Vec::new());
        let Outcome::Answer(Reply::Refused(errno), _) = outcome else { panic!("{spare}") };
        assert_eq!(errno, told(LIMITED));
        assert_eq!(broker.links.iter().count(), 0, "{spare}");
        assert_eq!(broker.next_sweep(), None, "{spare}");
        // The link's pages are released on another thread.
        let begun = Instant::now();
        while account.has(Resource::Descriptors) > has {
            assert!(begun.elapsed() < Duration::from_secs(60), "{spare}");
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(account.has(Resource::Sockets), 0);
    }
    let user = Limits { descriptors: Some(has + needs), ..Limits::default() };
    broker.accounts.limit(AllLimits { user, ..AllLimits::default() });
    let outcome = broker.request(client, connect(), Vec::new());
    assert!(matches!(outcome, Outcome::Answer(Reply::Connected { .. }, _)));
    // A second connection, which fails, leaves the link of the first unchanged.
    let outcome = broker.request(client, connect(), Vec::new());
    assert!(matches!(outcome, Outcome::Answer(Reply::Refused(_), _)));
    assert!(broker.links.iter().all(|(_, link)| link.live == 1));
    assert_eq!(broker.links.iter().count(), 1);
}

#[test]
fn memory_that_was_measured_lately_is_not_measured_again() {
    let (mut broker, client, at) = listening();
    let space = broker.namespaces.get_mut(0).unwrap();
    space.tenant = Some(Tenant {
        name: "web".into(),
        netns: "web".into(),
        sockets: None,
        memory: Some(1 << 30),
        weight: 1.0,
        rate: None,
    });
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
