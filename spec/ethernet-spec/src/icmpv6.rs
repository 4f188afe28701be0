//! ICMPv6 messages (RFC 4443, section 2.1) with the parts of neighbour discovery (RFC 4861) that a
//! switch checks or changes.

use core::net::Ipv6Addr;

use crate::checksum::{fold, sum};
use crate::mac::Mac;
use crate::view::{FrameError, view};

/// Offset of the checksum in a message.
pub const CHECKSUM: usize = 2;

/// Bytes of a message's fixed part: type, code, checksum.
const HEADER: usize = 4;
const TARGET: usize = 8;
/// Options of neighbour discovery with a link-layer address: the source's and the target's
/// (RFC 4861, section 4.6.1).
const LINK_ADDRESSES: [u8; 2] = [1, 2];
/// The unit of an option's length, in bytes.
const OPTION_UNIT: usize = 8;
/// Offset of the address in such an option.
const LINK_ADDRESS: usize = 2;

/// Types of messages.
pub mod message_type {
    /// A router solicitation.
    pub const ROUTER_SOLICITATION: u8 = 133;
    /// A router advertisement.
    pub const ROUTER_ADVERTISEMENT: u8 = 134;
    /// A neighbour solicitation.
    pub const NEIGHBOR_SOLICITATION: u8 = 135;
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

impl<T: AsRef<[u8]> + AsMut<[u8]>> Icmpv6Message<T> {
    /// Replaces the Ethernet address `from`, which is not all zeros, by `to` in the link-layer
    /// address options of a message of neighbour discovery, as far as they lie in the view. The
    /// checksum changes by the difference (RFC 1624), unless it is `summed_later`: then it holds
    /// the pseudo header's sum, in which the options are not.
    pub fn replace_link_address(&mut self, from: Mac, to: Mac, summed_later: bool) {
        let Some(mut at) = options(self.message_type()) else { return };
        loop {
            // Zeros beyond the end.
            let [kind, units] = self.0.get::<2>(at);
            if units == 0 {
                return;
            }
            let is_address = LINK_ADDRESSES.contains(&kind);
            if is_address && self.0.get::<6>(at + LINK_ADDRESS) == from.0 {
                self.0.put(at + LINK_ADDRESS, to.0);
                if !summed_later {
                    let without =
                        u64::from(!self.0.half(CHECKSUM)) + sum(&from.0.map(|byte| !byte));
                    self.0.put_half(CHECKSUM, !fold(without + sum(&to.0)));
                }
            }
            at += usize::from(units) * OPTION_UNIT;
        }
    }
}

/// Returns the offset of the options of a message of neighbour discovery (RFC 4861, sections 4.1
/// to 4.5). Returns `None` for other messages.
fn options(message_type: u8) -> Option<usize> {
    match message_type {
        message_type::ROUTER_SOLICITATION => Some(8),
        message_type::ROUTER_ADVERTISEMENT => Some(16),
        message_type::NEIGHBOR_SOLICITATION | message_type::NEIGHBOR_ADVERTISEMENT => Some(24),
        message_type::REDIRECT => Some(40),
        _ => None,
    }
}
