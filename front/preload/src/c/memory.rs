//! The memory of a caller as slices, references and values.

use std::cell::Cell;
use std::ffi::CStr;

use libc::{
    c_char, c_int, c_ulong, c_void, fd_set, iovec, nfds_t, pollfd, size_t, sockaddr, socklen_t,
};
use slipway_socket::{Address, Errno};

use crate::address::{self, Name};
use crate::select;

/// Returns the bytes that the caller wants to send.
///
/// # Safety
/// The contract of write(2).
#[inline]
pub unsafe fn bytes<'a>(buffer: *const c_void, length: size_t) -> Result<&'a [u8], Errno> {
    if length == 0 {
        return Ok(&[]);
    }
    if buffer.is_null() {
        return Err(Errno::FAULT);
    }
    // SAFETY: the caller guarantees valid pointers.
    Ok(unsafe { std::slice::from_raw_parts(buffer.cast(), length.min(isize::MAX as usize)) })
}

/// Returns the buffer that the caller wants to receive into.
///
/// # Safety
/// The contract of read(2). The bytes may be uninitialised: they are only written.
#[inline]
pub unsafe fn room<'a>(buffer: *mut c_void, length: size_t) -> Result<&'a mut [u8], Errno> {
    if length == 0 {
        return Ok(&mut []);
    }
    if buffer.is_null() {
        return Err(Errno::FAULT);
    }
    // SAFETY: the caller guarantees valid pointers.
    Ok(unsafe { std::slice::from_raw_parts_mut(buffer.cast(), length.min(isize::MAX as usize)) })
}

/// Returns the pieces of a call.
///
/// # Safety
/// The contract of readv(2).
pub unsafe fn iovecs<'a>(pieces: *const iovec, count: usize) -> Result<&'a [iovec], Errno> {
    match count {
        0 => Ok(&[]),
        1..=1024 if !pieces.is_null() => {
            // SAFETY: the caller guarantees valid pointers.
            Ok(unsafe { std::slice::from_raw_parts(pieces, count) })
        }
        1..=1024 => Err(Errno::FAULT),
        _ => Err(Errno::INVAL),
    }
}

/// Returns the bytes of an address in the caller's memory, or `None` if the pointer is null.
///
/// # Safety
/// `length` bytes can be read at `at`, if it is not null.
unsafe fn address_bytes<'a>(at: *const sockaddr, length: socklen_t) -> Option<&'a [u8]> {
    if at.is_null() {
        return None;
    }
    let length = address::LONGEST.min(length as usize);
    // SAFETY: the caller guarantees `length` readable bytes.
    Some(unsafe { std::slice::from_raw_parts(at.cast::<u8>(), length) })
}

/// Returns the IP address in the caller's memory with its family, or `None` if it is of another
/// family.
///
/// # Safety
/// `length` bytes can be read at `at`, if it is not null.
pub unsafe fn read_address(at: *const sockaddr, length: socklen_t) -> Option<(c_int, Address)> {
    // SAFETY: the caller guarantees `length` readable bytes.
    let bytes = unsafe { address_bytes(at, length) }?;
    Some((address::family(bytes)?, address::read(bytes)?))
}

/// Returns whether the address in the caller's memory is of no family, `AF_UNSPEC`.
///
/// # Safety
/// `length` bytes can be read at `at`, if it is not null.
pub unsafe fn is_of_no_family(at: *const sockaddr, length: socklen_t) -> bool {
    // SAFETY: the caller guarantees `length` readable bytes.
    let bytes = unsafe { address_bytes(at, length) };
    bytes.and_then(address::family) == Some(libc::AF_UNSPEC)
}

/// Writes a socket's name, cut to the room that the caller has.
///
/// # Safety
/// The contract of getsockname(2), but that the pointers may be null.
pub unsafe fn write_name(name: &Name, to: *mut sockaddr, length: *mut socklen_t) {
    if to.is_null() || length.is_null() {
        return;
    }
    // SAFETY: the caller guarantees valid pointers.
    let cut = name.cut(unsafe { *length });
    // SAFETY: the caller has room for as many bytes as `length` says.
    unsafe { std::ptr::copy_nonoverlapping(cut.as_ptr(), to.cast::<u8>(), cut.len()) };
    // SAFETY: the caller guarantees valid pointers.
    unsafe { *length = name.length() };
}

/// Returns the set that a program passes to poll(2), or `None` if it is empty, has a null pointer
/// or is larger than memory. The pointer of an empty set may be anything.
///
/// # Safety
/// The contract of ppoll(2).
pub unsafe fn polled<'a>(fds: *mut pollfd, count: nfds_t) -> Option<&'a mut [pollfd]> {
    let most = isize::MAX as usize / size_of::<pollfd>();
    let count = usize::try_from(count).ok().filter(|count| (1..=most).contains(count))?;
    if fds.is_null() {
        return None;
    }
    // SAFETY: the caller guarantees valid pointers.
    Some(unsafe { std::slice::from_raw_parts_mut(fds, count) })
}

/// Returns the words of a set of select(2) that the descriptors below `count` are in. Sets may be
/// longer than `fd_set`. Returns `None` for a null pointer, and for a count of 0 or less: then the
/// pointer may be anything.
///
/// # Safety
/// The contract of pselect(2).
pub unsafe fn set<'a>(set: *mut fd_set, count: c_int) -> Option<&'a [Cell<c_ulong>]> {
    let words = select::words(count);
    if set.is_null() || words == 0 {
        return None;
    }
    // SAFETY: the caller guarantees valid pointers; other sets of the call may be the same memory.
    Some(unsafe { std::slice::from_raw_parts(set.cast::<Cell<c_ulong>>(), words) })
}

/// Returns the string at `text`, or `None` if it is null.
///
/// # Safety
/// `text` is null or a string that lives as long as `'a`.
pub unsafe fn text<'a>(text: *const c_char) -> Option<&'a CStr> {
    if text.is_null() {
        return None;
    }
    // SAFETY: the caller guarantees a string.
    Some(unsafe { CStr::from_ptr(text) })
}
