use std::os::fd::AsFd;
use std::sync::atomic::Ordering;

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
