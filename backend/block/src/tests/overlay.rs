use super::memory::resident;
use super::*;
use crate::{FileDisk, FileOptions, NullDisk, OverlayDisk, RamDisk};

const SIZE: usize = 1 << 20;

fn base_bytes() -> Vec<u8> {
    noise(11, SIZE)
}

fn ram_base(block_size: u32) -> RamDisk {
    let mut base = RamDisk::new(SIZE as u64, block_size).unwrap();
    write(&mut base, 0, &base_bytes()).unwrap();
    base
}

#[test]
fn overlay_equals_its_model_and_leaves_the_base() {
    for (seed, block_size) in [(12, 512), (13, 4096)] {
        let mut base = ram_base(block_size);
        let mut overlay = OverlayDisk::new(&mut base, None).unwrap();
        refuses_the_impossible(&mut overlay);
        against_model(&mut overlay, base_bytes(), 1, seed);
        assert!(overlay.used() <= SIZE as u64);
        assert!(read(&mut base, 0, SIZE as u32 / block_size).unwrap() == base_bytes());
    }
}

#[test]
fn overlay_over_a_file_equals_its_model() {
    for direct in [false, true] {
        let directory = super::file::directory();
        let path = directory.path().join("base");
        std::fs::write(&path, base_bytes()).unwrap();
        let options = FileOptions { read_only: true, direct, ..FileOptions::default() };
        let base = FileDisk::open(&path, &options).unwrap();
        let second = FileDisk::open(&path, &options).unwrap();
        against_model(&mut OverlayDisk::new(base, None).unwrap(), base_bytes(), 1, 14);
        against_model(&mut OverlayDisk::new(second, None).unwrap(), base_bytes(), 4, 15);
        assert!(std::fs::read(&path).unwrap() == base_bytes());
    }
}

#[test]
fn overlay_of_any_size_uses_what_was_written() {
    let geometry = Geometry { block_size: 512, blocks: 1 << 33, read_only: true };
    let mut overlay = OverlayDisk::new(NullDisk::new(geometry), None).unwrap();
    for index in 0..256 {
        // One page in every 128 GiB is written; each gets eight blocks.
        write(&mut overlay, ((index / 8 * 8) << 25) + index % 8, &[1; 512]).unwrap();
    }
    assert_eq!(overlay.used(), 32 * 4096);
    assert_eq!(read(&mut overlay, 7, 1).unwrap(), [1; 512]);
}

#[test]
fn overlay_gives_discarded_pages_back() {
    let geometry = Geometry { block_size: 512, blocks: 1 << 18, read_only: true };
    let mut overlay = OverlayDisk::new(NullDisk::new(geometry), None).unwrap();
    let total = |overlay: &OverlayDisk<NullDisk>| -> usize {
        overlay.memory().into_iter().map(resident).sum()
    };
    assert_eq!(total(&overlay), 0);
    write(&mut overlay, 8, &vec![1; 8 << 20]).unwrap();
    assert_eq!(overlay.used(), 8 << 20);
    let full = total(&overlay);
    assert!((8 << 20..=(8 << 20) + 64 * 1024).contains(&full), "{full} bytes resident");
    one(&mut overlay, request(Operation::Discard, 9, (8 << 11) - 1, Vec::new())).unwrap();
    assert_eq!(overlay.used(), 4096);
    let left = total(&overlay);
    assert!(left <= 64 * 1024, "{left} bytes resident after the discard");
    assert_eq!(read(&mut overlay, 8, 2).unwrap(), [[1; 512], [0; 512]].concat());
}

#[test]
fn a_discarded_block_is_zeros_and_not_the_bases() {
    let mut overlay = OverlayDisk::new(ram_base(512), None).unwrap();
    one(&mut overlay, request(Operation::Discard, 3, 20, Vec::new())).unwrap();
    assert_eq!(overlay.used(), 0, "zeros need no page");
    let mut expected = base_bytes()[..64 * 512].to_vec();
    expected[3 * 512..23 * 512].fill(0);
    assert!(read(&mut overlay, 0, 64).unwrap() == expected);
}

#[test]
fn a_full_overlay_says_so_and_goes_on() {
    let mut overlay = OverlayDisk::new(ram_base(512), Some(3 * 4096 + 1)).unwrap();
    write(&mut overlay, 0, &[1; 2 * 4096]).unwrap();
    assert_eq!(write(&mut overlay, 16, &[2; 2 * 4096]), Err(DiskError::NoSpace));
    assert!(read(&mut overlay, 16, 16).unwrap() == base_bytes()[8192..16384], "unchanged");
    write(&mut overlay, 16, &[3; 4096]).unwrap();
    write(&mut overlay, 0, &[4; 3 * 4096]).unwrap();
    assert_eq!(write(&mut overlay, 24, &[5; 512]), Err(DiskError::NoSpace));
    one(&mut overlay, request(Operation::Discard, 0, 8, Vec::new())).unwrap();
    write(&mut overlay, 24, &[5; 512]).unwrap();
    assert_eq!(overlay.used(), 3 * 4096);
}

#[test]
fn an_error_of_the_base_reaches_the_reader_of_both_layers() {
    let directory = super::file::directory();
    let path = directory.path().join("base");
    std::fs::write(&path, base_bytes()).unwrap();
    let options = FileOptions { read_only: true, ..FileOptions::default() };
    let base = FileDisk::open(&path, &options).unwrap();
    let mut overlay = OverlayDisk::new(base, None).unwrap();
    write(&mut overlay, 100, &[9; 512]).unwrap();
    std::fs::File::options().write(true).open(&path).unwrap().set_len(50 * 512).unwrap();
    assert_eq!(read(&mut overlay, 98, 4), Err(DiskError::Io(0)));
    assert_eq!(read(&mut overlay, 100, 1).unwrap(), [9; 512]);
    assert!(read(&mut overlay, 40, 2).is_ok());
}
