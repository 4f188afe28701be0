use super::*;

const EIO: Result<(), DiskError> = Err(DiskError::Io(libc::EIO));
const ETIMEDOUT: Result<(), DiskError> = Err(DiskError::Io(libc::ETIMEDOUT));

#[test]
fn a_read_waits_for_its_blocks_and_a_later_one_of_them_does_not() {
    let rig = Rig::new(64 * BLOCK);
    let (mut disk, fetcher) = rig.open();
    let first = submit(&mut disk, 1, 3..5);
    let second = submit(&mut disk, 2, 10..11);
    assert_eq!(fetcher.wants(), [(3, 2), (10, 1)]);
    assert!(!is_awake(&disk, NOW) && polled(&mut disk).is_empty());
    fetcher.fill(10..11);
    assert!(is_awake(&disk, NOW));
    assert_eq!(ends(&mut disk, 1), [(2, Ok(()))]);
    check(&second, 10);
    fetcher.fill(3..5);
    assert_eq!(ends(&mut disk, 1), [(1, Ok(()))]);
    check(&first, 3);
    let third = submit(&mut disk, 3, 4..5);
    assert_eq!(ends(&mut disk, 1), [(3, Ok(()))]);
    check(&third, 4);
    assert!(fetcher.wants().is_empty());
}

#[test]
fn what_several_reads_lack_is_wanted_once() {
    let rig = Rig::new(64 * BLOCK);
    let (mut disk, fetcher) = rig.open();
    let reads = [4..6, 2..8, 4..5, 7..10];
    let spans = (1..).zip(reads.clone()).map(|(tag, blocks)| submit(&mut disk, tag, blocks));
    let spans: Vec<Span> = spans.collect();
    assert_eq!(fetcher.wants(), [(4, 2), (2, 2), (6, 2), (8, 2)]);
    fetcher.fill(0..8);
    let all_but_the_last = [1, 2, 3].map(|tag| (tag, Ok(())));
    assert_eq!(ends(&mut disk, 3), all_but_the_last);
    fetcher.fill(8..10);
    assert_eq!(ends(&mut disk, 1), [(4, Ok(()))]);
    spans.iter().zip(reads).for_each(|(span, blocks)| check(span, blocks.start));
    assert!(fetcher.wants().is_empty());
}

#[test]
fn a_large_read_is_wanted_in_pieces() {
    let rig = Rig::new(6000 * BLOCK);
    let (mut disk, fetcher) = rig.open();
    submit(&mut disk, 1, 0..5000);
    assert_eq!(fetcher.wants(), [(0, 4096), (4096, 904)]);
    fetcher.say(&Answer::Have(extent(4096..5000)));
    assert!(polled(&mut disk).is_empty());
    fetcher.say(&Answer::Have(extent(0..4096)));
    assert_eq!(ends(&mut disk, 1), [(1, Ok(()))]);
}

#[test]
fn a_bounded_number_of_wants_is_unanswered() {
    const MOST: usize = slipway_lazy_spec::MOST_WANTED / 2;
    let rig = Rig::new(1024 * BLOCK);
    let (mut disk, fetcher) = rig.open();
    let spans: Vec<Span> =
        (0..200).map(|tag| submit(&mut disk, tag, 2 * tag..2 * tag + 1)).collect();
    assert_eq!(fetcher.wants().len(), MOST);
    fetcher.fill(0..1);
    assert_eq!(ends(&mut disk, 1), [(0, Ok(()))]);
    assert_eq!(fetcher.wants(), [(2 * MOST as u64, 1)]);
    fetcher.fill(0..400);
    assert_eq!(ends(&mut disk, 199).len(), 199);
    spans.iter().zip(0..).for_each(|(span, tag)| check(span, 2 * tag));
    assert!(fetcher.wants().is_empty());
}

