//! Addresses at which huge pages of a file can be mapped as such.

use std::ffi::c_void;

use rustix::mm::{MapFlags, ProtFlags};

/// The size of a huge page of x86-64 in bytes.
pub(crate) const HUGE: usize = 2 << 20;

/// Returns an address at which a mapping of `len` bytes from `offset` of a file has the file's huge
/// pages at multiples of their size: only then one entry of a page table maps a page. It is a hint
/// for mmap(2), since another thread may map something there first; null if the mapping is smaller
/// than a huge page or no address is free.
pub(crate) fn hint(len: usize, offset: u64) -> *mut c_void {
    let any = std::ptr::null_mut();
    let Some(room) = len.checked_add(2 * HUGE).filter(|_| len >= HUGE) else { return any };
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    // SAFETY: a fresh mapping at an address of the kernel's choice, which allows no access.
    let found = unsafe { rustix::mm::mmap_anonymous(any, room, ProtFlags::empty(), flags) };
    let Ok(start) = found else { return any };
    #[allow(clippy::disallowed_methods, reason = "nothing was touched, so this takes no time")]
    // SAFETY: the mapping just made.
    let _ = unsafe { rustix::mm::munmap(start, room) };
    let skip = (offset % HUGE as u64) as usize;
    let aligned = start.addr().next_multiple_of(HUGE) + skip;
    start.cast::<u8>().wrapping_add(aligned - start.addr()).cast()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn huge_pages_of_the_file_are_at_multiples_of_their_size() {
        for offset in [0, 4096, HUGE as u64, 3 * HUGE as u64 + 8192] {
            let hint = hint(4 * HUGE, offset);
            assert!(!hint.is_null());
            assert_eq!((hint.addr() as u64).wrapping_sub(offset) % HUGE as u64, 0);
        }
        assert!(hint(HUGE - 4096, 0).is_null());
        assert!(hint(usize::MAX, 0).is_null());
        assert!(hint(usize::MAX / 2, 0).is_null());
    }
}
