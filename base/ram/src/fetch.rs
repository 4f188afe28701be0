//! Hints to the processor.

/// Has the processor fetch the line at `address`, soon to be read. A hint: the address need not be
/// one.
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

/// As [`fetch`], soon to be written: a line that another processor has is taken from it.
#[inline]
pub fn fetch_to_write<T: ?Sized>(address: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch changes nothing and never faults; where there is no such instruction it
    // does nothing at all.
    unsafe {
        std::arch::asm!("prefetchw [{}]", in(reg) address.cast::<u8>(),
            options(nostack, preserves_flags));
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}
