use std::os::fd::AsFd;
use std::sync::atomic::Ordering;
use std::time::Duration;

use slipway_vfio_user::testing::DONE;

use super::dma_map::copy;
use crate::common::*;

#[test]
fn registers_go_back_and_memory_stays() {
    let served = serve();
    let mut raw = served.client();
    let guest = memory(0x2000);
    raw.map(0, 0x2000, guest.as_fd()).ok();
    raw.write_u32(0x10, 9);
    assert!(raw.call(Command::DeviceReset, &[]).ok().is_empty());
    assert_eq!(raw.read_u32(0x10), 0);
    assert_eq!(served.knobs.resets.load(Ordering::SeqCst), 1);
    assert_eq!(copy(&mut raw, 0, 0x1000, 4), DONE);
    assert_eq!(raw.call(Command::DeviceReset, &[0]).err(), Errno::INVAL);
}

#[test]
fn it_is_answered_when_requests_of_before_have_ended() {
    let served = serve();
    let mut raw = served.client();
    served.knobs.restless.store(true, Ordering::SeqCst);
    let header = raw.header(Command::DeviceReset as u16, 0);
    raw.send(header.as_bytes(), &[]);
    let later = raw.header(Command::RegionRead as u16, 16);
    raw.send(&[later.as_bytes(), access(0, 0, 4).as_bytes()].concat(), &[]);
    eventually("the reset is taken", || served.knobs.resets.load(Ordering::SeqCst) == 1);
    served.knobs.restless.store(false, Ordering::SeqCst);
    for expected in [header, later] {
        let reply = raw.reply();
        assert_eq!(reply.header.id.get(), expected.id.get());
        reply.ok();
    }
}

#[test]
fn a_function_that_does_not_get_quiet_is_busy() {
    let served = serve_with(|config| config.reply_deadline = Duration::from_millis(30));
    let mut raw = served.client();
    served.knobs.restless.store(true, Ordering::SeqCst);
    assert_eq!(raw.call(Command::DeviceReset, &[]).err(), Errno::BUSY);
    served.knobs.restless.store(false, Ordering::SeqCst);
    raw.call(Command::DeviceReset, &[]).ok();
}
