//! Traces: counts of a port's frames by kind, and headers of some of them, for a reader on another
//! thread.

use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Duration;

use slipway_ethernet_spec::{Mac, TYPE, arp, ethertype, ipv4, ipv6, protocol, tci};
use slipway_rate::{Bucket, Rate};

use super::{Observer, Way, Ways};
use crate::{Burst, Pick};

/// The largest number of headers that wait for a reader; more are only counted.
const WAITING: usize = 1024;
/// The burst of headers, in seconds of their rate.
const BURST_SECONDS: u64 = 1;

/// The kind of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum FrameKind {
    /// ARP.
    Arp,
    /// TCP over IPv4.
    Tcp4,
    /// UDP over IPv4.
    Udp4,
    /// ICMP.
    Icmp4,
    /// Anything else over IPv4.
    Ipv4,
    /// TCP directly over IPv6.
    Tcp6,
    /// UDP directly over IPv6.
    Udp6,
    /// ICMPv6 directly over IPv6.
    Icmp6,
    /// Anything else over IPv6, extension headers included.
    Ipv6,
    /// Anything else.
    Other,
}

impl FrameKind {
    /// Every kind, with its name.
    pub const ALL: [(Self, &'static str); 10] = [
        (Self::Arp, "arp"),
        (Self::Tcp4, "tcp"),
        (Self::Udp4, "udp"),
        (Self::Icmp4, "icmp"),
        (Self::Ipv4, "ipv4"),
        (Self::Tcp6, "tcp6"),
        (Self::Udp6, "udp6"),
        (Self::Icmp6, "icmp6"),
        (Self::Ipv6, "ipv6"),
        (Self::Other, "other"),
    ];
}

impl fmt::Display for FrameKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(Self::ALL[*self as usize].1)
    }
}

/// The header of a frame, as far as it lies in the frame's first 96 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Summary {
    /// The time when the frame passed, since the epoch.
    pub time: Duration,
    /// The direction.
    pub way: Way,
    /// Bytes of the whole frame.
    pub len: u32,
    /// The destination address.
    pub to: Mac,
    /// The source address.
    pub from: Mac,
    /// The VLAN of the tag.
    pub vlan: Option<u16>,
    /// The EtherType after any tag.
    pub ethertype: u16,
    /// The kind of the frame.
    pub kind: FrameKind,
    /// Source and destination addresses of the packet; of ARP, the sender's and the target's.
    pub addresses: Option<(IpAddr, IpAddr)>,
    /// Source and destination ports of TCP and UDP; only in the first fragment.
    pub ports: Option<(u16, u16)>,
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let way = if self.way == Way::In { "sent" } else { "received" };
        write!(f, "{way} {} > {}", self.from, self.to)?;
        if let Some(vlan) = self.vlan {
            write!(f, " vlan {vlan}")?;
        }
        match self.kind {
            FrameKind::Other => write!(f, " type {:#06x}", self.ethertype)?,
            kind => write!(f, " {kind}")?,
        }
        match (self.addresses, self.ports) {
            (Some((from, to)), Some((source, destination))) => {
                let socket = std::net::SocketAddr::new;
                write!(f, " {} > {}", socket(from, source), socket(to, destination))?;
            }
            (Some((from, to)), None) => write!(f, " {from} > {to}")?,
            _ => {}
        }
        write!(f, ", {} bytes", self.len)
    }
}

/// Counters of one kind of frame in one direction.
#[derive(Default)]
struct Cell {
    frames: AtomicU64,
    bytes: AtomicU64,
}

#[derive(Default)]
struct Shared {
    /// The counters, by direction: inward, outward.
    cells: [[Cell; FrameKind::ALL.len()]; 2],
    untold: AtomicU64,
}

/// The number of frames of one kind in one direction, and their bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counts {
    /// The kind of the frames.
    pub kind: FrameKind,
    /// The direction.
    pub way: Way,
    /// The number of frames.
    pub frames: u64,
    /// The number of bytes.
    pub bytes: u64,
}

/// The switch's end of a trace: an [`Observer`].
pub struct Trace {
    shared: Arc<Shared>,
    ways: Ways,
    clock: fn() -> Duration,
    bucket: Bucket,
    told: SyncSender<Summary>,
}

/// The reader's end of a trace. Its channel ends when the observer is dropped.
pub struct Tracing {
    shared: Arc<Shared>,
    /// The headers.
    pub headers: Receiver<Summary>,
}

impl Trace {
    /// Creates both ends of a trace, which counts all frames and reports the headers of at most
    /// `headers` a second. `clock` returns the time since the epoch, and must not wait.
    pub fn new(headers: u32, ways: Ways, clock: fn() -> Duration) -> (Self, Tracing) {
        let per_second = u64::from(headers.max(1));
        let bucket = Bucket::new(Rate { per_second, burst: per_second * BURST_SECONDS });
        let shared = Arc::new(Shared::default());
        let (told, headers) = sync_channel(WAITING);
        let tracing = Tracing { shared: Arc::clone(&shared), headers };
        (Self { shared, ways, clock, bucket, told }, tracing)
    }
}

