//! Saved states.

use slipway_e1000_spec::{Context, Data, Transmit, command, option, register};
use slipway_pci::{Function, StateError};

use super::offloads::{check, context, tcp};
use super::rig::{Host, Setup, World, frame, pair};

/// Makes the driver go on with a successor of its device, attached to the same switch.
fn succeed(world: &World, host: &mut Host, setup: Setup) {
    while !host.device().quiesce() {
        world.settle();
    }
    let state = host.device().save();
    let setup = Setup { memory: host.memory.clone(), ..setup };
    let (mut device, port, sink) = setup.device(world);
    device.restore(&state).unwrap();
    assert_eq!(device.save(), state, "nothing is lost");
    drop(world.switch.borrow_mut().detach(host.port).unwrap());
    host.port = world.attach(Box::new(port));
    host.driver.registers.function = device;
    host.sink = sink;
    host.device().poll();
    world.settle();
}

#[test]
fn a_successor_goes_on_in_the_midst_of_traffic() {
    for make in [Setup::new, Setup::block] {
        let (world, mut a, mut b) = pair(make(1), make(2));
        let (mut sent, mut got) = (0, 0);
        for round in 0..40 {
            for step in 0..round {
                a.queue(&frame(a.mac, b.mac, 60 + step));
                sent += 1;
            }
            a.driver.flush().unwrap();
            succeed(&world, &mut a, make(1));
            got += b.received().len();
            succeed(&world, &mut b, make(2));
            a.send(&frame(a.mac, b.mac, 1000));
            b.send(&frame(b.mac, a.mac, 1000));
            sent += 1;
            got += b.received().len();
            assert_eq!(a.received().len(), 1);
        }
        assert_eq!(got, sent);
    }
}

#[test]
fn a_frame_whose_descriptors_are_not_complete_is_read_again() {
    let (world, mut a, mut b) = pair(Setup::new(1), Setup::new(2));
    let sent = frame(a.mac, b.mac, 900);
    let context = Context::default();
    let before = a.driver.sending.tail();
    assert!(a.driver.sending.queue_offloaded(&sent, 300, context, (0, 0, 0)).unwrap());
    // The tail is in the midst of the frame.
    a.driver.set(register::TDT, (before + 3) % 64).unwrap();
    world.settle();
    succeed(&world, &mut a, Setup::new(1));
    assert!(b.received().is_empty());
    a.driver.flush().unwrap();
    world.settle();
    assert_eq!(b.received(), [sent]);
    assert_eq!(a.driver.sending.clean().unwrap(), 1);
}

#[test]
fn a_frame_is_read_again_with_the_context_that_it_began_with() {
    let (world, mut a, mut b) = pair(Setup::new(1), Setup::new(2));
    let mut sent = tcp(a.mac, b.mac, 300, 300 - 34);
    sent[16..18].copy_from_slice(&286_u16.to_be_bytes());
    let options = option::IXSM | option::TXSM;
    // The context is reported with a whole frame.
    assert!(a.driver.sending.queue_offloaded(&sent, 300, context(0), (0, options, 0)).unwrap());
    a.driver.flush().unwrap();
    world.settle();
    check(&b.one().0);
    assert_eq!(a.driver.sending.clean().unwrap(), 1);
    // In the midst of the next frame comes a context that is of no use for it.
    let address = a.driver.sending.fill(&sent).unwrap();
    let piece = |at: u32, length, more| {
        let (address, command) = (address + u64::from(at), command::DEXT | command::IFCS | more);
        Transmit::Data(Data { address, length, command, options, ..Data::default() })
    };
    let other = Transmit::Context(Context { tucso: 3, ..context(0) });
    assert!(a.driver.sending.push(&piece(0, 100, 0)).unwrap());
    assert!(a.driver.sending.push(&other).unwrap());
    a.driver.flush().unwrap();
    world.settle();
    succeed(&world, &mut a, Setup::new(1));
    assert!(b.received().is_empty());
    assert!(a.driver.sending.push(&piece(100, 200, command::EOP | command::RS)).unwrap());
    a.driver.flush().unwrap();
    world.settle();
    check(&b.one().0);
    assert_eq!(a.driver.sending.clean().unwrap(), 1);
}

