//! Control messages: names, consoles, ends that open and close.

use slipway_pci::Function;
use slipway_virtio::InterruptCount;
use slipway_virtio::layout::{BAR_SIZE, NOTIFY, notification};
use slipway_virtio_spec::console::event;
use slipway_virtio_spec::pci::common;

use super::rig::{AGENT, CONSOLE, Rig, device};
use crate::driver::Options;
use crate::{Console, MAX_NAME, Parts, PartsError, PortSettings};

#[test]
fn the_driver_learns_of_consoles_names_and_open_ends() {
    let mut rig = Rig::new(Options::default());
    let [console, agent] = &rig.driver.ports[..] else { panic!("two ports") };
    assert!(console.is_there && console.is_console && console.name.is_none());
    assert!(agent.is_there && !agent.is_console);
    assert_eq!(agent.name.as_deref(), Some("slipway.agent"));
    assert_eq!((&console.host_opens, &agent.host_opens), (&vec![true], &vec![true]));
    assert!(rig.console().guest_open(CONSOLE) && rig.console().guest_open(AGENT));
    assert!(!rig.console().guest_open(2));
    rig.driver.open(AGENT, false).unwrap();
    assert!(!rig.console().guest_open(AGENT) && rig.console().guest_open(CONSOLE));
}

#[test]
fn two_connections_of_the_host_are_two_for_the_guest() {
    let mut rig = Rig::new(Options::default());
    rig.console().set_host_open(AGENT, false);
    rig.console().set_host_open(AGENT, true);
    rig.driver.pump().unwrap();
    assert_eq!(rig.driver.ports[1].host_opens, [true, false, true]);
    // A close that the driver has not been told of the open of is none.
    rig.console().set_host_open(AGENT, false);
    rig.driver.pump().unwrap();
    rig.console().set_host_open(AGENT, true);
    rig.console().set_host_open(AGENT, false);
    rig.driver.pump().unwrap();
    assert_eq!(rig.driver.ports[1].host_opens, [true, false, true, false]);
}

#[test]
fn after_a_reset_the_driver_is_told_again_and_the_host_end_is_still_open() {
    let mut rig = Rig::new(Options::default());
    rig.console().reset();
    assert!(!rig.console().guest_open(CONSOLE) && rig.console().host_open(AGENT));
    rig.recovers();
    assert_eq!(rig.driver.ports[1].host_opens, [true]);
}

#[test]
fn messages_that_make_no_sense_change_nothing() {
    let mut rig = Rig::new(Options::default());
    for (port, what, value) in [
        (0, event::DEVICE_READY, 1),
        (0, event::DEVICE_READY, 0),
        (1, event::PORT_READY, 1),
        (1, event::PORT_READY, 0),
        (0, event::PORT_ADD, 1),
        (2, event::PORT_READY, 1),
        (u32::MAX, event::PORT_OPEN, 1),
        (1, event::PORT_NAME, 1),
        (1, 0xffff, 1),
    ] {
        rig.driver.say(port, what, value).unwrap();
        rig.driver.pump().unwrap();
    }
    assert!(!rig.needs_reset());
    assert!(rig.driver.ports.iter().all(|port| port.host_opens == [true]));
    rig.recovers();
}

#[test]
fn a_driver_without_multiport_has_one_port() {
    let mut rig = Rig::new(Options { multiport: false, ..Options::default() });
    assert!(rig.console().guest_open(CONSOLE) && !rig.console().guest_open(AGENT));
    rig.driver.send(CONSOLE, b"boots", 1).unwrap();
    rig.settle();
    assert_eq!(rig.read_all(CONSOLE, 64), b"boots");
    assert_eq!(rig.console().port_write(CONSOLE, b"root\n"), 5);
    assert_eq!(rig.console().port_write(AGENT, b"hello"), 0);
    assert_eq!(rig.driver.receive(CONSOLE).unwrap(), b"root\n");
}

#[test]
fn parts_that_do_not_fit_are_refused() {
    let parts = |ports: Vec<PortSettings>| {
        let memory = slipway_ram::Memory::heap(4096);
        let sink = slipway_pci::FifoSink::new();
        Parts { memory, interrupts: vec![slipway_pci::Interrupt::new(sink, 0)], ports }
    };
    let refused = |ports: Vec<PortSettings>| Console::new(parts(ports)).err();
    assert_eq!(refused(vec![]), Some(PartsError::Ports(0)));
    assert_eq!(refused(vec![PortSettings::console(); 17]), Some(PartsError::Ports(17)));
    for bad in ["a/b", "a b", "a\0", "ä", &"x".repeat(MAX_NAME + 1)] {
        assert_eq!(refused(vec![PortSettings::named(bad)]), Some(PartsError::Name(bad.into())));
    }
    let mut without = parts(vec![PortSettings::console()]);
    without.interrupts.clear();
    assert_eq!(Console::new(without).err(), Some(PartsError::Interrupts(InterruptCount)));
    assert!(Console::new(parts(vec![PortSettings::named(&"x".repeat(MAX_NAME)); 16])).is_ok());
}

#[test]
fn each_queue_is_notified_at_a_place_of_its_own() {
    let (mut console, _) = device(&slipway_ram::Memory::heap(4096));
    assert_eq!(console.description().bars[0].size, BAR_SIZE);
    let mut word = [0; 2];
    console.read(0, common::NUM_QUEUES, &mut word);
    assert_eq!(word, [6, 0]);
    for queue in 0..6_u16 {
        console.write(0, common::QUEUE_SELECT, &queue.to_le_bytes());
        console.read(0, common::QUEUE_NOTIFY_OFF, &mut word);
        let off = u64::from(u16::from_le_bytes(word));
        assert_eq!(notification(queue), NOTIFY.start + 4 * off);
        assert!(NOTIFY.contains(&notification(queue)));
    }
}