#[test]
fn only_blocks_that_are_there_wholly_count() {
    let rig = Rig::new(64 * BLOCK);
    let (mut disk, fetcher) = rig.open();
    for (tag, blocks) in [(1, 2..3), (2, 3..5), (3, 5..6)] {
        submit(&mut disk, tag, blocks);
    }
    let ragged = Extent { offset: 2 * BLOCK + 1, bytes: 3 * BLOCK };
    fetcher.say(&Answer::Have(ragged));
    assert_eq!(ends(&mut disk, 1), [(2, Ok(()))]);
    fetcher.say(&Answer::Have(Extent { offset: 5 * BLOCK, bytes: BLOCK - 1 }));
    assert!(polled(&mut disk).is_empty());
    fetcher.say(&Answer::Have(extent(0..64)));
    assert_eq!(ends(&mut disk, 2), [(1, Ok(())), (3, Ok(()))]);
}

#[test]
fn the_last_block_ends_with_the_file() {
    let rig = Rig::new(3 * BLOCK + 512);
    let (mut disk, fetcher) = rig.open();
    let mut ended = Vec::new();
    let last = request(Operation::Read, 24, 1, vec![Span::heap(512)]);
    disk.submit(&mut vec![last], &mut ended);
    let rest = Extent { offset: 3 * BLOCK, bytes: 512 };
    assert_eq!(fetcher.extents(), [rest]);
    fetcher.say(&Answer::Have(Extent { offset: 3 * BLOCK, bytes: 511 }));
    assert!(polled(&mut disk).is_empty());
    fetcher.say(&Answer::Have(rest));
    assert_eq!(ends(&mut disk, 1), [(1, Ok(()))]);
}

#[test]
fn blocks_that_cannot_be_fetched_fail_the_reads_that_lack_them() {
    let rig = Rig::new(64 * BLOCK);
    let (mut disk, fetcher) = rig.open();
    for (tag, blocks) in [(1, 0..4), (2, 2..6), (3, 8..9), (4, 4..6)] {
        submit(&mut disk, tag, blocks);
    }
    assert_eq!(fetcher.wants(), [(0, 4), (4, 2), (8, 1)]);
    fetcher.say(&Answer::Failed(extent(8..10)));
    assert!(polled(&mut disk).is_empty(), "that was not wanted");
    fetcher.say(&Answer::Failed(extent(0..4)));
    let mut failed = polled(&mut disk);
    failed.sort_unstable_by_key(|(tag, _)| *tag);
    assert_eq!(failed, [(1, EIO), (2, EIO)]);
    let again = submit(&mut disk, 5, 0..1);
    assert_eq!(fetcher.wants(), [(0, 1)], "it is tried again");
    // Blocks that came unasked are there, whatever is said of them later.
    fetcher.fill(0..10);
    fetcher.say(&Answer::Failed(extent(4..6)));
    assert_eq!(ends(&mut disk, 3), [3, 4, 5].map(|tag| (tag, Ok(()))));
    check(&again, 0);
}

#[test]
fn a_read_fails_when_it_has_waited_too_long() {
    let rig = Rig::new(64 * BLOCK);
    let (mut disk, fetcher) = rig.open();
    submit(&mut disk, 1, 0..1);
    rig.clock.advance(Duration::from_secs(10));
    submit(&mut disk, 2, 1..2);
    rig.clock.advance(Duration::from_secs(10) - MILLISECOND);
    assert!(polled(&mut disk).is_empty());
    rig.clock.advance(MILLISECOND);
    assert_eq!(polled(&mut disk), [(1, ETIMEDOUT)]);
    assert_eq!(fetcher.wants(), [(0, 1), (1, 1)]);
    let again = submit(&mut disk, 3, 0..1);
    assert!(fetcher.wants().is_empty(), "the fetcher still works at it");
    fetcher.fill(0..1);
    assert_eq!(ends(&mut disk, 1), [(3, Ok(()))]);
    check(&again, 0);
    rig.clock.advance(Duration::from_secs(10));
    assert_eq!(polled(&mut disk), [(2, ETIMEDOUT)]);
}

