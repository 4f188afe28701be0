//! A decorator that translates the address of a port's peer, so that a guest that began with the
//! machine of another one need not change its own.
//!
//! It changes the source address of the peer's frames, the sender's hardware address in ARP packets
//! and the link-layer address options of IPv6's neighbour discovery; in frames to the peer, the
//! destination address and the target's hardware address of ARP. All of these are in frames'
//! private heads. Another station may have the address that the peer takes for its own, as the
//! sandbox that got the address of the saved one: so destinations of the peer's frames, and sources
//! of frames to the peer, are those of others and stay.
//!
//! An option farther back than the head stays as it is, as do the client's addresses in DHCP: the
//! host gives its guests their addresses.

use slipway_ethernet_spec::{
    ArpPacket, EthernetFrame, Icmpv6Message, Ipv6Packet, Mac, ethertype, icmpv6,
};

use super::Layer;
use crate::{BURST, Burst, Delivered, Pick, Port, PortStats};

/// Translates between the address that the peer takes for its own and that of the port.
pub struct Translated {
    inner: Box<dyn Port>,
    peer: Mac,
    network: Mac,
    /// The frames of a delivery: other ports get those of the switch's burst. Empty in between.
    burst: Burst,
    picks: Vec<Pick>,
}

impl Translated {
    /// Wraps `inner`, whose peer takes `peer` for its address, and has `network` on the switch.
    /// Both are unicast addresses.
    pub fn new(inner: Box<dyn Port>, peer: Mac, network: Mac) -> Self {
        Self { inner, peer, network, burst: Burst::new(), picks: Vec::with_capacity(BURST) }
    }
}

impl Port for Translated {
    super::forward_to_inner!(nothing_waits);

    fn take(&mut self, burst: &mut Burst, limit: usize) -> bool {
        let before = burst.len();
        let more = self.inner.take(burst, limit);
        for frame in before..burst.len() {
            let checksum = burst.frames()[frame].offload.checksum;
            replace_own(burst.head_mut(frame), (self.peer, self.network), checksum);
        }
        more
    }

    fn deliver(&mut self, burst: &Burst, picks: &[Pick]) -> Delivered {
        self.picks.clear();
        // A burst has no more frames, and each is delivered to a port once.
        for (number, pick) in (0..).zip(picks.iter().take(BURST)) {
            self.burst.adopt(burst, usize::from(pick.frame));
            let head = self.burst.head_mut(usize::from(number));
            replace_destination(head, (self.network, self.peer));
            self.picks.push(Pick { frame: number, tci: pick.tci });
        }
        let delivered = self.inner.deliver(&self.burst, &self.picks);
        self.burst.release();
        delivered
    }

    fn account(&mut self, stats: &mut PortStats) {
        self.inner.account(stats);
    }

    fn inner(&mut self) -> Option<(Layer, &mut Box<dyn Port>)> {
        Some((Layer::Translation, &mut self.inner))
    }
}

/// Replaces the address that the sender of a frame takes for its own, in the frame's head.
/// `checksum` is that of the frame's offload. A frame whose header is cut off stays as it is: the
/// switch drops it.
fn replace_own(head: &mut [u8], (from, to): (Mac, Mac), checksum: Option<(u16, u16)>) {
    let Ok(mut frame) = EthernetFrame::new_checked(head) else { return };
    if frame.source() == from {
        frame.set_source(to);
    }
    match frame.ethertype() {
        ethertype::ARP => {
            if let Ok(mut packet) = ArpPacket::new_checked(frame.payload_mut())
                && packet.sender_mac() == from
            {
                packet.set_sender_mac(to);
            }
        }
        ethertype::IPV6 => {
            let at = frame.header_len();
            replace_in_ipv6(frame.payload_mut(), at, (from, to), checksum);
        }
        _ => {}
    }
}

/// Replaces the address of the station that a frame is for, in the frame's head.
fn replace_destination(head: &mut [u8], (from, to): (Mac, Mac)) {
    let Ok(mut frame) = EthernetFrame::new_checked(head) else { return };
    if frame.destination() == from {
        frame.set_destination(to);
    }
    if frame.ethertype() == ethertype::ARP
        && let Ok(mut packet) = ArpPacket::new_checked(frame.payload_mut())
        && packet.target_mac() == from
    {
        packet.set_target_mac(to);
    }
}

