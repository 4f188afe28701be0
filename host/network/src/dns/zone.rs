//! The answers of a network's name server.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::{Ipv4Net, Ipv6Net};
use simple_dns::rdata::{A, AAAA, PTR, RData};
use simple_dns::{
    CLASS, Name, OPCODE, Packet, PacketFlag, QCLASS, QTYPE, Question, RCODE, ResourceRecord, TYPE,
};
use slipway_plane_api::attachments;

use crate::dns::{HOST, OURS};
use crate::ledger::{Lease, Network};

/// Seconds that an answer may be cached: short, since the next sandbox of that name has another
/// address.
const TTL: u32 = 1;

/// The names of one network.
#[derive(Debug)]
pub struct Zone {
    /// The network's name in lower case, after a dot.
    suffix: String,
    /// The leases with a name, by that name in lower case. There is at least one, and the first has
    /// the name.
    names: HashMap<String, Vec<Claim>>,
    /// Full names by address.
    addresses: HashMap<IpAddr, String>,
    subnet: Ipv4Net,
    prefix: Ipv6Net,
    internal: bool,
    host: (Ipv4Addr, Ipv6Addr),
}

/// A lease's claim to a name.
#[derive(Clone, Copy, Debug)]
struct Claim {
    addresses: (Ipv4Addr, Ipv6Addr),
    /// The name is the lease's own, and not that of its container.
    is_own: bool,
}

/// The decision about a query.
#[derive(Debug, PartialEq, Eq)]
pub enum Answer {
    /// These bytes are sent back.
    Reply(Vec<u8>),
    /// The host's resolvers are asked.
    Forward,
    /// Nothing is sent: the message is no query.
    Nothing,
}

impl Zone {
    /// Returns the names that `network` has now.
    pub fn of(network: &Network) -> Self {
        let suffix = format!(".{}", network.name.to_ascii_lowercase());
        let mut zone = Self {
            names: HashMap::new(),
            addresses: HashMap::new(),
            subnet: network.subnet,
            prefix: network.prefix,
            internal: network.internal,
            host: (network.gateway, network.gateway6()),
            suffix,
        };
        // Sandboxes, then attachments in their order. The sort keeps the order of equal ones.
        let mut leases: Vec<_> = network.leases.iter().collect();
        leases.sort_by_key(|(_, lease)| (lease.attached, lease.sequence));
        for (id, lease) in leases {
            zone.add(id, lease);
        }
        zone.addresses.insert(network.gateway.into(), HOST.to_owned());
        zone.addresses.insert(network.gateway6().into(), HOST.to_owned());
        zone
    }

    /// Adds the names of a lease that comes after all others of its network, as that of a new
    /// attachment does.
    pub fn add(&mut self, id: &str, lease: &Lease) {
        for (name, is_own) in names(id, lease) {
            self.add_name(name, Claim { addresses: (lease.ipv4, lease.ipv6), is_own });
        }
    }

    /// Adds a claim to a name. Another lease that has the name keeps it: whoever chooses the name
    /// of a new pod does not take over the name of a station that is there.
    fn add_name(&mut self, name: &str, claim: Claim) {
        let name = name.to_ascii_lowercase();
        let claims = self.names.entry(name.clone()).or_default();
        // A container may be called by its id.
        if claims.last().is_some_and(|last| last.addresses == claim.addresses) {
            return;
        }
        claims.push(claim);
        if claims.len() == 1 {
            self.point(&name, claim);
        }
    }

    /// Makes the addresses of a lease that has a name lead to the name, unless they lead to the
    /// lease's own one already.
    fn point(&mut self, name: &str, claim: Claim) {
        let (ipv4, ipv6) = claim.addresses;
        for address in [IpAddr::V4(ipv4), IpAddr::V6(ipv6)] {
            if claim.is_own || !self.addresses.contains_key(&address) {
                self.addresses.insert(address, format!("{name}{}", self.suffix));
            }
        }
    }

    /// Removes the names of a lease that was added. The next lease with such a name gets it.
    pub fn remove(&mut self, id: &str, lease: &Lease) {
        for (name, _) in names(id, lease) {
            self.remove_name(&name.to_ascii_lowercase(), (lease.ipv4, lease.ipv6));
        }
        self.addresses.remove(&IpAddr::V4(lease.ipv4));
        self.addresses.remove(&IpAddr::V6(lease.ipv6));
    }

