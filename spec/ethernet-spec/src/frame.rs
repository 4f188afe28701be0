//! Ethernet frames: the addresses, at most one 802.1Q tag, the type and the payload.

use core::fmt;

use crate::arp::ArpPacket;
use crate::ipv4::Ipv4Packet;
use crate::ipv6::Ipv6Packet;
use crate::kind::FrameKind;
use crate::mac::Mac;
use crate::numbers::{ethertype, tci};
use crate::view::{FrameError, view};

/// Bytes of an untagged header: two addresses and a type.
pub const HEADER: usize = 14;
/// Bytes of an 802.1Q tag: its type and its control information.
pub const TAG: usize = 4;
/// Offset of the source address in a frame.
pub const SOURCE: usize = 6;
/// Offset of the type, or of the tag, in a frame.
pub const TYPE: usize = 12;
/// Bytes of the shortest frame on a wire, without the check sequence. A sender pads a shorter
/// frame.
pub const MIN_FRAME: usize = 60;

view! {
    /// An Ethernet frame with or without an 802.1Q tag. A tag within the tag counts as payload.
    EthernetFrame
}

impl<T: AsRef<[u8]>> EthernetFrame<T> {
    /// Checks that the header, with its tag if there is one, ends within the bytes.
    #[inline]
    fn check(&self) -> Result<(), FrameError> {
        let len = self.0.len();
        if len < HEADER || len < self.header_len() { Err(FrameError::Short) } else { Ok(()) }
    }

    #[inline]
    fn is_tagged(&self) -> bool {
        self.0.half(TYPE) == ethertype::VLAN
    }

    /// Returns the destination address.
    #[inline]
    pub fn destination(&self) -> Mac {
        Mac(self.0.get(0))
    }

    /// Returns the source address.
    #[inline]
    pub fn source(&self) -> Mac {
        Mac(self.0.get(SOURCE))
    }

    /// Returns the control information of the tag, or `None` if the frame has no tag.
    #[inline]
    pub fn tag(&self) -> Option<u16> {
        self.is_tagged().then(|| self.0.half(HEADER))
    }

    /// Returns the VLAN of the tag, 0 to 4095, or `None` if the frame has no tag.
    #[inline]
    pub fn vlan(&self) -> Option<u16> {
        self.tag().map(|tag| tag & tci::VLAN)
    }

    /// Returns the type of the payload, behind the tag if there is one.
    #[inline]
    pub fn ethertype(&self) -> u16 {
        self.0.half(if self.is_tagged() { TYPE + TAG } else { TYPE })
    }

    /// Returns the bytes of the header, with the tag: 14 or 18.
    #[inline]
    pub fn header_len(&self) -> usize {
        if self.is_tagged() { HEADER + TAG } else { HEADER }
    }

    /// Returns the bytes behind the header.
    #[inline]
    pub fn payload(&self) -> &[u8] {
        self.0.rest(self.header_len())
    }

    /// Returns the kind of the frame.
    pub fn kind(&self) -> FrameKind {
        let packet = self.payload();
        match self.ethertype() {
            ethertype::ARP => FrameKind::Arp,
            ethertype::IPV4 => {
                Ipv4Packet::new_checked(packet).map_or(FrameKind::Ipv4, |packet| packet.kind())
            }
            ethertype::IPV6 => {
                Ipv6Packet::new_checked(packet).map_or(FrameKind::Ipv6, |packet| packet.kind())
            }
            _ => FrameKind::Other,
        }
    }
}

impl<T: AsRef<[u8]> + AsMut<[u8]>> EthernetFrame<T> {
    /// Writes the destination address.
    #[inline]
    pub fn set_destination(&mut self, address: Mac) {
        self.0.put(0, address.0);
    }

    /// Writes the source address.
    #[inline]
    pub fn set_source(&mut self, address: Mac) {
        self.0.put(SOURCE, address.0);
    }

    /// Writes the type of a frame without a tag. A frame with a tag would lose it.
    #[inline]
    pub fn set_ethertype(&mut self, ethertype: u16) {
        self.0.put_half(TYPE, ethertype);
    }

    /// Returns the bytes behind the header, to be written.
    #[inline]
    pub fn payload_mut(&mut self) -> &mut [u8] {
        let at = self.header_len();
        self.0.rest_mut(at)
    }
}

impl<T: AsRef<[u8]>> fmt::Display for EthernetFrame<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} > {}", self.source(), self.destination())?;
        if let Some(vlan) = self.vlan() {
            write!(f, " vlan {vlan}")?;
        }
        let packet = self.payload();
        match self.ethertype() {
            ethertype::ARP => print(f, FrameKind::Arp, ArpPacket::new_checked(packet)),
            ethertype::IPV4 => print(f, FrameKind::Ipv4, Ipv4Packet::new_checked(packet)),
            ethertype::IPV6 => print(f, FrameKind::Ipv6, Ipv6Packet::new_checked(packet)),
            other => write!(f, " type {other:#06x}"),
        }
    }
}

/// Prints a packet, or the kind of packet and the error if the packet has no valid header.
fn print<P: fmt::Display>(
    f: &mut fmt::Formatter<'_>,
    kind: FrameKind,
    packet: Result<P, FrameError>,
) -> fmt::Result {
    match packet {
        Ok(packet) => write!(f, " {packet}"),
        Err(error) => write!(f, " {kind} ({error})"),
    }
}
