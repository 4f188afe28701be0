//! Socket addresses in the formats of C: `sockaddr_in` and `sockaddr_in6`. Flow labels and scopes
//! of IPv6 are ignored, and written as 0.

use libc::{c_int, sockaddr_in, sockaddr_in6, socklen_t};
use slipway_socket::Address;

/// The length in bytes of the longest address that is read or written.
pub const LONGEST: usize = size_of::<sockaddr_in6>();
/// The length in bytes of RFC 2133's structure for IPv6, which is 4 bytes shorter than
/// `sockaddr_in6`. The kernel takes it, too (`SIN6_LEN_RFC2133`).
const SHORT_V6: usize = 24;

/// Reads the family of the address in `bytes`. Returns `None` if `bytes` are too few.
pub fn family(bytes: &[u8]) -> Option<c_int> {
    bytes.first_chunk().map(|family| c_int::from(u16::from_ne_bytes(*family)))
}

/// Reads the IP address and the port in `bytes`. Returns `None` if the address is of another family
/// or `bytes` are too few for its family.
pub fn read(bytes: &[u8]) -> Option<Address> {
    let family = family(bytes)?;
    if family == libc::AF_INET && bytes.len() >= size_of::<sockaddr_in>() {
        let ip = std::array::from_fn(|at| bytes[4 + at]);
        return Some(Address::v4(ip, u16::from_be_bytes([bytes[2], bytes[3]])));
    }
    if family == libc::AF_INET6 && bytes.len() >= SHORT_V6 {
        let ip = std::array::from_fn(|at| bytes[8 + at]);
        return Some(Address { ip, port: u16::from_be_bytes([bytes[2], bytes[3]]) });
    }
    None
}

/// The name of a socket: its address in the C format of its domain.
#[derive(Clone, Copy)]
pub struct Name {
    bytes: [u8; LONGEST],
    length: usize,
}

impl Name {
    /// Writes `address` in the format of `domain`, `AF_INET` or `AF_INET6`. An IPv6 address in the
    /// format of `AF_INET` becomes 0.0.0.0.
    pub fn new(address: Address, domain: c_int) -> Self {
        let mut bytes = [0; LONGEST];
        bytes[..2].copy_from_slice(&(domain as libc::sa_family_t).to_ne_bytes());
        bytes[2..4].copy_from_slice(&address.port.to_be_bytes());
        let length = if domain == libc::AF_INET {
            bytes[4..8].copy_from_slice(&address.as_v4().unwrap_or_default());
            size_of::<sockaddr_in>()
        } else {
            bytes[8..24].copy_from_slice(&address.ip);
            LONGEST
        };
        Self { bytes, length }
    }

    /// Returns the first `room` bytes of the name, or the whole name if it is shorter.
    pub fn cut(&self, room: socklen_t) -> &[u8] {
        &self.bytes[..self.length.min(room as usize)]
    }

    /// Returns the length of the whole name in bytes.
    pub fn length(&self) -> socklen_t {
        self.length as socklen_t
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_that_is_written_reads_back() {
        let ip = std::array::from_fn(|at| at as u8);
        for (address, domain, size) in [
            (Address::v4([192, 0, 2, 7], 4080), libc::AF_INET, 16),
            (Address { ip, port: 80 }, libc::AF_INET6, 28),
            (Address { ip: [0xff; 16], port: u16::MAX }, libc::AF_INET6, 28),
            (Address::v4([0; 4], 0), libc::AF_INET, 16),
        ] {
            let name = Name::new(address, domain);
            assert_eq!(name.length(), size);
            assert_eq!(read(name.cut(size)), Some(address));
            assert_eq!(family(name.cut(size)), Some(domain));
            assert_eq!(family(name.cut(1)), None);
        }
    }

    #[test]
    fn a_name_is_cut_to_the_room_and_the_whole_length_is_reported() {
        let name = Name::new(Address::v4([192, 0, 2, 7], 4080), libc::AF_INET);
        for room in 0..28 {
            assert_eq!(name.cut(room).len(), room.min(16) as usize);
            assert_eq!(name.length(), 16);
        }
        assert_eq!(name.cut(socklen_t::MAX).len(), 16);
    }

    #[test]
    fn what_is_no_ip_address_is_none() {
        let name = Name::new(Address::v4([192, 0, 2, 7], 4080), libc::AF_INET);
        for cut in 0..16 {
            assert_eq!(read(name.cut(cut)), None, "{cut}");
        }
        let unix = (libc::AF_UNIX as libc::sa_family_t).to_ne_bytes();
        assert_eq!(read(&[unix.as_slice(), &[0; 26]].concat()), None);
        // RFC 2133's structure has 24 bytes.
        let name = Name::new(Address { ip: [1; 16], port: 1 }, libc::AF_INET6);
        assert_eq!((read(name.cut(23)), read(name.cut(24)).is_some()), (None, true));
    }

    #[test]
    fn the_bytes_of_a_name_are_those_of_cs_structures() {
        let bytes = *Name::new(Address::v4([192, 0, 2, 7], 0x1234), libc::AF_INET)
            .cut(16)
            .first_chunk::<8>()
            .unwrap();
        let family = (libc::AF_INET as libc::sa_family_t).to_ne_bytes();
        assert_eq!(bytes, [family[0], family[1], 0x12, 0x34, 192, 0, 2, 7]);
    }
}
