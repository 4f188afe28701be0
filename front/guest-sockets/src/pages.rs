//! Huge pages: reserved early, before memory is fragmented, and located in physical memory.

use std::fs::{read_to_string, write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::Ordering;

use anyhow::{Context, Result, bail};
use slipway_ram::Lasting;
use slipway_sgiov::guest::Piece;
use slipway_sgiov_spec::function::PIECE;

const POOL: &str = "sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages";
/// The fewest and the most huge pages to reserve: one for control, and one for each arena.
const LEAST: u64 = 4;
const MOST: u64 = 64;
/// Fewer huge pages than this leave no room for an arena.
const NEEDED: u64 = 2;

/// Bits of a word of /proc/PID/pagemap (Documentation/admin-guide/mm/pagemap.rst).
const PRESENT: u64 = 1 << 63;
const FRAME: u64 = (1 << 55) - 1;
const SMALL: u64 = 4096;

/// Reserves an eighth of the memory in huge pages, beside so many that the kernel has made for
/// others. Returns how many there are.
///
/// # Errors
/// If the kernel has no huge pages.
pub fn reserve(root: &Path, beside: u64) -> Result<u64> {
    let pool = root.join(POOL);
    let wanted = wanted(&read_to_string(root.join("proc/meminfo")).context("/proc/meminfo")?)?;
    let there = || -> Result<u64> {
        let text = read_to_string(&pool).context("the kernel has no huge pages of 2 MiB")?;
        Ok(text.trim().parse::<u64>()?.saturating_sub(beside))
    };
    if there()? < wanted {
        let all = wanted.saturating_add(beside);
        write(&pool, all.to_string()).context("cannot reserve huge pages")?;
    }
    let held = there()?;
    if held < NEEDED {
        bail!(
            "the kernel could reserve {held} of {wanted} huge pages: give the sandbox more memory"
        );
    }
    if held < wanted {
        tracing::warn!(
            "{held} of {wanted} huge pages could be reserved: fewer programs can have sockets"
        );
    }
    Ok(held)
}

fn wanted(meminfo: &str) -> Result<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"));
    let kib = line.and_then(|rest| rest.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
    let bytes = kib.context("/proc/meminfo has no MemTotal")? * 1024;
    Ok((bytes / 8 / PIECE as u64).clamp(LEAST, MOST))
}

/// Takes a huge page and finds its physical address.
///
/// # Errors
/// If no huge page is left, or the kernel does not report the address.
pub fn piece() -> std::io::Result<Piece> {
    let memory = Lasting::huge("slipway-sockets")?;
    // A page has no physical address before it is touched.
    memory.words()[0].store(0, Ordering::Relaxed);
    let at = physical(memory.as_ptr() as u64)?;
    if !at.is_multiple_of(PIECE as u64) {
        return Err(std::io::Error::other("a huge page that is not aligned"));
    }
    Ok(Piece { memory, at })
}

/// Returns the physical address of a page of this process.
fn physical(address: u64) -> std::io::Result<u64> {
    let mut word = [0; 8];
    let pagemap = std::fs::File::open("/proc/self/pagemap")?;
    pagemap.read_exact_at(&mut word, address / SMALL * 8)?;
    let word = u64::from_le_bytes(word);
    let frame = word & FRAME;
    // The kernel reports frame 0 to a reader without the privilege.
    if word & PRESENT == 0 || frame == 0 {
        return Err(std::io::Error::other("the kernel does not say where a page is: not root?"));
    }
    Ok(frame * SMALL)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_eighth_of_the_memory_is_reserved() {
        for (kib, pages) in [(65_536, 4), (262_144, 16), (248_000, 15), (1 << 30, 64)] {
            assert_eq!(wanted(&format!("A: 1\nMemTotal:   {kib} kB\nB: 2\n")).unwrap(), pages);
        }
        assert!(wanted("MemTotal: much").is_err());
        let dir = tempfile::tempdir().unwrap();
        let error = || format!("{:#}", reserve(dir.path(), 0).unwrap_err());
        std::fs::create_dir_all(dir.path().join("proc")).unwrap();
        write(dir.path().join("proc/meminfo"), "MemTotal: 262144 kB\n").unwrap();
        assert!(error().contains("no huge pages"));
        std::fs::create_dir_all(dir.path().join(POOL).parent().unwrap()).unwrap();
        write(dir.path().join(POOL), "0\n").unwrap();
        assert_eq!(reserve(dir.path(), 0).unwrap(), 16);
        // Pages of containers are not the engine's.
        assert_eq!(reserve(dir.path(), 32).unwrap(), 16);
        assert_eq!(read_to_string(dir.path().join(POOL)).unwrap(), "48");
    }

    /// Needs root and a free huge page, and does nothing without them.
    #[test]
    fn a_piece_is_where_the_kernel_says() {
        let Ok(piece) = piece() else { return };
        assert!(piece.at.is_multiple_of(PIECE as u64) && piece.memory.len() == PIECE);
        let last = piece.memory.as_ptr() as u64 + PIECE as u64 - SMALL;
        assert_eq!(physical(last).unwrap(), piece.at + PIECE as u64 - SMALL);
    }
}