/// Replaces an address in the IPv6 packet that begins at `at` of its frame.
fn replace_in_ipv6(
    packet: &mut [u8],
    at: usize,
    (from, to): (Mac, Mac),
    checksum: Option<(u16, u16)>,
) {
    let Ok(known) = Ipv6Packet::new_checked(&*packet) else { return };
    let message_len = known.icmpv6().map_or(0, <[u8]>::len);
    // The message goes to the end of the known part of the packet.
    let before = packet.len().saturating_sub(message_len);
    let place = at + before + icmpv6::CHECKSUM;
    let summed_later =
        checksum.is_some_and(|(start, offset)| usize::from(start) + usize::from(offset) == place);
    if let Ok(mut message) = Icmpv6Message::new_checked(&mut packet[before..]) {
        message.replace_link_address(from, to, summed_later);
    }
}

#[cfg(test)]
mod tests {
    use slipway_ethernet_spec::checksum::{finish, fold, sum};
    use slipway_ethernet_spec::{HEADER, TAG, protocol};

    use super::*;

    const FROM: Mac = Mac([0x5a, 0x11, 0x0a, 0, 0, 1]);
    const TO: Mac = Mac([0x5a, 0xff, 0xff, 0xd5, 0xfe, 2]);
    const OTHER: Mac = Mac([2, 0, 0, 0, 0, 9]);

    /// Returns a frame, with a tag if one is wanted.
    fn frame(tagged: bool, kind: u16, packet: &[u8]) -> Vec<u8> {
        let tag: &[u8] = if tagged { &[0x81, 0, 0, 5] } else { &[] };
        [&OTHER.0[..], &FROM.0, tag, &kind.to_be_bytes(), packet].concat()
    }

    /// Returns an IPv6 packet with a message of neighbour discovery: its type, fixed bytes behind
    /// the checksum, and options. Extension headers are in front of it if they are wanted.
    fn discovery(kind: u8, fixed: usize, options: &[u8], extended: bool) -> Vec<u8> {
        let message = [&[kind, 0, 0, 0][..], &vec![0x33; fixed], options].concat();
        let mut packet = vec![0x60, 0, 0, 0, 0, 0, protocol::ICMPV6, 255];
        packet.extend([7; 32]);
        packet[4..6].copy_from_slice(&(message.len() as u16).to_be_bytes());
        if extended {
            packet[6] = protocol::HOP_BY_HOP;
            packet.extend([protocol::ICMPV6, 0, 5, 2, 0, 0, 1, 0]);
        }
        let at = packet.len();
        packet.extend(&message);
        let value = finish(message_sum(&packet, at));
        packet[at + 2..at + 4].copy_from_slice(&value.to_be_bytes());
        packet
    }

    /// Returns the sum of the message at `at` of a packet and of its pseudo header.
    fn message_sum(packet: &[u8], at: usize) -> u64 {
        let message = &packet[at..];
        let pseudo = u64::from(protocol::ICMPV6) + message.len() as u64;
        sum(&packet[8..40]) + pseudo + sum(message)
    }

    fn option(kind: u8, mac: Mac) -> Vec<u8> {
        [&[kind, 1][..], &mac.0].concat()
    }

    /// Returns a frame of the peer as the switch gets it.
    fn replaced(frame: &[u8], checksum: Option<(u16, u16)>) -> Vec<u8> {
        let mut frame = frame.to_vec();
        replace_own(&mut frame, (FROM, TO), checksum);
        frame
    }

    /// Returns a frame of the switch as the peer gets it.
    fn delivered(frame: &[u8]) -> Vec<u8> {
        let mut frame = frame.to_vec();
        replace_destination(&mut frame, (TO, FROM));
        frame
    }

    #[test]
    fn headers_have_the_other_address() {
        for tagged in [false, true] {
            let sent = frame(tagged, 0x88b5, &FROM.0);
            let got = replaced(&sent, None);
            assert_eq!(
                (&got[..6], &got[6..12], &got[12..]),
                (&OTHER.0[..], &TO.0[..], &sent[12..])
            );
            let back = [&TO.0[..], &OTHER.0, &sent[12..]].concat();
            assert_eq!(delivered(&back), [&FROM.0[..], &OTHER.0, &sent[12..]].concat());
        }
        let others = [&OTHER.0[..], &OTHER.0, &[8, 0]].concat();
        assert_eq!((replaced(&others, None), delivered(&others)), (others.clone(), others));
    }

