//! The allocator of all fuzz targets, which refuses allocations of a size that only a hostile
//! length can ask for.
//!
//! The engine's own limit looks at resident memory, and a buffer that a hostile length made huge
//! but that nobody touched is not resident. So every target counts an allocation above
//! [`LARGEST_ALLOCATION`] as a finding: lengths are checked before they allocate.

use std::alloc::{GlobalAlloc, Layout, System};

/// In bytes. Well above what any target needs for honest input.
pub const LARGEST_ALLOCATION: usize = 64 << 20;

/// The system's allocator with a limit on single allocations.
pub struct Limited;

fn check(size: usize) {
    if size > LARGEST_ALLOCATION {
        // Nothing here may allocate, so the message has no size in it.
        let _ = std::io::Write::write_all(
            &mut std::io::stderr(),
            b"fuzz: an allocation above the limit of 64 MiB\n",
        );
        std::process::abort();
    }
}

// SAFETY: every method hands its arguments to the system's allocator unchanged, whose contract is
// the same; `check` neither allocates nor unwinds.
unsafe impl GlobalAlloc for Limited {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        check(layout.size());
        // SAFETY: the caller keeps `alloc`'s contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        check(layout.size());
        // SAFETY: the caller keeps `alloc_zeroed`'s contract.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps `dealloc`'s contract, and the block came from `System`.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        check(new_size);
        // SAFETY: the caller keeps `realloc`'s contract, and the block came from `System`.
        unsafe { System.realloc(pointer, layout, new_size) }
    }
}

/// Makes the program a fuzz target that runs an entry, a `fn(&[u8])`, on every input.
#[macro_export]
macro_rules! target {
    ($entry:path) => {
        #[global_allocator]
        static ALLOCATOR: $crate::Limited = $crate::Limited;

        libfuzzer_sys::fuzz_target!(|data: &[u8]| $entry(data));
    };
}
