//! The host's memory: how much there is of it, and whether a subject can have what it needs.

use rustix::fs::MemfdFlags;
use rustix::mm::{MapFlags, ProtFlags};

use super::PageSize;
use crate::meminfo::meminfo;

/// The bytes that a measurement leaves to the rest of the host.
const SPARE: u64 = 512 << 20;
/// Returns the reason why the host has no `bytes` of pages of this size, and the remedy. Returns
/// `None` if it has them.
pub(super) fn lacks(bytes: u64, page: PageSize) -> Option<String> {
    match page {
        PageSize::Base => {
            let (free, needed) = (free(page), bytes + SPARE);
            (free < needed).then(|| {
                format!(
                    "needs {} MiB of free memory, the host has {}; free some, or choose less \
                     memory with --load",
                    needed >> 20,
                    free >> 20
                )
            })
        }
        PageSize::Huge => lacks_huge(bytes),
    }
}

/// Returns the reason why this process can have no pool, and the remedy. Returns `None` if it can.
pub(super) fn lacks_pool() -> Option<String> {
    let path = "/dev/userfaultfd";
    let error = std::fs::File::options().read(true).write(true).open(path).err()?;
    Some(format!("needs {path} ({error}): Linux 6.1 or later, and root"))
}

/// Tries to reserve huge pages: the figures of the host do not tell whether the kernel will make
/// what `vm.nr_overcommit_hugepages` allows.
fn lacks_huge(bytes: u64) -> Option<String> {
    let error = reserve(bytes).err()?;
    let count = bytes.div_ceil(2 << 20);
    let free = free(PageSize::Huge) >> 21;
    Some(format!(
        "needs {count} free pages of 2 MiB, the host has {free} ({error}); as root, `sysctl \
         vm.nr_hugepages={count}` sets them aside, and 0 gives them back"
    ))
}

/// Reserves huge pages, and gives them back.
fn reserve(bytes: u64) -> rustix::io::Result<()> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
    let file = rustix::fs::memfd_create("slipway-bench", flags)?;
    rustix::fs::ftruncate(&file, bytes)?;
    let len = usize::try_from(bytes).map_err(|_| rustix::io::Errno::INVAL)?;
    let (any, none) = (std::ptr::null_mut(), ProtFlags::empty());
    #[allow(unsafe_code)]
    // SAFETY: a new mapping at an address of the kernel's choice, which allows no access.
    let start = unsafe { rustix::mm::mmap(any, len, none, MapFlags::SHARED, &file, 0) }?;
    #[allow(clippy::disallowed_methods, reason = "nothing was touched, so this takes no time")]
    #[allow(unsafe_code)]
    // SAFETY: the mapping just made.
    unsafe {
        rustix::mm::munmap(start, len)
    }
}

/// Returns whether the kernel makes transparent huge pages for a program that asks for them.
pub(super) fn has_transparent() -> bool {
    let path = "/sys/kernel/mm/transparent_hugepage/enabled";
    let text = std::fs::read_to_string(path).unwrap_or_default();
    text.contains("[always]") || text.contains("[madvise]")
}

/// Returns the bytes of free pages of this size.
fn free(page: PageSize) -> u64 {
    match page {
        PageSize::Base => meminfo("MemAvailable:") << 10,
        PageSize::Huge => meminfo("HugePages_Free:") << 21,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_no_host_has_is_named_with_the_remedy() {
        let much = 1 << 50;
        let base = lacks(much, PageSize::Base).unwrap();
        assert!(base.contains("1073742336 MiB") && base.contains("--load"), "{base}");
        let huge = lacks(much, PageSize::Huge).unwrap();
        assert!(huge.contains("vm.nr_hugepages=536870912"), "{huge}");
    }
}
