//! Connections at the limits of accounts.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use slipway_sgiov_spec::control::{Request, VERSION};

use super::*;
use crate::accounts::{AllLimits, Limits};
use crate::broker::{LIMITED, told};

/// Returns a new client of the broker, with a family of its own.
pub fn attach(broker: &mut Broker) -> u32 {
    let (here, _there) = std::os::unix::net::UnixStream::pair().unwrap();
    let peer = crate::peer::peer(here.as_fd()).unwrap();
    let (client, _) = broker.join(peer, false).unwrap();
    broker.request(client, Request::Attach { version: VERSION }, Vec::new());
    client
}

/// Returns a broker with one client, which listens at the address.
pub fn listening() -> (Broker, u32, Address) {
    let (mut broker, at) = (Broker::default(), Address::v4([127, 0, 0, 1], 9000));
    let client = attach(&mut broker);
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

/// Takes the count of an eventfd. Returns 0 if it is not raised.
fn take_count(eventfd: &std::os::fd::OwnedFd) -> u64 {
    let mut count = [0; 8];
    rustix::io::read(eventfd, &mut count).map_or(0, |_| u64::from_ne_bytes(count))
}

#[test]
fn connections_for_which_a_killed_process_was_woken_are_accepted_by_the_others() {
    let (mut broker, parent, at) = listening();
    let Outcome::Forked { client: child, .. } = broker.request(parent, Request::Fork, Vec::new())
    else {
        panic!("no child")
    };
    let (number, eventfd) =
        broker.listeners.iter().map(|(number, one)| (number, one.eventfd.clone())).next().unwrap();
    let connector = attach(&mut broker);
    for _ in 0..3 {
        let connect = Request::Connect { to: at, from: Address::ANY };
        let outcome = broker.request(connector, connect, Vec::new());
        assert!(matches!(outcome, Outcome::Answer(Reply::Connected { .. }, _)));
    }
    // The child is woken for all of them, and killed before it asks for any.
    assert_eq!(take_count(&eventfd), 3);
    broker.leave(child);
    for _ in 0..3 {
        assert_eq!(take_count(&eventfd), 1);
        let accept = Request::Accept { listener: number.into() };
        let outcome = broker.request(parent, accept, Vec::new());
        assert!(!matches!(outcome, Outcome::Answer(Reply::Refused(_), _)));
    }
    assert_eq!(take_count(&eventfd), 0);
}
