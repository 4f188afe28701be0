//! The memory that overlays count: exact at every time, and within the bounds of their owners.

use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use super::overlay_kept::{adopt, file, taken};
use super::*;
use crate::overlay::testing::{Killed, kill_after};
use crate::{Budget, NullDisk, OverlayDisk};

const PAGE: u64 = 4096;
/// The memory of the two maps and of the page table of a small overlay without a file, once
/// something was written.
const MAPS: u64 = 3 * PAGE;

fn overlay(budget: &Budget) -> OverlayDisk<NullDisk> {
    let geometry = Geometry { block_size: 512, blocks: 1 << 11, read_only: true };
    OverlayDisk::new(NullDisk::new(geometry), None).unwrap().counted_in(budget)
}

fn discard(disk: &mut dyn Disk, lba: u64, blocks: u32) {
    one(disk, request(Operation::Discard, lba, blocks, Vec::new())).unwrap();
}

fn part(whole: &Budget) -> Budget {
    whole.part(u64::MAX, |_| {})
}

/// Checks that a kept overlay counts its file, and its own copies of the maps in it.
fn check_exact<D: Disk>(disk: &OverlayDisk<D>, file: &OwnedFd) {
    let (held, used) = (disk.held(), disk.used());
    let records = (held - used - PAGE - disk.tables()) / 2;
    assert_eq!(used + PAGE + records, taken(file), "{held} bytes held, {used} used");
}

#[test]
fn two_owners_at_their_budget() {
    let whole = Budget::new(2 * MAPS + 6 * PAGE);
    let parts = [part(&whole), part(&whole)];
    let [mut one, mut two] = [overlay(&parts[0]), overlay(&parts[1])];
    assert_eq!(whole.held(), 0);
    write(&mut two, 0, &[2; 4096]).unwrap();
    write(&mut one, 0, &[1; 4 * 4096]).unwrap();
    assert_eq!(write(&mut one, 64, &[1; 2 * 4096]), Err(DiskError::NoSpace));
    assert_eq!(read(&mut one, 64, 16).unwrap(), [0; 16 * 512], "unchanged");
    // The other has what it has, and the page that is left.
    write(&mut two, 3, &[3; 512]).unwrap();
    write(&mut two, 8, &[4; 4096]).unwrap();
    assert_eq!(write(&mut two, 16, &[5; 512]), Err(DiskError::NoSpace));
    write(&mut one, 1, &[6; 512]).unwrap();
    assert_eq!(read(&mut one, 0, 2).unwrap(), [[1; 512], [6; 512]].concat());
    // A page that one gives back is the other's.
    discard(&mut one, 0, 8);
    write(&mut two, 16, &[5; 512]).unwrap();
    assert_eq!(parts.each_ref().map(Budget::held), [MAPS + 3 * PAGE, MAPS + 3 * PAGE]);
    assert_eq!(parts.each_ref().map(Budget::refused), [1, 1]);
    assert_eq!((whole.held(), whole.refused()), (2 * MAPS + 6 * PAGE, 2));
    drop(one);
    assert_eq!((whole.held(), two.held()), (MAPS + 3 * PAGE, MAPS + 3 * PAGE));
    drop(two);
    assert_eq!(whole.held(), 0);
}

#[test]
fn the_overlays_of_one_owner_have_its_part_together() {
    let whole = Budget::new(u64::MAX);
    let pod = whole.part(2 * MAPS + 2 * PAGE, |_| {});
    let [mut one, mut two, mut other] = [overlay(&pod), overlay(&pod), overlay(&part(&whole))];
    write(&mut one, 0, &[1; 512]).unwrap();
    write(&mut two, 0, &[2; 512]).unwrap();
    assert_eq!(write(&mut one, 8, &[1; 512]), Err(DiskError::NoSpace));
    write(&mut other, 0, &[3; 64 * 512]).unwrap();
    // A removed overlay gives its memory back to the budget.
    drop(two);
    write(&mut one, 8, &[1; 512]).unwrap();
    assert_eq!((pod.held(), pod.refused(), whole.refused()), (MAPS + 2 * PAGE, 1, 0));
}

#[test]
fn a_full_budget_refuses_no_discard() {
    let budget = Budget::new(MAPS + PAGE);
    let mut disk = overlay(&budget);
    write(&mut disk, 0, &[1; 512]).unwrap();
    let mut other = overlay(&budget);
    discard(&mut other, 0, 2048);
    assert_eq!(budget.held(), MAPS + PAGE + other.held(), "maps are counted beyond the bound");
    assert!(other.held() <= MAPS);
    assert_eq!(write(&mut other, 0, &[1; 512]), Err(DiskError::NoSpace));
    discard(&mut disk, 0, 2048);
    drop(other);
    assert_eq!((disk.used(), budget.held()), (0, MAPS));
}

