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

    /// Adds the names of a lease if no other lease has one of them. Returns whether it did.
    pub fn add_new(&mut self, id: &str, lease: &Lease) -> bool {
        let is_new =
            names(id, lease).all(|(name, _)| !self.names.contains_key(&name.to_ascii_lowercase()));
        if is_new {
            self.add(id, lease);
        }
        is_new
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
mod tests;
