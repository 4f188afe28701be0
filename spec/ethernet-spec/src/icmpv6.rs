//! ICMPv6 messages (RFC 4443, section 2.1) with the parts of neighbour discovery (RFC 4861) that a
//! switch checks.

use core::net::Ipv6Addr;

use crate::view::{FrameError, view};

/// Bytes of a message's fixed part: type, code, checksum.
const HEADER: usize = 4;
const TARGET: usize = 8;

/// Types of messages.
pub mod message_type {
    /// A router advertisement.
    pub const ROUTER_ADVERTISEMENT: u8 = 134;
    /// A neighbour advertisement.
    pub const NEIGHBOR_ADVERTISEMENT: u8 = 136;
    /// A redirect.
    pub const REDIRECT: u8 = 137;
}

view! {
    /// An ICMPv6 message.
    Icmpv6Message
}

impl<T: AsRef<[u8]>> Icmpv6Message<T> {
    #[inline]
    fn check(&self) -> Result<(), FrameError> {
        if self.0.len() < HEADER { Err(FrameError::Short) } else { Ok(()) }
    }

    /// Returns the type, as in [`message_type`].
    pub fn message_type(&self) -> u8 {
        self.0.byte(0)
    }

    /// Returns the target address of a neighbour advertisement. Returns `None` if it does not lie
    /// in the message.
    pub fn target(&self) -> Option<Ipv6Addr> {
        self.0.rest(TARGET).first_chunk::<16>().map(|octets| Ipv6Addr::from(*octets))
    }
}
