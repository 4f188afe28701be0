//! A doorbell page that a client maps.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Mutex;
use std::sync::atomic::AtomicU32;

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};
use slipway_doorbells::CellPage;
use slipway_keeper::Shelf;
use slipway_peer::Foreign;

use crate::slots::DOORBELLS;

/// Doorbell cells in a memfd. Every client gets a file of its own, so that an earlier client cannot
/// ring a later one's doorbells. The cells stay at one address nevertheless.
pub(crate) struct SharedPage {
    base: *mut u8,
    len: usize,
    count: usize,
    file: Mutex<Backing>,
    /// The shelf where each client's file is left for a successor.
    shelf: Option<Shelf>,
}

struct Backing {
    file: OwnedFd,
    /// The offset of the cells in the file. mmap(2) adds the offsets of a region and an area, so
    /// the cells lie as far from the file's start as the page from its BAR's start.
    offset: u64,
    /// The file lies on the shelf, if there is one.
    is_left: bool,
}

// SAFETY: the memory is accessed through atomics only.
unsafe impl Send for SharedPage {}
// SAFETY: the memory is accessed through atomics only.
unsafe impl Sync for SharedPage {}

impl SharedPage {
    /// Makes `count` cells, at the start of a file until [`SharedPage::renew`] moves them.
    pub(crate) fn new(count: usize) -> std::io::Result<Self> {
        let page = rustix::param::page_size();
        let len = (count * 4).next_multiple_of(page).max(page);
        let file = sealed_file(len as u64)?;
        // SAFETY: a fresh mapping at an address of the kernel's choice aliases nothing of ours.
        let base = unsafe { map(std::ptr::null_mut(), len, MapFlags::SHARED, &file, 0)? };
        let backing = Backing { file, offset: 0, is_left: false };
        Ok(Self { base, len, count, file: Mutex::new(backing), shelf: None })
    }

    /// Makes `count` cells and leaves every client's file on `shelf`. `found` is the file that a
    /// predecessor's client has mapped.
    pub(crate) fn kept(
        count: usize,
        shelf: Shelf,
        found: Option<Foreign>,
    ) -> std::io::Result<Self> {
        let mut page = Self::new(count)?;
        page.shelf = Some(shelf);
        let Some(file) = found else { return Ok(page) };
        let text = "a file that is no predecessor's page of doorbells";
        let invalid = || std::io::Error::new(std::io::ErrorKind::InvalidData, text);
        let sealed =
            rustix::fs::fcntl_get_seals(&file).is_ok_and(|s| s.contains(SealFlags::SHRINK));
        // A memfd of a few pages: closing it never waits.
        let file = Some(file).filter(|_| sealed).ok_or_else(invalid)?.into_owned();
        let len = u64::try_from(rustix::fs::fstat(&file)?.st_size).unwrap_or(0);
        let offset = len.checked_sub(page.len()).ok_or_else(invalid)?;
        page.put(Backing { file, offset, is_left: true })?;
        Ok(page)
    }

    /// Returns the size of the cells in bytes: whole pages.
    pub(crate) fn len(&self) -> u64 {
        self.len as u64
    }

    /// Returns the number of cells.
    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// Has the cells lie at `offset` of the first client's file, which is on the shelf then. A file
    /// that a predecessor's client has mapped stays.
    pub(crate) fn place(&self, offset: u64) -> std::io::Result<()> {
        let is_placed = {
            let backing = self.lock();
            backing.offset == offset && (backing.is_left || self.shelf.is_none())
        };
        if is_placed { Ok(()) } else { self.renew(offset) }
    }

    /// Puts a fresh zeroed file behind the cells, which then lie at `offset` of it.
    pub(crate) fn renew(&self, offset: u64) -> std::io::Result<()> {
        let file = sealed_file(offset + self.len as u64)?;
        if let Some(shelf) = &self.shelf {
            shelf.put(DOORBELLS, &file)?;
        }
        self.put(Backing { file, offset, is_left: true })
    }

    /// Puts a file behind the cells.
    fn put(&self, backing: Backing) -> std::io::Result<()> {
        let flags = MapFlags::SHARED | MapFlags::FIXED;
        // SAFETY: replaces, in one step, our own mapping of the same length by one of the same
        // protection: the address stays valid for concurrent loads from a cell.
        unsafe { map(self.base.cast(), self.len, flags, &backing.file, backing.offset)? };
        *self.lock() = backing;
        Ok(())
    }

    /// Returns the file of the current client.
    pub(crate) fn file(&self) -> std::io::Result<OwnedFd> {
        self.lock().file.as_fd().try_clone_to_owned()
    }

    /// Returns the offset of the cells in the file.
    pub(crate) fn offset(&self) -> u64 {
        self.lock().offset
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Backing> {
        self.file.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl Drop for SharedPage {
    fn drop(&mut self) {
        // SAFETY: mapped by `new` or `put` with this length; borrows of the cells have ended.
        unsafe { slipway_ram::unmap(self.base, self.len) };
    }
}

// SAFETY: the mapping keeps its address and length until drop; its file is sealed against
// shrinking, so no client can take the pages away.
unsafe impl CellPage for SharedPage {
    fn cells(&self) -> &[AtomicU32] {
        // SAFETY: page-aligned, at least `count * 4` bytes long, valid until drop, and only ever
        // accessed atomically on our side.
        unsafe { std::slice::from_raw_parts(self.base.cast::<AtomicU32>(), self.count) }
    }
}

/// # Safety
/// The requirements of mmap(2): with `FIXED`, `address` must be a mapping of the caller's of this
/// length.
unsafe fn map(
    address: *mut core::ffi::c_void,
    len: usize,
    flags: MapFlags,
    file: &OwnedFd,
    offset: u64,
) -> std::io::Result<*mut u8> {
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: the caller meets the requirements of mmap(2).
    let base = unsafe { rustix::mm::mmap(address, len, protection, flags, file, offset)? };
    Ok(base.cast())
}

fn sealed_file(len: u64) -> std::io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = rustix::fs::memfd_create("slipway-doorbells", flags)?;
    rustix::fs::ftruncate(&file, len)?;
    rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;
    use slipway_doorbells::Doorbells;
    use std::sync::Arc;

    #[test]
    fn a_new_file_takes_the_old_clients_hands_off_the_cells() {
        let page = Arc::new(SharedPage::new(4).unwrap());
        let doorbells = Doorbells::shared(page.clone());
        page.renew(8192).unwrap();
        let old = page.file().unwrap();
        rustix::io::pwrite(&old, &7u32.to_le_bytes(), 8192 + 4).unwrap();
        assert_eq!(doorbells.load(1), 7);
        page.renew(8192).unwrap();
        assert_eq!(doorbells.load(1), 0);
        rustix::io::pwrite(&old, &9u32.to_le_bytes(), 8192 + 4).unwrap();
        assert_eq!(doorbells.load(1), 0);
    }

    #[test]
    fn the_file_cannot_be_shrunk_or_grown() {
        let page = SharedPage::new(4).unwrap();
        let file = page.file().unwrap();
        assert!(rustix::fs::ftruncate(&file, 0).is_err());
        assert!(rustix::fs::ftruncate(&file, 1 << 20).is_err());
    }
}