#[test]
fn every_operation_counts_what_it_takes_and_gives_back() {
    let whole = Budget::new(u64::MAX);
    for seed in 0..20 {
        let file = file(512);
        let (first, second) = (part(&whole), part(&whole));
        let (mut kept, mut own) = (adopt(&file, 512).counted_in(&first), overlay(&second));
        let noise = noise(300 + seed, 1000);
        let mut choices = Choices(&noise);
        for _ in 0..100 {
            let (lba, kind) = (choices.below(100), choices.below(3));
            let blocks = (1 + choices.below(24)) as u32;
            for disk in [&mut kept as &mut dyn Disk, &mut own] {
                match kind {
                    0 => write(disk, lba, &vec![7; 512 * blocks as usize]).unwrap(),
                    1 => discard(disk, lba, blocks),
                    _ => drop(read(disk, lba, blocks).unwrap()),
                }
            }
            check_exact(&kept, &file);
            assert!([0, PAGE, MAPS].contains(&(own.held() - own.used())));
            assert_eq!((first.held(), second.held()), (kept.held(), own.held()));
            assert_eq!(whole.held(), kept.held() + own.held());
        }
        // A successor counts the same, while its predecessor's memory is not counted any more.
        let held = kept.held();
        drop(kept);
        assert_eq!(first.held(), 0);
        assert_eq!(adopt(&file, 512).counted_in(&first).held(), held);
    }
    assert_eq!(whole.held(), 0);
}

#[test]
fn a_successor_counts_what_a_kill_at_any_point_left() {
    let whole = Budget::new(u64::MAX);
    for at in 0.. {
        let file = file(512);
        let mut disk = adopt(&file, 512).counted_in(&whole);
        write(&mut disk, 0, &[1; 3 * 4096]).unwrap();
        kill_after(Some(at));
        let ended = catch_unwind(AssertUnwindSafe(|| {
            write(&mut disk, 30, &[2; 4096]).unwrap();
            discard(&mut disk, 0, 12);
        }));
        kill_after(None);
        drop(disk);
        assert_eq!(whole.held(), 0, "killed at {at}");
        let mut disk = adopt(&file, 512).counted_in(&whole);
        assert!(whole.held() >= taken(&file), "killed at {at}");
        // Its device carries unfinished commands out again.
        write(&mut disk, 30, &[2; 4096]).unwrap();
        discard(&mut disk, 0, 12);
        check_exact(&disk, &file);
        assert_eq!(whole.held(), disk.held());
        match ended {
            Ok(()) => {
                assert!(at > 5, "only {at} points");
                break;
            }
            Err(reason) if reason.is::<Killed>() => {}
            Err(reason) => resume_unwind(reason),
        }
    }
}

#[test]
fn a_successor_with_a_smaller_budget_has_what_was_left_and_gets_no_more() {
    let file = file(512);
    write(&mut adopt(&file, 512), 0, &[1; 3 * 4096]).unwrap();
    let budget = Budget::new(8 * PAGE);
    let mut disk = adopt(&file, 512).counted_in(&budget);
    // Three pages of data and their page table, two maps with a record each, and the head.
    assert_eq!(budget.held(), 9 * PAGE);
    write(&mut disk, 1, &[2; 512]).unwrap();
    assert_eq!(write(&mut disk, 24, &[3; 512]), Err(DiskError::NoSpace));
    discard(&mut disk, 0, 16);
    write(&mut disk, 24, &[3; 512]).unwrap();
    assert_eq!(budget.held(), 8 * PAGE);
    drop(disk);
    assert_eq!(budget.held(), 0);
}

#[test]
fn page_tables_count_as_long_as_the_overlay_lives() {
    let geometry = Geometry { block_size: 512, blocks: 1 << 18, read_only: true };
    let budget = Budget::new(u64::MAX);
    let base = NullDisk::new(geometry);
    let mut disk = OverlayDisk::new(base, None).unwrap().counted_in(&budget);
    // A page in each 2 MiB of 128 MiB.
    for lba in (0..1 << 18).step_by(4096) {
        write(&mut disk, lba, &[1; 512]).unwrap();
    }
    discard(&mut disk, 0, 1 << 18);
    // Beside the tables: eight pages of one map, and one page of the other.
    assert_eq!((disk.used(), disk.tables(), disk.held()), (0, 64 * PAGE, (64 + 9) * PAGE));
    write(&mut disk, 4096, &[1; 4096]).unwrap();
    assert_eq!((disk.tables(), disk.held()), (64 * PAGE, (64 + 10) * PAGE));
    drop(disk);
    assert_eq!(budget.held(), 0);
    // There is room for a page of data, and not for its table.
    let budget = Budget::new(PAGE);
    let mut disk = overlay(&budget);
    assert_eq!(write(&mut disk, 0, &[1; 512]), Err(DiskError::NoSpace));
    assert_eq!((disk.tables(), budget.held()), (0, 0));
}

#[test]
fn a_page_that_the_kernel_does_not_take_back_stays_counted() {
    let budget = Budget::new(u64::MAX);
    let mut disk = overlay(&budget);
    write(&mut disk, 0, &[1; 2 * 4096]).unwrap();
    // SAFETY: the disk's own memory; the call changes no byte. The lock ends with the mapping.
    if unsafe { libc::mlock(disk.memory()[0].as_ptr().cast(), 4096) } != 0 {
        println!("SKIPPED: a_page_that_the_kernel_does_not_take_back_stays_counted: mlock(2)");
        return;
    }
    discard(&mut disk, 0, 8);
    assert_eq!(read(&mut disk, 0, 8).unwrap(), [0; 4096]);
    assert_eq!((disk.used(), budget.held()), (2 * PAGE, 2 * PAGE + MAPS));
    discard(&mut disk, 8, 8);
    assert_eq!((disk.used(), budget.held()), (PAGE, PAGE + MAPS));
}