    fn remove_name(&mut self, name: &str, addresses: (Ipv4Addr, Ipv6Addr)) {
        let Some(claims) = self.names.get_mut(name) else { return };
        let Some(at) = claims.iter().position(|one| one.addresses == addresses) else { return };
        claims.remove(at);
        match claims.first().copied() {
            None => drop(self.names.remove(name)),
            Some(next) if at == 0 => self.point(name, next),
            Some(_) => {}
        }
    }

    /// Returns whether a client with this address is answered.
    pub fn serves(&self, client: IpAddr) -> bool {
        match client {
            IpAddr::V4(client) => self.subnet.contains(&client),
            IpAddr::V6(client) => self.prefix.contains(&client),
        }
    }

    /// Returns the addresses of a name. A sandbox's name with dots is found below the network's
    /// name only: a sandbox must not decide what `example.org` is elsewhere.
    fn find(&self, name: &str) -> Option<(Ipv4Addr, Ipv6Addr)> {
        if name == HOST {
            return Some(self.host);
        }
        let own = (!name.contains('.')).then_some(name).or(name.strip_suffix(&self.suffix));
        self.names.get(own?)?.first().map(|claim| claim.addresses)
    }

    /// Returns whether no other server could know the name: it has one label, or is below the
    /// network's name or Slipway's.
    fn owns(&self, name: &str) -> bool {
        let below =
            |name: &str, top: &str| name.strip_suffix(top).is_some_and(|n| n.ends_with('.'));
        (!name.is_empty() && !name.contains('.'))
            || name.ends_with(&self.suffix)
            || name == OURS
            || below(name, OURS)
    }
}

/// Returns the names of a lease, each with whether it is the lease's own: the other one is that of
/// an attachment's container.
fn names<'a>(id: &'a str, lease: &'a Lease) -> impl Iterator<Item = (&'a str, bool)> {
    let parts = attachments::parts(id).filter(|_| lease.attached);
    let container = parts.map(|(_, container, _)| (container, false));
    [(lease.name.as_str(), true)].into_iter().chain(container)
}

/// Decides about `query`, which may be any bytes.
pub fn answer(zone: &Zone, query: &[u8]) -> Answer {
    // At least as long as a header, and not itself an answer (RFC 1035, section 4.1.1): two servers
    // must not talk to each other for ever.
    if query.len() < 12 || query[2] & 0x80 != 0 {
        return Answer::Nothing;
    }
    let Ok(packet) = Packet::parse(query) else {
        return Answer::Reply(failure(query, RCODE::FormatError));
    };
    if packet.opcode() != OPCODE::StandardQuery {
        return Answer::Reply(failure(query, RCODE::NotImplemented));
    }
    let [question] = packet.questions.as_slice() else {
        return Answer::Reply(failure(query, RCODE::FormatError));
    };
    if !matches!(question.qclass, QCLASS::CLASS(CLASS::IN) | QCLASS::ANY) {
        return Answer::Reply(failure(query, RCODE::Refused));
    }
    let Some(name) = text(&question.qname) else {
        return Answer::Reply(failure(query, RCODE::FormatError));
    };
    match records(zone, &name, question) {
        Some(Ok(records)) => reply(&packet, question, records, RCODE::NoError),
        Some(Err(NoName)) => reply(&packet, question, Vec::new(), RCODE::NameError),
        // An internal network must not lead out by names either.
        None if zone.internal => Answer::Reply(failure(query, RCODE::Refused)),
        None => Answer::Forward,
    }
}

struct NoName;

