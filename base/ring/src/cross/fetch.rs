//! Having memory near before it is looked at.

/// Bytes that come at a time.
const LINE: usize = 64;

/// Has the processor fetch `bytes` bytes from `at` on, and goes on meanwhile. Any address will do:
/// one that cannot be read is not.
#[inline]
pub fn fetch<T>(at: *const T, bytes: usize) {
    let at = at.cast::<u8>();
    for line in (0..bytes).step_by(LINE) {
        fetch_line(at.wrapping_add(line));
    }
}

/// As [`fetch`], to be written: nobody else has the lines then. A copy to memory that another
/// processor has read waits for each line otherwise, and the next atomic operation for all of them.
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
