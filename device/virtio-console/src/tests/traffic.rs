//! Bytes both ways, and who waits for whom.

use slipway_pci::{Function, Progress};
use slipway_virtio_spec::console::queue;

use super::rig::{AGENT, CONSOLE, Rig, pattern};
use crate::driver::{BUFFER, Options};

fn all_options() -> impl Iterator<Item = Options> {
    [true, false].into_iter().map(|event_index| Options { event_index, ..Options::default() })
}

#[test]
fn the_guest_s_bytes_arrive_whole_and_in_order_whatever_the_pieces() {
    for options in all_options() {
        let mut rig = Rig::new(options);
        for (len, pieces, call) in [(1, 1, 1), (100, 3, 7), (5000, 8, 64), (5000, 2, 5000)] {
            let sent = pattern(len);
            rig.driver.send(AGENT, &sent, pieces).unwrap();
            rig.settle();
            assert_eq!(rig.read_all(AGENT, call), sent, "{len} {pieces} {call}");
        }
        assert_eq!(rig.driver.ports[1].transmit.as_mut().unwrap().in_flight().unwrap(), 0);
    }
}

#[test]
fn a_buffer_goes_back_when_its_last_byte_was_read() {
    let mut rig = Rig::new(Options::default());
    let transmit =
        |rig: &mut Rig| rig.driver.ports[1].transmit.as_mut().unwrap().in_flight().unwrap();
    for _ in 0..8 {
        rig.driver.send(AGENT, &pattern(100), 1).unwrap();
    }
    rig.settle();
    assert_eq!(transmit(&mut rig), 8, "nothing is buffered by the device");
    let mut bytes = [0; 99];
    assert_eq!(rig.console().port_read(AGENT, &mut bytes), 99);
    assert_eq!(transmit(&mut rig), 8);
    assert_eq!(rig.console().port_read(AGENT, &mut bytes[..1]), 1);
    assert_eq!(transmit(&mut rig), 7);
    assert!(rig.driver.send(AGENT, &pattern(100), 1).is_ok());
    assert_eq!(rig.read_all(AGENT, 4096).len(), 800);
    assert_eq!(transmit(&mut rig), 0);
}

#[test]
fn the_host_s_bytes_wait_for_the_guest_s_buffers() {
    for options in all_options() {
        let mut rig = Rig::new(options);
        let sent = pattern(20 * 8 * BUFFER as usize);
        let (mut done, mut received) = (0, Vec::new());
        while done < sent.len() {
            let taken = rig.console().port_write(AGENT, &sent[done..]);
            assert_eq!(taken, 8 * BUFFER as usize);
            done += taken;
            assert_eq!(rig.console().port_write(AGENT, b"more"), 0);
            assert_eq!(rig.settle(), 0, "no buffer, no work");
            received.extend(rig.driver.receive(AGENT).unwrap());
            rig.driver.fill(AGENT).unwrap();
            assert_eq!(rig.console().poll(), Progress::Busy, "there is room again");
            assert_eq!(rig.console().poll(), Progress::Idle(None));
        }
        assert!(received == sent);
    }
}

#[test]
fn notifications_are_asked_for_when_they_are_needed() {
    let mut rig = Rig::new(Options::default());
    // An idle transmit queue: the driver notifies. One with unread bytes: it does not.
    assert!(rig.driver.send(AGENT, b"1", 1).unwrap());
    assert!(!rig.driver.send(AGENT, b"2", 1).unwrap());
    rig.settle();
    assert!(!rig.driver.send(AGENT, b"3", 1).unwrap());
    assert_eq!(rig.read_all(AGENT, 64), b"123");
    assert!(rig.driver.send(AGENT, b"4", 1).unwrap());
    assert_eq!(rig.read_all(AGENT, 1), b"4");
    assert!(rig.driver.send(AGENT, b"5", 1).unwrap());
    // A host that has not met the end of the bytes: the poll asks.
    assert_eq!(rig.console().port_read(AGENT, &mut [0; 1]), 1);
    rig.settle();
    assert!(rig.driver.send(AGENT, b"6", 1).unwrap());
    assert_eq!(rig.read_all(AGENT, 64), b"6");
    // A host without bytes does not want to know of receive buffers.
    rig.console().port_write(AGENT, b"one");
    rig.driver.receive(AGENT).unwrap();
    let inbox = rig.driver.ports[1].receive.as_mut().unwrap();
    let event = inbox.ring.areas()[2].load_u16(4 + 8 * 8).unwrap();
    assert_eq!(event, 0, "as at first");
}

