use std::sync::Arc;
use std::time::Duration;

use slipway_telemetry::{ManualClock, MonotonicClock};

use super::*;
use crate::{DelayDisk, FaultDisk, FaultRule, RamDisk, TraceDisk};

fn ram() -> RamDisk {
    RamDisk::new(1 << 20, 512).unwrap()
}

#[test]
fn faults_strike_by_operation_range_and_count() {
    let writes = FaultRule {
        operation: Some(Operation::Write),
        blocks: Some(10..20),
        skip: 1,
        count: 2,
        error: DiskError::NoSpace,
    };
    let mut disk = FaultDisk::new(ram(), vec![writes]);
    assert_eq!(write(&mut disk, 9, &[1; 512]), Ok(()), "before the range");
    assert_eq!(write(&mut disk, 20, &[1; 512]), Ok(()), "after the range");
    assert_eq!(write(&mut disk, 9, &[1; 1024]), Ok(()), "skipped");
    assert_eq!(write(&mut disk, 19, &[2; 1024]), Err(DiskError::NoSpace));
    assert!(read(&mut disk, 19, 1).unwrap() == [0; 512], "the disk never saw it");
    assert_eq!(write(&mut disk, 10, &[2; 512]), Err(DiskError::NoSpace));
    assert_eq!(write(&mut disk, 10, &[3; 512]), Ok(()), "the rule is over");
    disk.rules().push(FaultRule::always(DiskError::Io(5)));
    assert_eq!(one(&mut disk, request(Operation::Flush, 0, 0, vec![])), Err(DiskError::Io(5)));
}

#[test]
fn a_delayed_request_ends_at_its_time_and_not_before() {
    let clock = ManualClock::new();
    let late = Duration::from_millis(5);
    let mut disk = DelayDisk::new(ram(), Arc::new(clock.clone()), late).unwrap();
    let mut ended = Vec::new();
    let flush = |tag| Request { tag, ..request(Operation::Flush, 0, 0, vec![]) };
    disk.submit(&mut vec![flush(1)], &mut ended);
    clock.advance(Duration::from_millis(3));
    disk.submit(&mut vec![flush(2)], &mut ended);
    clock.advance(Duration::from_nanos(1_999_999));
    disk.poll(&mut ended);
    assert!(ended.is_empty());
    clock.advance(Duration::from_nanos(1));
    disk.poll(&mut ended);
    assert_eq!(ended.iter().map(|one| one.tag).collect::<Vec<_>>(), [1]);
    clock.advance(late);
    disk.poll(&mut ended);
    assert_eq!(ended.len(), 2);
}

#[test]
fn a_delayed_disk_wakes_its_sleeper() {
    let clock = Arc::new(MonotonicClock::new());
    let inner = DelayDisk::new(ram(), clock.clone(), Duration::from_micros(50)).unwrap();
    let mut disk = DelayDisk::new(inner, clock, Duration::from_micros(20)).unwrap();
    against_model(&mut disk, vec![0; 1 << 20], 1, 20);
}

#[test]
fn a_trace_counts_requests_bytes_errors_and_time() {
    let clock = ManualClock::new();
    let late = Duration::from_micros(7);
    let slow = DelayDisk::new(ram(), Arc::new(clock.clone()), late).unwrap();
    let mut disk = TraceDisk::new(slow, Arc::new(clock.clone()));
    let stats = disk.stats();
    let mut ended = Vec::new();
    let write = request(Operation::Write, 0, 2, vec![Span::heap(1024)]);
    let beyond = request(Operation::Write, u64::MAX, 2, vec![Span::heap(1024)]);
    disk.submit(&mut vec![write], &mut ended);
    clock.advance(2 * late);
    disk.poll(&mut ended);
    disk.submit(&mut vec![Request { tag: 2, ..beyond }], &mut ended);
    clock.advance(late);
    disk.poll(&mut ended);
    let figures = stats.figures(Operation::Write);
    assert_eq!((figures.requests, figures.errors, figures.bytes), (2, 1, 1024));
    assert_eq!((figures.total, figures.longest), (3 * late, 2 * late));
    assert_eq!(stats.figures(Operation::Read), Default::default());
}
