//! Buffers for direct input and output.

use std::alloc::Layout;
use std::ptr::NonNull;

/// The largest memory alignment that a device asks for: a page.
const ALIGNMENT: usize = 4096;

/// A page-aligned buffer on the heap.
#[derive(Debug)]
pub(crate) struct Aligned {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: plain memory owned by this value.
unsafe impl Send for Aligned {}

impl Aligned {
    /// Creates a buffer of no bytes.
    pub fn empty() -> Self {
        Self { base: NonNull::dangling(), len: 0 }
    }

    /// Creates a buffer of `len` zeros. Aborts, as every allocation does, if there is no memory.
    pub fn zeroed(len: usize) -> Self {
        if len == 0 {
            return Self::empty();
        }
        let layout = Self::layout(len);
        // SAFETY: the layout is not of size zero.
        let base = unsafe { std::alloc::alloc_zeroed(layout) };
        let base = NonNull::new(base).unwrap_or_else(|| std::alloc::handle_alloc_error(layout));
        Self { base, len }
    }

    pub fn bytes(&self) -> &[u8] {
        // SAFETY: allocated and initialised for `len` bytes (dangling for none), owned by `self`.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.len) }
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: allocated and initialised for `len` bytes (dangling if there are none), owned by
        // `self`; `&mut self` makes the borrow unique.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), self.len) }
    }

    fn layout(len: usize) -> Layout {
        match Layout::from_size_align(len, ALIGNMENT) {
            Ok(layout) => layout,
            Err(_) => unreachable!("buffers have constant sizes far below the limit"),
        }
    }
}

impl Drop for Aligned {
    fn drop(&mut self) {
        if self.len > 0 {
            // SAFETY: allocated by `zeroed` with this layout.
            unsafe { std::alloc::dealloc(self.base.as_ptr(), Self::layout(self.len)) };
        }
    }
}
