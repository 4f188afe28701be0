//! Registers, capabilities and negotiation.

use slipway_pci::Function;
use slipway_virtio_spec::net::Features;
use slipway_virtio_spec::pci::{CAPABILITY_ID, common, config_type};
use slipway_virtio_spec::{RingFeatures, Status};

use super::rig::{Setup, World};
use crate::driver::{Driver, DriverError};
use crate::layout::{BAR_SIZE, COMMON, DEVICE, ISR, NOTIFY};

fn byte(device: &mut impl Function, at: u16) -> u8 {
    let mut byte = [0];
    device.config_read(at, &mut byte);
    byte[0]
}

#[test]
fn capabilities_point_to_their_structures() {
    let (mut device, _port, _) = Setup::new(1).device();
    let mut identity = [0; 12];
    device.config_read(0, &mut identity);
    assert_eq!(identity[..4], [0xf4, 0x1a, 0x41, 0x10]);
    assert_eq!(identity[8..], [1, 0, 0, 2], "revision 1, Ethernet controller");
    let (mut at, mut found) = (byte(&mut device, 0x34), Vec::new());
    while at != 0 {
        let mut bytes = [0; 16];
        device.config_read(at.into(), &mut bytes);
        if bytes[0] == CAPABILITY_ID {
            assert_eq!(bytes[4], 0, "BAR");
            let offset = u32::from_le_bytes(bytes[8..12].try_into().unwrap());
            found.push((bytes[3], u64::from(offset)));
        }
        at = bytes[1];
    }
    let expected = [
        (config_type::COMMON, COMMON.start),
        (config_type::NOTIFY, NOTIFY.start),
        (config_type::ISR, ISR.start),
        (config_type::DEVICE, DEVICE.start),
        (config_type::PCI, 0),
    ];
    assert_eq!(found, expected);
}

#[test]
fn the_window_in_configuration_space_reaches_registers() {
    let (mut device, _port, _) = Setup::new(1).device();
    let mut at = byte(&mut device, 0x34);
    while byte(&mut device, u16::from(at) + 3) != config_type::PCI
        || byte(&mut device, at.into()) != CAPABILITY_ID
    {
        at = byte(&mut device, u16::from(at) + 1);
    }
    let at = u16::from(at);
    let choose = |device: &mut dyn Function, offset: u64, len: u32| {
        device.config_write(at + 4, &[0]);
        device.config_write(at + 8, &(offset as u32).to_le_bytes());
        device.config_write(at + 12, &len.to_le_bytes());
    };
    choose(&mut device, common::DEVICE_STATUS, 1);
    device.config_write(at + 16, &[1, 0, 0, 0]);
    let mut direct = [0];
    device.read(0, common::DEVICE_STATUS, &mut direct);
    assert_eq!(direct, [Status::ACKNOWLEDGE.bits()]);
    let mut data = [0; 4];
    device.config_read(at + 16, &mut data);
    assert_eq!(data[0], 1);
    choose(&mut device, DEVICE.start, 4);
    device.config_read(at + 16, &mut data);
    assert_eq!(data, [2, 1, 0, 0], "the MAC's first bytes");
    for (offset, len) in [(BAR_SIZE, 4), (2, 4), (0, 3), (0xffff_fffc, 4), (0, 0)] {
        choose(&mut device, offset, len);
        device.config_read(at + 16, &mut data);
        device.config_write(at + 16, &[0xff; 4]);
    }
    device.read(0, common::DEVICE_STATUS, &mut direct);
    assert_eq!(direct, [1]);
}

#[test]
fn a_driver_reads_what_it_was_offered() {
    let setup = Setup::new(7).settings(|settings| (settings.mtu, settings.pairs) = (9000, 2));
    let mut host = setup.host(&World::new());
    let config = host.driver.config().unwrap();
    assert_eq!((config.mac, config.mtu.get()), (host.mac.0, 9000));
    assert_eq!((config.status.get(), config.max_virtqueue_pairs.get()), (1, 2));
    assert_eq!((config.speed.get(), config.duplex), (100_000, 1));
    assert!(host.driver.features.contains(Features::MQ | Features::MRG_RXBUF));
}

#[test]
fn features_that_cannot_be_are_refused() {
    let try_with = |change: fn(&mut crate::driver::Options)| {
        let setup = Setup::new(1).options(change);
        let (device, _port, _) = setup.device();
        let registers = crate::driver::Direct::beside(device, || {});
        let arena = crate::driver::Arena::new(setup.memory.clone(), 0, 1 << 20);
        Driver::new(registers, arena, setup.options).map(drop)
    };
    assert!(try_with(|_| {}).is_ok());
    let refused = [
        try_with(|options| options.rings -= RingFeatures::VERSION_1),
        try_with(|options| options.features -= Features::CTRL_VQ),
        try_with(|options| options.features -= Features::CSUM),
        try_with(|options| options.features -= Features::GUEST_CSUM),
    ];
    for outcome in refused {
        assert!(matches!(outcome, Err(DriverError::Features(_))), "{outcome:?}");
    }
}

#[test]
fn accesses_of_any_width_and_place_are_answered() {
    let (mut device, _port, _) = Setup::new(1).device();
    for offset in (0..BAR_SIZE).step_by(3) {
        for len in [1, 2, 4, 8, 3] {
            let mut bytes = vec![0xaa; len];
            assert_eq!(device.read(0, offset, &mut bytes), slipway_pci::Access::Done);
        }
    }
    assert_eq!(device.read(1, 0, &mut [0]), slipway_pci::Access::Refused);
    // A queue that does not exist has size 0.
    device.write(0, common::QUEUE_SELECT, &[99, 0]);
    let mut size = [1; 2];
    device.read(0, common::QUEUE_SIZE, &mut size);
    assert_eq!(size, [0; 2]);
}

#[test]
fn a_queue_in_a_wrong_place_needs_a_reset() {
    for (field, address) in
        [(common::QUEUE_DESC, 8_u32), (common::QUEUE_DRIVER, 1), (common::QUEUE_DEVICE, 2)]
    {
        let (mut device, _port, _) = Setup::new(1).device();
        device.write(0, field, &address.to_le_bytes());
        device.write(0, common::QUEUE_ENABLE, &[1, 0]);
        let mut status = [0];
        device.read(0, common::DEVICE_STATUS, &mut status);
        assert_eq!(status, [Status::DEVICE_NEEDS_RESET.bits()]);
    }
}
