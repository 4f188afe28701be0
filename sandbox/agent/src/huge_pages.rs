//! Huge pages of 2 MiB, which the kernel makes for the limits of containers.
//!
//! The kernel has one pool of them, whose size is a file of sysfs (kernel documentation, "HugeTLB
//! Pages"). A container's limit makes the pool larger from the container's creation to its removal.
//! Pages that are in use when the pool shrinks, as those of files in a directory that containers
//! share, become surplus pages: the kernel frees each when it is left, or has it back in the pool
//! when that grows.

use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context, Result, bail};
use slipway_agent_protocol::HUGE_PAGE;

use crate::lock::lock;
use crate::{group, log};

/// The directory of the pool in sysfs.
const POOL: &str = "kernel/mm/hugepages/hugepages-2048kB";
/// The file with the number of pages, surplus ones among them; a write does not count these.
const PAGES: &str = "nr_hugepages";
/// The file with the number of surplus pages.
const SURPLUS: &str = "surplus_hugepages";
/// The file that has the kernel move free memory together.
const COMPACT: &str = "/proc/sys/vm/compact_memory";

/// The most looks at a pool until its files go together.
const LOOKS: usize = 1000;

/// The number of pages that containers' limits have added. Held while the size of the pool is read
/// and changed.
static ADDED: Mutex<u64> = Mutex::new(0);

/// The huge pages that a container's limit has added to the kernel's pool.
pub struct HugePages {
    /// The directory of the pool.
    pool: PathBuf,
    /// The number of pages; 0 once they were given back.
    pages: AtomicU64,
}

impl HugePages {
    /// Adds as many whole pages as `bytes` has to the pool. May wait for the kernel to move memory.
    ///
    /// # Errors
    /// The kernel has no huge pages, or cannot make so many. None was added then.
    pub async fn add(sysfs: &Path, bytes: u64) -> Result<Self> {
        let (pool, pages) = (sysfs.join(POOL), bytes / HUGE_PAGE);
        if pages > 0 {
            let pool = pool.clone();
            let grown = tokio::task::spawn_blocking(move || grow(&pool, pages, compact)).await;
            grown.context("making huge pages")??;
        }
        Ok(Self { pool, pages: AtomicU64::new(pages) })
    }

    /// Takes the pages out of the pool. A repetition changes nothing.
    pub async fn give_back(&self) {
        let pages = self.pages.swap(0, Ordering::Relaxed);
        if pages > 0 {
            let pool = self.pool.clone();
            let _ = tokio::task::spawn_blocking(move || shrink(&pool, pages)).await;
        }
    }
}

impl Drop for HugePages {
    /// Takes the pages of a container that could not be created out of the pool.
    fn drop(&mut self) {
        let pages = *self.pages.get_mut();
        if pages > 0 {
            let pool = std::mem::take(&mut self.pool);
            // The kernel may be making pages for another container.
            let _ = std::thread::Builder::new().spawn(move || shrink(&pool, pages));
        }
    }
}

/// Returns the number of pages of the pool that are for containers' limits. Waits while the kernel
/// makes some.
pub fn added() -> u64 {
    *lock(&ADDED)
}

/// Adds pages to the pool. `compact` has the kernel move free memory together.
fn grow(pool: &Path, pages: u64, compact: fn()) -> Result<()> {
    let mut added = lock(&ADDED);
    if !pool.join(PAGES).exists() {
        bail!("the guest's kernel has no huge pages of 2 MiB");
    }
    let before = size(pool);
    let wanted = before.saturating_add(pages);
    set(pool, wanted)?;
    if size(pool) < wanted {
        compact();
        set(pool, wanted)?;
    }
    let made = size(pool).saturating_sub(before);
    if made >= pages {
        *added = added.saturating_add(pages);
        return Ok(());
    }
    set(pool, before)?;
    bail!(
        "the guest's kernel can make {made} of {pages} huge pages of 2 MiB: the rest of its memory \
         is in use or in smaller pieces; give the sandbox more memory"
    )
}

fn compact() {
    let _ = std::fs::write(COMPACT, "1");
}

/// Takes pages out of the pool.
fn shrink(pool: &Path, pages: u64) {
    let mut added = lock(&ADDED);
    *added = added.saturating_sub(pages);
    if let Err(error) = set(pool, size(pool).saturating_sub(pages)) {
        log!("{error:#}");
    }
}

/// Returns the number of pages that the pool has for good.
fn size(pool: &Path) -> u64 {
    let count = |file: &str| group::number(&group::read(&pool.join(file)));
    let mut surplus = count(SURPLUS);
    for _ in 0..LOOKS {
        // A program may leave a surplus page between two looks, which both files then count less.
        let (pages, now) = (count(PAGES), count(SURPLUS));
        if now == surplus {
            return pages.saturating_sub(surplus);
        }
        surplus = now;
    }
    count(PAGES).saturating_sub(surplus)
}

/// Sets the number of pages that the pool is to have. The kernel makes as many as it can, which is
/// no error.
fn set(pool: &Path, pages: u64) -> Result<()> {
    std::fs::write(pool.join(PAGES), pages.to_string()).context("setting the number of huge pages")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Makes a pool of so many pages, some of them surplus ones.
    fn pool(pages: u64, surplus: u64) -> tempfile::TempDir {
        let sysfs = tempfile::tempdir().unwrap();
        let at = sysfs.path().join(POOL);
        std::fs::create_dir_all(&at).unwrap();
        std::fs::write(at.join(PAGES), format!("{pages}\n")).unwrap();
        std::fs::write(at.join(SURPLUS), format!("{surplus}\n")).unwrap();
        sysfs
    }

    fn pages(sysfs: &tempfile::TempDir) -> u64 {
        group::number(&group::read(&sysfs.path().join(POOL).join(PAGES)))
    }

    #[tokio::test]
    async fn pages_come_with_a_container_and_go_with_it() {
        let sysfs = pool(3, 0);
        let one = HugePages::add(sysfs.path(), 3 * HUGE_PAGE - 1).await.unwrap();
        assert_eq!(pages(&sysfs), 5);
        let none = HugePages::add(sysfs.path(), 1).await.unwrap();
        assert_eq!(pages(&sysfs), 5, "less than a page is none");
        one.give_back().await;
        one.give_back().await;
        none.give_back().await;
        assert_eq!(pages(&sysfs), 3);
        let elsewhere = tempfile::tempdir().unwrap();
        HugePages::add(elsewhere.path(), 0).await.unwrap();
        let error = HugePages::add(elsewhere.path(), HUGE_PAGE).await.err().unwrap();
        assert!(error.to_string().contains("no huge pages of 2 MiB"), "{error}");
    }

    #[test]
    fn pages_that_the_kernel_does_not_make_are_not_taken() {
        // A surplus page counts as one that was not made.
        let sysfs = pool(3, 1);
        let error = grow(&sysfs.path().join(POOL), 2, || {}).unwrap_err().to_string();
        assert!(error.contains("can make 1 of 2 huge pages"), "{error}");
        assert_eq!(pages(&sysfs), 2);
    }
}
