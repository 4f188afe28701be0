//! ARP packets for IPv4 over Ethernet (RFC 826).

use core::fmt;
use core::net::Ipv4Addr;

use crate::kind::FrameKind;
use crate::mac::Mac;
use crate::view::{FrameError, view};

/// Bytes of a packet.
pub const LEN: usize = 28;

/// Hardware type Ethernet, protocol type IPv4, the lengths of their addresses, and operation
/// "request".
const REQUEST: [u8; 8] = [0, 1, 8, 0, 6, 4, 0, 1];
const SENDER_MAC: usize = 8;
const SENDER_IP: usize = 14;
const TARGET_MAC: usize = 18;
const TARGET_IP: usize = 24;

view! {
    /// An ARP packet. Types and lengths of its addresses are taken for those of IPv4 and Ethernet.
    ArpPacket
}

impl<T: AsRef<[u8]>> ArpPacket<T> {
    #[inline]
    fn check(&self) -> Result<(), FrameError> {
        if self.0.len() < LEN { Err(FrameError::Short) } else { Ok(()) }
    }

    /// Returns the sender's hardware address.
    pub fn sender_mac(&self) -> Mac {
        Mac(self.0.get(SENDER_MAC))
    }

    /// Returns the target's hardware address.
    pub fn target_mac(&self) -> Mac {
        Mac(self.0.get(TARGET_MAC))
    }

    /// Returns the sender's protocol address.
    pub fn sender(&self) -> Ipv4Addr {
        self.0.get::<4>(SENDER_IP).into()
    }

    /// Returns the target's protocol address.
    pub fn target(&self) -> Ipv4Addr {
        self.0.get::<4>(TARGET_IP).into()
    }
}

impl<T: AsRef<[u8]> + AsMut<[u8]>> ArpPacket<T> {
    /// Makes the packet a request for the hardware address of `target`.
    pub fn set_request(&mut self, sender_mac: Mac, sender: Ipv4Addr, target: Ipv4Addr) {
        self.0.put(0, REQUEST);
        self.0.put(SENDER_MAC, sender_mac.0);
        self.0.put(SENDER_IP, sender.octets());
        self.0.put(TARGET_MAC, [0; 6]);
        self.0.put(TARGET_IP, target.octets());
    }

    /// Writes the sender's hardware address.
    pub fn set_sender_mac(&mut self, address: Mac) {
        self.0.put(SENDER_MAC, address.0);
    }

    /// Writes the target's hardware address.
    pub fn set_target_mac(&mut self, address: Mac) {
        self.0.put(TARGET_MAC, address.0);
    }
}

impl<T: AsRef<[u8]>> fmt::Display for ArpPacket<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} > {}", FrameKind::Arp, self.sender(), self.target())
    }
}
