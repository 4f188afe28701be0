//! Numbers of protocols and tags.

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

/// Protocols above IP (IANA, *Protocol Numbers*).
pub mod protocol {
    /// ICMP.
    pub const ICMP: u8 = 1;
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
