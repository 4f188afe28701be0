//! Resets, links, loopback, ports that come and go.

use slipway_e1000_spec::{cause, control, mdic, phy, rctl, register, status, tctl};
use slipway_pci::{Access, Function};
use slipway_switch::ports::UnpluggedPort;
use slipway_switch::{LinkSetting, PortConfig};

use super::rig::{Host, Setup, World, frame, pair};

fn access_phy(host: &mut Host, operation: u32, register: u8, data: u16) -> u32 {
    let address = mdic::PHY_ADDRESS << mdic::PHY | u32::from(register) << mdic::REGISTER;
    host.driver.set(register::MDIC, operation | address | u32::from(data)).unwrap();
    host.driver.get(register::MDIC).unwrap()
}

#[test]
fn a_reset_forgets_everything_and_the_driver_starts_again() {
    let (world, mut a, mut b) = pair(Setup::new(1), Setup::new(2));
    b.driver.set(register::CTRL, control::RST).unwrap();
    assert_ne!(b.driver.get(register::CTRL).unwrap() & control::RST, 0, "the port has the path");
    a.send(&frame(a.mac, b.mac, 60));
    b.device().poll();
    assert_eq!(b.driver.get(register::CTRL).unwrap() & control::RST, 0);
    for register in [register::RCTL, register::TCTL, register::IMS, register::RDT, register::RDH] {
        assert_eq!(b.driver.get(register).unwrap(), 0, "{register:#x}");
    }
    assert!(b.received().is_empty());
    let (memory, registers) = (b.memory.clone(), b.driver.registers);
    let options = crate::driver::Options { descriptors: 64, ..Default::default() };
    let len = crate::driver::memory_len(64) as u64;
    b.driver = crate::driver::Driver::new(registers, &memory, (0, len), options).unwrap();
    world.settle();
    a.send(&frame(a.mac, b.mac, 61));
    b.send(&frame(b.mac, a.mac, 62));
    assert_eq!((b.received()[0].len(), a.received()[0].len()), (61, 62));
}

#[test]
fn the_driver_disables_and_enables_the_rings_at_any_time() {
    let (_, mut a, mut b) = pair(Setup::new(1), Setup::new(2));
    for round in 0..20 {
        b.driver.set(register::RCTL, 0).unwrap();
        a.driver.set(register::TCTL, 0).unwrap();
        a.send(&frame(a.mac, b.mac, 60 + round));
        assert!(b.received().is_empty(), "the frame waits");
        b.driver.set(register::RCTL, rctl::EN).unwrap();
        a.driver.set(register::TCTL, tctl::EN).unwrap();
        a.world.settle();
        assert_eq!(b.received()[0].len(), 60 + round);
    }
}

#[test]
fn a_link_that_goes_and_comes_is_told_and_negotiated() {
    let (world, mut a, mut b) = pair(Setup::new(1), Setup::new(2));
    let set = |host: &Host, link| {
        let config = PortConfig { link, ..PortConfig::default() };
        world.switch.borrow_mut().configure(host.port, config).unwrap();
    };
    assert_ne!(b.driver.get(register::STATUS).unwrap() & status::LU, 0);
    set(&b, LinkSetting::Down);
    b.device().poll();
    assert_eq!(b.driver.get(register::STATUS).unwrap() & status::LU, 0);
    assert!(b.sink.pin());
    assert_eq!(b.driver.get(register::ICR).unwrap(), cause::LSC);
    a.send(&frame(a.mac, b.mac, 60));
    assert!(b.received().is_empty());
    set(&b, LinkSetting::Auto);
    b.device().poll();
    assert_eq!(b.driver.get(register::STATUS).unwrap() & status::LU, 0);
    let read = access_phy(&mut b, mdic::READ, phy::STATUS, 0);
    assert_eq!(read & u32::from(phy::status::COMPLETE), 0);
    world.pass(crate::phy::NEGOTIATION);
    b.device().poll();
    assert_eq!(b.driver.get(register::ICR).unwrap(), cause::LSC);
    a.send(&frame(a.mac, b.mac, 60));
    assert_eq!(b.received().len(), 1);
}