/// Returns the records of a name, or `None` if another server must be asked.
fn records(
    zone: &Zone,
    name: &str,
    question: &Question<'_>,
) -> Option<Result<Vec<RData<'static>>, NoName>> {
    let wants = |kind: TYPE| question.qtype == QTYPE::TYPE(kind) || question.qtype == QTYPE::ANY;
    if let Some((ipv4, ipv6)) = zone.find(name) {
        let four = wants(TYPE::A).then(|| RData::A(A { address: ipv4.to_bits() }));
        let six = wants(TYPE::AAAA).then(|| RData::AAAA(AAAA { address: ipv6.to_bits() }));
        return Some(Ok(four.into_iter().chain(six).collect()));
    }
    if let Some(address) = reversed(name).filter(|address| zone.serves(*address)) {
        let Some(full) = zone.addresses.get(&address) else { return Some(Err(NoName)) };
        let name = Name::new(full).ok().map(Name::into_owned);
        let pointer = name.filter(|_| wants(TYPE::PTR)).map(|name| RData::PTR(PTR(name)));
        return Some(Ok(pointer.into_iter().collect()));
    }
    zone.owns(name).then_some(Err(NoName))
}

fn reply(
    query: &Packet<'_>,
    question: &Question<'_>,
    records: Vec<RData<'static>>,
    code: RCODE,
) -> Answer {
    let mut reply = Packet::new_reply(query.id());
    reply.set_flags(PacketFlag::AUTHORITATIVE_ANSWER | PacketFlag::RECURSION_AVAILABLE);
    if query.has_flags(PacketFlag::RECURSION_DESIRED) {
        reply.set_flags(PacketFlag::RECURSION_DESIRED);
    }
    *reply.rcode_mut() = code;
    let record = |data| ResourceRecord::new(question.qname.clone(), CLASS::IN, TTL, data);
    reply.answers = records.into_iter().map(record).collect();
    reply.questions = vec![question.clone()];
    // A question that was parsed can be written again.
    reply.build_bytes_vec().map_or(Answer::Nothing, Answer::Reply)
}

/// Returns a reply to `query` with an error code only. The reply does not repeat the question,
/// which may be unreadable. The reply is empty if `query` is shorter than a header.
pub fn failure(query: &[u8], code: RCODE) -> Vec<u8> {
    let Some(&[a, b, flags, ..]) = query.get(..12) else { return Vec::new() };
    // QR is set, the opcode and RD are the query's, RA is set, and the code follows (RFC 1035,
    // section 4.1.1).
    let head = [a, b, 0x80 | flags & 0x79, 0x80 | code as u8 & 0xf];
    let mut bytes = head.to_vec();
    bytes.resize(12, 0);
    bytes
}

/// Returns a name in lower case without the last dot, or `None` if a label is not printable ASCII.
fn text(name: &Name<'_>) -> Option<String> {
    let mut text = String::new();
    for label in name.as_bytes() {
        if !label.iter().all(|byte| byte.is_ascii_graphic() && *byte != b'.') {
            return None;
        }
        if !text.is_empty() {
            text.push('.');
        }
        text.extend(label.iter().map(|byte| char::from(byte.to_ascii_lowercase())));
    }
    Some(text)
}

/// Returns the address that a name of `in-addr.arpa` (RFC 1035, section 3.5) or `ip6.arpa` (RFC
/// 3596, section 2.5) stands for.
fn reversed(name: &str) -> Option<IpAddr> {
    if let Some(rest) = name.strip_suffix(".in-addr.arpa") {
        let mut parts: Vec<&str> = rest.split('.').collect();
        parts.reverse();
        return parts.join(".").parse::<Ipv4Addr>().ok().map(IpAddr::V4);
    }
    let rest = name.strip_suffix(".ip6.arpa")?;
    let mut bits = 0_u128;
    let mut count = 0;
    for nibble in rest.split('.').rev() {
        let digit = Some(nibble).filter(|nibble| nibble.len() == 1)?;
        bits = bits << 4 | u128::from_str_radix(digit, 16).ok()?;
        count += 1;
        if count > 32 {
            return None;
        }
    }
    (count == 32).then(|| Ipv6Addr::from_bits(bits).into())
}

#[cfg(test)]
mod tests {
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
        for name in [
            "",
            "db_1.x",
            "example.org",
            "web.green",
            "notslipway.internal",
            "1.2.3.4.in-addr.arpa",
        ] {
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
            // A name is free again.
            let lease = lease("web", 10, 1);
            zone.add("a,p9,eth0", &lease);
            let known = Some((RCODE::NoError, vec!["10.0.1.10".to_owned()]));
            assert_eq!(ask(&zone, "web", TYPE::A), known);
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
}
