//! Host memory that backs guest memory: a mapped file, heap, or a message channel.

use std::ffi::c_void;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use rustix::mm::{Advice, MapFlags, ProtFlags};
use slipway_numa::NumaNode;
use slipway_peer::Bin;

use crate::backing::{self, Backing};
use crate::gate::{Late, NotYet};
use crate::pages::Pages;
use crate::write_log::WriteLog;
use crate::{Fault, Permissions, aligned, copy, fetch, fetch_to_write};

/// Memory of a client that passed no descriptor for it: accessed by messages only.
///
/// An implementation may block until its own deadline, so call it on a thread that serves no other
/// client.
pub trait MessageMemory: Send + Sync {
    /// Fills `into` from address `iova` of the client.
    ///
    /// # Errors
    /// [`Fault::Remote`] if the client refused, vanished or was too slow.
    fn read(&self, iova: u64, into: &mut [u8]) -> Result<(), Fault>;

    /// Writes `from` to address `iova` of the client.
    ///
    /// # Errors
    /// As for [`MessageMemory::read`].
    fn write(&self, iova: u64, from: &[u8]) -> Result<(), Fault>;
}

/// Bytes in this process's address space that back guest memory.
///
/// No code may form a reference to the bytes: the owner of the file changes them at will.
pub struct Mapping {
    base: *mut u8,
    len: usize,
    permissions: Permissions,
    guarded: bool,
    /// Set if a page may have other bytes than its user begins with until it is taken.
    late: Option<Late>,
    /// The pages that were written to through this mapping, while that is noted.
    log: WriteLog,
    owner: Owner,
}

/// Origin of the memory at `base`, which decides how it is freed.
enum Owner {
    /// A mapped file, unmapped by `bin`'s thread.
    File {
        start: *mut c_void,
        len: usize,
        granule: usize,
        bin: Bin,
    },
    Heap {
        words: *mut [u64],
    },
    /// Another mapping, which stays as long as this one.
    Other {
        _whole: Arc<Mapping>,
    },
}

