//! Ethernet frames and the packets in them, as switches and network interfaces see them.
//!
//! IEEE 802.3 clause 3 (frames), IEEE 802.1Q clause 9 (tags), RFC 826 (ARP), RFC 791 (IPv4), RFC
//! 8200 (IPv6), RFC 4443 and 4861 (ICMPv6), RFC 9293 (TCP), RFC 768 (UDP). Frames are without
//! preamble and frame check sequence, which software does not see.
//!
//! A view ([`EthernetFrame`], [`Ipv4Packet`], …) wraps the bytes from a header's beginning on. Its
//! `new_checked` checks the header's lengths once, so that each field lies in the bytes. All views
//! have this contract:
//! - No method panics, whatever the bytes are. In a view that was not checked, a field beyond the
//!   end of the bytes is read as zeros, and is not written.
//! - The content is hostile: a view checks where a header ends, not what its other fields say. A
//!   payload is the rest of the bytes, which may be the head of a longer frame, or be padded.
//! - A view copies nothing and allocates nothing.
//!
//! Frames and packets print as one line of text: addresses, VLAN, protocol, ports.
//!
//! Not here: LLC frames, except that their type field is a length; 802.1ad, except its types; the
//! options of IPv4 and TCP; protocols above IP other than TCP, UDP and parts of ICMPv6.
//!
//! No dependencies.
#![no_std]

pub mod arp;
pub mod checksum;
mod frame;
pub mod icmpv6;
pub mod ipv4;
pub mod ipv6;
mod kind;
mod mac;
mod numbers;
pub mod tcp;
#[cfg(test)]
mod tests;
pub mod udp;
mod view;

pub use arp::ArpPacket;
pub use frame::{EthernetFrame, HEADER, MIN_FRAME, SOURCE, TAG, TYPE};
pub use icmpv6::{Icmpv6Message, message_type};
pub use ipv4::Ipv4Packet;
pub use ipv6::Ipv6Packet;
pub use kind::FrameKind;
pub use mac::{BadMac, Mac};
pub use numbers::{ethertype, protocol, tci};
pub use tcp::TcpSegment;
pub use udp::UdpDatagram;
pub use view::FrameError;
