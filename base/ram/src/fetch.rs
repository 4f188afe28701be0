//! Prefetch hints.

/// Prefetches the cache line at `address` for reading. A hint: `address` may be invalid.
#[inline]
pub fn fetch<T: ?Sized>(address: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch reads nothing as far as the program can tell, and never faults.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(address.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

/// Prefetches the cache line at `address` for writing: takes the line from another processor's
/// cache. A hint: `address` may be invalid.
#[inline]
pub fn fetch_to_write<T: ?Sized>(address: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch changes nothing and never faults; a processor without the instruction
    // treats it as a no-op.
    unsafe {
        std::arch::asm!("prefetchw [{}]", in(reg) address.cast::<u8>(),
            options(nostack, preserves_flags));
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}