#[test]
fn a_frame_that_is_too_long_is_dropped_to_its_end_by_the_successor() {
    let long_ring = || {
        let mut setup = Setup::new(1).options(|one| one.descriptors = 512);
        setup.memory = slipway_ram::Memory::heap(crate::driver::memory_len(512));
        setup
    };
    let (world, mut a, mut b) = pair(long_ring(), Setup::new(2));
    let piece = |address, length, more| {
        let command = command::DEXT | command::RS | more;
        Transmit::Data(Data { address, length, command, ..Data::default() })
    };
    for _ in 0..300 {
        assert!(a.driver.sending.push(&piece(0, 1, 0)).unwrap());
    }
    a.driver.flush().unwrap();
    world.settle();
    succeed(&world, &mut a, long_ring());
    // The frame's last descriptor, with the bytes of a whole frame.
    let rest = a.driver.sending.fill(&frame(a.mac, b.mac, 60)).unwrap();
    assert!(a.driver.sending.push(&piece(rest, 60, command::EOP)).unwrap());
    a.driver.flush().unwrap();
    world.settle();
    assert!(b.received().is_empty(), "the rest of a dropped frame is no frame");
    assert_eq!(a.counters().bad_shape, 1);
    // A driver that sets its ring anew begins with a frame.
    a.driver.sending.clean().unwrap();
    (0..300).for_each(|_| assert!(a.driver.sending.push(&piece(0, 1, 0)).unwrap()));
    a.driver.flush().unwrap();
    world.settle();
    a.driver.sending.restart();
    a.driver.set(register::TDH, 0).unwrap();
    a.driver.set(register::TDT, 0).unwrap();
    succeed(&world, &mut a, long_ring());
    a.send(&frame(a.mac, b.mac, 77));
    assert_eq!(b.received()[0].len(), 77);
}

#[test]
fn delays_and_throttles_end_at_their_time_in_the_successor() {
    let slow = || Setup::new(2).options(|one| (one.delays, one.throttle) = ([50, 90, 0, 0], 1000));
    let (world, mut a, mut b) = pair(Setup::new(1), slow());
    a.send(&frame(a.mac, b.mac, 60));
    world.pass(20 * 1024);
    succeed(&world, &mut b, slow());
    world.pass(30 * 1024 - 1);
    b.device().poll();
    assert!(!b.sink.pin());
    world.pass(1);
    b.device().poll();
    assert!(b.sink.pin());
    b.driver.interrupt(|_| ()).unwrap();
    // An interrupt that waits is the successor's, and the interval began in the predecessor.
    world.pass(10_000);
    a.send(&frame(a.mac, b.mac, 60));
    world.pass(50 * 1024);
    b.device().poll();
    assert!(!b.sink.pin());
    succeed(&world, &mut b, slow());
    world.pass(1000 * 256 - 10_000 - 50 * 1024 - 1);
    b.device().poll();
    assert!(!b.sink.pin());
    world.pass(1);
    b.device().poll();
    assert!(b.sink.pin());
}

#[test]
fn a_state_of_another_device_or_version_is_refused() {
    let world = World::new();
    let mut host = Setup::new(1).host(&world);
    assert!(host.driver.sending.queue(&[0; 60], command::IDE).unwrap());
    while !host.device().quiesce() {
        world.settle();
    }
    let state = String::from_utf8(host.device().save()).unwrap();
    let refused = |text: String, setup: Setup| {
        let (mut device, _port, _) = setup.device(&world);
        device.restore(text.as_bytes()).unwrap_err()
    };
    for version in ["0", "3"] {
        let other =
            state.replace("\"version\":2,\"mac\"", &format!("\"version\":{version},\"mac\""));
        assert_ne!(other, state);
        assert!(matches!(refused(other, Setup::new(1)), StateError::Unknown(_)));
    }
    let older = state.replace("\"version\":2,\"mac\"", "\"version\":1,\"mac\"");
    assert_eq!(Setup::new(1).device(&world).0.restore(older.as_bytes()), Ok(()));
    assert!(matches!(refused(state.clone(), Setup::block(1)), StateError::Inconsistent(_)));
    let more = state.replacen('{', "{\"more\":1,", 1);
    assert!(matches!(refused(more, Setup::new(1)), StateError::Unknown(_)));
    let heads = state.replace("\"heads\":[0,0]", "\"heads\":[70000,0]");
    assert_ne!(heads, state);
    assert!(matches!(refused(heads, Setup::new(1)), StateError::Inconsistent(_)));
}
