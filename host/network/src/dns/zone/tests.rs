//! Names and addresses that a zone answers, and queries of any bytes.

use super::*;
use crate::Mac;

fn network(name: &str) -> Network {
    let subnet = "10.0.1.0/24".parse().unwrap();
    let prefix = "fd00:1::/64".parse().unwrap();
    Network::new(name.into(), "slip0".into(), subnet, prefix)
}

fn zone(internal: bool) -> Zone {
    let mut network = network("Blue");
    network.internal = internal;
    // Some sandboxes have names that belong to others.
    let names = ["web", "DB_1.x", "example.org", "web.blue", HOST, "host.slipway"];
    for (number, name) in (2_u8..).zip(names) {
        network.leases.insert(name.into(), lease(name, number, 0));
    }
    Zone::of(&network)
}

/// Makes a lease of a sandbox, or with a sequence number that of an attachment.
fn lease(name: &str, number: u8, sequence: u64) -> Lease {
    let ipv4 = Ipv4Addr::new(10, 0, 1, number);
    Lease {
        name: name.into(),
        mac: Mac::derived(ipv4),
        ipv4,
        ipv6: format!("fd00:1::{number}").parse().unwrap(),
        published: Vec::new(),
        attached: sequence > 0,
        sequence,
    }
}

fn query(name: &str, kind: QTYPE) -> Vec<u8> {
    let mut packet = Packet::new_query(0x1234);
    packet.set_flags(PacketFlag::RECURSION_DESIRED);
    let name = Name::new_unchecked(name);
    packet.questions.push(Question::new(name, kind, QCLASS::CLASS(CLASS::IN), false));
    packet.build_bytes_vec().unwrap()
}

fn ask(zone: &Zone, name: &str, kind: TYPE) -> Option<(RCODE, Vec<String>)> {
    match answer(zone, &query(name, QTYPE::TYPE(kind))) {
        Answer::Forward => None,
        Answer::Nothing => panic!("no answer to {name}"),
        Answer::Reply(bytes) => {
            let packet = Packet::parse(&bytes).unwrap();
            assert_eq!(packet.id(), 0x1234);
            assert!(packet.has_flags(PacketFlag::RESPONSE | PacketFlag::RECURSION_DESIRED));
            let records = packet.answers.iter().map(|record| match &record.rdata {
                RData::A(a) => Ipv4Addr::from_bits(a.address).to_string(),
                RData::AAAA(a) => Ipv6Addr::from_bits(a.address).to_string(),
                RData::PTR(name) => name.0.to_string(),
                other => panic!("{other:?}"),
            });
            Some((packet.rcode(), records.collect()))
        }
    }
}

#[test]
fn names_of_the_network_are_answered_and_others_forwarded() {
    let zone = zone(false);
    let found = |name: &str, kind, what: &str| {
        let known = what.split_whitespace().map(str::to_owned).collect();
        assert_eq!(ask(&zone, name, kind), Some((RCODE::NoError, known)), "{name}");
    };
    found("web", TYPE::A, "10.0.1.2");
    found("WEB", TYPE::AAAA, "fd00:1::2");
    found("web.blue", TYPE::A, "10.0.1.2");
    found("db_1.X.BLUE", TYPE::A, "10.0.1.3");
    found("example.org.blue", TYPE::A, "10.0.1.4");
    found("web.blue.blue", TYPE::A, "10.0.1.5");
    found("web", TYPE::MX, "");
    found(HOST, TYPE::A, "10.0.1.1");
    found(HOST, TYPE::AAAA, "fd00:1::1");
    found("2.1.0.10.in-addr.arpa", TYPE::PTR, "web.blue");
    found("1.1.0.10.in-addr.arpa", TYPE::PTR, HOST);
    let six = "2.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.1.0.0.0.0.0.d.f.ip6.arpa";
    found(six, TYPE::PTR, "web.blue");
    for name in ["nobody", "nobody.blue", "x.slipway.internal", "9.1.0.10.in-addr.arpa"] {
        assert_eq!(ask(&zone, name, TYPE::A), Some((RCODE::NameError, vec![])), "{name}");
    }
    for name in
        ["", "db_1.x", "example.org", "web.green", "notslipway.internal", "1.2.3.4.in-addr.arpa"]
    {
        assert_eq!(ask(&zone, name, TYPE::A), None, "{name}");
    }
}