#[test]
fn a_read_that_waits_can_be_cancelled() {
    let rig = Rig::new(64 * BLOCK);
    let (mut disk, fetcher) = rig.open();
    submit(&mut disk, 1, 0..2);
    let second = submit(&mut disk, 2, 1..2);
    let mut ended = Vec::new();
    assert!(!disk.cancel(3, &mut ended) && ended.is_empty());
    assert!(disk.cancel(1, &mut ended));
    assert_eq!(outcomes(&ended), [(1, Err(DiskError::Cancelled))]);
    assert!(!disk.cancel(1, &mut ended));
    fetcher.fill(0..2);
    assert_eq!(ends(&mut disk, 1), [(2, Ok(()))]);
    check(&second, 1);
    let third = submit(&mut disk, 3, 0..1);
    assert_eq!(ends(&mut disk, 1), [(3, Ok(()))], "its blocks came all the same");
    check(&third, 0);
}

#[test]
fn it_is_read_only_and_checks_requests_at_once() {
    let rig = Rig::new(64 * BLOCK);
    let mut disk = rig.disk();
    let geometry = disk.geometry();
    assert_eq!(geometry, Geometry { block_size: 512, blocks: 512, read_only: true });
    assert_eq!(disk.refresh(), geometry);
    assert_eq!(write(&mut disk, 0, &[1; 512]), Err(DiskError::ReadOnly));
    let zero = request(Operation::WriteZeroes, 0, 1, Vec::new());
    assert_eq!(one(&mut disk, zero), Err(DiskError::ReadOnly));
    assert_eq!(one(&mut disk, request(Operation::Flush, 0, 0, Vec::new())), Ok(()));
    assert_eq!(one(&mut disk, request(Operation::Read, 0, 0, Vec::new())), Ok(()));
    assert_eq!(read(&mut disk, 511, 2), Err(DiskError::OutOfRange));
    let span = [Span::heap(512)];
    disk.expect(Operation::Read, 600, 1);
    let refused = disk.transfer(Operation::Read, (512, 1), &span);
    assert_eq!(refused, Some(Err(DiskError::OutOfRange)));
    assert_eq!(disk.transfer(Operation::Read, (0, 1), &span), None);
    assert!(!disk.copies(Operation::Read));
}

/// A disk in memory carries reads out within the call, once their blocks are there.
#[test]
fn transfers_wait_for_their_blocks_too() {
    let rig = Rig::new(8 * BLOCK);
    let ram = crate::RamDisk::new(8 * BLOCK, 512).unwrap();
    let clock = Arc::new(rig.clock.clone());
    let mut disk = LazyDisk::new(ram, rig.hello(), &rig.socket(), clock).unwrap();
    let fetcher = rig.welcome(&mut disk);
    let span = [Span::heap(512)];
    assert_eq!(disk.transfer(Operation::Read, (8, 1), &span), None);
    fetcher.say(&Answer::Have(extent(1..2)));
    assert!(polled(&mut disk).is_empty());
    assert_eq!(disk.transfer(Operation::Read, (8, 1), &span), Some(Ok(())));
    assert_eq!(disk.transfer(Operation::Read, (16, 1), &span), None);
    let refused = disk.transfer(Operation::Write, (8, 1), &span);
    assert_eq!(refused, Some(Err(DiskError::ReadOnly)));
    assert!(disk.copies(Operation::Read));
}

/// Checks that a disk whose image is whole reads all of it without the fetcher.
fn reads_all(rig: &Rig, disk: &mut LazyDisk, fetcher: &Fetcher) {
    assert!(disk.is_whole() && !is_awake(disk, NOW));
    assert!(fetcher.is_over());
    let span = submit(disk, 9, 0..16);
    assert_eq!(ends(disk, 1), [(9, Ok(()))]);
    check(&span, 0);
    assert_eq!(write(disk, 0, &[1; 512]), Err(DiskError::ReadOnly));
    rig.clock.advance(Duration::from_secs(3600));
    assert!(polled(disk).is_empty());
    assert!(rig.accept().is_none());
}

