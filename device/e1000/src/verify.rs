//! Checks the checksums of received frames (section 3.2.9).

use slipway_e1000_spec::{receive_error, receive_status, rxcsum};
use slipway_ethernet_spec::checksum::{fold, sum};
use slipway_ethernet_spec::{
    EthernetFrame, Ipv4Packet, Ipv6Packet, UdpDatagram, ethertype, ipv6, protocol,
};
use slipway_switch::{Burst, Pick};

/// Status and error bits of a receive descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Checked {
    pub status: u8,
    pub errors: u8,
}

/// Nothing was checked.
const IGNORED: Checked = Checked { status: receive_status::IXSM, errors: 0 };

/// The place of a packet's transport header.
struct Transport {
    at: usize,
    /// Bytes from there to the packet's end.
    len: usize,
    protocol: u8,
    /// The sum of the pseudo header, not folded.
    pseudo: u64,
    /// The result of the IPv4 header's check, if there is one.
    header: Option<bool>,
    fragment: bool,
}

/// Checks frame `pick` of a burst as `wanted`, RXCSUM, asks for.
#[inline]
pub(crate) fn check(burst: &Burst, pick: Pick, wanted: u32) -> Checked {
    let offload = burst.frames()[usize::from(pick.frame)].offload;
    if offload.is_some() || wanted & (rxcsum::IPOFL | rxcsum::TUOFL) == 0 {
        return IGNORED;
    }
    let head = burst.head(usize::from(pick.frame));
    let Some(found) = transport(head) else { return IGNORED };
    let mut checked = Checked { status: 0, errors: 0 };
    if let Some(right) = found.header
        && wanted & rxcsum::IPOFL != 0
    {
        checked.status |= receive_status::IPCS;
        checked.errors |= if right { 0 } else { receive_error::IPE };
    }
    let known = matches!(found.protocol, protocol::TCP | protocol::UDP) && !found.fragment;
    if known && wanted & rxcsum::TUOFL != 0 {
        match if offload.valid { Some(true) } else { payload(burst, pick, &found) } {
            Some(true) => checked.status |= receive_status::TCPCS,
            Some(false) => {
                checked.status |= receive_status::TCPCS;
                checked.errors |= receive_error::TCPE;
            }
            None => {}
        }
    }
    if checked.status == 0 { IGNORED } else { checked }
}

fn transport(head: &[u8]) -> Option<Transport> {
    let frame = EthernetFrame::new_checked(head).ok()?;
    let ip = frame.header_len();
    match frame.ethertype() {
        ethertype::IPV4 => {
            let packet = Ipv4Packet::new_checked(frame.payload()).ok()?;
            let len = usize::from(packet.total_length()).checked_sub(packet.header_len())?;
            Some(Transport {
                at: ip + packet.header_len(),
                len,
                protocol: packet.protocol(),
                pseudo: packet.pseudo_sum(len),
                header: Some(packet.is_checksum_right()),
                fragment: packet.is_fragment(),
            })
        }
        ethertype::IPV6 => {
            let packet = Ipv6Packet::new_checked(frame.payload()).ok()?;
            let len = usize::from(packet.payload_length());
            Some(Transport {
                at: ip + ipv6::HEADER,
                len,
                protocol: packet.next_header(),
                pseudo: packet.pseudo_sum(len),
                header: None,
                fragment: false,
            })
        }
        _ => None,
    }
}

/// Checks the transport header and its payload. Returns `None` if they are not whole, or have no
/// checksum.
fn payload(burst: &Burst, pick: Pick, found: &Transport) -> Option<bool> {
    let mut reader = burst.read(Pick { tci: 0, ..pick });
    let mut bytes = [0; 2048];
    let skipped = bytes.get_mut(..found.at)?;
    if reader.read(skipped).ok()? < found.at {
        return None;
    }
    let (mut left, mut all, mut first) = (found.len, found.pseudo, true);
    while left > 0 {
        let part = left.min(bytes.len());
        let part = &mut bytes[..part];
        if reader.read(part).ok()? < part.len() {
            return None;
        }
        if std::mem::take(&mut first)
            && found.protocol == protocol::UDP
            && UdpDatagram::new_checked(&*part).ok()?.checksum() == 0
        {
            return None;
        }
        // Every part but the last has an even length.
        all += sum(part);
        left -= part.len();
    }
    Some(fold(all) == 0xffff)
}
