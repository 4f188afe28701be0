//! Copies for machines other than x86-64: guarded ones go through the kernel
//! (`process_vm_readv(2)`), which answers a vanished page with a short count, not a signal.

use std::ffi::c_void;
use std::sync::atomic::{AtomicU16, AtomicU32, Ordering, fence};

/// Does nothing: no handler is needed here.
///
/// # Errors
/// None.
pub(crate) fn prepare() -> std::io::Result<()> {
    Ok(())
}

/// Copies `into.len()` bytes from guest memory. Returns `false` if any of it is gone.
///
/// # Safety
/// `guest` points to as many readable bytes of one mapping, which stays mapped during the call; its
/// pages may go only if `guarded`.
pub(crate) unsafe fn read(guest: *const u8, into: &mut [u8], guarded: bool) -> bool {
    if guarded {
        return through_kernel(guest.cast_mut(), into.as_mut_ptr(), into.len(), false);
    }
    // SAFETY: by this function's contract; `into` is this process's own and cannot overlap `guest`.
    unsafe { copy(guest, into.as_mut_ptr(), into.len()) };
    true
}

/// Copies `len` bytes from guest memory to `into`, which others may change meanwhile and which
/// therefore is no Rust slice. Returns `false` if any of the guest memory is gone.
///
/// # Safety
/// As for [`read`]; `into` is writable for `len` bytes and does not overlap the guest memory.
pub(crate) unsafe fn read_raw(guest: *const u8, into: *mut u8, len: usize, guarded: bool) -> bool {
    if guarded {
        return through_kernel(guest.cast_mut(), into, len, false);
    }
    // SAFETY: by this function's contract.
    unsafe { copy(guest, into, len) };
    true
}

/// Copies `len` bytes to guest memory from `from`, which others may change meanwhile and which
/// therefore is no Rust slice. Returns `false` if any of the guest memory is gone.
///
/// # Safety
/// As for [`write`]; `from` is readable for `len` bytes and does not overlap the guest memory.
pub(crate) unsafe fn write_raw(guest: *mut u8, from: *const u8, len: usize, guarded: bool) -> bool {
    if guarded {
        return through_kernel(guest, from.cast_mut(), len, true);
    }
    // SAFETY: by this function's contract.
    unsafe { copy(from, guest, len) };
    true
}

/// Copies `from` to guest memory. Returns `false` if any of it is gone.
///
/// # Safety
/// As for [`read`], with writable bytes.
pub(crate) unsafe fn write(guest: *mut u8, from: &[u8], guarded: bool) -> bool {
    if guarded {
        return through_kernel(guest, from.as_ptr().cast_mut(), from.len(), true);
    }
    // SAFETY: as for `read`, with the roles exchanged.
    unsafe { copy(from.as_ptr(), guest, from.len()) };
    true
}

/// Writes `len` zeros to guest memory. Returns `false` if any of it is gone.
///
/// # Safety
/// As for [`write`].
pub(crate) unsafe fn zero(guest: *mut u8, len: usize, guarded: bool) -> bool {
    static ZEROS: [u8; 4096] = [0; 4096];
    (0..len).step_by(ZEROS.len()).all(|at| {
        let part = &ZEROS[..ZEROS.len().min(len - at)];
        // SAFETY: within the range that this function's contract names.
        unsafe { write(guest.add(at), part, guarded) }
    })
}

/// Copies between two mappings. Returns `false` if any of either is gone.
///
/// # Safety
/// As for [`read`] of `from` and for [`write`] of `to`.
pub(crate) unsafe fn between(to: *mut u8, from: *const u8, len: usize, guarded: bool) -> bool {
    // SAFETY: by this function's contract; if `guarded`, the kernel checks both sides; otherwise no
    // page of either side goes.
    unsafe { read_raw(from, to, len, guarded) }
}

/// Loads a 32-bit word with acquire ordering; in one access if it is aligned and not guarded.
/// Returns `None` if the memory is gone.
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

/// Stores a 32-bit word with release ordering; in one access if it is aligned and not guarded.
/// Returns `false` if the memory is gone.
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

/// Loads a 16-bit word with acquire ordering; in one access if it is aligned and not guarded.
/// Returns `None` if the memory is gone.
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

/// Stores a 16-bit word with release ordering; in one access if it is aligned and not guarded.
/// Returns `false` if the memory is gone.
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

/// Stores 16 bytes so that a reader that sees the last four sees all of the rest. Returns `false`
/// if the memory is gone.
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

/// Calls the C library's memmove through a pointer whose value the compiler cannot know: see the
/// parent module for the reason.
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
        // SAFETY: `done < len`, and the callers checked both ranges for `len` bytes.
        let (guest, own) = unsafe { (guest.add(done), own.add(done)) };
        let local = libc::iovec { iov_base: own.cast(), iov_len: len - done };
        let remote = libc::iovec { iov_base: guest.cast(), iov_len: len - done };
        // SAFETY: the kernel checks both ranges itself; they are valid except for pages that have
        // gone.
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
