//! The features of `VFIO_USER_DEVICE_FEATURE` that log writes to the client's memory.

use std::os::fd::AsFd;
use std::sync::atomic::Ordering;
use std::time::Duration;

use slipway_vfio_user::testing::DONE;
use spec::{DeviceFeature, LogControl, LogReport, feature};

use super::dma_map::copy;
use super::migration::feature_call;
use crate::common::*;

const START: u32 = feature::SET | feature::LOG_START;
const STOP: u32 = feature::SET | feature::LOG_STOP;
const REPORT: u32 = feature::GET | feature::LOG_REPORT;
/// The memory that tests map, in pages.
const PAGES: u64 = 130;

fn start(raw: &mut Raw) -> Reply {
    let control = LogControl { page_size: U64::new(4096), ..Default::default() };
    feature_call(raw, 24, START, control.as_bytes())
}

fn report(raw: &mut Raw, iova: u64, length: u64) -> Reply {
    let (iova, length, page_size) = (U64::new(iova), U64::new(length), U64::new(4096));
    let report = LogReport { iova, length, page_size };
    feature_call(raw, 4096, REPORT, report.as_bytes())
}

/// Returns the words of a report of all of the memory, which begins at 1 MiB.
fn words(raw: &mut Raw) -> Vec<u64> {
    let reply = report(raw, 1 << 20, PAGES * 4096).ok();
    let (head, data) = DeviceFeature::read_from_prefix(&reply).unwrap();
    assert_eq!((head.argsz.get() as usize, head.flags.get()), (reply.len(), REPORT));
    let (range, bits) = LogReport::read_from_prefix(data).unwrap();
    assert_eq!((range.iova.get(), range.length.get()), (1 << 20, PAGES * 4096));
    bits.chunks(8).map(|word| u64::from_le_bytes(word.try_into().unwrap())).collect()
}

fn at(page: u64) -> u64 {
    (1 << 20) + page * 4096
}

#[test]
fn pages_that_the_function_writes_are_reported_once() {
    let served = serve();
    let mut raw = served.client();
    let guest = memory(PAGES * 4096);
    raw.map(1 << 20, PAGES * 4096, guest.as_fd()).ok();
    assert_eq!(copy(&mut raw, at(0), at(1), 8), DONE);
    assert_eq!(report(&mut raw, at(0), 64 * 4096).err(), Errno::INVAL, "no log");
    start(&mut raw).ok();
    assert_eq!(words(&mut raw), [0; 3]);
    assert_eq!(copy(&mut raw, at(9), at(5) - 1, 2), DONE);
    assert_eq!(copy(&mut raw, at(9), at(129), 4096), DONE);
    assert_eq!(words(&mut raw), [3 << 4, 0, 2]);
    assert_eq!(words(&mut raw), [0; 3]);
    // A log that begins anew has nothing of the one before.
    assert_eq!(copy(&mut raw, at(0), at(1), 8), DONE);
    start(&mut raw).ok();
    assert_eq!(words(&mut raw), [0; 3]);
    feature_call(&mut raw, 8, STOP, &[]).ok();
    assert_eq!(report(&mut raw, at(0), 64 * 4096).err(), Errno::INVAL);
    feature_call(&mut raw, 8, STOP, &[]).ok();
}

#[test]
fn requests_that_cannot_be_change_nothing() {
    let served = serve();
    let mut raw = served.client();
    let guest = memory(PAGES * 4096);
    raw.map(1 << 20, PAGES * 4096, guest.as_fd()).ok();
    let control = LogControl { num_ranges: U32::new(1), ..Default::default() };
    assert_eq!(feature_call(&mut raw, 64, START, control.as_bytes()).err(), Errno::INVAL);
    let control = LogControl { num_ranges: U32::new(u32::MAX), ..Default::default() };
    assert_eq!(feature_call(&mut raw, 64, START, control.as_bytes()).err(), Errno::INVAL);
    assert_eq!(feature_call(&mut raw, 64, START, &[0; 15]).err(), Errno::INVAL);
    assert_eq!(
        feature_call(&mut raw, 64, feature::GET | feature::LOG_START, &[]).err(),
        Errno::INVAL
    );
    start(&mut raw).ok();
    assert_eq!(copy(&mut raw, at(9), at(3), 8), DONE);
    for (iova, len) in [
        (at(0), 0),
        (at(0), 100),
        (at(0) + 1, 4096),
        (at(0), 63 * 4096),
        (at(1), 64 * 4096),
        (at(0), (PAGES + 1) * 4096),
        (at(0) - 4096, 4096),
        (at(0), u64::MAX - 4095),
        (0, 1 << 62),
    ] {
        assert_eq!(report(&mut raw, iova, len).err(), Errno::INVAL, "{iova:#x}+{len:#x}");
    }
    let wrong =
        LogReport { iova: U64::new(at(0)), length: U64::new(1 << 16), ..Default::default() };
    assert_eq!(feature_call(&mut raw, 4096, REPORT, wrong.as_bytes()).err(), Errno::INVAL);
    let right = LogReport { page_size: U64::new(4096), length: U64::new(1 << 18), ..wrong };
    let room = feature_call(&mut raw, 39, REPORT, right.as_bytes());
    assert_eq!(room.err(), Errno::INVAL, "no room for the bits");
    assert_eq!(words(&mut raw), [8, 0, 0], "nothing was taken");
}

#[test]
fn memory_that_came_later_has_no_log() {
    let served = serve();
    let mut raw = served.client();
    start(&mut raw).ok();
    let guest = memory(PAGES * 4096);
    raw.map(1 << 20, PAGES * 4096, guest.as_fd()).ok();
    assert_eq!(report(&mut raw, at(0), PAGES * 4096).err(), Errno::INVAL);
}

#[test]
fn a_log_waits_until_the_function_is_quiet() {
    let served = serve_with(|config| config.reply_deadline = Duration::from_millis(30));
    let mut raw = served.client();
    let guest = memory(PAGES * 4096);
    raw.map(1 << 20, PAGES * 4096, guest.as_fd()).ok();
    served.knobs.restless.store(true, Ordering::SeqCst);
    assert_eq!(start(&mut raw).err(), Errno::BUSY);
    assert!(served.knobs.quiesces.load(Ordering::SeqCst) > 0);
    served.knobs.restless.store(false, Ordering::SeqCst);
    start(&mut raw).ok();
    assert_eq!(copy(&mut raw, at(9), at(3), 8), DONE);
    served.knobs.restless.store(true, Ordering::SeqCst);
    assert_eq!(report(&mut raw, at(0), PAGES * 4096).err(), Errno::BUSY);
    served.knobs.restless.store(false, Ordering::SeqCst);
    assert_eq!(words(&mut raw), [8, 0, 0]);
    // The function goes on meanwhile.
    assert_eq!(copy(&mut raw, at(9), at(64), 8), DONE);
    assert_eq!(words(&mut raw), [0, 1, 0]);
}
