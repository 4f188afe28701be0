use super::*;
use crate::{NullDisk, OpenError, RamDisk};

/// Returns the bytes of `bytes` that are resident, by mincore(2).
pub(super) fn resident(bytes: &[u8]) -> usize {
    let page = rustix::param::page_size();
    let mut pages = vec![0_u8; bytes.len().div_ceil(page)];
    // SAFETY: the range is a mapping of ours from its first byte on, and there is a byte per page.
    let done =
        unsafe { libc::mincore(bytes.as_ptr().cast_mut().cast(), bytes.len(), pages.as_mut_ptr()) };
    assert_eq!(done, 0);
    pages.iter().filter(|&&page| page & 1 != 0).count() * page
}

#[test]
fn null_takes_everything_on_the_disk() {
    let geometry = Geometry { block_size: 4096, blocks: 100, read_only: false };
    let mut disk = NullDisk::new(geometry);
    refuses_the_impossible(&mut disk);
    assert_eq!(write(&mut disk, 99, &[1; 4096]), Ok(()));
    let mut locked = NullDisk::new(Geometry { read_only: true, ..geometry });
    assert_eq!(write(&mut locked, 0, &[1; 4096]), Err(DiskError::ReadOnly));
}

#[test]
fn ram_equals_its_model() {
    for (seed, block_size) in [(1, 512), (2, 4096), (3, 2048)] {
        let mut disk = RamDisk::new(1 << 20, block_size).unwrap();
        refuses_the_impossible(&mut disk);
        against_model(&mut disk, vec![0; 1 << 20], 1, seed);
    }
}

#[test]
fn ram_of_any_size_costs_what_was_written() {
    let mut disk = RamDisk::new(1 << 40, 512).unwrap();
    write(&mut disk, (1 << 31) - 8, &[7; 4096]).unwrap();
    assert_eq!(read(&mut disk, (1 << 31) - 8, 8).unwrap(), [7; 4096]);
    assert_eq!(read(&mut disk, 0, 8).unwrap(), [0; 4096]);
}

#[test]
fn ram_gives_discarded_pages_back() {
    let mut disk = RamDisk::new(64 << 20, 512).unwrap();
    write(&mut disk, 0, &vec![1; 32 << 20]).unwrap();
    let full = resident(disk.bytes());
    assert!(full >= 32 << 20, "{full} bytes resident");
    one(&mut disk, request(Operation::Discard, 1, 65534, Vec::new())).unwrap();
    let left = resident(disk.bytes());
    assert!(left <= 2 * 4096, "{left} bytes resident after the discard");
    assert_eq!(read(&mut disk, 0, 1).unwrap(), [1; 512]);
    assert_eq!(read(&mut disk, 1, 1).unwrap(), [0; 512]);
    assert_eq!(read(&mut disk, 65535, 1).unwrap(), [1; 512]);
}

#[test]
fn ram_of_a_bad_shape_is_refused() {
    for size in [0, 1, 511, 513] {
        assert!(matches!(RamDisk::new(size, 512), Err(OpenError::Size { .. })));
    }
    for block in [0, 256, 513, 8192, u32::MAX] {
        assert!(matches!(RamDisk::new(1 << 20, block), Err(OpenError::BlockSize(_))));
    }
    assert!(matches!(RamDisk::new(1 << 62, 512), Err(OpenError::Memory { .. })));
}
