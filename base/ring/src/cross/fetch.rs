//! Prefetching of memory before it is accessed.

/// The size of a cache line in bytes.
const LINE: usize = 64;

/// Prefetches `bytes` bytes from `at` on, without waiting. Any address is allowed; one that cannot
/// be read is ignored.
#[inline]
pub fn fetch<T>(at: *const T, bytes: usize) {
    let at = at.cast::<u8>();
    for line in (0..bytes).step_by(LINE) {
        fetch_line(at.wrapping_add(line));
    }
}

/// Prefetches as [`fetch`] does, for writing: the processor gets the lines exclusively. Otherwise a
/// copy to memory that another processor has read waits for each line, and the next atomic
/// operation for all of them.
#[inline]
pub fn fetch_to_write<T>(at: *const T, bytes: usize) {
    let at = at.cast::<u8>();
    for line in (0..bytes).step_by(LINE) {
        own_line(at.wrapping_add(line));
    }
}

#[cfg(target_arch = "x86_64")]
#[inline]
fn own_line(at: *const u8) {
    // SAFETY: a hint, as below; processors that do not know it do nothing.
    unsafe {
        std::arch::asm!("prefetchw byte ptr [{}]", in(reg) at,
            options(nostack, preserves_flags, readonly));
    }
}

#[cfg(not(target_arch = "x86_64"))]
#[inline]
fn own_line(_at: *const u8) {}

#[cfg(target_arch = "x86_64")]
#[inline]
fn fetch_line(at: *const u8) {
    use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
    // SAFETY: a hint, which never faults and changes nothing that a program can see.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) };
}

#[cfg(not(target_arch = "x86_64"))]
#[inline]
fn fetch_line(_at: *const u8) {}
