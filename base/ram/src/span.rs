//! A pinned piece of guest memory.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use crate::{Access, Fault, Mapping, Permissions, pages};

/// A contiguous, pinned piece of guest memory in this process: the mapping stays as long as the
/// span lives. Disks read into spans and write from them.
#[derive(Clone)]
pub struct Span {
    mapping: Arc<Mapping>,
    offset: usize,
    len: usize,
    iova: u64,
}

impl std::fmt::Debug for Span {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Span({:#x}+{:#x})", self.iova, self.len)
    }
}

impl Span {
    pub(crate) fn new(mapping: Arc<Mapping>, offset: usize, len: usize, iova: u64) -> Self {
        debug_assert!(offset + len <= mapping.len());
        Self { mapping, offset, len, iova }
    }

    /// Returns `len` zeroed bytes of heap: a bounce buffer.
    pub fn heap(len: usize) -> Self {
        Self::new(Arc::new(Mapping::heap(len)), 0, len, 0)
    }

    /// Maps `len` bytes at `offset` of `file`, shared, readable and writable, like one region of a
    /// client's memory: for memory that is shared without a DMA map.
    ///
    /// # Errors
    /// As for [`Mapping::file`].
    pub fn file(file: BorrowedFd<'_>, offset: u64, len: usize) -> std::io::Result<Self> {
        let mapping = Mapping::file(file, offset, len, Permissions::READ_WRITE, pages::own())?;
        Ok(Self::new(Arc::new(mapping), 0, len, 0))
    }

    /// Returns the size in bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the size is 0.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns whether the span is memory of this process alone: a bounce buffer.
    pub fn is_heap(&self) -> bool {
        self.mapping.is_heap()
    }

    /// Returns whether the owner may take the memory away: then only copies through this handle are
    /// safe.
    pub fn is_guarded(&self) -> bool {
        self.mapping.is_guarded()
    }

    /// Returns whether the region allows `access`.
    pub(crate) fn allows(&self, access: Access) -> bool {
        self.mapping.permissions().allow(access)
    }

    /// Returns the client's address of the first byte; 0 for a bounce buffer.
    pub fn iova(&self) -> u64 {
        self.iova
    }

    /// Returns the part `offset..offset + len` of this span.
    ///
    /// # Panics
    /// If the part leaves the span: a programmer's error.
    pub fn slice(&self, offset: usize, len: usize) -> Self {
        assert!(offset.checked_add(len).is_some_and(|end| end <= self.len), "slice out of span");
        Self { offset: self.offset + offset, len, iova: self.at(offset), ..self.clone() }
    }

    /// Returns the memory around this span: the part of its mapping in the same block of `granule`
    /// bytes, a power of two, aligned by addresses of this process. The result's IOVA is
    /// meaningless. Returns `None` for heap, for memory that its owner may take away, and for a
    /// span that crosses a block boundary.
    pub fn around(&self, granule: usize) -> Option<Self> {
        let base = self.mapping.address(0, 0).addr();
        let (start, end) = (base + self.offset, base + self.offset + self.len);
        let first = start & !(granule - 1);
        if self.is_heap() || self.mapping.is_guarded() || end - first > granule {
            return None;
        }
        let begin = first.max(base) - base;
        let past = (first + granule).min(base + self.mapping.len()) - base;
        Some(Self { offset: begin, len: past - begin, iova: 0, mapping: Arc::clone(&self.mapping) })
    }

    /// Makes this span the part `offset..offset + len` of `whole`, like [`Span::slice`]. No
    /// reference count changes if both have the same mapping, so that reusing a span over and over
    /// costs a few stores.
    ///
    /// # Panics
    /// If the part leaves `whole`: a programmer's error.
    #[inline]
    pub fn assign(&mut self, whole: &Self, offset: usize, len: usize) {
        assert!(offset.checked_add(len).is_some_and(|end| end <= whole.len), "slice out of span");
        self.renew(&whole.mapping, whole.offset + offset, len, whole.at(offset));
    }

    /// Appends `next` if it directly follows this span in the same mapping and in the client's
    /// address space. Returns whether it does.
    pub fn join(&mut self, next: &Self) -> bool {
        self.extend(&next.mapping, next.offset, next.len, next.iova)
    }

    /// Makes this span refer to another range. No reference count changes if the mapping is the
    /// same: an atomic change of a count would wait for all copies before it.
    #[inline]
    pub(crate) fn renew(&mut self, mapping: &Arc<Mapping>, offset: usize, len: usize, iova: u64) {
        debug_assert!(offset + len <= mapping.len());
        if !Arc::ptr_eq(&self.mapping, mapping) {
            self.mapping = Arc::clone(mapping);
        }
        (self.offset, self.len, self.iova) = (offset, len, iova);
    }

