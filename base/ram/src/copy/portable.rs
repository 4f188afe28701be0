//! Copies for machines without routines of their own: guarded ones go through the kernel
//! (`process_vm_readv(2)`), which answers a vanished page with a short count, not a signal.

use std::ffi::c_void;
use std::sync::atomic::{AtomicU16, AtomicU32, Ordering, fence};

/// Nothing to prepare.
///
/// # Errors
/// None.
pub(crate) fn prepare() -> std::io::Result<()> {
    Ok(())
}

/// Copies `into.len()` bytes from guest memory. False: some of it is gone.
///
/// # Safety
/// `guest` lies in a mapping that holds as many bytes, readable, and stays mapped for the call; its
/// pages may go if `guarded`.
pub(crate) unsafe fn read(guest: *const u8, into: &mut [u8], guarded: bool) -> bool {
    if guarded {
        return through_kernel(guest.cast_mut(), into.as_mut_ptr(), into.len(), false);
    }
    // SAFETY: by this function's contract; `into` is ours and cannot overlap it.
    unsafe { copy(guest, into.as_mut_ptr(), into.len()) };
    true
}

/// As [`read`], to memory of this process that is no slice of Rust's, as others change it.
///
/// # Safety
/// As for [`read`]; `into` is writable for `len` bytes and does not overlap the guest's.
pub(crate) unsafe fn read_raw(guest: *const u8, into: *mut u8, len: usize, guarded: bool) -> bool {
    if guarded {
        return through_kernel(guest.cast_mut(), into, len, false);
    }
    // SAFETY: by this function's contract.
    unsafe { copy(guest, into, len) };
    true
}

/// As [`write`], from memory of this process that is no slice of Rust's, as others change it.
///
/// # Safety
/// As for [`write`]; `from` is readable for `len` bytes and does not overlap the guest's.
pub(crate) unsafe fn write_raw(guest: *mut u8, from: *const u8, len: usize, guarded: bool) -> bool {
    if guarded {
        return through_kernel(guest, from.cast_mut(), len, true);
    }
    // SAFETY: by this function's contract.
    unsafe { copy(from, guest, len) };
    true
}

/// Copies `from` to guest memory. False: some of it is gone.
///
/// # Safety
/// As for [`read`], writable.
pub(crate) unsafe fn write(guest: *mut u8, from: &[u8], guarded: bool) -> bool {
    if guarded {
        return through_kernel(guest, from.as_ptr().cast_mut(), from.len(), true);
    }
    // SAFETY: as for `read`, with the roles exchanged.
    unsafe { copy(from.as_ptr(), guest, from.len()) };
    true
}

/// Copies between two mappings. False: some of either is gone.
///
/// # Safety
/// As for [`read`] of `from` and for [`write`] of `to`.
pub(crate) unsafe fn between(to: *mut u8, from: *const u8, len: usize, guarded: bool) -> bool {
    // SAFETY: by this function's contract; the kernel checks both sides, and what is not guarded on
    // either does not go.
    unsafe { read_raw(from, to, len, guarded) }
}

/// Loads a word with acquire ordering; in one access where it is not guarded.
///
/// # Safety
/// As for [`read`], for four bytes.
pub(crate) unsafe fn load_u32(guest: *const u8, guarded: bool) -> Option<u32> {
    let word = guest.cast::<AtomicU32>();
    if !guarded && word.is_aligned() {
        // SAFETY: in bounds, aligned, not going away; atomics tolerate concurrent change.
        return Some(unsafe { &*word }.load(Ordering::Acquire));
    }
    let mut bytes = [0; 4];
    // SAFETY: by this function's contract.
    let there = unsafe { read(guest, &mut bytes, guarded) };
    fence(Ordering::Acquire);
    there.then_some(u32::from_ne_bytes(bytes))
}

