//! The network device (section 5.1).

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::{U16, U32};

/// Device type (section 5).
pub const DEVICE_TYPE: u16 = 1;

bitflags::bitflags! {
    /// Feature bits of a network device (section 5.1.3). "Guest" is what the driver can receive,
    /// "host" what the device can.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
    pub struct Features: u64 {
        /// Device takes frames with a partial checksum.
        const CSUM = 1 << 0;
        /// Driver takes frames with a partial checksum.
        const GUEST_CSUM = 1 << 1;
        /// Offloads of what the driver receives change at run time (section 5.1.6.5.8).
        const CTRL_GUEST_OFFLOADS = 1 << 2;
        /// Device says its maximum MTU.
        const MTU = 1 << 3;
        /// Device has a MAC address.
        const MAC = 1 << 5;
        /// Driver receives TSOv4.
        const GUEST_TSO4 = 1 << 7;
        /// Driver receives TSOv6.
        const GUEST_TSO6 = 1 << 8;
        /// Driver receives TSO with ECN.
        const GUEST_ECN = 1 << 9;
        /// Device receives TSOv4.
        const HOST_TSO4 = 1 << 11;
        /// Device receives TSOv6.
        const HOST_TSO6 = 1 << 12;
        /// Device receives TSO with ECN.
        const HOST_ECN = 1 << 13;
        /// A frame may lie in several receive buffers.
        const MRG_RXBUF = 1 << 15;
        /// The configuration has a status.
        const STATUS = 1 << 16;
        /// There is a control queue.
        const CTRL_VQ = 1 << 17;
        /// Control of receive modes.
        const CTRL_RX = 1 << 18;
        /// Control of VLAN filtering.
        const CTRL_VLAN = 1 << 19;
        /// More receive modes.
        const CTRL_RX_EXTRA = 1 << 20;
        /// Driver sends gratuitous packets when asked.
        const GUEST_ANNOUNCE = 1 << 21;
        /// Several queue pairs with automatic steering.
        const MQ = 1 << 22;
        /// The MAC address is set by the control queue.
        const CTRL_MAC_ADDR = 1 << 23;
        /// Driver receives USOv4.
        const GUEST_USO4 = 1 << 54;
        /// Driver receives USOv6.
        const GUEST_USO6 = 1 << 55;
        /// Device receives USO.
        const HOST_USO = 1 << 56;
        /// Device says its speed and duplex.
        const SPEED_DUPLEX = 1 << 63;
    }
}

impl Features {
    /// The offloads that VIRTIO_NET_CTRL_GUEST_OFFLOADS_SET may name (section 5.1.6.5.8), by the
    /// bits of their features.
    pub const GUEST_OFFLOADS: Self = Self::GUEST_CSUM
        .union(Self::GUEST_TSO4)
        .union(Self::GUEST_TSO6)
        .union(Self::GUEST_ECN)
        .union(Self::GUEST_USO4)
        .union(Self::GUEST_USO6);
}

/// `struct virtio_net_config` (section 5.1.4), up to `duplex`.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Config {
    /// The MAC address.
    pub mac: [u8; 6],
    /// [`config_status`] bits.
    pub status: U16,
    /// Queue pairs that there are, 1 to 0x8000.
    pub max_virtqueue_pairs: U16,
    /// The largest MTU that the driver may use.
    pub mtu: U16,
    /// Mbit/s, 0 to 0x7fffffff; 0xffffffff: unknown.
    pub speed: U32,
    /// 1: full; 0: half; 0xff: unknown.
    pub duplex: u8,
}

/// Bits of the configuration's status (section 5.1.4).
pub mod config_status {
    /// The link is up.
    pub const LINK_UP: u16 = 1;
    /// The driver shall announce itself.
    pub const ANNOUNCE: u16 = 2;
}

/// Bytes of the header in front of every frame (section 5.1.6).
pub const HEADER: usize = 12;