    /// Appends a range if it directly follows this span, like [`Span::join`]. Returns whether it
    /// does.
    pub(crate) fn extend(
        &mut self,
        mapping: &Arc<Mapping>,
        offset: usize,
        len: usize,
        iova: u64,
    ) -> bool {
        let follows = Arc::ptr_eq(&self.mapping, mapping)
            && self.offset + self.len == offset
            && self.iova.wrapping_add(self.len as u64) == iova;
        if follows {
            self.len += len;
        }
        follows
    }

    /// Copies from `offset` of the span into `into`.
    ///
    /// # Errors
    /// [`Fault::Gone`] if the owner took the memory away, [`Fault::Denied`] if the region does not
    /// allow the access.
    ///
    /// # Panics
    /// If the range leaves the span.
    #[inline]
    pub fn read(&self, offset: usize, into: &mut [u8]) -> Result<(), Fault> {
        assert!(offset.checked_add(into.len()).is_some_and(|end| end <= self.len), "out of span");
        self.allow(Access::Read, offset)?;
        self.outcome(self.mapping.read(self.offset + offset, into), offset)
    }

    /// Copies `from` to `offset` of the span.
    ///
    /// # Errors
    /// [`Fault::Gone`] if the owner took the memory away, [`Fault::Denied`] if the region does not
    /// allow the access.
    ///
    /// # Panics
    /// If the range leaves the span.
    #[inline]
    pub fn write(&self, offset: usize, from: &[u8]) -> Result<(), Fault> {
        assert!(offset.checked_add(from.len()).is_some_and(|end| end <= self.len), "out of span");
        self.allow(Access::Write, offset)?;
        self.outcome(self.mapping.write(self.offset + offset, from), offset)
    }

    /// Copies `len` bytes from `offset` of the span to byte `at` of `to` without a buffer in
    /// between. The owners of both sides may change their memory meanwhile; the copy is then any
    /// mix of old and new.
    ///
    /// # Errors
    /// [`Fault::Gone`] if either owner took the memory away, always with the address in `self`;
    /// [`Fault::Denied`] if a region does not allow the access.
    ///
    /// # Panics
    /// If a range leaves its span.
    #[inline]
    pub fn copy_to(&self, offset: usize, to: &Self, at: usize, len: usize) -> Result<(), Fault> {
        assert!(offset.checked_add(len).is_some_and(|end| end <= self.len), "out of span");
        assert!(at.checked_add(len).is_some_and(|end| end <= to.len), "out of span");
        self.allow(Access::Read, offset)?;
        to.allow(Access::Write, at)?;
        let there = self.mapping.copy_to(self.offset + offset, &to.mapping, to.offset + at, len);
        self.outcome(there, offset)
    }

    /// Prefetches the cache line of byte `offset` for reading. Ignored if `offset` is outside the
    /// span.
    #[inline]
    pub fn prefetch(&self, offset: usize) {
        if offset < self.len {
            self.mapping.prefetch(self.offset + offset);
        }
    }

    /// Prefetches the cache line of byte `offset` for writing. Ignored if `offset` is outside the
    /// span.
    #[inline]
    pub fn prefetch_to_write(&self, offset: usize) {
        if offset < self.len {
            self.mapping.prefetch_to_write(self.offset + offset);
        }
    }

    /// Loads the little-endian 32-bit word at `offset` in one access, with acquire ordering.
    ///
    /// # Errors
    /// As for [`Span::read`].
    ///
    /// # Panics
    /// If the word leaves the span.
    #[inline]
    pub fn load_u32(&self, offset: usize) -> Result<u32, Fault> {
        assert!(offset.checked_add(4).is_some_and(|end| end <= self.len), "word out of span");
        self.allow(Access::Read, offset)?;
        let word = self.mapping.load_u32(self.offset + offset);
        word.ok_or(Fault::Gone { iova: self.at(offset) })
    }

    /// Stores the little-endian 32-bit word at `offset` in one access, with release ordering.
    ///
    /// # Errors
    /// As for [`Span::write`].
    ///
    /// # Panics
    /// If the word leaves the span.
    #[inline]
    pub fn store_u32(&self, offset: usize, value: u32) -> Result<(), Fault> {
        assert!(offset.checked_add(4).is_some_and(|end| end <= self.len), "word out of span");
        self.allow(Access::Write, offset)?;
        self.outcome(self.mapping.store_u32(self.offset + offset, value), offset)
    }

    /// Loads the little-endian 16-bit word at `offset` in one access, with acquire ordering.
    ///
    /// # Errors
    /// As for [`Span::read`].
    ///
    /// # Panics
    /// If the word leaves the span.
    #[inline]
    pub fn load_u16(&self, offset: usize) -> Result<u16, Fault> {
        assert!(offset.checked_add(2).is_some_and(|end| end <= self.len), "word out of span");
        self.allow(Access::Read, offset)?;
        let word = self.mapping.load_u16(self.offset + offset);
        word.ok_or(Fault::Gone { iova: self.at(offset) })
    }

