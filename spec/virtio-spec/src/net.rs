//! The network device (section 5.1).

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::{U16, U32};

/// Device type (section 5).
pub const DEVICE_TYPE: u16 = 1;

bitflags::bitflags! {
    /// Feature bits of a network device (section 5.1.3). "Guest" bits are abilities of the driver
    /// to receive, "host" bits those of the device.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
    pub struct Features: u64 {
        /// Device takes frames with a partial checksum.
        const CSUM = 1 << 0;
        /// Driver takes frames with a partial checksum.
        const GUEST_CSUM = 1 << 1;
        /// The driver can change its receive offloads at run time (section 5.1.6.5.8).
        const CTRL_GUEST_OFFLOADS = 1 << 2;
        /// Device reports its maximum MTU.
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
        /// Device reports its status in the configuration.
        const STATUS = 1 << 16;
        /// Device has a control queue.
        const CTRL_VQ = 1 << 17;
        /// Receive modes are set by the control queue.
        const CTRL_RX = 1 << 18;
        /// VLAN filtering is set by the control queue.
        const CTRL_VLAN = 1 << 19;
        /// The control queue has more receive modes.
        const CTRL_RX_EXTRA = 1 << 20;
        /// Driver sends gratuitous packets when asked.
        const GUEST_ANNOUNCE = 1 << 21;
        /// Device has several queue pairs with automatic steering.
        const MQ = 1 << 22;
        /// The MAC address is set by the control queue.
        const CTRL_MAC_ADDR = 1 << 23;
        /// Driver receives USOv4.
        const GUEST_USO4 = 1 << 54;
        /// Driver receives USOv6.
        const GUEST_USO6 = 1 << 55;
        /// Device receives USO.
        const HOST_USO = 1 << 56;
        /// Device reports its speed and duplex.
        const SPEED_DUPLEX = 1 << 63;
    }
}

impl Features {
    /// The offloads that the driver may set with VIRTIO_NET_CTRL_GUEST_OFFLOADS_SET (section
    /// 5.1.6.5.8), by the bits of their features.
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
    /// Number of queue pairs, 1 to 0x8000.
    pub max_virtqueue_pairs: U16,
    /// The largest MTU that the driver may use.
    pub mtu: U16,
    /// Speed in Mbit/s, 0 to 0x7fffffff; 0xffffffff if unknown.
    pub speed: U32,
    /// Duplex: 1 is full, 0 half, 0xff unknown.
    pub duplex: u8,
}

/// Bits of the configuration's status (section 5.1.4).
pub mod config_status {
    /// The link is up.
    pub const LINK_UP: u16 = 1;
    /// The driver shall announce itself with gratuitous packets.
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
    /// Flags, see [`header_flag`].
    pub flags: u8,
    /// Segmentation type, see [`gso`].
    pub gso_type: u8,
    /// Bytes of the headers to repeat in each segment: a hint.
    pub hdr_len: U16,
    /// Bytes of payload in each segment.
    pub gso_size: U16,
    /// Offset in the frame at which the checksummed data begin.
    pub csum_start: U16,
    /// Offset of the checksum from `csum_start`.
    pub csum_offset: U16,
    /// Number of receive buffers that hold the frame; 0 in sent frames.
    pub num_buffers: U16,
}

/// Flags of a header (section 5.1.6).
pub mod header_flag {
    /// The checksum is partial.
    pub const NEEDS_CSUM: u8 = 1;
    /// The checksum is valid.
    pub const DATA_VALID: u8 = 2;
}

/// Segmentation types (section 5.1.6).
pub mod gso {
    /// No segmentation.
    pub const NONE: u8 = 0;
    /// TCP over IPv4.
    pub const TCPV4: u8 = 1;
    /// UDP fragmentation: legacy.
    pub const UDP: u8 = 3;
    /// TCP over IPv6.
    pub const TCPV6: u8 = 4;
    /// UDP, with one datagram for each segment.
    pub const UDP_L4: u8 = 5;
    /// Flag: TCP has ECN set; combined with a TCP type.
    pub const ECN: u8 = 0x80;
}

/// Commands of the control queue: classes, and commands within each class (section 5.1.6.5).
pub mod control {
    /// Acknowledgement of a successful command.
    pub const OK: u8 = 0;
    /// Acknowledgement of a failed command.
    pub const ERR: u8 = 1;

    /// Class: receive modes (section 5.1.6.5.1). The data are one byte, on or off.
    pub const RX: u8 = 0;
    /// Receives all frames.
    pub const RX_PROMISC: u8 = 0;
    /// Receives all multicast frames.
    pub const RX_ALLMULTI: u8 = 1;
    /// Receives all unicast frames.
    pub const RX_ALLUNI: u8 = 2;
    /// Receives no multicast frames.
    pub const RX_NOMULTI: u8 = 3;
    /// Receives no unicast frames.
    pub const RX_NOUNI: u8 = 4;
    /// Receives no broadcast frames.
    pub const RX_NOBCAST: u8 = 5;

    /// Class: MAC addresses (section 5.1.6.5.2).
    pub const MAC: u8 = 1;
    /// Sets two tables, unicast and multicast, each a 32-bit count and addresses.
    pub const MAC_TABLE_SET: u8 = 0;
    /// Sets the device's own address.
    pub const MAC_ADDR_SET: u8 = 1;

    /// Class: VLAN filter (section 5.1.6.5.3). The data are a 16-bit VLAN identifier.
    pub const VLAN: u8 = 2;
    /// Lets frames of a VLAN through.
    pub const VLAN_ADD: u8 = 0;
    /// Stops letting frames of a VLAN through.
    pub const VLAN_DEL: u8 = 1;

    /// Class: gratuitous packets (section 5.1.6.5.4).
    pub const ANNOUNCE: u8 = 3;
    /// The driver has sent the gratuitous packets.
    pub const ANNOUNCE_ACK: u8 = 0;

    /// Class: queue pairs (section 5.1.6.5.5). The data are a 16-bit count.
    pub const MQ: u8 = 4;
    /// Sets the number of queue pairs in use.
    pub const MQ_VQ_PAIRS_SET: u8 = 0;

    /// Class: receive offloads of the driver (section 5.1.6.5.8). The data are 64 bits.
    pub const GUEST_OFFLOADS: u8 = 5;
    /// Sets the offloads in use; all others are off.
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
