//! Unmapping without blocking.
//!
//! munmap(2) of gigabytes that were touched takes seconds, and so does the last close of a memfd,
//! which an unmapping may be. A thread that serves others does neither: it hands the mapping to a
//! [`Bin`].

use std::ffi::c_void;
use std::sync::LazyLock;

use slipway_peer::Bin;

/// Maximum number of bytes that one call unmaps, unless a huge page is larger: for about as long as
/// the call takes, a few milliseconds, page faults and mmap(2) of other threads wait. Mappings of
/// this process's own memory up to this size are unmapped at once.
const SLICE: usize = 32 << 20;

/// Bin for memory that belongs to no peer.
static OWN: LazyLock<Bin> = LazyLock::new(Bin::new);

/// Returns the bin for this process's own memory.
pub(crate) fn own() -> &'static Bin {
    &OWN
}

/// An unused mapping. Dropping it unmaps it, slice by slice.
pub(crate) struct Pages {
    start: *mut c_void,
    len: usize,
    /// Maximum number of bytes for one call: a power of two.
    step: usize,
}

// SAFETY: nothing refers to the addresses, which any thread may unmap.
unsafe impl Send for Pages {}

impl Pages {
    /// Takes the `len` bytes at `start`, in pages of `granule` bytes.
    ///
    /// # Safety
    /// The range consists of whole mappings of the caller, and is unused from now on.
    pub(crate) unsafe fn new(start: *mut c_void, len: usize, granule: usize) -> Self {
        Self { start, len, step: SLICE.max(granule) }
    }

    fn is_small(&self) -> bool {
        self.len <= SLICE
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        let mut at = 0;
        while at < self.len {
            let from = self.start.cast::<u8>().wrapping_add(at);
            // Each part ends at a multiple of a step, which no huge page crosses.
            let part = (self.step - from.addr() % self.step).min(self.len - at);
            // SAFETY: by the contract of `new`; each part is unmapped once. Unmapped addresses may
            // belong to another mapping by now, and are not touched again.
            #[allow(clippy::disallowed_methods, reason = "this is the form that others use")]
            let _ = unsafe { rustix::mm::munmap(from.cast(), part) };
            at += part;
        }
    }
}

/// Unmaps `len` bytes of this process's own memory at `start`: at once up to 32 MiB, otherwise on a
/// disposal thread. The caller never waits for long.
///
/// # Safety
/// The range consists of whole mappings of the caller, in pages of the machine's base size, and is
/// unused from now on.
pub unsafe fn unmap(start: *mut u8, len: usize) {
    // SAFETY: by this function's own contract.
    let pages = unsafe { Pages::new(start.cast(), len, 1) };
    if !pages.is_small() {
        own().discard_value(pages);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::os::fd::{AsFd, OwnedFd};
    use std::sync::mpsc::{Receiver, channel};
    use std::time::{Duration, Instant};

    use rustix::mm::{MapFlags, ProtFlags};

    use super::*;
    use crate::{Lasting, Permissions, Region};

    fn file(name: &str, len: usize) -> OwnedFd {
        let file = rustix::fs::memfd_create(name, rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, len as u64).unwrap();
        file
    }

    /// Returns whether any page of the memfd `name` is mapped in this process.
    fn is_mapped(name: &str) -> bool {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        maps.contains(&format!("/memfd:{name} "))
    }

    fn goes(name: &str) -> bool {
        let limit = Instant::now() + Duration::from_secs(60);
        while is_mapped(name) && Instant::now() < limit {
            std::thread::sleep(Duration::from_millis(1));
        }
        !is_mapped(name)
    }

    /// A value whose drop blocks until the test sends to it.
    struct Sleeper(Receiver<()>);

    impl Drop for Sleeper {
        fn drop(&mut self) {
            let _ = self.0.recv();
        }
    }

    #[test]
    fn all_slices_are_unmapped_wherever_they_begin() {
        for skip in [0, 4096, SLICE - 4096] {
            let (name, len) = (format!("slices-{skip}"), 3 * SLICE);
            let (any, protection) = (std::ptr::null_mut(), ProtFlags::READ);
            let file = file(&name, len);
            // SAFETY: a fresh mapping.
            let start =
                unsafe { rustix::mm::mmap(any, len, protection, MapFlags::SHARED, &file, 0) };
            let start = start.unwrap();
            let rest = start.cast::<u8>().wrapping_add(skip).cast();
            // SAFETY: mapped above, and unused.
            drop(unsafe { Pages::new(rest, len - skip, 4096) });
            assert_eq!(is_mapped(&name), skip > 0);
            // SAFETY: as above.
            drop(unsafe { Pages::new(start, skip, 4096) });
            assert!(!is_mapped(&name));
        }
    }

    #[test]
    fn a_peers_memory_is_unmapped_by_the_thread_of_its_bin_alone() {
        let (name, bin) = ("of-a-peer", Bin::new());
        let (wake, told) = channel();
        bin.discard_value(Sleeper(told));
        let region =
            Region::of_peer(file(name, 8192).as_fd(), 0, 8192, Permissions::READ_WRITE, &bin);
        drop(region.unwrap());
        assert!(is_mapped(name), "it was unmapped by who dropped it");
        assert_eq!(bin.held(), 2);
        wake.send(()).unwrap();
        assert!(goes(name));
    }

    #[test]
    fn much_lasting_memory_goes_elsewhere_and_little_at_once() {
        drop(Lasting::new("little", 2 << 20).unwrap());
        assert!(!is_mapped("little"));
        let much = Lasting::new("much", 2 * SLICE).unwrap();
        assert!(is_mapped("much"));
        drop(much);
        assert!(goes("much"));
    }
}
