//! Memory with known and fixed physical addresses: huge pages.

use std::fs::{self, File};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;

use anyhow::{Context, Result, ensure};
use rustix::fs::{MemfdFlags, SealFlags};
use slipway_nvme::driver::Arena;
use slipway_ram::{Access, DmaMap, Permissions, Region};

/// Bytes of a huge page.
const HUGE: u64 = 2 << 20;
/// The file with the size of the kernel's pool of huge pages.
const POOL: &str = "/proc/sys/vm/nr_hugepages";
/// Bytes that an entry of /proc/self/pagemap stands for.
const PAGE: u64 = 4096;

/// Huge pages under their physical addresses. The kernel neither swaps nor moves huge pages, while
/// it may move smaller ones even if they are locked.
pub(super) struct HugePages {
    pub map: DmaMap,
    /// The physical address of each page.
    pages: Vec<u64>,
    /// The memfd, which keeps the pages as long as it is open.
    _file: OwnedFd,
    _pool: Pool,
}

impl HugePages {
    /// Allocates at least `bytes`, zeroed.
    pub fn new(bytes: u64) -> Result<Self> {
        let count = bytes.div_ceil(HUGE);
        let pool = Pool::grow(count)?;
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let huge = flags | MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
        let file = rustix::fs::memfd_create("slipway-load", huge).context("no huge pages")?;
        rustix::fs::ftruncate(&file, count * HUGE)?;
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK)?;
        let pages = physical(&file, count)?;
        let mut map = DmaMap::new();
        for (offset, &page) in (0..).step_by(HUGE as usize).zip(&pages) {
            let region = Region::mapped(file.as_fd(), offset, HUGE, Permissions::READ_WRITE);
            map.add(page, region.context("mapping a huge page")?)?;
        }
        Ok(Self { map, pages, _file: file, _pool: pool })
    }

    /// Returns an arena of all pages, for a driver.
    pub fn arena(&self) -> Arena {
        let mut arena = Arena::new(self.map.memory(), 0, 0);
        self.pages.iter().for_each(|page| arena.add(*page, HUGE));
        arena
    }
}

/// Returns the physical addresses of the first `count` huge pages of `file`, and allocates those
/// pages.
fn physical(file: &OwnedFd, count: u64) -> Result<Vec<u64>> {
    let mut map = DmaMap::new();
    let whole = Region::mapped(file.as_fd(), 0, count * HUGE, Permissions::READ_WRITE);
    map.add(0, whole.context("mapping huge pages")?)?;
    let memory = map.memory();
    let pagemap = File::open("/proc/self/pagemap").context("/proc/self/pagemap")?;
    let page = |number: u64| {
        let at = number * HUGE;
        // If the pool has no page left, this store faults.
        memory.store_u32(at, 0).context("the pool of huge pages is empty")?;
        let mut spans = Vec::new();
        memory.pin(at, HUGE as usize, Access::Write, &mut spans)?;
        let address = spans.first().context("a page is one span")?.io_vector().0.addr() as u64;
        let mut line = [0; 8];
        pagemap.read_exact_at(&mut line, address / PAGE * 8)?;
        frame(u64::from_le_bytes(line)).context("the kernel tells no physical addresses")
    };
    (0..count).map(page).collect()
}

/// Returns the physical address in an entry of /proc/PID/pagemap. Returns `None` if the page is not
/// present, or if the kernel hides the address from this process.
fn frame(line: u64) -> Option<u64> {
    const PRESENT: u64 = 1 << 63;
    const FRAME: u64 = (1 << 55) - 1;
    let address = (line & FRAME) * PAGE;
    (line & PRESENT != 0 && address != 0 && address.is_multiple_of(HUGE)).then_some(address)
}

/// Additional pages in the kernel's pool, given back on drop.
struct Pool {
    before: u64,
}

impl Pool {
    fn grow(by: u64) -> Result<Self> {
        let before = read()?;
        let pool = Self { before };
        fs::write(POOL, (before + by).to_string()).context(POOL)?;
        let got = read()?;
        ensure!(
            got >= before + by,
            "the machine has {} huge pages of the {by} that are needed: more memory helps",
            got.saturating_sub(before)
        );
        Ok(pool)
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        let _ = fs::write(POOL, self.before.to_string());
    }
}

fn read() -> Result<u64> {
    let text = fs::read_to_string(POOL).context(POOL)?;
    text.trim().parse().context(POOL)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_says_where_a_page_is() {
        // An entry that Debian's kernel showed for a page of a pool.
        assert_eq!(frame(0xa180_0000_0000_6600), Some(0x660_0000));
        // Entries that are hidden from non-root users, not present, and not of a huge page.
        for line in [0xa180_0000_0000_0000, 0x2180_0000_0000_6600, 0xa180_0000_0000_6601] {
            assert_eq!(frame(line), None, "{line:#x}");
        }
    }
}
