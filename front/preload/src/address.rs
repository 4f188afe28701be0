//! Socket addresses in the formats of C.

use libc::{c_int, sockaddr, sockaddr_in, socklen_t};
use slipway_socket::Address;

/// Reads the IP address in `address`, or returns `None` if it is of another family.
///
/// # Safety
/// `length` bytes can be read at `address`.
pub unsafe fn read_address(address: *const sockaddr, length: socklen_t) -> Option<Address> {
    if address.is_null() || length < 2 {
        return None;
    }
    // SAFETY: the caller guarantees `length` readable bytes, at least 2.
    let family = c_int::from(unsafe { address.cast::<libc::sa_family_t>().read_unaligned() });
    if family == libc::AF_INET && length as usize >= size_of::<sockaddr_in>() {
        // SAFETY: the caller guarantees `length` bytes, and that is enough.
        let v4 = unsafe { address.cast::<sockaddr_in>().read_unaligned() };
        return Some(Address::v4(v4.sin_addr.s_addr.to_ne_bytes(), u16::from_be(v4.sin_port)));
    }
    // RFC 2133's structure is 4 bytes shorter and suffices.
    if family == libc::AF_INET6 && length as usize >= 24 {
        // SAFETY: the 24 bytes that are read are there.
        let bytes = unsafe { address.cast::<[u8; 24]>().read_unaligned() };
        let ip = std::array::from_fn(|at| bytes[8 + at]);
        return Some(Address { ip, port: u16::from_be_bytes([bytes[2], bytes[3]]) });
    }
    None
}

/// Writes `address` in the format of `domain`, cut to the room that the caller has.
///
/// # Safety
/// The contract of getsockname(2).
pub unsafe fn write_address(
    address: Address,
    domain: c_int,
    to: *mut sockaddr,
    length: *mut socklen_t,
) {
    if to.is_null() || length.is_null() {
        return;
    }
    let mut bytes = [0; 28];
    bytes[..2].copy_from_slice(&(domain as libc::sa_family_t).to_ne_bytes());
    bytes[2..4].copy_from_slice(&address.port.to_be_bytes());
    let size = if domain == libc::AF_INET {
        bytes[4..8].copy_from_slice(&address.as_v4().unwrap_or_default());
        16
    } else {
        bytes[8..24].copy_from_slice(&address.ip);
        28
    };
    // SAFETY: the caller guarantees valid pointers.
    unsafe {
        let room = (*length as usize).min(size);
        std::ptr::copy_nonoverlapping(bytes.as_ptr(), to.cast::<u8>(), room);
        *length = size as socklen_t;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Writes `address` into `room` bytes. Returns the bytes and the length that is reported.
    fn written(address: Address, domain: c_int, room: usize) -> (Vec<u8>, socklen_t) {
        let (mut bytes, mut length) = (vec![0xff; 28], room as socklen_t);
        // SAFETY: 28 bytes can be written, and the length says that there are at most as many.
        unsafe { write_address(address, domain, bytes.as_mut_ptr().cast(), &raw mut length) };
        (bytes, length)
    }

    /// Reads an address from the first `length` of `bytes`.
    fn read(bytes: &[u8], length: usize) -> Option<Address> {
        assert!(length <= bytes.len());
        // SAFETY: `length` bytes can be read.
        unsafe { read_address(bytes.as_ptr().cast(), length as socklen_t) }
    }

    #[test]
    fn an_address_that_is_written_reads_back() {
        let ip = std::array::from_fn(|at| at as u8);
        for (address, domain, size) in [
            (Address::v4([192, 0, 2, 7], 4080), libc::AF_INET, 16),
            (Address { ip, port: 80 }, libc::AF_INET6, 28),
        ] {
            let (bytes, length) = written(address, domain, 28);
            assert_eq!(length, size);
            assert_eq!(read(&bytes, size as usize), Some(address));
        }
    }

    #[test]
    fn no_byte_is_written_beyond_the_room_and_the_whole_length_is_reported() {
        for room in 0..28 {
            let (bytes, length) = written(Address::v4([192, 0, 2, 7], 4080), libc::AF_INET, room);
            assert_eq!(length, 16);
            assert!(bytes[room.min(16)..].iter().all(|byte| *byte == 0xff), "{room}");
        }
    }

    #[test]
    fn what_is_no_ip_address_is_none() {
        let (bytes, _) = written(Address::v4([192, 0, 2, 7], 4080), libc::AF_INET, 28);
        assert_eq!((read(&bytes, 1), read(&bytes, 15)), (None, None));
        let unix = (libc::AF_UNIX as libc::sa_family_t).to_ne_bytes();
        assert_eq!(read(&[unix.as_slice(), &[0; 26]].concat(), 28), None);
        // RFC 2133's structure has 24 bytes.
        let (bytes, _) = written(Address { ip: [1; 16], port: 1 }, libc::AF_INET6, 28);
        assert_eq!((read(&bytes, 23), read(&bytes, 24).is_some()), (None, true));
    }
}
