//! The first pass, first half: selects the frames of a burst that the source port's settings admit.
//! All decisions are made on the burst's private copies.

use slipway_ethernet_spec::{EthernetFrame, Mac, ethertype, ipv4, ipv6};

use crate::burst::{BURST, Burst, Frame, Offload, Segmentation};
use crate::lookup::{Key, Station};
use crate::rules::PortConfig;
use crate::stats::{Drop, PortStats};

/// A frame that the source port's settings admit.
#[derive(Clone, Copy, Default)]
pub(crate) struct AdmittedFrame {
    /// The frame's number in the burst.
    pub frame: u16,
    /// The frame's VLAN, with the priority of its tag.
    pub tci: u16,
}

/// Addresses for bridges' own protocols: 01:80:c2:00:00:00 to 0f (802.1Q, table 8-1).
const RESERVED: u64 = Mac([0x01, 0x80, 0xc2, 0, 0, 0]).to_bits();
const RESERVED_MASK: u64 = 0xf0ff_ffff_ffff;

/// Fills `keys` and `kept` with the admitted frames, whose tags are taken off, and counts the
/// others. Returns the number of admitted frames.
#[inline]
pub(crate) fn judge(
    config: &PortConfig,
    stats: &mut PortStats,
    burst: &mut Burst,
    keys: &mut [Key; BURST],
    kept: &mut [AdmittedFrame; BURST],
) -> usize {
    let mut count = 0;
    for frame in 0..burst.len() {
        match admit(config, burst, frame) {
            Ok((key, tci)) => {
                keys[count] = key;
                kept[count] = AdmittedFrame { frame: frame as u16, tci };
                count += 1;
            }
            Err(cause) => stats.drop_in(cause),
        }
    }
    count
}

#[inline]
fn admit(config: &PortConfig, burst: &mut Burst, frame: usize) -> Result<(Key, u16), Drop> {
    let Ok(head) = EthernetFrame::new_checked(burst.head(frame)) else { return Err(Drop::Short) };
    let (destination, source) = (head.destination(), head.source());
    if source.is_group() || source == Mac::default() {
        return Err(Drop::BadSource);
    }
    if destination.to_bits() & RESERVED_MASK == RESERVED {
        return Err(Drop::Reserved);
    }
    let (tag, kind) = (head.tag(), head.ethertype());
    let vlan = config.vlan_in(tag).ok_or(Drop::Vlan)?;
    let Frame { len, offload, .. } = burst.frames()[frame];
    let checksum = offload.checksum;
    if offload.is_some() && !is_possible(&offload, len)
        || checksum.is_some_and(|(start, _)| !is_above_ip(kind, head.header_len(), start))
    {
        return Err(Drop::BadOffload);
    }
    if config.spoof_check {
        check_sender(config, source, kind, head.payload(), checksum.is_some())?;
    }
    let priority = tag.map_or(0, |tag| tag & 0xf000);
    if tag.is_some() {
        burst.take_tag(frame);
    }
    let key =
        Key { source: Station::new(source, vlan), destination: Station::new(destination, vlan) };
    Ok((key, vlan | priority))
}

/// Returns whether the work that a frame of `len` bytes leaves can be done, and passed to a guest's
/// driver (virtio 1.2, section 5.1.6.4.1): the checksum lies in the frame, and a frame to be cut
/// has a checksum and a segment length above 0.
fn is_possible(offload: &Offload, len: u32) -> bool {
    let Some((start, offset)) = offload.checksum else { return false };
    let within = u32::from(start) + u32::from(offset) + 2 <= len;
    within && (offload.segmentation == Segmentation::None || offload.segment > 0)
}

/// Returns whether a checksum that begins at `start` cannot change addresses, whatever its offset:
/// it is filled in after the frame was checked, by the switch or by the receiver.
#[inline]
fn is_above_ip(kind: u16, network: usize, start: u16) -> bool {
    let header = match kind {
        ethertype::IPV4 => ipv4::MIN_HEADER,
        ethertype::IPV6 => ipv6::HEADER,
        _ => return false,
    };
    usize::from(start) >= network + header
}

fn check_sender(
    config: &PortConfig,
    source: Mac,
    kind: u16,
    packet: &[u8],
    summed_later: bool,
) -> Result<(), Drop> {
    if config.mac != Some(source) {
        return Err(Drop::SpoofedMac);
    }
    // Kernels take tags off, so the receiver would see an inner tag as the frame's own.
    let hidden =
        matches!(kind, ethertype::VLAN | ethertype::PROVIDER_VLAN | ethertype::OLD_PROVIDER_VLAN);
    let own = config.addresses.is_empty() || config.owns_sender(kind, packet, summed_later);
    if hidden || !own { Err(Drop::SpoofedAddress) } else { Ok(()) }
}
