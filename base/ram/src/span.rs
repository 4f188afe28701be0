//! A pinned piece of guest memory.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use crate::{Access, Fault, Mapping, Permissions, pages};

/// A contiguous piece of guest memory in this process, pinned: the mapping stays as long as the
/// span lives. What a disk reads into and writes from.
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

    /// `len` zeroed bytes of heap: a bounce buffer.
    pub fn heap(len: usize) -> Self {
        Self::new(Arc::new(Mapping::heap(len)), 0, len, 0)
    }

    /// `len` bytes at `offset` of `file`, mapped shared, to be read and written: as one region of a
    /// client's memory, for who shares memory without a DMA map.
    ///
    /// # Errors
    /// As for [`Mapping::file`].
    pub fn file(file: BorrowedFd<'_>, offset: u64, len: usize) -> std::io::Result<Self> {
        let mapping = Mapping::file(file, offset, len, Permissions::READ_WRITE, pages::own())?;
        Ok(Self::new(Arc::new(mapping), 0, len, 0))
    }

    /// Size in bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it holds no byte.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether it is memory of this process alone: a bounce buffer.
    pub fn is_heap(&self) -> bool {
        self.mapping.is_heap()
    }

    /// Whether its owner may take the memory away: only copies through this handle are safe then.
    pub fn is_guarded(&self) -> bool {
        self.mapping.is_guarded()
    }

    /// Whether its region allows the access.
    pub(crate) fn allows(&self, access: Access) -> bool {
        self.mapping.permissions().allow(access)
    }

    /// The client's address of the first byte; 0 for a bounce buffer.
    pub fn iova(&self) -> u64 {
        self.iova
    }

    /// The part `offset..offset + len` of this span.
    ///
    /// # Panics
    /// When that leaves the span: a programmer's error.
    pub fn slice(&self, offset: usize, len: usize) -> Self {
        assert!(offset.checked_add(len).is_some_and(|end| end <= self.len), "slice out of span");
        Self { offset: self.offset + offset, len, iova: self.at(offset), ..self.clone() }
    }

    /// The memory around this span: what its mapping has between the multiples of `granule`, a
    /// power of two, that the span lies between, by addresses of this process. None for heap, for
    /// memory that its owner may take away, and for a span with such a multiple inside. Its IOVA
    /// says nothing.
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

    /// Makes this span the part `offset..offset + len` of `whole`, as [`Span::slice`] would:
    /// without counting references where both are of the same mapping, so that a span that is used
    /// over and over costs a few stores.
    ///
    /// # Panics
    /// When that leaves `whole`: a programmer's error.
    #[inline]
    pub fn assign(&mut self, whole: &Self, offset: usize, len: usize) {
        assert!(offset.checked_add(len).is_some_and(|end| end <= whole.len), "slice out of span");
        self.renew(&whole.mapping, whole.offset + offset, len, whole.at(offset));
    }

    /// Appends `next` when it follows this span directly in the same mapping. False: it does not.
    pub fn join(&mut self, next: &Self) -> bool {
        self.extend(&next.mapping, next.offset, next.len, next.iova)
    }

    /// Makes this span name another place, without counting references when it is of the same
    /// mapping: an atomic change of a count would wait for all copies before it.
    #[inline]
    pub(crate) fn renew(&mut self, mapping: &Arc<Mapping>, offset: usize, len: usize, iova: u64) {
        debug_assert!(offset + len <= mapping.len());
        if !Arc::ptr_eq(&self.mapping, mapping) {
            self.mapping = Arc::clone(mapping);
        }
        (self.offset, self.len, self.iova) = (offset, len, iova);
    }

    /// As [`Span::join`] for a place that is no span yet.
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

    /// Copies bytes from `offset` of the span into `into`.
    ///
    /// # Errors
    /// [`Fault::Gone`] when the owner took the memory away, [`Fault::Denied`] when its region does
    /// not allow the access.
    ///
    /// # Panics
    /// When the range leaves the span.
    #[inline]
    pub fn read(&self, offset: usize, into: &mut [u8]) -> Result<(), Fault> {
        assert!(offset.checked_add(into.len()).is_some_and(|end| end <= self.len), "out of span");
        self.allow(Access::Read, offset)?;
        self.outcome(self.mapping.read(self.offset + offset, into), offset)
    }

    /// Copies `from` to `offset` of the span.
    ///
    /// # Errors
    /// [`Fault::Gone`] when the owner took the memory away, [`Fault::Denied`] when its region does
    /// not allow the access.
    ///
    /// # Panics
    /// When the range leaves the span.
    #[inline]
    pub fn write(&self, offset: usize, from: &[u8]) -> Result<(), Fault> {
        assert!(offset.checked_add(from.len()).is_some_and(|end| end <= self.len), "out of span");
        self.allow(Access::Write, offset)?;
        self.outcome(self.mapping.write(self.offset + offset, from), offset)
    }

    /// Copies `len` bytes from `offset` of the span to `at` of `to`, in one go: memory of two
    /// parties, each of whom may change its own meanwhile. What is copied is then any mix.
    ///
    /// # Errors
    /// [`Fault::Gone`] when one of the owners took the memory away, with the address in `self`
    /// (whose of the two it was is not told); [`Fault::Denied`] when a region does not allow it.
    ///
    /// # Panics
    /// When a range leaves its span.
    #[inline]
    pub fn copy_to(&self, offset: usize, to: &Self, at: usize, len: usize) -> Result<(), Fault> {
        assert!(offset.checked_add(len).is_some_and(|end| end <= self.len), "out of span");
        assert!(at.checked_add(len).is_some_and(|end| end <= to.len), "out of span");
        self.allow(Access::Read, offset)?;
        to.allow(Access::Write, at)?;
        let there = self.mapping.copy_to(self.offset + offset, &to.mapping, to.offset + at, len);
        self.outcome(there, offset)
    }

    /// Has the processor fetch the line that `offset` lies in, soon to be read. A hint.
    #[inline]
    pub fn prefetch(&self, offset: usize) {
        if offset < self.len {
            self.mapping.prefetch(self.offset + offset);
        }
    }

    /// As [`Span::prefetch`], soon to be written.
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
    /// When the word leaves the span.
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
    /// When the word leaves the span.
    #[inline]
    pub fn store_u32(&self, offset: usize, value: u32) -> Result<(), Fault> {
        assert!(offset.checked_add(4).is_some_and(|end| end <= self.len), "word out of span");
        self.allow(Access::Write, offset)?;
        self.outcome(self.mapping.store_u32(self.offset + offset, value), offset)
    }

    /// As [`Span::load_u32`], for 16 bits.
    ///
    /// # Errors
    /// As for [`Span::read`].
    ///
    /// # Panics
    /// When the word leaves the span.
    #[inline]
    pub fn load_u16(&self, offset: usize) -> Result<u16, Fault> {
        assert!(offset.checked_add(2).is_some_and(|end| end <= self.len), "word out of span");
        self.allow(Access::Read, offset)?;
        let word = self.mapping.load_u16(self.offset + offset);
        word.ok_or(Fault::Gone { iova: self.at(offset) })
    }

    /// As [`Span::store_u32`], for 16 bits.
    ///
    /// # Errors
    /// As for [`Span::write`].
    ///
    /// # Panics
    /// When the word leaves the span.
    #[inline]
    pub fn store_u16(&self, offset: usize, value: u16) -> Result<(), Fault> {
        assert!(offset.checked_add(2).is_some_and(|end| end <= self.len), "word out of span");
        self.allow(Access::Write, offset)?;
        self.outcome(self.mapping.store_u16(self.offset + offset, value), offset)
    }

    /// Stores 16 bytes at `offset` as [`Memory::publish`](crate::Memory::publish) does.
    ///
    /// # Errors
    /// As for [`Span::write`].
    ///
    /// # Panics
    /// When the range leaves the span.
    #[inline]
    pub fn publish(&self, offset: usize, bits: u128) -> Result<(), Fault> {
        assert!(offset.checked_add(16).is_some_and(|end| end <= self.len), "out of span");
        self.allow(Access::Write, offset)?;
        self.outcome(self.mapping.publish(self.offset + offset, bits), offset)
    }

    /// As [`Span::read`], to memory that is no slice of Rust's: what others change meanwhile.
    ///
    /// # Errors
    /// As for [`Span::read`].
    ///
    /// # Panics
    /// When the range leaves the span.
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

    /// As [`Span::write`], from memory that is no slice of Rust's: what others change meanwhile.
    ///
    /// # Errors
    /// As for [`Span::write`].
    ///
    /// # Panics
    /// When the range leaves the span.
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

    /// Address and length for a system call's I/O vector. The kernel answers a vanished page with
    /// `EFAULT`; the caller must not dereference the address itself and must keep the span until
    /// the call has ended.
    pub fn io_vector(&self) -> (*mut u8, usize) {
        (self.mapping.address(self.offset, self.len), self.len)
    }

    /// Checked at `pin` for the access named there; a second check keeps a span that was pinned
    /// for the other one from touching pages that are not mapped for it.
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

    /// Address of byte `offset`. The end of a span at the top of the address space is 0.
    #[inline]
    fn at(&self, offset: usize) -> u64 {
        self.iova.wrapping_add(offset as u64)
    }
}
