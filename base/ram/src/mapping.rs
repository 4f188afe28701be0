//! A stretch of host memory that backs guest memory: a mapped file, heap, or a message channel.

use std::ffi::c_void;
use std::os::fd::BorrowedFd;

use rustix::mm::{Advice, MapFlags, ProtFlags};
use slipway_peer::Bin;

use crate::backing::{self, Backing};
use crate::pages::Pages;
use crate::{Fault, Permissions, copy, fetch, fetch_to_write};

/// Memory that is reached by messages only: a client that passed no descriptor for it.
///
/// An implementation may block until its own deadline; therefore it is called on a thread that
/// serves no other client.
pub trait Remote: Send + Sync {
    /// Fills `into` from address `iova` of the client.
    ///
    /// # Errors
    /// [`Fault::Remote`] when the client refused, vanished or was too slow.
    fn read(&self, iova: u64, into: &mut [u8]) -> Result<(), Fault>;

    /// Writes `from` to address `iova` of the client.
    ///
    /// # Errors
    /// As for [`Remote::read`].
    fn write(&self, iova: u64, from: &[u8]) -> Result<(), Fault>;
}

/// Bytes in this process's address space that back guest memory.
///
/// Nobody may form a reference to them: the owner of the file changes them at will.
pub struct Mapping {
    base: *mut u8,
    len: usize,
    permissions: Permissions,
    guarded: bool,
    owner: Owner,
}

/// What `base` points into, and how it is given back.
enum Owner {
    /// Unmapped by `bin`'s thread.
    File {
        start: *mut c_void,
        len: usize,
        granule: usize,
        bin: Bin,
    },
    Heap {
        words: *mut [u64],
    },
}

