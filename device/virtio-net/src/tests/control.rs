//! The control queue as a driver uses it.

use slipway_pci::Function;
use slipway_switch::{LinkSetting, Mac, PortConfig};
use slipway_virtio_spec::net::{Features, config_status, control as command};
use slipway_virtio_spec::pci::common;

use super::rig::{Host, Setup, World, frame, pair};
use crate::driver::DriverError;

fn wanted(world: &World, a: &mut Host, b: &mut Host, to: Mac) -> bool {
    a.send(&frame(a.mac, to, 60));
    world.settle();
    !b.received().is_empty()
}

#[test]
fn receive_modes_and_tables_filter() {
    let (world, mut a, mut b) = pair(Setup::new(1), Setup::new(2));
    let group = Mac([0x33, 0x33, 0, 0, 0, 9]);
    let stranger = Mac::local(77);
    assert!(wanted(&world, &mut a, &mut b, stranger), "promiscuous to begin with");
    b.driver.command(command::RX, command::RX_PROMISC, &[0]).unwrap();
    let own = b.mac;
    for (to, expected) in [(stranger, false), (group, false), (own, true), (Mac::BROADCAST, true)] {
        assert_eq!(wanted(&world, &mut a, &mut b, to), expected, "{to}");
    }
    assert_eq!(b.device().control().counters().filtered, 2);
    let tables = [&[0, 0, 0, 0, 1, 0, 0, 0][..], &group.0].concat();
    b.driver.command(command::MAC, command::MAC_TABLE_SET, &tables).unwrap();
    assert!(wanted(&world, &mut a, &mut b, group));
    b.driver.command(command::RX, command::RX_ALLMULTI, &[1]).unwrap();
    assert!(wanted(&world, &mut a, &mut b, Mac([0x33, 0x33, 0, 0, 0, 8])));
}

#[test]
fn a_new_address_is_read_back_and_filtered_by() {
    let (world, mut a, mut b) = pair(Setup::new(1), Setup::new(2));
    b.driver.command(command::RX, command::RX_PROMISC, &[0]).unwrap();
    let other = Mac::local(99);
    b.driver.command(command::MAC, command::MAC_ADDR_SET, &other.0).unwrap();
    assert_eq!(b.driver.config().unwrap().mac, other.0);
    assert!(wanted(&world, &mut a, &mut b, other));
    let group = [1, 0, 0, 0, 0, 1];
    let refused = b.driver.command(command::MAC, command::MAC_ADDR_SET, &group);
    assert!(matches!(refused, Err(DriverError::Refused)));
}

#[test]
fn vlans_are_filtered() {
    let (world, mut a, mut b) = pair(Setup::new(1), Setup::new(2));
    let mut tagged = frame(a.mac, b.mac, 64);
    tagged[12..18].copy_from_slice(&[0x81, 0, 0, 7, 0x88, 0xb5]);
    // The switch knows stations by VLAN. It knows B only in the first VLAN, so this frame is
    // flooded.
    let mut arrives = |b: &mut Host| {
        a.send(&tagged);
        world.settle();
        let received = b.received();
        assert!(received.iter().all(|one| one.frame == tagged));
        received.len()
    };
    assert_eq!(arrives(&mut b), 0);
    b.driver.command(command::VLAN, command::VLAN_ADD, &[7, 0]).unwrap();
    assert_eq!(arrives(&mut b), 1);
    b.driver.command(command::VLAN, command::VLAN_DEL, &[7, 0]).unwrap();
    assert_eq!(arrives(&mut b), 0);
}

#[test]
fn the_link_and_announcements_are_told_by_the_configuration() {
    let world = World::new();
    let mut host = Setup::new(1).host(&world);
    let vector = 3_u16;
    Function::write(host.device(), 0, common::CONFIG_VECTOR, &vector.to_le_bytes());
    let status = |host: &mut Host| host.driver.config().unwrap().status.get();
    let told = |host: &mut Host| {
        Function::poll(host.device());
        host.sink.take().contains(&vector)
    };
    let set = |host: &mut Host, link: LinkSetting| {
        let config = PortConfig { link, ..PortConfig::default() };
        world.0.borrow_mut().configure(host.port, config).unwrap();
        told(host)
    };
    assert_eq!(status(&mut host), config_status::LINK_UP);
    assert!(set(&mut host, LinkSetting::Down) && !set(&mut host, LinkSetting::Down));
    assert_eq!(status(&mut host), 0);
    assert!(set(&mut host, LinkSetting::Up) && !set(&mut host, LinkSetting::Auto));
    host.driver.command(command::ANNOUNCE, command::ANNOUNCE_ACK, &[]).unwrap();
    assert_eq!(status(&mut host), config_status::LINK_UP);
    // Without a switch there is no carrier, unless the link was set to stay up.
    let mut other = Setup::new(2).host(&world);
    set(&mut other, LinkSetting::Up);
    for gone in [&host, &other] {
        drop(world.0.borrow_mut().detach(gone.port).unwrap());
    }
    assert!(told(&mut host) && !told(&mut other));
    assert_eq!((status(&mut host), status(&mut other)), (0, config_status::LINK_UP));
}

#[test]
fn offloads_are_switched_at_run_time() {
    let (world, _a, mut b) = pair(Setup::new(1), Setup::new(2));
    let port = b.port;
    let abilities = |world: &World| world.0.borrow_mut().port_mut(port).unwrap().abilities();
    assert_eq!(abilities(&world), slipway_switch::Abilities::ALL);
    let only = Features::GUEST_CSUM.bits().to_le_bytes();
    b.driver.command(command::GUEST_OFFLOADS, command::GUEST_OFFLOADS_SET, &only).unwrap();
    let expected = slipway_switch::Abilities { checksum: true, ..slipway_switch::Abilities::NONE };
    assert_eq!(abilities(&world), expected);
}