/// Stores a word with release ordering; in one access where it is not guarded.
///
/// # Safety
/// As for [`write`], for four bytes.
pub(crate) unsafe fn store_u32(guest: *mut u8, word: u32, guarded: bool) -> bool {
    let place = guest.cast::<AtomicU32>();
    if !guarded && place.is_aligned() {
        // SAFETY: as for `load_u32`.
        unsafe { &*place }.store(word, Ordering::Release);
        return true;
    }
    fence(Ordering::Release);
    // SAFETY: by this function's contract.
    unsafe { write(guest, &word.to_ne_bytes(), guarded) }
}

/// As [`load_u32`], for 16 bits.
///
/// # Safety
/// As for [`read`], for two bytes.
pub(crate) unsafe fn load_u16(guest: *const u8, guarded: bool) -> Option<u16> {
    let word = guest.cast::<AtomicU16>();
    if !guarded && word.is_aligned() {
        // SAFETY: as for `load_u32`.
        return Some(unsafe { &*word }.load(Ordering::Acquire));
    }
    let mut bytes = [0; 2];
    // SAFETY: by this function's contract.
    let there = unsafe { read(guest, &mut bytes, guarded) };
    fence(Ordering::Acquire);
    there.then_some(u16::from_ne_bytes(bytes))
}

/// As [`store_u32`], for 16 bits.
///
/// # Safety
/// As for [`write`], for two bytes.
pub(crate) unsafe fn store_u16(guest: *mut u8, word: u16, guarded: bool) -> bool {
    let place = guest.cast::<AtomicU16>();
    if !guarded && place.is_aligned() {
        // SAFETY: as for `load_u32`.
        unsafe { &*place }.store(word, Ordering::Release);
        return true;
    }
    fence(Ordering::Release);
    // SAFETY: by this function's contract.
    unsafe { write(guest, &word.to_ne_bytes(), guarded) }
}

/// Stores 16 bytes so that whoever sees one of the last four sees all of the rest.
///
/// # Safety
/// As for [`write`], for 16 bytes.
pub(crate) unsafe fn publish(guest: *mut u8, bits: u128, guarded: bool) -> bool {
    let bytes = bits.to_le_bytes();
    let last = u32::from_ne_bytes([bytes[12], bytes[13], bytes[14], bytes[15]]);
    // SAFETY: by this function's contract, for parts of the 16 bytes.
    unsafe {
        write(guest, &bytes[..12], guarded) && store_u32(guest.wrapping_add(12), last, guarded)
    }
}

/// The C library's memmove behind a pointer whose value the compiler cannot know: see the parent
/// module for why.
///
/// # Safety
/// `from` is readable and `to` writable for `len` bytes.
unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
    type Move = unsafe extern "C" fn(*mut c_void, *const c_void, usize) -> *mut c_void;
    let move_bytes: Move = libc::memmove;
    // SAFETY: reads a local variable.
    let move_bytes = unsafe { std::ptr::read_volatile(&move_bytes) };
    // SAFETY: by this function's own contract.
    unsafe { move_bytes(to.cast(), from.cast(), len) };
}

fn through_kernel(guest: *mut u8, own: *mut u8, len: usize, to_guest: bool) -> bool {
    let mut done = 0;
    while done < len {
        // SAFETY: `done < len`, both ranges were checked for `len` bytes by the callers.
        let (guest, own) = unsafe { (guest.add(done), own.add(done)) };
        let local = libc::iovec { iov_base: own.cast(), iov_len: len - done };
        let remote = libc::iovec { iov_base: guest.cast(), iov_len: len - done };
        // SAFETY: `own` is valid for the length; the kernel checks `guest` itself.
        let copied = unsafe {
            let pid = libc::getpid();
            match to_guest {
                false => libc::process_vm_readv(pid, &local, 1, &remote, 1, 0),
                true => libc::process_vm_writev(pid, &local, 1, &remote, 1, 0),
            }
        };
        match usize::try_from(copied) {
            Ok(0) | Err(_) => return false,
            Ok(count) => done += count,
        }
    }
    true
}