#[test]
fn a_call_that_ends_early_is_told_by_the_next_poll() {
    let mut rig = Rig::new(Options { entries: 32, ..Options::default() });
    for _ in 0..20 {
        rig.driver.send(AGENT, b"", 1).unwrap();
    }
    rig.driver.send(AGENT, b"data", 1).unwrap();
    assert_eq!(rig.settle(), 0);
    let mut bytes = [0; 8];
    assert_eq!(rig.console().port_read(AGENT, &mut bytes), 0);
    assert_eq!(rig.console().poll(), Progress::Busy);
    assert_eq!(rig.console().port_read(AGENT, &mut bytes), 4);
    assert_eq!(rig.console().poll(), Progress::Idle(None));
    let sent = pattern(20 * BUFFER as usize);
    let first = rig.console().port_write(AGENT, &sent);
    assert_eq!(first, 16 * BUFFER as usize);
    assert_eq!(rig.console().poll(), Progress::Busy);
    assert_eq!(rig.console().port_write(AGENT, &sent[first..]), 4 * BUFFER as usize);
    assert_eq!(rig.console().poll(), Progress::Idle(None));
    assert!(rig.driver.receive(AGENT).unwrap() == sent);
}

#[test]
fn the_guest_is_interrupted_by_the_queue_s_vector() {
    let mut rig = Rig::new(Options::default());
    for port in [CONSOLE, AGENT] {
        rig.sink.take();
        let inbox = rig.driver.ports[usize::from(port)].receive.as_mut().unwrap();
        assert!(!inbox.ring.want_interrupt().unwrap());
        assert_eq!(rig.console().port_write(port, b"x"), 1);
        assert_eq!(rig.sink.take(), [queue::receive(port) + 1]);
    }
}

#[test]
fn bytes_of_a_port_that_the_host_has_closed_are_dropped() {
    let mut rig = Rig::new(Options::default());
    rig.driver.send(CONSOLE, &pattern(300), 3).unwrap();
    rig.settle();
    let mut first = [0; 10];
    assert_eq!(rig.console().port_read(CONSOLE, &mut first), 10);
    rig.console().set_host_open(CONSOLE, false);
    for _ in 0..200 {
        rig.driver.send(CONSOLE, b"nobody reads this", 1).unwrap();
        rig.settle();
    }
    assert_eq!(rig.driver.ports[0].transmit.as_mut().unwrap().in_flight().unwrap(), 0);
    assert_eq!(rig.console().port_read(CONSOLE, &mut first), 0);
    assert_eq!(rig.console().port_write(CONSOLE, b"x"), 0);
    rig.console().set_host_open(CONSOLE, true);
    rig.settle();
    rig.driver.send(CONSOLE, b"new", 1).unwrap();
    rig.settle();
    assert_eq!(rig.read_all(CONSOLE, 64), b"new");
}

#[test]
fn a_guest_that_closes_takes_no_more_but_what_it_sent_is_there() {
    let mut rig = Rig::new(Options::default());
    rig.driver.send(AGENT, b"last words", 1).unwrap();
    rig.driver.open(AGENT, false).unwrap();
    assert_eq!(rig.console().port_write(AGENT, b"x"), 0);
    assert_eq!(rig.read_all(AGENT, 64), b"last words");
    rig.driver.open(AGENT, true).unwrap();
    assert_eq!(rig.console().port_write(AGENT, b"x"), 1);
}

#[test]
fn quiesced_it_touches_nothing_and_lets_go_of_all_memory() {
    use slipway_ram::{DmaMap, Region};
    let mut map = DmaMap::new();
    map.add(0, Region::heap(super::rig::MEMORY)).unwrap();
    let (mut console, _) = super::rig::device(&map.memory());
    console.set_host_open(AGENT, true);
    let arena = crate::driver::Arena::new(map.memory(), 0, super::rig::MEMORY as u64);
    let registers = slipway_pci::driver::Direct::new(console);
    let mut driver = crate::driver::Driver::new(registers, arena, Options::default()).unwrap();
    driver.open(AGENT, true).unwrap();
    driver.send(AGENT, b"unread", 1).unwrap();
    let console = &mut driver.registers.function;
    assert_eq!(console.port_write(AGENT, b"x"), 1);
    assert!(console.quiesce() && console.guest_open(AGENT));
    assert_eq!((console.port_write(AGENT, b"y"), console.port_read(AGENT, &mut [0; 8])), (0, 0));
    let mut sent = [0; 8];
    console.poll();
    assert_eq!(console.port_read(AGENT, &mut sent), 6);
    assert!(console.quiesce());
    let removed = map.remove(0, super::rig::MEMORY as u64).unwrap();
    assert!(!removed.is_idle(), "the driver's rings");
    let other = super::rig::device(&slipway_ram::Memory::heap(4096)).0;
    let console = std::mem::replace(console, other);
    drop(driver);
    assert!(removed.is_idle());
    drop(console);
}