    #[test]
    fn arp_has_the_other_address() {
        let packet = |sender: Mac, target: Mac| {
            let (one, two): (&[u8], &[u8]) = (&[10, 0, 0, 1], &[10, 0, 0, 2]);
            [&[0, 1, 8, 0, 6, 4, 0, 2][..], &sender.0, one, &target.0, two].concat()
        };
        for tagged in [false, true] {
            let at = HEADER + if tagged { TAG } else { 0 };
            let sent = |sender, target| frame(tagged, ethertype::ARP, &packet(sender, target));
            let got = |sender, target| replaced(&sent(sender, target), None)[at..].to_vec();
            assert_eq!(got(FROM, OTHER), packet(TO, OTHER));
            assert_eq!(got(OTHER, OTHER), packet(OTHER, OTHER));
            let got = |sender, target| delivered(&sent(sender, target))[at..].to_vec();
            assert_eq!(got(OTHER, TO), packet(OTHER, FROM));
            assert_eq!(got(OTHER, OTHER), packet(OTHER, OTHER));
        }
    }

    /// A sandbox may have got the address with which the peer's machine was saved.
    #[test]
    fn a_station_with_the_address_that_the_peer_keeps_is_another_one() {
        let packet = [&[0, 1, 8, 0, 6, 4, 0, 2][..], &FROM.0, &[10, 0, 0, 1], &FROM.0, &[0; 4]];
        let both = [&FROM.0[..], &FROM.0, &[8, 6], &packet.concat()].concat();
        let sender_at = HEADER + 8;
        let sent = [&both[..6], &TO.0, &both[12..sender_at], &TO.0, &both[sender_at + 6..]];
        assert_eq!(replaced(&both, None), sent.concat());
        assert_eq!(delivered(&both), both);
    }

    #[test]
    fn neighbour_discovery_has_the_other_address_and_its_checksum() {
        let messages = [(133, 4), (134, 12), (135, 20), (136, 20)];
        for (kind, fixed) in messages {
            for (tagged, extended) in [(false, false), (true, false), (false, true)] {
                for options in [
                    option(1, FROM),
                    option(2, FROM),
                    [option(14, FROM), option(1, FROM)].concat(),
                    option(1, OTHER),
                ] {
                    let packet = discovery(kind, fixed, &options, extended);
                    let sent = frame(tagged, ethertype::IPV6, &packet);
                    let got = replaced(&sent, None);
                    let got = &got[sent.len() - packet.len()..];
                    let at = packet.len() - 4 - fixed - options.len();
                    assert_eq!(fold(message_sum(got, at)), 0xffff, "the checksum holds");
                    let last = &got[got.len() - 6..];
                    let is_from = options.ends_with(&FROM.0);
                    assert_eq!(last, if is_from { TO.0 } else { OTHER.0 });
                    assert_eq!(got[..at + 2], packet[..at + 2]);
                    let kept = packet.len() - 6;
                    assert_eq!(got[at + 4..kept], packet[at + 4..kept], "another option stays");
                }
            }
        }
    }

    #[test]
    fn a_checksum_that_is_filled_in_later_stays() {
        let packet = discovery(135, 20, &option(1, FROM), false);
        let sent = frame(false, ethertype::IPV6, &packet);
        let message = HEADER + 40;
        let got = replaced(&sent, Some((message as u16, 2)));
        assert_eq!(got[message..message + 4], sent[message..message + 4]);
        assert!(got.ends_with(&TO.0));
        // This one is of something else, so that the message's is complete.
        let got = replaced(&sent, Some((message as u16, 6)));
        assert_eq!(fold(message_sum(&got[HEADER..], 40)), 0xffff);
    }

    #[test]
    fn what_is_cut_off_or_malformed_changes_no_more_than_its_addresses() {
        let packet = discovery(136, 20, &option(2, FROM), true);
        let whole = frame(true, ethertype::IPV6, &packet);
        for len in 0..whole.len() {
            let got = replaced(&whole[..len], None);
            assert_eq!(got.len(), len);
            assert_eq!(got.get(12..), whole[..len].get(12..), "the option is cut off");
        }
        for units in [0, 2, 255] {
            let options = [[14, units, 0, 0, 0, 0, 0, 0].to_vec(), option(1, FROM)].concat();
            let sent = frame(false, ethertype::IPV6, &discovery(135, 20, &options, false));
            assert_eq!(replaced(&sent, None)[12..], sent[12..], "the option is not reached");
        }
        // Another message, another protocol, no IPv6.
        for (at, byte) in [(HEADER + 40, 128), (HEADER + 6, 17), (HEADER, 0x40)] {
            let packet = discovery(135, 20, &option(1, FROM), false);
            let mut sent = frame(false, ethertype::IPV6, &packet);
            sent[at] = byte;
            assert_eq!(replaced(&sent, None)[12..], sent[12..]);
        }
    }
}
