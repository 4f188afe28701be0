//! Ethernet frames as a switch sees them: addresses, tags, and the offsets of the addresses that a
//! switch checks in the protocols above.
//!
//! IEEE 802.3 clause 3 (frames), IEEE 802.1Q clause 9 (tags), RFC 826 (ARP), RFC 791 (IPv4), RFC
//! 8200 (IPv6), RFC 4861 (neighbour discovery). Frames are without preamble and frame check
//! sequence, which software does not see.
//!
//! Everything here is a number, an offset or a small value, except the Internet checksum. Not here:
//! LLC frames, except that their type field is a length; 802.1ad, except its types; protocols above
//! IP, except their numbers and parts of ICMPv6.
//!
//! No dependencies.
#![no_std]

pub mod checksum;
mod mac;

pub use mac::{BadMac, Mac};

/// Bytes of an untagged header: two addresses and a type.
pub const HEADER: usize = 14;
/// Bytes of an 802.1Q tag: its type and its control information.
pub const TAG: usize = 4;
/// Offset of the source address in a frame.
pub const SOURCE: usize = 6;
/// Offset of the type, or of the tag, in a frame.
pub const TYPE: usize = 12;
/// Bytes of the shortest frame on a wire; the sender pads a shorter one.
pub const MIN_FRAME: usize = 60;

/// Types of frames (IANA, *IEEE 802 Numbers*). A value below 0x600 in the type field is a length.
pub mod ethertype {
    /// IPv4.
    pub const IPV4: u16 = 0x0800;
    /// ARP.
    pub const ARP: u16 = 0x0806;
    /// An 802.1Q tag follows.
    pub const VLAN: u16 = 0x8100;
    /// IPv6.
    pub const IPV6: u16 = 0x86dd;
    /// An 802.1ad tag follows.
    pub const PROVIDER_VLAN: u16 = 0x88a8;
    /// An 802.1ad tag follows; the type used before 802.1ad had one of its own.
    pub const OLD_PROVIDER_VLAN: u16 = 0x9100;
}

/// The control information of an 802.1Q tag (clause 9.6).
pub mod tci {
    /// Mask of the VLAN identifier. Identifier 0 is a tag with a priority only; 4095 is reserved.
    pub const VLAN: u16 = 0x0fff;
    /// Largest usable VLAN identifier.
    pub const LAST_VLAN: u16 = 4094;
}

/// Offsets in the ARP packet that follows the header, for IPv4 over Ethernet (RFC 826).
pub mod arp {
    /// The sender's hardware address.
    pub const SENDER_MAC: usize = 8;
    /// The sender's protocol address.
    pub const SENDER_IP: usize = 14;
    /// Bytes of the packet.
    pub const LEN: usize = 28;
}

/// Offsets in an IPv4 header (RFC 791, section 3.1).
pub mod ipv4 {
    /// Total length, header included.
    pub const TOTAL_LENGTH: usize = 2;
    /// Identification.
    pub const IDENTIFICATION: usize = 4;
    /// The protocol of the payload.
    pub const PROTOCOL: usize = 9;
    /// Header checksum.
    pub const CHECKSUM: usize = 10;
    /// Source address.
    pub const SOURCE: usize = 12;
    /// Bytes of a header without options.
    pub const MIN_HEADER: usize = 20;
}

/// Offsets in an IPv6 header (RFC 8200, section 3), and neighbour discovery (RFC 4861).
pub mod ipv6 {
    /// Payload length.
    pub const PAYLOAD_LENGTH: usize = 4;
    /// The next header.
    pub const NEXT_HEADER: usize = 6;
    /// Source address.
    pub const SOURCE: usize = 8;
    /// Bytes of the header.
    pub const HEADER: usize = 40;
    /// Type of a router advertisement, in the first byte of ICMPv6.
    pub const ROUTER_ADVERTISEMENT: u8 = 134;
    /// Type of a neighbour advertisement.
    pub const NEIGHBOR_ADVERTISEMENT: u8 = 136;
    /// Type of a redirect.
    pub const REDIRECT: u8 = 137;
    /// Offset of the target address of a neighbour advertisement, from the start of ICMPv6.
    pub const ADVERTISED_TARGET: usize = 8;
}

/// Protocols above IP (IANA, *Protocol Numbers*).
pub mod protocol {
    /// TCP.
    pub const TCP: u8 = 6;
    /// UDP.
    pub const UDP: u8 = 17;
    /// Hop-by-hop options of IPv6 (RFC 8200, section 4.3).
    pub const HOP_BY_HOP: u8 = 0;
    /// A routing header of IPv6 (section 4.4).
    pub const ROUTING: u8 = 43;
    /// Destination options of IPv6 (section 4.6).
    pub const DESTINATION: u8 = 60;
    /// An authentication header (RFC 4302): its length field counts words of four bytes, less two.
    pub const AUTHENTICATION: u8 = 51;
    /// ICMPv6.
    pub const ICMPV6: u8 = 58;
}
