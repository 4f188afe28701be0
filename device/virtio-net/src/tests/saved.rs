//! Saved states, and successors of devices that were killed.

use slipway_pci::{Function, StateError};
use slipway_ram::Lasting;
use slipway_switch::{LinkSetting, PortConfig};
use slipway_virtio_spec::net::{config_status, control as command};
use slipway_virtio_spec::pci::common;

use super::rig::{Host, Setup, World, frame, pair};
use crate::journal_len;

/// Makes the driver go on with another device, attached to the same switch.
fn succeed(world: &World, host: &mut Host, setup: &Setup, state: Option<&[u8]>) {
    let (mut device, port, sink) = setup.device();
    match state {
        Some(state) => device.restore(state).unwrap(),
        None => device.recover().unwrap(),
    }
    drop(world.0.borrow_mut().detach(host.port).unwrap());
    host.port = world.attach(port);
    host.driver.registers.function = device;
    host.sink = sink;
    host.device().poll();
    world.settle();
}

/// Makes the driver go on with a device of these settings that has the state of the device before,
/// once that is quiet. The memory is the same.
fn succeed_with(world: &World, host: &mut Host, mut setup: Setup) {
    while !host.device().quiesce() {
        world.settle();
    }
    let state = host.device().save();
    setup.memory = host.driver.arena.memory().clone();
    succeed(world, host, &setup, Some(&state));
}

#[test]
fn a_successor_goes_on_where_the_device_was() {
    let (world, mut a, mut b) = pair(Setup::new(1), Setup::new(2));
    b.driver.command(command::RX, command::RX_PROMISC, &[0]).unwrap();
    for round in 0..5 {
        succeed_with(&world, &mut b, Setup::new(2));
        let status = b.driver.config().unwrap().status.get();
        assert_eq!(status, config_status::LINK_UP | config_status::ANNOUNCE);
        b.driver.command(command::ANNOUNCE, command::ANNOUNCE_ACK, &[]).unwrap();
        b.send(&frame(b.mac, a.mac, 60 + round));
        world.settle();
        assert_eq!(a.received()[0].frame.len(), 60 + round);
        a.send(&frame(a.mac, b.mac, 1000 + round));
        a.send(&frame(a.mac, slipway_switch::Mac::local(50), 60));
        world.settle();
        let received = b.received();
        assert_eq!((received.len(), received[0].frame.len()), (1, 1000 + round));
    }
}

#[test]
fn a_successor_tells_its_driver_of_the_link() {
    let world = World::new();
    let mut host = Setup::new(1).host(&world);
    let vector = 3_u16;
    host.device().write(0, common::CONFIG_VECTOR, &vector.to_le_bytes());
    let status = |host: &mut Host| host.driver.config().unwrap().status.get();
    let told = |host: &mut Host| host.sink.take().contains(&vector);
    let down = PortConfig { link: LinkSetting::Down, ..PortConfig::default() };
    world.0.borrow_mut().configure(host.port, down).unwrap();
    host.device().poll();
    assert!(told(&mut host));
    assert_eq!(status(&mut host), 0);
    // With another address, so that the driver is not asked to announce itself.
    succeed_with(&world, &mut host, Setup::new(2));
    assert!(told(&mut host));
    assert_eq!(status(&mut host), config_status::LINK_UP);
    host.device().poll();
    assert!(!told(&mut host));
}

#[test]
fn a_device_that_is_killed_at_any_time_loses_its_driver_nothing_but_frames() {
    let world = World::new();
    let mut setup = Setup::new(2);
    setup.journal = Some(Lasting::heap(journal_len(1)));
    let (memory, journal) = (setup.memory.clone(), setup.journal.clone());
    let again = move || {
        let mut setup = Setup::new(2);
        (setup.memory, setup.journal) = (memory.clone(), journal.clone());
        setup
    };
    let mut a = Setup::new(1).host(&world);
    let mut b = setup.host(&world);
    for round in 0..20 {
        // Frames both ways, some not yet seen by the device.
        for _ in 0..round {
            a.send(&frame(a.mac, b.mac, 64));
            b.send(&frame(b.mac, a.mac, 64));
            if round % 3 == 0 {
                world.settle();
            }
        }
        // The device is killed: nothing is quiesced, nothing is handed back.
        succeed(&world, &mut b, &again(), None);
        a.received();
        b.received();
        b.driver.needs_no_reset().unwrap();
        b.send(&frame(b.mac, a.mac, 100));
        world.settle();
        assert_eq!(a.received().last().unwrap().frame.len(), 100);
        a.send(&frame(a.mac, b.mac, 101));
        world.settle();
        assert_eq!(b.received().last().unwrap().frame.len(), 101);
        b.driver.command(command::RX, command::RX_ALLMULTI, &[1]).unwrap();
    }
    // After a reset there is nothing to go on with.
    b.driver.reset().unwrap();
    succeed(&world, &mut b, &again(), None);
    assert!(b.driver.status().unwrap().is_empty());
}

#[test]
fn states_that_cannot_be_are_refused() {
    let world = World::new();
    let mut host = Setup::new(1).host(&world);
    while !host.device().quiesce() {
        world.settle();
    }
    let state = String::from_utf8(host.device().save()).unwrap();
    let refused = |state: &str| {
        let (mut device, _port, _) = Setup::new(1).device();
        let outcome = device.restore(state.as_bytes());
        let mut status = [1];
        device.read(0, slipway_virtio_spec::pci::common::DEVICE_STATUS, &mut status);
        assert!(outcome.is_ok() || status == [0], "as after a reset");
        outcome
    };
    assert_eq!(refused(&state), Ok(()));
    let unknown = [
        "",
        "{}",
        &state.replace("\"version\":2,\"mac\"", "\"version\":1,\"mac\""),
        &state.replace("virtio-net", "nvme"),
        &state.replacen('{', "{\"more\":1,", 1),
        &state[..state.len() / 2],
    ];
    for bad in unknown {
        assert!(matches!(refused(bad), Err(StateError::Unknown(_))), "{bad}");
    }
    let inconsistent = [
        state.replace("\"size\":64", "\"size\":63"),
        state.replace("\"size\":64", "\"size\":2048"),
        state.replace("\"status\":15", "\"status\":7"),
        state.replace("\"status\":15", "\"status\":31"),
        state.replace("\"pairs\":1,", "\"pairs\":2,"),
        state.replace("\"config_vector\":65535", "\"config_vector\":99"),
    ];
    for bad in inconsistent {
        assert_ne!(bad, state);
        assert!(matches!(refused(&bad), Err(StateError::Inconsistent(_))), "{bad}");
    }
}

#[test]
fn a_journal_has_room_for_the_largest_state() {
    for pairs in [1, 64] {
        let setup = Setup::new(1).settings(|settings| settings.pairs = pairs);
        let (mut device, _port, _) = setup.device();
        device.driven.filter.vlans = Some((0..4096).collect());
        device.driven.filter.unicast = Some(vec![[255; 6]; 64]);
        device.driven.filter.multicast = Some(vec![[255; 6]; 64]);
        for queue in &mut device.transport.registers.state.queues {
            (queue.descriptors, queue.available, queue.used) = (u64::MAX, u64::MAX, u64::MAX);
        }
        let len = device.save().len();
        assert!(len < journal_len(pairs) / 2 - 64, "{len} bytes with {pairs} pairs");
    }
}