    /// Stores the little-endian 16-bit word at `offset` in one access, with release ordering.
    ///
    /// # Errors
    /// As for [`Span::write`].
    ///
    /// # Panics
    /// If the word leaves the span.
    #[inline]
    pub fn store_u16(&self, offset: usize, value: u16) -> Result<(), Fault> {
        assert!(offset.checked_add(2).is_some_and(|end| end <= self.len), "word out of span");
        self.allow(Access::Write, offset)?;
        self.outcome(self.mapping.store_u16(self.offset + offset, value), offset)
    }

    /// Stores 16 bytes at `offset`, little-endian, like
    /// [`Memory::publish`](crate::Memory::publish).
    ///
    /// # Errors
    /// As for [`Span::write`].
    ///
    /// # Panics
    /// If the range leaves the span.
    #[inline]
    pub fn publish(&self, offset: usize, bits: u128) -> Result<(), Fault> {
        assert!(offset.checked_add(16).is_some_and(|end| end <= self.len), "out of span");
        self.allow(Access::Write, offset)?;
        self.outcome(self.mapping.publish(self.offset + offset, bits), offset)
    }

    /// Copies `len` bytes from `offset` of the span to `into`: for memory that others may change
    /// meanwhile and that therefore is no Rust slice.
    ///
    /// # Errors
    /// As for [`Span::read`].
    ///
    /// # Panics
    /// If the range leaves the span.
    ///
    /// # Safety
    /// `into` is valid for writes of `len` bytes, and does not overlap the span.
    pub unsafe fn read_raw(&self, offset: usize, into: *mut u8, len: usize) -> Result<(), Fault> {
        assert!(offset.checked_add(len).is_some_and(|end| end <= self.len), "out of span");
        self.allow(Access::Read, offset)?;
        // SAFETY: by this function's own contract.
        let there = unsafe { self.mapping.read_raw(self.offset + offset, into, len) };
        self.outcome(there, offset)
    }

    /// Copies `len` bytes from `from` to `offset` of the span: for memory that others may change
    /// meanwhile and that therefore is no Rust slice.
    ///
    /// # Errors
    /// As for [`Span::write`].
    ///
    /// # Panics
    /// If the range leaves the span.
    ///
    /// # Safety
    /// `from` is valid for reads of `len` bytes, and does not overlap the span.
    pub unsafe fn write_raw(
        &self,
        offset: usize,
        from: *const u8,
        len: usize,
    ) -> Result<(), Fault> {
        assert!(offset.checked_add(len).is_some_and(|end| end <= self.len), "out of span");
        self.allow(Access::Write, offset)?;
        // SAFETY: by this function's own contract.
        let there = unsafe { self.mapping.write_raw(self.offset + offset, from, len) };
        self.outcome(there, offset)
    }

    /// Returns address and length for a system call's I/O vector. The kernel answers a vanished
    /// page with `EFAULT`; the caller must not dereference the address and must keep the span until
    /// the call has ended. Memory whose writes are noted ([`Region::log_writes`]) counts as written
    /// to from here on if the region allows writes, since the kernel may write to it. So ask for
    /// the address anew for each call.
    ///
    /// [`Region::log_writes`]: crate::Region::log_writes
    pub fn io_vector(&self) -> (*mut u8, usize) {
        if self.allows(Access::Write) {
            self.mapping.wrote(self.offset, self.len);
        }
        self.extent()
    }

    /// Returns address and length for advice to the kernel (madvise(2)), under which nobody writes
    /// to the memory. The memory does not count as written to, unlike that of
    /// [`Span::io_vector`].
    pub fn extent(&self) -> (*mut u8, usize) {
        (self.mapping.address(self.offset, self.len), self.len)
    }

    /// Checks the permission again: `pin` checked only the access named there, and a span pinned
    /// for the other one must not touch pages that are not mapped for it.
    #[inline]
    fn allow(&self, access: Access, offset: usize) -> Result<(), Fault> {
        if self.allows(access) {
            return Ok(());
        }
        Err(Fault::Denied { iova: self.at(offset) })
    }

    #[inline]
    fn outcome(&self, there: bool, offset: usize) -> Result<(), Fault> {
        if there { Ok(()) } else { Err(Fault::Gone { iova: self.at(offset) }) }
    }

    /// Returns the client's address of byte `offset`. The end of a span at the top of the address
    /// space is 0.
    #[inline]
    fn at(&self, offset: usize) -> u64 {
        self.iova.wrapping_add(offset as u64)
    }
}
