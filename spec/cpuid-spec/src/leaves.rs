//! Leaves of caches and topology, as a template makes them up: 32 KiB of first-level cache for
//! instructions and as much for data, 512 KiB of second level for each CPU, and 16 MiB of third
//! level for all of them; lines of 64 bytes. Programs size their buffers by them. Topology: one
//! package, a core for each CPU, no threads.

use alloc::vec::Vec;

use crate::Leaf;

/// Values of a topology level's type (Intel SDM, volume 2, CPUID leaf 0x0b).
const LEVEL_THREAD: u32 = 1;
const LEVEL_CORE: u32 = 2;

/// Returns the number of bits that the numbers of `cpus` CPUs need.
pub fn bits(cpus: u32) -> u32 {
    cpus.next_power_of_two().trailing_zeros()
}

/// Returns leaf 0x0b of CPU `cpu` of `cpus`: one thread in a core, all cores in one package.
pub fn topology(cpu: u32, cpus: u32) -> [Leaf; 3] {
    let level = |index: u32, shift, count, kind| {
        Leaf::indexed(0x0b, index, [shift, count, index | kind << 8, cpu])
    };
    [level(0, 0, 1, LEVEL_THREAD), level(1, bits(cpus), cpus, LEVEL_CORE), level(2, 0, 0, 0)]
}

/// A cache.
struct Cache {
    /// 1: data, 2: instructions, 3: both.
    kind: u32,
    level: u32,
    ways: u32,
    sets: u32,
}

const CACHES: [Cache; 4] = [
    Cache { kind: 1, level: 1, ways: 8, sets: 64 },
    Cache { kind: 2, level: 1, ways: 8, sets: 64 },
    Cache { kind: 3, level: 2, ways: 8, sets: 1024 },
    Cache { kind: 3, level: 3, ways: 16, sets: 16384 },
];
/// The level of the cache that all CPUs share.
const SHARED: u32 = 3;
/// Bytes of a cache line.
const LINE: u32 = 64;

/// Returns the caches, one for each index, in the format of Intel's leaf 4, which is that of AMD's
/// leaf 0x8000_001d but for the number of cores (bits 31:26 of EAX, which AMD reserves).
pub fn caches(function: u32, cpus: u32, cores: bool) -> Vec<Leaf> {
    /// Needs no initialisation by software.
    const SELF_INITIALISING: u32 = 1 << 8;
    let cores = if cores { (1 << bits(cpus)) - 1 } else { 0 };
    let mut all: Vec<_> = (0..)
        .zip(&CACHES)
        .map(|(index, cache)| {
            let sharing = if cache.level == SHARED { cpus - 1 } else { 0 };
            let kind = cache.kind | cache.level << 5 | SELF_INITIALISING;
            let shape = (cache.ways - 1) << 22 | (LINE - 1);
            Leaf::indexed(
                function,
                index,
                [kind | sharing << 14 | cores << 26, shape, cache.sets - 1, 0],
            )
        })
        .collect();
    all.push(Leaf::indexed(function, CACHES.len() as u32, [0; 4]));
    all
}

/// AMD's leaves of caches and translation buffers (AMD64 APM, volume 3, appendix E.4.4), with the
/// caches of [`caches`].
pub fn amd_caches() -> [Leaf; 2] {
    /// 64 entries, fully associative, for small pages and for large ones.
    const FIRST_BUFFERS: u32 = 0xff40_ff40;
    /// 32 KiB, eight ways, one line of 64 bytes for each tag.
    const FIRST: u32 = 32 << 24 | 8 << 16 | 1 << 8 | LINE;
    /// 1536 entries for large pages, eight ways (6), for data and for instructions.
    const SECOND_BUFFERS: u32 = 0x6600_6600;
    /// 512 KiB, eight ways (6).
    const SECOND: u32 = 512 << 16 | 6 << 12 | 1 << 8 | LINE;
    /// 16 MiB, in units of 512 KiB; sixteen ways (8).
    const THIRD: u32 = 32 << 18 | 8 << 12 | 1 << 8 | LINE;
    [
        Leaf::new(0x8000_0005, [FIRST_BUFFERS, FIRST_BUFFERS, FIRST, FIRST]),
        Leaf::new(0x8000_0006, [SECOND_BUFFERS, SECOND_BUFFERS, SECOND, THIRD]),
    ]
}

/// Intel's leaf of the second-level cache.
pub fn intel_cache() -> Leaf {
    Leaf::new(0x8000_0006, [0, 0, 512 << 16 | 6 << 12 | LINE, 0])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_caches_have_the_same_sizes_in_every_format() {
        let size =
            |entry: &Leaf| ((entry.ebx >> 22) + 1) * ((entry.ebx & 0xfff) + 1) * (entry.ecx + 1);
        let four = caches(4, 6, true);
        let sizes: Vec<_> = four[..4].iter().map(size).collect();
        assert_eq!(sizes, [32 << 10, 32 << 10, 512 << 10, 16 << 20]);
        assert_eq!(four[4].eax & 0x1f, 0);
        let [first, second] = amd_caches();
        assert_eq!([first.ecx >> 24 << 10, first.edx >> 24 << 10], [sizes[0], sizes[1]]);
        assert_eq!([second.ecx >> 16 << 10, second.edx >> 18 << 19], [sizes[2], sizes[3]]);
        assert_eq!(intel_cache().ecx >> 16 << 10, sizes[2]);
        assert_eq!(four[3].eax >> 14 & 0xfff, 5, "the CPUs that share it, less one");
        assert_eq!(four[3].eax >> 26, 7, "numbers of cores, less one");
        assert_eq!(caches(0x8000_001d, 6, false)[3].eax >> 26, 0);
    }
}
