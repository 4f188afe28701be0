//! INTx: a level that masks itself when it is delivered.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use slipway_vfio_user::testing::{PIN_OFF, PIN_ON};

use crate::common::*;
use spec::IrqSetFlags as F;

const ROUTE: F = F::DATA_EVENTFD.union(F::TRIGGER);
const UNMASK: F = F::DATA_NONE.union(F::UNMASK);

fn request(flags: F, start: u32, count: u32) -> spec::IrqSet {
    spec::IrqSet {
        argsz: U32::new(20),
        flags: U32::new(flags.bits()),
        index: U32::new(spec::irq::INTX),
        start: U32::new(start),
        count: U32::new(count),
    }
}

fn set(raw: &mut Raw, flags: F, count: u32, files: &[BorrowedFd<'_>]) {
    raw.call_with(Command::DeviceSetIrqs, request(flags, 0, count).as_bytes(), files).ok();
}

/// Connects a client with a route for the pin.
fn routed(served: &Served) -> (Raw, OwnedFd) {
    let (mut raw, file) = (served.client(), event());
    set(&mut raw, ROUTE, 1, &[file.as_fd()]);
    (raw, file)
}

fn readable(file: &OwnedFd) -> bool {
    let mut files = [PollFd::new(file, PollFlags::IN)];
    poll(&mut files, Some(&Timespec::default())).unwrap() == 1
}

#[test]
fn it_comes_once_and_again_after_each_unmask_while_asserted() {
    let served = serve();
    let (mut raw, file) = routed(&served);
    assert_eq!(count(&file), 0);
    raw.write_u32(0x58, PIN_ON);
    assert_eq!(count(&file), 1);
    raw.write_u32(0x58, PIN_OFF);
    raw.write_u32(0x58, PIN_ON);
    assert_eq!(count(&file), 0, "it waits to be unmasked");
    set(&mut raw, UNMASK, 1, &[]);
    assert_eq!(count(&file), 1, "it is still asserted");
    raw.write_u32(0x58, PIN_OFF);
    set(&mut raw, UNMASK, 1, &[]);
    assert_eq!(count(&file), 0, "the register write came before the unmask");
    raw.write_u32(0x58, PIN_ON);
    assert_eq!(count(&file), 1);
}

#[test]
fn a_mask_of_the_clients_holds_until_it_ends() {
    let served = serve();
    let (mut raw, file) = routed(&served);
    set(&mut raw, F::DATA_NONE | F::MASK, 1, &[]);
    raw.write_u32(0x58, PIN_ON);
    assert_eq!(count(&file), 0);
    set(&mut raw, UNMASK, 1, &[]);
    assert_eq!(count(&file), 1);
    set(&mut raw, F::DATA_NONE | F::TRIGGER, 1, &[]);
    assert_eq!(count(&file), 1, "a client may try the way");
}

#[test]
fn an_eventfd_unmasks() {
    let served = serve();
    let (mut raw, file) = routed(&served);
    let unmask = event();
    set(&mut raw, F::DATA_EVENTFD | F::UNMASK, 1, &[unmask.as_fd()]);
    raw.write_u32(0x58, PIN_ON);
    assert_eq!(count(&file), 1);
    for _ in 0..3 {
        rustix::io::write(&unmask, &1_u64.to_ne_bytes()).unwrap();
        eventually("it is delivered again", || count(&file) == 1);
    }
    raw.write_u32(0x58, PIN_OFF);
    rustix::io::write(&unmask, &1_u64.to_ne_bytes()).unwrap();
    eventually("the eventfd is taken", || !readable(&unmask));
    // Once it is no route any more, the file is an eventfd like any other.
    set(&mut raw, F::DATA_EVENTFD | F::UNMASK, 1, &[]);
    raw.write_u32(0x58, PIN_ON);
    assert_eq!(count(&file), 1);
    rustix::io::write(&unmask, &1_u64.to_ne_bytes()).unwrap();
    raw.write_u32(0x58, PIN_ON);
    assert_eq!((count(&unmask), count(&file)), (1, 0));
}

#[test]
fn an_eventfd_that_never_ends_is_given_up() {
    let served = serve();
    let (mut raw, file) = routed(&served);
    let flags = rustix::event::EventfdFlags::SEMAPHORE;
    let endless = rustix::event::eventfd(1_000_000_000, flags).unwrap();
    set(&mut raw, F::DATA_EVENTFD | F::UNMASK, 1, &[endless.as_fd()]);
    let mut delivered = 0;
    for _ in 0..100 {
        raw.write_u32(0x58, PIN_ON);
        delivered += count(&file);
    }
    assert!(delivered <= 3, "{delivered}: each unmask would have delivered it again");
}

#[test]
fn a_level_waits_for_its_route_and_tear_down_takes_everything() {
    let served = serve();
    let (mut raw, file) = (served.client(), event());
    raw.write_u32(0x58, PIN_ON);
    set(&mut raw, ROUTE, 1, &[file.as_fd()]);
    assert_eq!(count(&file), 1);
    set(&mut raw, F::DATA_NONE | F::TRIGGER, 0, &[]);
    set(&mut raw, UNMASK, 1, &[]);
    raw.write_u32(0x58, PIN_ON);
    assert_eq!(count(&file), 0);
    set(&mut raw, ROUTE, 1, &[file.as_fd()]);
    assert_eq!(count(&file), 1, "asserted, and set up anew");
    raw.call(Command::DeviceReset, &[]).ok();
    set(&mut raw, UNMASK, 1, &[]);
    assert_eq!(count(&file), 0, "a reset deasserts it");
}

#[test]
fn bad_requests_are_refused() {
    let served = serve();
    let (mut raw, file) = (served.client(), event());
    let (pipe, _writer) = rustix::pipe::pipe().unwrap();
    let fd = [file.as_fd()];
    let mut refused = |flags: F, start, count, files: &[BorrowedFd<'_>]| {
        let message = request(flags, start, count);
        raw.call_with(Command::DeviceSetIrqs, message.as_bytes(), files).err()
    };
    assert_eq!(refused(ROUTE, 0, 2, &[file.as_fd(), file.as_fd()]), Errno::INVAL);
    assert_eq!(refused(ROUTE, 1, 1, &fd), Errno::INVAL);
    assert_eq!(refused(F::DATA_EVENTFD | F::UNMASK, 0, 1, &[pipe.as_fd()]), Errno::INVAL);
    assert_eq!(refused(F::DATA_EVENTFD | F::MASK, 0, 1, &fd), Errno::NOTSUP);
    assert_eq!(refused(F::DATA_NONE | F::UNMASK, 0, 0, &[]), Errno::INVAL);
    assert_eq!(refused(F::DATA_BOOL | F::UNMASK, 0, 1, &[]), Errno::INVAL);
}
