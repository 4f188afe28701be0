//! Makes memory: files of base pages or huge ones.
#![allow(unsafe_code)] // mmap(2), to reserve huge pages

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use slipway_numa::{NumaNode, Topology};
use slipway_pool_spec::{Page, Request};
use slipway_ram::{GRANULE, LateMemory, Template};

/// The most memory of one sandbox in bytes: 256 GiB with which its machine begins, and as much room
/// for more behind that in the file of a fork. A template beyond it has no forks.
pub(crate) const MOST: u64 = 512 << 30;
/// The size of a huge page in bytes.
const HUGE: u64 = 2 << 20;

/// Refuses a size that no memory has.
///
/// # Errors
/// The reason, for the launcher.
pub(crate) fn check(request: Request) -> Result<(), String> {
    let unit = if request.page == Page::Huge { HUGE } else { GRANULE as u64 };
    if request.bytes == 0 || request.bytes > MOST || !request.bytes.is_multiple_of(unit) {
        let (bytes, kib, gib) = (request.bytes, unit >> 10, MOST >> 30);
        return Err(format!(
            "{bytes} bytes: memory has whole units of {kib} KiB, {gib} GiB at most"
        ));
    }
    Ok(())
}

/// Returns the size in bytes of the pages of a file in memory.
pub(crate) fn page_size(file: BorrowedFd<'_>) -> u64 {
    rustix::fs::fstatfs(file).map_or(0, |system| system.f_bsize.unsigned_abs())
}

pub(crate) fn is_like(memory: &LateMemory, request: Request) -> bool {
    let huge = request.page == Page::Huge;
    memory.len() as u64 == request.bytes && is_huge(memory) == huge
}

pub(crate) fn is_huge(memory: &LateMemory) -> bool {
    page_size(memory.file()) == HUGE
}

/// Makes memory whose pages the kernel makes at their first touch, on the NUMA node `home` if there
/// is one. Huge pages, of which there may be too few, are reserved now.
pub(crate) fn fresh(
    request: Request,
    home: Option<NumaNode>,
    topology: &Topology,
) -> Result<Arc<LateMemory>, String> {
    let bytes = request.bytes;
    let failed = |error: std::io::Error| format!("{bytes} bytes: {error}");
    let file = sealed(request).map_err(failed)?;
    if request.page == Page::Huge {
        reserve_on(&file, bytes, home, topology)
            .map_err(|error| format!("{bytes} bytes of huge pages (vm.nr_hugepages): {error}"))?;
    }
    let memory = LateMemory::new(file).map_err(failed)?;
    Ok(Arc::new(at_home(memory, home)))
}

/// Refuses a fork that is not as its template.
///
/// # Errors
/// The reason, for the launcher.
pub(crate) fn check_fork(request: Request, template: &Template) -> Result<(), String> {
    let (bytes, has) = (request.bytes, template.len());
    if bytes != has as u64 || request.page == Page::Huge {
        return Err(format!("{bytes} bytes: its template has {has}, in pages of 4 KiB"));
    }
    Ok(())
}

/// Makes memory that begins as `template`, without pages. Its pages are on the NUMA node `home`, if
/// there is one, once they are made. The request is one that [`check_fork`] allows.
pub(crate) fn fork(
    request: Request,
    template: &Arc<Template>,
    home: Option<NumaNode>,
) -> Result<Arc<LateMemory>, String> {
    let bytes = request.bytes;
    let file = sealed(request);
    let memory = file.and_then(|file| LateMemory::fork(file, template));
    let memory = memory.map_err(|error| format!("{bytes} bytes: {error}"))?;
    Ok(Arc::new(at_home(memory, home)))
}

/// Has the pages of memory made on the NUMA node `home`, if there is one.
pub(crate) fn at_home(mut memory: LateMemory, home: Option<NumaNode>) -> LateMemory {
    if let Some(home) = home
        && let Err(error) = memory.set_home(home)
    {
        tracing::warn!(%error, %home, "memory for a sandbox is on any NUMA node");
    }
    memory
}

/// Returns the bytes of the pages that the file of a memory has.
pub(crate) fn held(memory: &LateMemory) -> u64 {
    // Blocks of 512 bytes (stat(2)).
    rustix::fs::fstat(memory.file()).map_or(0, |status| status.st_blocks.unsigned_abs() * 512)
}

/// Reserves huge pages, of the NUMA node `home` if it has enough of them. Pages that the kernel
/// makes for the reservation (`vm.nr_overcommit_hugepages`) are on the node of the CPU, or on a
/// node that the thread is bound to, depending on the kernel's version.
fn reserve_on(
    file: &OwnedFd,
    bytes: u64,
    home: Option<NumaNode>,
    topology: &Topology,
) -> std::io::Result<()> {
    let Some(home) = home else { return reserve(file, bytes) };
    on_cpus(topology.cpus(home), || match slipway_numa::bound_to(home, || reserve(file, bytes)) {
        Ok(Ok(())) => Ok(()),
        // That node has too few: pages of any will do.
        Ok(Err(_)) | Err(_) => reserve(file, bytes),
    })
}

/// Does `work` on one of `cpus`, if that is possible.
fn on_cpus<T>(cpus: Option<&CpuSet>, work: impl FnOnce() -> T) -> T {
    let before = cpus.and_then(|cpus| {
        let before = sched_getaffinity(None).ok()?;
        sched_setaffinity(None, cpus).ok().map(|()| before)
    });
    let result = work();
    if let Some(before) = before {
        // Refused only if a cpuset has changed meanwhile, which then decides.
        let _ = sched_setaffinity(None, &before);
    }
    result
}

/// Sets pages of the host's pool of huge pages aside for all of a file: no later touch finds that
/// pool empty. A shared mapping reserves what its file lacks, and the reservation stays with the
/// file (Linux, *mm/hugetlb_reserv*).
fn reserve(file: &OwnedFd, bytes: u64) -> std::io::Result<()> {
    let len = usize::try_from(bytes).map_err(|_| std::io::ErrorKind::InvalidInput)?;
    let any = std::ptr::null_mut();
    // SAFETY: a fresh mapping at an address of the kernel's choice, which allows no access.
    let start = unsafe { mmap(any, len, ProtFlags::empty(), MapFlags::SHARED, file, 0) }?;
    #[allow(clippy::disallowed_methods, reason = "nothing was touched, so this takes no time")]
    // SAFETY: the mapping just made.
    Ok(unsafe { munmap(start, len) }?)
}

/// Makes a file in memory whose size cannot be changed.
fn sealed(request: Request) -> std::io::Result<OwnedFd> {
    let mut flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    if request.page == Page::Huge {
        flags |= MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
    }
    let file = rustix::fs::memfd_create(c"guest-memory", flags)?;
    rustix::fs::ftruncate(&file, request.bytes)?;
    rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_has_the_largest_machine_and_the_most_room_behind_it() {
        let of = |bytes| check(Request { bytes, page: Page::Base, near: None, template: None });
        let most = (256 << 30) + (256 << 30);
        assert_eq!(of(most), Ok(()));
        let refused = of(most + (1 << 20)).unwrap_err();
        assert!(refused.ends_with("whole units of 64 KiB, 512 GiB at most"), "{refused}");
    }
}