// SAFETY: the bytes are accessed by raw copies only, which tolerate concurrent change.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len` bytes at `offset` of `file`, shared. Neither must be a multiple of a page: what
    /// is mapped around them is never reached. Guarded unless nothing that the file's owner does
    /// can take a page away (see the crate's head).
    ///
    /// The mapping is unmapped through `bin`, the file owner's, whoever drops it: that may take
    /// seconds, and may be the last close of the file.
    ///
    /// # Errors
    /// `InvalidInput` for zero bytes or a range beyond what a file can have; `Unsupported` for a
    /// file of a kind that could stall whoever touches the mapping; whatever mmap(2) says:
    /// permission, no memory, no huge pages.
    pub fn file(
        file: BorrowedFd<'_>,
        offset: u64,
        len: usize,
        permissions: Permissions,
        bin: &Bin,
    ) -> std::io::Result<Self> {
        let Backing { granule, can_lose_pages } = backing::inspect(file)?;
        copy::prepare()?;
        // Remainders of a granule, which is a `usize`.
        let head = (offset % granule as u64) as usize;
        let whole = len.checked_add(head).and_then(|end| end.checked_next_multiple_of(granule));
        let whole = whole.filter(|_| len > 0).ok_or(std::io::ErrorKind::InvalidInput)?;
        let mut prot = ProtFlags::empty();
        prot.set(ProtFlags::READ, permissions.read);
        prot.set(ProtFlags::WRITE, permissions.write);
        let (any, from) = (std::ptr::null_mut(), offset - head as u64);
        // Not reserved: a client that names a large file of huge pages must not have the host's
        // pool set aside for it. Such files are guarded, so a page that is missing is a fault.
        let flags = MapFlags::SHARED | MapFlags::NORESERVE;
        // SAFETY: a fresh mapping at an address of the kernel's choice aliases nothing of ours.
        let start = unsafe { rustix::mm::mmap(any, whole, prot, flags, file, from)? };
        // What a guest keeps in its memory is no business of this process's core dump.
        // SAFETY: the mapping just made; the advice changes no byte.
        let _ = unsafe { rustix::mm::madvise(start, whole, Advice::LinuxDontDump) };
        // After mmap: who seals and sizes the file in between only errs on the guarded side.
        let guarded = can_lose_pages || !backing::cannot_shrink(file, offset, len);
        let base = start.cast::<u8>().wrapping_add(head);
        let owner = Owner::File { start, len: whole, granule, bin: bin.clone() };
        Ok(Self { base, len, permissions, guarded, owner })
    }

    /// `len` zeroed bytes of heap, for unit tests and bounce buffers.
    pub fn heap(len: usize) -> Self {
        // Only the raw pointer is kept: moving a box would claim that nothing else points into it.
        let words = Box::into_raw(vec![0_u64; len.div_ceil(8)].into_boxed_slice());
        Self {
            base: words.cast(),
            len,
            permissions: Permissions::READ_WRITE,
            guarded: false,
            owner: Owner::Heap { words },
        }
    }

    /// Size in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it holds no byte.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether the owner may take the memory away, so that a copy can find it gone.
    pub fn is_guarded(&self) -> bool {
        self.guarded
    }

    /// Whether it is heap.
    pub(crate) fn is_heap(&self) -> bool {
        matches!(self.owner, Owner::Heap { .. })
    }

    /// What may be done with it.
    #[inline]
    pub(crate) fn permissions(&self) -> Permissions {
        self.permissions
    }

    /// Address of byte `offset`, for a system call that the kernel checks (an I/O vector).
    ///
    /// # Panics
    /// When `offset..offset + len` leaves the mapping: the caller has checked it.
    #[inline]
    pub(crate) fn address(&self, offset: usize, len: usize) -> *mut u8 {
        assert!(offset.checked_add(len).is_some_and(|end| end <= self.len), "span out of mapping");
        // SAFETY: within the mapping, by the assertion.
        unsafe { self.base.add(offset) }
    }

    /// Copies from `offset` into `into`. False: the memory is gone.
    #[inline]
    pub(crate) fn read(&self, offset: usize, into: &mut [u8]) -> bool {
        let from = self.address(offset, into.len());
        // SAFETY: within the mapping, which stays as long as `self`, and readable (the callers
        // checked the permission); `file` prepared for its pages to go.
        unsafe { copy::read(from, into, self.guarded) }
    }

    /// Copies `from` to `offset`. False: the memory is gone.
    #[inline]
    pub(crate) fn write(&self, offset: usize, from: &[u8]) -> bool {
        let to = self.address(offset, from.len());
        // SAFETY: as for `read`, writable.
        unsafe { copy::write(to, from, self.guarded) }
    }

    /// Copies `len` bytes from `offset` to `into`. False: the memory is gone.
    ///
    /// # Safety
    /// `into` is valid for writes of `len` bytes, and does not overlap the mapping.
    pub(crate) unsafe fn read_raw(&self, offset: usize, into: *mut u8, len: usize) -> bool {
        let from = self.address(offset, len);
        // SAFETY: as for `read`; `into` by this function's own contract.
        unsafe { copy::read_raw(from, into, len, self.guarded) }
    }

    /// Copies `len` bytes from `from` to `offset`. False: the memory is gone.
    ///
    /// # Safety
    /// `from` is valid for reads of `len` bytes, and does not overlap the mapping.
    pub(crate) unsafe fn write_raw(&self, offset: usize, from: *const u8, len: usize) -> bool {
        let to = self.address(offset, len);
        // SAFETY: as for `write`; `from` by this function's own contract.
        unsafe { copy::write_raw(to, from, len, self.guarded) }
    }

    /// Copies `len` bytes from `offset` to `at` of `to`. False: memory of one of them is gone.
    #[inline]
    pub(crate) fn copy_to(&self, offset: usize, to: &Self, at: usize, len: usize) -> bool {
        let (from, into) = (self.address(offset, len), to.address(at, len));
        // SAFETY: as for `read` and `write`. Where the ranges overlap, since both are one client's
        // memory, what that client gets is a mix of its own bytes.
        unsafe { copy::between(into, from, len, self.guarded || to.guarded) }
    }

    /// Has the processor fetch the line that `offset` lies in: a hint, wherever that is.
    #[inline]
    pub(crate) fn prefetch(&self, offset: usize) {
        fetch(self.address(offset, 1));
    }

    /// As [`Mapping::prefetch`], soon to be written: a line that another processor has is taken
    /// from it.
    #[inline]
    pub(crate) fn prefetch_to_write(&self, offset: usize) {
        fetch_to_write(self.address(offset, 1));
    }

    /// Loads the little-endian word at `offset`, acquiring. None: the memory is gone.
    #[inline]
    pub(crate) fn load_u32(&self, offset: usize) -> Option<u32> {
        let from = self.address(offset, 4);
        // SAFETY: as for `read`.
        unsafe { copy::load_u32(from, self.guarded) }.map(u32::from_le)
    }

    /// Stores the little-endian word at `offset`, releasing. False: the memory is gone.
    pub(crate) fn store_u32(&self, offset: usize, word: u32) -> bool {
        let to = self.address(offset, 4);
        // SAFETY: as for `write`.
        unsafe { copy::store_u32(to, word.to_le(), self.guarded) }
    }

    /// As [`Mapping::load_u32`], for 16 bits.
    #[inline]
    pub(crate) fn load_u16(&self, offset: usize) -> Option<u16> {
        let from = self.address(offset, 2);
        // SAFETY: as for `read`.
        unsafe { copy::load_u16(from, self.guarded) }.map(u16::from_le)
    }

    /// As [`Mapping::store_u32`], for 16 bits.
    #[inline]
    pub(crate) fn store_u16(&self, offset: usize, word: u16) -> bool {
        let to = self.address(offset, 2);
        // SAFETY: as for `write`.
        unsafe { copy::store_u16(to, word.to_le(), self.guarded) }
    }

    /// Stores 16 bytes, little-endian, the last four with or after all others. False: the memory is
    /// gone.
    #[inline]
    pub(crate) fn publish(&self, offset: usize, bits: u128) -> bool {
        let to = self.address(offset, 16);
        // SAFETY: as for `write`.
        unsafe { copy::publish(to, bits, self.guarded) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        match &self.owner {
            Owner::File { start, len, granule, bin } => {
                // SAFETY: mapped by `file` with this length; no span refers to it any more.
                bin.discard_memory(unsafe { Pages::new(*start, *len, *granule) }, *len);
            }
            // SAFETY: from `Box::into_raw` in `heap`, and given back once.
            Owner::Heap { words } => drop(unsafe { Box::from_raw(*words) }),
        }
    }
}