impl Observer for Trace {
    fn see(&mut self, way: Way, burst: &Burst, picks: &[Pick]) {
        if !self.ways.has(way) {
            return;
        }
        let time = (self.clock)();
        let mut untold = 0;
        for pick in picks {
            let summary = summarise(time, way, burst, *pick);
            let cell = &self.shared.cells[way as usize][summary.kind as usize];
            // Only one thread writes.
            let add = |to: &AtomicU64, count: u64| {
                to.store(to.load(Ordering::Relaxed) + count, Ordering::Relaxed);
            };
            add(&cell.frames, 1);
            add(&cell.bytes, summary.len.into());
            if self.bucket.opens_at() <= time && self.told.try_send(summary).is_ok() {
                self.bucket.take(1, time);
            } else {
                untold += 1;
            }
        }
        self.shared.untold.fetch_add(untold, Ordering::Relaxed);
    }
}

impl Tracing {
    /// Returns the counts so far, without kinds that had no frame.
    pub fn counts(&self) -> Vec<Counts> {
        let ways = [Way::In, Way::Out].into_iter();
        let all = ways.flat_map(|way| {
            FrameKind::ALL.map(|(kind, _)| {
                let cell = &self.shared.cells[way as usize][kind as usize];
                let frames = cell.frames.load(Ordering::Relaxed);
                Counts { kind, way, frames, bytes: cell.bytes.load(Ordering::Relaxed) }
            })
        });
        all.filter(|count| count.frames > 0).collect()
    }

    /// Returns the number of frames that were counted but whose headers were not reported.
    pub fn untold(&self) -> u64 {
        self.shared.untold.load(Ordering::Relaxed)
    }
}

/// Summarises a frame. The head is a private copy with whatever content the peer wrote.
fn summarise(time: Duration, way: Way, burst: &Burst, pick: Pick) -> Summary {
    let head = burst.head(pick.frame.into());
    let mac = |at: usize| Mac(field(head, at).unwrap_or_default());
    let mut at = TYPE;
    let mut ethertype = number(head, at).unwrap_or(0);
    let mut vlan = (pick.tci != 0).then_some(pick.tci & tci::VLAN);
    if ethertype == ethertype::VLAN {
        vlan = number(head, at + 2).map(|tci| tci & tci::VLAN);
        at += slipway_ethernet_spec::TAG;
        ethertype = number(head, at).unwrap_or(0);
    }
    let packet = head.get(at + 2..).unwrap_or_default();
    let (kind, addresses, above) = classify(ethertype, packet);
    let has_ports =
        matches!(kind, FrameKind::Tcp4 | FrameKind::Udp4 | FrameKind::Tcp6 | FrameKind::Udp6);
    let ports =
        above.filter(|_| has_ports).and_then(|at| number(packet, at).zip(number(packet, at + 2)));
    let len = burst.len_of(pick) as u32;
    Summary { time, way, len, to: mac(0), from: mac(6), vlan, ethertype, kind, addresses, ports }
}

type Classified = (FrameKind, Option<(IpAddr, IpAddr)>, Option<usize>);

/// Returns a packet's kind, its addresses, and the offset of the TCP or UDP header if the packet
/// may have one.
fn classify(ethertype: u16, packet: &[u8]) -> Classified {
    let v4 = |at: usize| field::<4>(packet, at).map(IpAddr::from);
    let v6 = |at: usize| field::<16>(packet, at).map(IpAddr::from);
    match ethertype {
        ethertype::ARP => (FrameKind::Arp, v4(arp::SENDER_IP).zip(v4(arp::LEN - 4)), None),
        ethertype::IPV4 => {
            let kind = match packet.get(ipv4::PROTOCOL) {
                Some(&protocol::TCP) => FrameKind::Tcp4,
                Some(&protocol::UDP) => FrameKind::Udp4,
                Some(1) => FrameKind::Icmp4,
                _ => FrameKind::Ipv4,
            };
            let header = packet.first().map_or(0, |first| usize::from(first & 15) * 4);
            let first = number(packet, 6).is_some_and(|offset| offset & 0x1fff == 0);
            let above = (first && header >= ipv4::MIN_HEADER).then_some(header);
            (kind, v4(ipv4::SOURCE).zip(v4(ipv4::SOURCE + 4)), above)
        }
        ethertype::IPV6 => {
            let kind = match packet.get(ipv6::NEXT_HEADER) {
                Some(&protocol::TCP) => FrameKind::Tcp6,
                Some(&protocol::UDP) => FrameKind::Udp6,
                Some(&protocol::ICMPV6) => FrameKind::Icmp6,
                _ => FrameKind::Ipv6,
            };
            (kind, v6(ipv6::SOURCE).zip(v6(ipv6::SOURCE + 16)), Some(ipv6::HEADER))
        }
        _ => (FrameKind::Other, None, None),
    }
}

fn number(bytes: &[u8], at: usize) -> Option<u16> {
    field(bytes, at).map(u16::from_be_bytes)
}

fn field<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..at + N)?.try_into().ok()
}