// SAFETY: the bytes are accessed by raw copies only, which tolerate concurrent change.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len` bytes at `offset` of `file`, shared. Neither must be a multiple of a page: bytes
    /// that are mapped around them are never accessed. The mapping is guarded unless the file's
    /// owner cannot take a page away (see the crate's head).
    ///
    /// Whichever thread drops the mapping, the bin of the file's owner, `bin`, unmaps it: that may
    /// take seconds, and may be the last close of the file.
    ///
    /// # Errors
    /// `InvalidInput` for zero bytes or a length that overflows; `Unsupported` for a file of a kind
    /// that could stall a thread that touches the mapping; errors of fstat(2), sigaction(2) and
    /// mmap(2): a range beyond the largest file, permission, no memory.
    pub fn file(
        file: BorrowedFd<'_>,
        offset: u64,
        len: usize,
        permissions: Permissions,
        bin: &Bin,
    ) -> std::io::Result<Self> {
        let Backing { granule, can_lose_pages } = backing::inspect(file)?;
        copy::prepare()?;
        // Lossless: the remainder is below a granule, which is a `usize`.
        let head = (offset % granule as u64) as usize;
        let whole = len.checked_add(head).and_then(|end| end.checked_next_multiple_of(granule));
        let whole = whole.filter(|_| len > 0).ok_or(std::io::ErrorKind::InvalidInput)?;
        let mut prot = ProtFlags::empty();
        prot.set(ProtFlags::READ, permissions.read);
        prot.set(ProtFlags::WRITE, permissions.write);
        let from = offset - head as u64;
        let hint = aligned::hint(whole, from);
        // Not reserved: a client that passes a large file of huge pages must not have the host's
        // pool set aside for it. Such files are guarded, so a missing page is a [`Fault::Gone`].
        let flags = MapFlags::SHARED | MapFlags::NORESERVE;
        // SAFETY: a fresh mapping at an address of the kernel's choice, which the hint does not
        // replace, aliases nothing of this process.
        let start = unsafe { rustix::mm::mmap(hint, whole, prot, flags, file, from)? };
        // Guest memory does not belong in this process's core dump.
        // SAFETY: the range is the mapping just made; the advice changes no byte.
        let _ = unsafe { rustix::mm::madvise(start, whole, Advice::LinuxDontDump) };
        // After mmap: an owner that seals and sizes the file in between only errs on the guarded
        // side.
        let guarded = can_lose_pages || !backing::cannot_shrink(file, offset, len);
        let base = start.cast::<u8>().wrapping_add(head);
        let owner = Owner::File { start, len: whole, granule, bin: bin.clone() };
        Ok(Self { base, len, permissions, guarded, late: None, log: WriteLog::default(), owner })
    }

    /// Returns a mapping of the same bytes as `whole`, which stays mapped for as long.
    pub(crate) fn sharing(whole: &Arc<Self>) -> Self {
        let Self { base, len, permissions, guarded, .. } = **whole;
        let owner = Owner::Other { _whole: Arc::clone(whole) };
        Self { base, len, permissions, guarded, late: None, log: WriteLog::default(), owner }
    }

    /// Puts the mapping behind a gate.
    pub(crate) fn behind(mut self, late: Late) -> Self {
        self.late = Some(late);
        self
    }

    /// Returns `len` zeroed bytes of heap, for unit tests and bounce buffers.
    pub fn heap(len: usize) -> Self {
        // Only the raw pointer is kept: moving a box would assert that no other pointer into it
        // exists.
        let words = Box::into_raw(vec![0_u64; len.div_ceil(8)].into_boxed_slice());
        Self {
            base: words.cast(),
            len,
            permissions: Permissions::READ_WRITE,
            guarded: false,
            late: None,
            log: WriteLog::default(),
            owner: Owner::Heap { words },
        }
    }

    /// Returns the size in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the size is 0.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns whether the owner may take the memory away, so that a copy can find it gone.
    pub fn is_guarded(&self) -> bool {
        self.guarded
    }

    /// Returns the pages that were written to through this mapping.
    pub(crate) fn log(&self) -> &WriteLog {
        &self.log
    }

    /// Notes a write of `len` bytes at `offset`, that has happened or that the kernel may do as
    /// long as the request at hand lasts. Does nothing while writes are not noted.
    #[inline]
    pub(crate) fn wrote(&self, offset: usize, len: usize) {
        self.log.note(offset, len);
    }

    /// Returns whether the pages are huge ones of hugetlbfs.
    pub(crate) fn is_huge(&self) -> bool {
        matches!(&self.owner, Owner::File { granule, .. } if *granule > rustix::param::page_size())
    }

    /// Has the kernel make pages on `node` from now on, as [`slipway_numa::prefer`] does.
    ///
    /// # Errors
    /// The errors of mbind(2); `InvalidInput` if this mapping has mapped no file itself.
    pub(crate) fn prefer(&self, node: NumaNode) -> std::io::Result<()> {
        match &self.owner {
            Owner::File { start, len, .. } => {
                slipway_numa::prefer(start.addr() as u64, *len as u64, node)
            }
            _ => Err(std::io::ErrorKind::InvalidInput.into()),
        }
    }

    /// Has the kernel make the pages of `len` bytes from `offset` on, both multiples of a base
    /// page, where this mapping has them made. Pages that are there stay as they are.
    ///
    /// # Errors
    /// The errors of madvise(2): the host has no memory left.
    ///
    /// # Panics
    /// If `offset..offset + len` leaves the mapping.
    pub(crate) fn populate(&self, offset: usize, len: usize) -> std::io::Result<()> {
        let start = self.address(offset, len).cast();
        // SAFETY: the range is within the mapping, and the advice changes no byte of it.
        Ok(unsafe { rustix::mm::madvise(start, len, Advice::LinuxPopulateWrite) }?)
    }

    /// Returns whether the memory is heap.
    pub(crate) fn is_heap(&self) -> bool {
        matches!(self.owner, Owner::Heap { .. })
    }

    /// Returns the accesses that the memory allows.
    #[inline]
    pub(crate) fn permissions(&self) -> Permissions {
        self.permissions
    }

    /// Returns the address of byte `offset`, for a system call in which the kernel checks it (an
    /// I/O vector).
    ///
    /// # Panics
    /// If `offset..offset + len` leaves the mapping; callers have checked it.
    #[inline]
    pub(crate) fn address(&self, offset: usize, len: usize) -> *mut u8 {
        assert!(offset.checked_add(len).is_some_and(|end| end <= self.len), "span out of mapping");
        // SAFETY: the assertion keeps the address within the mapping.
        unsafe { self.base.add(offset) }
    }

    /// Takes late memory for an access that is to happen now or later. Never waits for another
    /// thread's granule: the caller comes back if the memory is busy. Copying a template's page may
    /// sleep.
    #[inline]
    pub(crate) fn take(&self, offset: usize, len: usize) -> Result<(), NotYet> {
        match &self.late {
            None => Ok(()),
            Some(late) => late.take(offset, len),
        }
    }

    /// Takes late memory for an access. Waits while another thread writes a granule's first bytes.
    #[inline]
    pub(crate) fn take_patiently(&self, offset: usize, len: usize) -> bool {
        match &self.late {
            None => true,
            Some(late) => late.take_patiently(offset, len).is_ok(),
        }
    }

    /// Takes late memory for hardware, as [`Mapping::take_patiently`] does for an access. Returns
    /// the number of bytes that were not yet those with which their user begins, or `None` if
    /// memory is gone.
    pub(crate) fn give_to_hardware(&self, offset: usize, len: usize) -> Option<usize> {
        match &self.late {
            None => Some(0),
            Some(late) => late.give_to_hardware(offset, len).ok(),
        }
    }

    /// Copies from `offset` into `into`, of memory that may not have been taken: that reads as its
    /// user begins with it. Returns `false` if the memory is gone.
    #[inline]
    pub(crate) fn look(&self, offset: usize, into: &mut [u8]) -> bool {
        match &self.late {
            None => self.read(offset, into),
            Some(late) if late.is_open() => self.read(offset, into),
            Some(late) => late.look(offset, into, |at, part| self.read(offset + at, part)),
        }
    }

    /// Copies from `offset` into `into`. Returns `false` if the memory is gone.
    #[inline]
    pub(crate) fn read(&self, offset: usize, into: &mut [u8]) -> bool {
        let from = self.address(offset, into.len());
        // SAFETY: the range is within the mapping, which stays as long as `self`, and readable (the
        // callers checked the permission); `file` called `copy::prepare`, so its pages may go.
        unsafe { copy::read(from, into, self.guarded) }
    }

    /// Copies `from` to `offset`. Returns `false` if the memory is gone.
    #[inline]
    pub(crate) fn write(&self, offset: usize, from: &[u8]) -> bool {
        let to = self.address(offset, from.len());
        // SAFETY: as for `read`; the callers checked that the range is writable.
        let there = unsafe { copy::write(to, from, self.guarded) };
        self.wrote(offset, from.len());
        there
    }

    /// Writes `len` zeros from `offset` on. Returns `false` if the memory is gone.
    pub(crate) fn zero(&self, offset: usize, len: usize) -> bool {
        let to = self.address(offset, len);
        // SAFETY: as for `write`.
        unsafe { copy::zero(to, len, self.guarded) }
    }

    /// Copies `len` bytes from `offset` to `into`. Returns `false` if the memory is gone.
    ///
    /// # Safety
    /// `into` is valid for writes of `len` bytes, and does not overlap the mapping.
    pub(crate) unsafe fn read_raw(&self, offset: usize, into: *mut u8, len: usize) -> bool {
        let from = self.address(offset, len);
        // SAFETY: as for `read`; `into` by this function's own contract.
        unsafe { copy::read_raw(from, into, len, self.guarded) }
    }

    /// Copies `len` bytes from `from` to `offset`. Returns `false` if the memory is gone.
    ///
    /// # Safety
    /// `from` is valid for reads of `len` bytes, and does not overlap the mapping.
    pub(crate) unsafe fn write_raw(&self, offset: usize, from: *const u8, len: usize) -> bool {
        let to = self.address(offset, len);
        // SAFETY: as for `write`; `from` by this function's own contract.
        let there = unsafe { copy::write_raw(to, from, len, self.guarded) };
        self.wrote(offset, len);
        there
    }

    /// Copies `len` bytes from `offset` to byte `at` of `to`. Returns `false` if memory on either
    /// side is gone.
    #[inline]
    pub(crate) fn copy_to(&self, offset: usize, to: &Self, at: usize, len: usize) -> bool {
        let (from, into) = (self.address(offset, len), to.address(at, len));
        // SAFETY: as for `read` and `write`. Ranges overlap only if both are one client's memory;
        // that client then gets a mix of its own bytes.
        let there = unsafe { copy::between(into, from, len, self.guarded || to.guarded) };
        to.wrote(at, len);
        there
    }

    /// Prefetches the cache line of byte `offset`, which must lie in the mapping, for reading.
    #[inline]
    pub(crate) fn prefetch(&self, offset: usize) {
        fetch(self.address(offset, 1));
    }

    /// Prefetches the cache line of byte `offset`, which must lie in the mapping, for writing:
    /// takes the line from another processor's cache.
    #[inline]
    pub(crate) fn prefetch_to_write(&self, offset: usize) {
        fetch_to_write(self.address(offset, 1));
    }

    /// Loads the little-endian 32-bit word at `offset` with acquire ordering. Returns `None` if the
    /// memory is gone.
    #[inline]
    pub(crate) fn load_u32(&self, offset: usize) -> Option<u32> {
        let from = self.address(offset, 4);
        // SAFETY: as for `read`.
        unsafe { copy::load_u32(from, self.guarded) }.map(u32::from_le)
    }

    /// Stores the little-endian 32-bit word at `offset` with release ordering. Returns `false` if
    /// the memory is gone.
    pub(crate) fn store_u32(&self, offset: usize, word: u32) -> bool {
        let to = self.address(offset, 4);
        // SAFETY: as for `write`.
        let there = unsafe { copy::store_u32(to, word.to_le(), self.guarded) };
        self.wrote(offset, 4);
        there
    }

    /// Loads the little-endian 16-bit word at `offset` with acquire ordering. Returns `None` if the
    /// memory is gone.
    #[inline]
    pub(crate) fn load_u16(&self, offset: usize) -> Option<u16> {
        let from = self.address(offset, 2);
        // SAFETY: as for `read`.
        unsafe { copy::load_u16(from, self.guarded) }.map(u16::from_le)
    }

    /// Stores the little-endian 16-bit word at `offset` with release ordering. Returns `false` if
    /// the memory is gone.
    #[inline]
    pub(crate) fn store_u16(&self, offset: usize, word: u16) -> bool {
        let to = self.address(offset, 2);
        // SAFETY: as for `write`.
        let there = unsafe { copy::store_u16(to, word.to_le(), self.guarded) };
        self.wrote(offset, 2);
        there
    }

    /// Stores 16 bytes, little-endian, the last four with or after all others. Returns `false` if
    /// the memory is gone.
    #[inline]
    pub(crate) fn publish(&self, offset: usize, bits: u128) -> bool {
        let to = self.address(offset, 16);
        // SAFETY: as for `write`.
        let there = unsafe { copy::publish(to, bits, self.guarded) };
        self.wrote(offset, 16);
        there
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        match &self.owner {
            Owner::File { start, len, granule, bin } => {
                // SAFETY: mapped by `file` with this length; this was the last reference, so no
                // span is left.
                bin.discard_memory(unsafe { Pages::new(*start, *len, *granule) }, *len);
            }
            // SAFETY: the pointer comes from `Box::into_raw` in `heap`, and is freed once.
            Owner::Heap { words } => drop(unsafe { Box::from_raw(*words) }),
            Owner::Other { .. } => {}
        }
    }
}
