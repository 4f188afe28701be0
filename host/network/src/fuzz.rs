//! Entry points of fuzz targets.

use std::net::Ipv4Addr;

use crate::dns::{Answer, Zone, answer};
use crate::ledger::{Lease, Network};
use crate::{Mac, allocate, publish};

/// Handles a query as a sandbox may send it, and text as a user may type it.
///
/// # Panics
/// If a reply does not belong to its query, is too long, or cannot be parsed.
pub fn name_query(bytes: &[u8]) {
    let zone = zone();
    if let Answer::Reply(reply) = answer(&zone, bytes) {
        assert!((12..=4096).contains(&reply.len()), "a reply of {} bytes", reply.len());
        assert_eq!(reply[..2], bytes[..2], "an answer to another query");
        assert!(reply[2] & 0x80 != 0, "a query for an answer");
        simple_dns::Packet::parse(&reply).map_or_else(|error| panic!("{error}"), drop);
        // A reply gets no reply, or two servers would talk to each other for ever.
        assert_eq!(answer(&zone, &reply), Answer::Nothing);
    }
    if let Ok(text) = std::str::from_utf8(bytes) {
        for one in publish::Published::parse(text).unwrap_or_default() {
            assert_eq!(publish::Published::parse(&one.to_string()).ok(), Some(vec![one]));
        }
        drop((text.parse::<Mac>(), allocate::subnet(text), allocate::prefix(text)));
    }
}

fn zone() -> Zone {
    let subnet = ipnet::Ipv4Net::new_assert(Ipv4Addr::new(10, 0, 1, 0), 24);
    let prefix = ipnet::Ipv6Net::new_assert(0xfd00_u128.wrapping_shl(112).into(), 64);
    let mut network = Network::new("blue".into(), "slip0".into(), subnet, prefix);
    let ipv4 = Ipv4Addr::new(10, 0, 1, 2);
    let ipv6 = (prefix.network().to_bits() | 2).into();
    let mac = Mac::derived(ipv4);
    let lease = Lease {
        name: "web".into(),
        mac,
        ipv4,
        ipv6,
        published: Vec::new(),
        attached: false,
        sequence: 0,
    };
    network.leases.insert("0123456789ab".into(), lease);
    Zone::of(&network)
}