#[test]
fn loopback_by_controller_and_phy_returns_frames_to_their_sender_only() {
    let (_, mut a, mut b) = pair(Setup::new(1), Setup::new(2));
    let own = frame(b.mac, b.mac, 1000);
    b.driver.set(register::RCTL, rctl::EN | rctl::LBM).unwrap();
    b.send(&own);
    assert_eq!(b.received(), std::slice::from_ref(&own));
    b.driver.set(register::RCTL, rctl::EN).unwrap();
    b.send(&own);
    assert!(b.received().is_empty());
    // As `ethtool -t` does, with interrupts off and 64 frames at a time.
    access_phy(&mut b, mdic::WRITE, phy::CONTROL, 0x4140);
    for _ in 0..5 {
        (0..50).for_each(|_| b.queue(&own));
        b.driver.flush().unwrap();
        b.world.settle();
        assert_eq!(b.received().len(), 50);
        assert_eq!(b.driver.sending.clean().unwrap(), 50);
    }
    assert!(a.received().is_empty());
    access_phy(&mut b, mdic::WRITE, phy::CONTROL, phy::control::INITIAL);
    a.send(&frame(a.mac, b.mac, 60));
    assert_eq!(b.received().len(), 1);
}

#[test]
fn the_phy_answers_at_its_address_only() {
    let world = World::new();
    let mut host = Setup::new(1).host(&world);
    let id = access_phy(&mut host, mdic::READ, phy::ID1, 0);
    assert_eq!(id & mdic::DATA, 0x141);
    assert_ne!(id & mdic::READY, 0);
    host.driver.set(register::MDIC, mdic::READ | 2 << mdic::PHY | mdic::INTERRUPT).unwrap();
    assert_ne!(host.driver.get(register::MDIC).unwrap() & mdic::ERROR, 0);
    assert_eq!(host.driver.get(register::ICR).unwrap(), cause::MDAC);
}

#[test]
fn registers_are_words_and_unknown_ones_are_empty() {
    let world = World::new();
    let mut host = Setup::new(1).host(&world);
    let device = host.device();
    let mut bytes = [0; 8];
    assert_eq!(device.read(0, 0, &mut bytes), Access::Done);
    assert_eq!(device.read(0, 0x20_000 - 4, &mut bytes[..4]), Access::Done);
    assert_eq!(bytes[..4], [0; 4]);
    assert_eq!(device.read(0, 0x20_000, &mut bytes[..4]), Access::Refused);
    assert_eq!(device.read(2, 0, &mut bytes[..4]), Access::Refused);
    assert_eq!(device.read(0, 2, &mut bytes[..4]), Access::Refused);
    assert_eq!(device.write(0, 0, &[0; 2]), Access::Refused);
    assert_eq!(device.write(0, 0x5ffc, &[0xff; 8]), Access::Done);
    let mut status = [0; 2];
    assert_eq!(device.read(0, 8, &mut status), Access::Done);
    assert_eq!(status[0] & 0x83, 0x83);
}

#[test]
fn a_port_that_is_detached_takes_the_link_along_and_the_path_comes_back() {
    let (world, mut a, mut b) = pair(Setup::new(1), Setup::new(2));
    drop(world.switch.borrow_mut().replace(b.port, Box::new(UnpluggedPort)));
    b.device().poll();
    assert_eq!(b.driver.get(register::STATUS).unwrap() & status::LU, 0);
    assert!(b.device().quiesce());
    a.send(&frame(a.mac, b.mac, 60));
    b.send(&frame(b.mac, a.mac, 60));
    assert!(a.received().is_empty());
}

#[test]
fn a_device_that_is_dropped_leaves_a_port_that_does_nothing() {
    let (world, mut a, b) = pair(Setup::new(1), Setup::new(2));
    let (mac, memory) = (b.mac, b.memory.clone());
    drop(b);
    world.settle();
    a.send(&frame(a.mac, mac, 60));
    world.settle();
    assert_eq!(a.driver.sending.clean().unwrap(), 1);
    drop(memory);
}

#[test]
fn the_ports_reach_every_register_and_reset_the_device() {
    let (world, mut a, mut b) = pair(Setup::new(1), Setup::new(2));
    let port = |device: &mut crate::Device, at: u64, value: u32| {
        assert_eq!(device.write(1, at, &value.to_le_bytes()), Access::Done);
    };
    port(b.device(), 0, register::STATUS);
    let mut bytes = [0; 4];
    assert_eq!(b.device().read(1, 4, &mut bytes), Access::Done);
    assert_ne!(u32::from_le_bytes(bytes) & status::LU, 0);
    assert_eq!(b.device().read(1, 8, &mut bytes), Access::Refused);
    port(b.device(), 0, u32::MAX);
    port(b.device(), 4, u32::MAX);
    // As Linux resets this controller.
    port(b.device(), 0, register::CTRL);
    port(b.device(), 4, control::RST);
    world.settle();
    b.device().poll();
    assert_eq!(b.driver.get(register::RCTL).unwrap(), 0);
    a.send(&frame(a.mac, b.mac, 60));
    assert!(b.received().is_empty());
}