#[test]
fn a_whole_image_needs_no_fetcher() {
    let all = content(extent(0..16));
    // Whole as the first answer.
    let rig = Rig::new(16 * BLOCK);
    std::fs::write(rig.image(), &all).unwrap();
    let mut disk = rig.disk();
    let fetcher = rig.accept().unwrap();
    submit(&mut disk, 1, 2..3);
    fetcher.say(&Answer::Whole);
    assert_eq!(ends(&mut disk, 1), [(1, Ok(()))]);
    reads_all(&rig, &mut disk, &fetcher);
    // Whole later, while reads wait.
    let rig = Rig::new(16 * BLOCK);
    let (mut disk, fetcher) = rig.open();
    for tag in 1..4 {
        submit(&mut disk, tag, tag..tag + 2);
    }
    assert_eq!(fetcher.wants().len(), 3);
    std::fs::write(rig.image(), &all).unwrap();
    fetcher.say(&Answer::Whole);
    assert_eq!(ends(&mut disk, 3), [1, 2, 3].map(|tag| (tag, Ok(()))));
    reads_all(&rig, &mut disk, &fetcher);
    // Piece by piece.
    let rig = Rig::new(16 * BLOCK);
    let (mut disk, fetcher) = rig.open();
    for blocks in [4..9, 0..5, 9..15] {
        fetcher.fill(blocks);
        assert!(polled(&mut disk).is_empty() && !disk.is_whole());
    }
    fetcher.fill(15..16);
    assert!(polled(&mut disk).is_empty());
    reads_all(&rig, &mut disk, &fetcher);
}

/// A read that succeeds has the image's content, whatever the fetcher does and in which order.
#[test]
fn no_read_sees_a_hole() {
    const BLOCKS: u64 = 256;
    let rig = Rig::new(BLOCKS * BLOCK);
    let (mut disk, mut fetcher) = rig.open();
    let noise = noise(21, 30_000);
    let mut choices = Choices(&noise);
    let mut reads = std::collections::BTreeMap::new();
    let mut wanted: Vec<(u64, u64)> = Vec::new();
    let mut ended = Vec::new();
    for tag in 0..3000 {
        match choices.below(16) {
            0..8 if reads.len() < 64 => {
                let start = choices.below(BLOCKS);
                let end = (start + 1 + choices.below(12)).min(BLOCKS);
                reads.insert(tag, (submit(&mut disk, tag, start..end), start));
            }
            8..14 if !wanted.is_empty() => {
                let (start, count) =
                    wanted.swap_remove(choices.below(wanted.len() as u64) as usize);
                fetcher.fill(start..(start + count + choices.below(3)).min(BLOCKS));
            }
            14 if !wanted.is_empty() => {
                let (start, count) = wanted.swap_remove(0);
                fetcher.say(&Answer::Failed(extent(start..start + count)));
            }
            15 if choices.below(8) == 0 => {
                drop(fetcher);
                disk.poll(&mut ended);
                rig.clock.advance(AGAIN);
                // A disk whose reads all have their blocks connects with the next read.
                reads.insert(tag, (submit(&mut disk, tag, 0..BLOCKS), 0));
                disk.poll(&mut ended);
                let Some(next) = rig.accept() else { return assert!(disk.is_whole()) };
                next.say(&Answer::Open);
                (fetcher, wanted) = (next, Vec::new());
            }
            _ => {}
        }
        disk.poll(&mut ended);
        wanted.extend(fetcher.wants());
        for (tag, result) in outcomes(&std::mem::take(&mut ended)) {
            let (span, start) = reads.remove(&tag).unwrap();
            match result {
                Ok(()) => check(&span, start),
                failed => assert_eq!(failed, EIO),
            }
        }
        if disk.is_whole() {
            break;
        }
    }
    if !disk.is_whole() {
        fetcher.fill(0..BLOCKS);
    }
    for (tag, result) in ends(&mut disk, reads.len()) {
        assert_eq!(result, Ok(()));
        check(&reads[&tag].0, reads[&tag].1);
    }
}