#[test]
fn a_later_attachment_takes_over_no_name() {
    let mut network = network("blue");
    // The order of ids is another one than that of the attachments. The last pods have the
    // name of another one's container, and a container with the name of a sandbox.
    for (id, name, number, sequence) in [
        ("0123456789ab", "db", 2, 0),
        ("a,p1,eth0", "DB", 3, 1),
        ("a,p3,eth0", "web", 4, 3),
        ("a,p2,eth0", "web", 5, 2),
        ("a,p4,eth0", "p3", 6, 4),
        ("a,db,eth0", "Web", 7, 5),
    ] {
        network.leases.insert(id.into(), lease(name, number, sequence));
    }
    let zone = Zone::of(&network);
    let names = [("db", 2), ("p1", 3), ("web", 5), ("p2", 5), ("p3", 4), ("p4", 6)];
    for (name, number) in names {
        let known = Some((RCODE::NoError, vec![format!("10.0.1.{number}")]));
        assert_eq!(ask(&zone, name, TYPE::A), known, "{name}");
        assert_eq!(ask(&zone, &format!("{name}.blue"), TYPE::A), known, "{name}");
    }
    let reverse = |number: u8| ask(&zone, &format!("{number}.1.0.10.in-addr.arpa"), TYPE::PTR);
    let names = [(2, "db"), (3, "p1"), (4, "p3"), (5, "web"), (6, "p4")];
    for (number, name) in names {
        assert_eq!(reverse(number), Some((RCODE::NoError, vec![format!("{name}.blue")])));
    }
    assert_eq!(reverse(7), Some((RCODE::NameError, vec![])));
    // When the first attachment ends, the second one gets the name.
    network.leases.remove("a,p2,eth0");
    let known = Some((RCODE::NoError, vec!["10.0.1.4".to_owned()]));
    assert_eq!(ask(&Zone::of(&network), "web", TYPE::A), known);
}

/// Removes leases in several orders: each time the names are those of a zone of the rest.
#[test]
fn a_lease_that_is_removed_takes_its_own_names_only() {
    let mut network = network("blue");
    let all = [
        ("0123456789ab", "db", 2, 0),
        ("a,p1,eth0", "DB", 3, 1),
        ("a,p2,eth0", "web", 4, 2),
        ("a,p3,eth0", "web", 5, 3),
        ("a,p4,eth0", "p3", 6, 4),
        ("a,db,eth0", "Web", 7, 5),
        ("a,web,eth0", "web", 8, 6),
        ("a,p6,eth0", "p6", 9, 7),
    ];
    for (id, name, number, sequence) in all {
        network.leases.insert(id.into(), lease(name, number, sequence));
    }
    let entries = |zone: &Zone| {
        let names = zone.names.iter().map(|(name, claims)| (name.clone(), claims[0].addresses));
        (names.collect::<HashMap<_, _>>(), zone.addresses.clone())
    };
    for step in [1, 3, 5, 7] {
        let (mut network, mut zone) = (network.clone(), Zone::of(&network));
        for number in 0..all.len() {
            let (id, ..) = all[(1 + number * step) % all.len()];
            zone.remove(id, &network.leases.remove(id).unwrap());
            assert_eq!(entries(&zone), entries(&Zone::of(&network)), "{step} {id}");
        }
        // A name is free again, for one lease.
        let lease = |number| lease("web", number, 0);
        assert!(zone.add_new("b", &lease(10)) && !zone.add_new("c", &lease(11)));
        network.leases.insert("b".into(), lease(10));
        assert_eq!(entries(&zone), entries(&Zone::of(&network)));
    }
}

#[test]
fn an_internal_network_asks_nobody() {
    let zone = zone(true);
    assert_eq!(ask(&zone, "example.org", TYPE::A), Some((RCODE::Refused, vec![])));
    assert_eq!(ask(&zone, "web", TYPE::A).unwrap().0, RCODE::NoError);
}

#[test]
fn what_is_no_query_is_refused_or_left() {
    let zone = zone(false);
    let good = query("web", QTYPE::TYPE(TYPE::A));
    for cut in 0..12 {
        assert_eq!(answer(&zone, &good[..cut]), Answer::Nothing);
    }
    let code = |bytes: &[u8]| match answer(&zone, bytes) {
        Answer::Reply(reply) => reply[3] & 0xf,
        other => panic!("{other:?}"),
    };
    for cut in 12..good.len() {
        assert_eq!(code(&good[..cut]), 1, "{cut}");
    }
    let with = |at: usize, byte: u8| {
        let mut bytes = good.clone();
        bytes[at] = byte;
        bytes
    };
    assert_eq!(answer(&zone, &with(2, 0x81)), Answer::Nothing);
    // Another operation (status), two questions announced where there is one, a name that
    // points at itself.
    assert_eq!(code(&with(2, 0x11)), 4);
    assert_eq!(code(&with(5, 2)), 1);
    let mut pointer = good[..12].to_vec();
    pointer.extend([0xc0, 12, 0, 1, 0, 1]);
    assert_eq!(code(&pointer), 1);
    // Class CHAOS.
    assert_eq!(code(&with(good.len() - 1, 3)), 5);
    // A label that is not text.
    assert_eq!(code(&with(13, 0)), 1);
}
