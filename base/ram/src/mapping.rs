//! A stretch of host memory that backs guest memory: a mapped file, heap, or a message channel.

use std::ffi::c_void;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::backing::{self, Backing};
use crate::{Fault, Permissions};

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
    File { start: *mut c_void, len: usize },
    Heap { words: *mut [u64] },
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
    /// # Errors
    /// `InvalidInput` for zero bytes or a range beyond what a file can have; `Unsupported` for a
    /// file of a kind that could stall whoever touches the mapping; whatever mmap(2) says:
    /// permission, no memory, no huge pages.
    pub fn file(
        file: BorrowedFd<'_>,
        offset: u64,
        len: usize,
        permissions: Permissions,
    ) -> std::io::Result<Self> {
        let Backing { granule, can_lose_pages } = backing::inspect(file)?;
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
        Ok(Self { base, len, permissions, guarded, owner: Owner::File { start, len: whole } })
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

    /// Whether copies go through the kernel because the owner may take the memory away.
    pub fn is_guarded(&self) -> bool {
        self.guarded
    }

    /// What may be done with it.
    pub(crate) fn permissions(&self) -> Permissions {
        self.permissions
    }

    /// Address of byte `offset`, for a system call that the kernel checks (an I/O vector).
    ///
    /// # Panics
    /// When `offset..offset + len` leaves the mapping: the caller has checked it.
    pub(crate) fn address(&self, offset: usize, len: usize) -> *mut u8 {
        assert!(offset.checked_add(len).is_some_and(|end| end <= self.len), "span out of mapping");
        // SAFETY: within the mapping, by the assertion.
        unsafe { self.base.add(offset) }
    }

    /// Copies from `offset` into `into`. False: the memory is gone.
    pub(crate) fn read(&self, offset: usize, into: &mut [u8]) -> bool {
        let from = self.address(offset, into.len());
        if self.guarded {
            return guarded_copy(from, into.as_mut_ptr(), into.len(), Direction::FromGuest);
        }
        // SAFETY: `from` is valid for the length, readable (the callers checked the permission)
        // and not going away; `into` is ours and cannot overlap it.
        unsafe { copy(from, into.as_mut_ptr(), into.len()) };
        true
    }

    /// Copies `from` to `offset`. False: the memory is gone.
    pub(crate) fn write(&self, offset: usize, from: &[u8]) -> bool {
        let to = self.address(offset, from.len());
        if self.guarded {
            return guarded_copy(to, from.as_ptr().cast_mut(), from.len(), Direction::ToGuest);
        }
        // SAFETY: as for `read`, with the roles exchanged.
        unsafe { copy(from.as_ptr(), to, from.len()) };
        true
    }

    /// The aligned 32-bit word at `offset`, when it can be accessed without the guard.
    pub(crate) fn word(&self, offset: usize) -> Option<&AtomicU32> {
        let at = self.address(offset, 4);
        if self.guarded || !at.cast::<AtomicU32>().is_aligned() {
            return None;
        }
        // SAFETY: in bounds, aligned, not going away; atomics tolerate concurrent change.
        Some(unsafe { &*at.cast::<AtomicU32>() })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        match self.owner {
            Owner::File { start, len } => {
                // SAFETY: mapped by `file` with this length; no span refers to it any more.
                let _ = unsafe { rustix::mm::munmap(start, len) };
            }
            // SAFETY: from `Box::into_raw` in `heap`, and given back once.
            Owner::Heap { words } => drop(unsafe { Box::from_raw(words) }),
        }
    }
}

/// Copies between guest memory and memory of ours.
///
/// The guest may change its side meanwhile. For Rust that is another process's doing, outside the
/// program, as long as the compiler assumes nothing about those bytes. It would if it saw the copy:
/// from a plain `copy_nonoverlapping` into a local it may read the guest's memory a second time
/// where the program reads the local, and a checked length could differ from the used one. So the
/// copy is the C library's memcpy behind a pointer whose value the compiler cannot know; what comes
/// back is any mix of old and new bytes, and stays as it is. Word-wise volatile loads would do the
/// same at a fraction of the speed.
///
/// # Safety
/// `from` is readable and `to` writable for `len` bytes, and they do not overlap.
unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
    type Memcpy = unsafe extern "C" fn(*mut c_void, *const c_void, usize) -> *mut c_void;
    let memcpy: Memcpy = libc::memcpy;
    // SAFETY: reads a local variable.
    let memcpy = unsafe { std::ptr::read_volatile(&memcpy) };
    // SAFETY: by this function's own contract.
    unsafe { memcpy(to.cast(), from.cast(), len) };
}

#[derive(Clone, Copy)]
enum Direction {
    FromGuest,
    ToGuest,
}

/// Copies through the kernel, which answers a vanished page with a short count, not a signal.
fn guarded_copy(guest: *mut u8, own: *mut u8, len: usize, direction: Direction) -> bool {
    let mut done = 0;
    while done < len {
        // SAFETY: `done < len`, both ranges were checked for `len` bytes by the callers.
        let (guest, own) = unsafe { (guest.add(done), own.add(done)) };
        let local = libc::iovec { iov_base: own.cast(), iov_len: len - done };
        let remote = libc::iovec { iov_base: guest.cast(), iov_len: len - done };
        // SAFETY: `own` is valid for the length; the kernel checks `guest` itself.
        let copied = unsafe {
            let pid = libc::getpid();
            match direction {
                Direction::FromGuest => libc::process_vm_readv(pid, &local, 1, &remote, 1, 0),
                Direction::ToGuest => libc::process_vm_writev(pid, &local, 1, &remote, 1, 0),
            }
        };
        match usize::try_from(copied) {
            Ok(0) | Err(_) => return false,
            Ok(count) => done += count,
        }
    }
    true
}

/// A 32-bit load of a device from guest memory pairs with the guest's release store.
pub(crate) const LOAD: Ordering = Ordering::Acquire;
/// A 32-bit store of a device to guest memory makes all its writes before it visible.
pub(crate) const STORE: Ordering = Ordering::Release;