/// `struct virtio_net_hdr` (section 5.1.6).
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct Header {
    /// [`header_flag`]s.
    pub flags: u8,
    /// How to cut the frame: [`gso`].
    pub gso_type: u8,
    /// Bytes of the headers to repeat: a hint.
    pub hdr_len: U16,
    /// Bytes of payload in each piece.
    pub gso_size: U16,
    /// Where the checksum begins.
    pub csum_start: U16,
    /// Where it goes, from there.
    pub csum_offset: U16,
    /// Receive buffers that the frame lies in; 0 in what is sent.
    pub num_buffers: U16,
}

/// Flags of a header (section 5.1.6).
pub mod header_flag {
    /// The checksum is partial.
    pub const NEEDS_CSUM: u8 = 1;
    /// The checksum is known to be good.
    pub const DATA_VALID: u8 = 2;
}

/// Ways to cut a frame (section 5.1.6).
pub mod gso {
    /// Not at all.
    pub const NONE: u8 = 0;
    /// TCP over IPv4.
    pub const TCPV4: u8 = 1;
    /// UDP fragmentation: legacy.
    pub const UDP: u8 = 3;
    /// TCP over IPv6.
    pub const TCPV6: u8 = 4;
    /// UDP datagrams.
    pub const UDP_L4: u8 = 5;
    /// TCP has ECN set; with one of the above.
    pub const ECN: u8 = 0x80;
}

/// Commands of the control queue: class, and command within it (section 5.1.6.5).
pub mod control {
    /// Acknowledgement of a command that was carried out.
    pub const OK: u8 = 0;
    /// Acknowledgement of one that was not.
    pub const ERR: u8 = 1;

    /// Receive modes (section 5.1.6.5.1): one byte, on or off.
    pub const RX: u8 = 0;
    /// All frames.
    pub const RX_PROMISC: u8 = 0;
    /// All multicast frames.
    pub const RX_ALLMULTI: u8 = 1;
    /// All unicast frames.
    pub const RX_ALLUNI: u8 = 2;
    /// No multicast frames.
    pub const RX_NOMULTI: u8 = 3;
    /// No unicast frames.
    pub const RX_NOUNI: u8 = 4;
    /// No broadcast frames.
    pub const RX_NOBCAST: u8 = 5;

    /// MAC addresses (section 5.1.6.5.2).
    pub const MAC: u8 = 1;
    /// Two tables, unicast and multicast, each a 32-bit count and addresses.
    pub const MAC_TABLE_SET: u8 = 0;
    /// The device's own address.
    pub const MAC_ADDR_SET: u8 = 1;

    /// VLAN filter (section 5.1.6.5.3): a 16-bit VLAN.
    pub const VLAN: u8 = 2;
    /// Lets a VLAN through.
    pub const VLAN_ADD: u8 = 0;
    /// No more.
    pub const VLAN_DEL: u8 = 1;

    /// Gratuitous packets (section 5.1.6.5.4).
    pub const ANNOUNCE: u8 = 3;
    /// They were sent.
    pub const ANNOUNCE_ACK: u8 = 0;

    /// Queue pairs (section 5.1.6.5.5): a 16-bit count.
    pub const MQ: u8 = 4;
    /// Uses so many of them.
    pub const MQ_VQ_PAIRS_SET: u8 = 0;

    /// Offloads of what the driver receives (section 5.1.6.5.8): 64 bits.
    pub const GUEST_OFFLOADS: u8 = 5;
    /// Uses these and no others.
    pub const GUEST_OFFLOADS_SET: u8 = 0;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layouts_are_those_of_the_specification() {
        assert_eq!(size_of::<Header>(), HEADER);
        assert_eq!(size_of::<Config>(), 17);
        assert_eq!(core::mem::offset_of!(Config, speed), 12);
        assert_eq!(core::mem::offset_of!(Header, num_buffers), 10);
    }
}
