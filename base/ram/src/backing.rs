//! Checks of a client's file: whether it may be mapped, and whether a mapping may lose pages.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{FileType, SealFlags};

/// File system types (`f_type` of statfs(2)).
mod magic {
    /// tmpfs, and the kernel's internal one, which memfds lie on.
    pub const TMPFS: u64 = 0x0102_1994;
    pub const HUGETLBFS: u64 = 0x9584_58f6;
}

/// Properties of a file that may back guest memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Backing {
    /// Page size of the file in bytes: mappings begin and end at multiples of it.
    pub granule: usize,
    /// A page may be missing at its first touch although the file is large enough.
    pub can_lose_pages: bool,
}

/// Inspects a client's file before it is mapped. Never blocks.
///
/// # Errors
/// `Unsupported` unless the file is a regular file that lives in memory. A page fault on any other
/// file waits for a disk, a network or a server: a client could pass a file that it serves itself
/// (FUSE) and stall the thread that touches the memory for ever. fstat(2) and fstatfs(2) of such a
/// file would stall too, so they come after the check.
pub(crate) fn inspect(file: BorrowedFd<'_>) -> io::Result<Backing> {
    let refused = || {
        let text = "guest memory must be a memfd or a regular file on tmpfs or hugetlbfs";
        io::Error::new(io::ErrorKind::Unsupported, text)
    };
    if !slipway_peer::is_memory_file(file) {
        return Err(refused());
    }
    let stat = rustix::fs::fstat(file)?;
    let system = rustix::fs::fstatfs(file)?;
    let regular = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
    let page = rustix::param::page_size();
    match system.f_type as u64 {
        // Pages of a hugetlbfs file come from a pool. A mapping can reserve its pages, but the
        // owner can punch a hole, which gives page and reservation back, whatever the seals are:
        // with the pool empty the next touch raises SIGBUS.
        magic::HUGETLBFS if regular => {
            let granule = usize::try_from(system.f_bsize).unwrap_or(page).max(page);
            Ok(Backing { granule, can_lose_pages: true })
        }
        // A memfd's pages are limited by memory alone: a full memory cgroup kills a process, it
        // raises no SIGBUS. Only strict overcommit refuses a page at its first touch.
        magic::TMPFS if regular => {
            Ok(Backing { granule: page, can_lose_pages: overcommit_is_strict() })
        }
        _ => Err(refused()),
    }
}

/// Returns whether the file is sealed against shrinking and holds the whole range now. Only memfds
/// can be sealed, so a sealed file is never on a mounted tmpfs, whose size limit could make a touch
/// of a hole raise SIGBUS.
pub(crate) fn cannot_shrink(file: BorrowedFd<'_>, offset: u64, len: usize) -> bool {
    let sealed =
        rustix::fs::fcntl_get_seals(file).is_ok_and(|seals| seals.contains(SealFlags::SHRINK));
    // After the check of the seals: from then on the size can only grow.
    sealed
        && rustix::fs::fstat(file).is_ok_and(|stat| {
            let size = u64::try_from(stat.st_size).unwrap_or(0);
            offset.checked_add(len as u64).is_some_and(|end| end <= size)
        })
}

/// Returns whether the kernel may refuse a page at its first touch (`vm.overcommit_memory` = 2).
/// If the setting cannot be read, returns what it was when this process last could read it, and
/// `true` if it never could. A process that is to lose its files calls this before.
pub fn overcommit_is_strict() -> bool {
    static LAST: AtomicBool = AtomicBool::new(true);
    if let Ok(text) = std::fs::read_to_string("/proc/sys/vm/overcommit_memory") {
        LAST.store(text.trim() == "2", Ordering::Relaxed);
    }
    LAST.load(Ordering::Relaxed)
}
