//! Frames between two drivers.

use slipway_pci::Function;
use slipway_switch::{Mac, QueuesView};
use slipway_virtio_spec::RingFeatures;
use slipway_virtio_spec::net::{Features, Header};

use crate::layout::NOTIFY;

use super::rig::{Setup, World, frame, pair};

#[test]
fn frames_of_every_size_arrive_as_they_were() {
    let (world, mut a, mut b) = pair(Setup::new(1), Setup::new(2));
    for len in (14..130).chain([1000, 1513, 1514, 1518]) {
        let sent = frame(a.mac, b.mac, len);
        a.send(&sent);
        world.settle();
        let received = b.received();
        assert_eq!(received.len(), 1, "{len}");
        assert!(received[0].frame == sent, "{len}");
        assert_eq!(received[0].header, Header { num_buffers: 1.into(), ..Header::default() });
    }
    assert!(a.received().is_empty());
}

#[test]
fn a_view_of_the_port_has_the_rings_and_the_filter() {
    let (world, mut a, b) = pair(Setup::new(1), Setup::new(2));
    let look = |port| {
        let mut view = QueuesView::default();
        world.0.borrow_mut().port_mut(port).unwrap().inspect(&mut view);
        view
    };
    let before = [look(a.port), look(b.port)];
    assert_eq!(before[0].rings.iter().map(|ring| &*ring.name).collect::<Vec<_>>(), ["rx0", "tx0"]);
    assert!(before[0].filter.is_some() && before[0].more_rings == 0);
    a.send(&frame(a.mac, b.mac, 60));
    world.settle();
    let after = [look(a.port), look(b.port)];
    assert_eq!(after[0].rings[1].next, before[0].rings[1].next + 1, "one was sent");
    assert_eq!(after[1].rings[0].next, before[1].rings[0].next + 1, "and one received");
    assert_eq!(after[0].rings[1].waiting, 0);
}

#[test]
fn a_frame_may_come_in_any_pieces() {
    let (world, mut a, mut b) = pair(Setup::new(1), Setup::new(2));
    let sent = frame(a.mac, b.mac, 1514);
    for cuts in [vec![12], vec![1, 2, 3, 11], vec![12, 26, 76], vec![100, 1000], (1..40).collect()]
    {
        a.send_with(&Header::default(), &sent, &cuts);
        world.settle();
        assert!(b.received()[0].frame == sent, "{cuts:?}");
    }
}

#[test]
fn a_long_burst_arrives_whole_and_in_order_whatever_the_rings_are() {
    for rings in [RingFeatures::all(), RingFeatures::all() - RingFeatures::EVENT_IDX] {
        let setup = |number| Setup::new(number).options(|options| options.rings = rings);
        let (world, mut a, mut b) = pair(setup(1), setup(2));
        // Send more frames than a 16-bit index counts.
        let mut next = 0_u32;
        for _ in 0..1100 {
            for number in 0..60_u32 {
                let mut sent = frame(a.mac, b.mac, 64);
                sent[20..24].copy_from_slice(&(next + number).to_le_bytes());
                let driver = &mut a.driver;
                let queue = &mut driver.transmit[0];
                queue.push(&mut driver.arena, &Header::default(), &sent, &[]).unwrap();
            }
            a.driver.flush(0).unwrap();
            world.settle();
            for received in b.received() {
                assert_eq!(received.frame[20..24], next.to_le_bytes());
                next += 1;
            }
        }
        assert_eq!(next, 66_000);
    }
}

#[test]
fn while_the_switch_looks_no_notification_comes_and_before_it_sleeps_one_is_asked_for() {
    for rings in [RingFeatures::all(), RingFeatures::all() - RingFeatures::EVENT_IDX] {
        let setup = |number| Setup::new(number).options(|options| options.rings = rings);
        let (world, mut a, b) = pair(setup(1), setup(2));
        let before = a.device().control().counters();
        for _ in 0..200 {
            a.send(&frame(a.mac, b.mac, 64));
            world.settle();
        }
        assert_eq!(a.device().control().counters().notifications, before.notifications);
        assert!(!world.0.borrow_mut().arm(a.port));
        a.send(&frame(a.mac, b.mac, 64));
        let after = a.device().control().counters();
        assert_eq!(after.notifications, before.notifications + 1);
        assert!(world.0.borrow_mut().arm(a.port), "there is one already");
    }
}

/// A host that was told by an event does not know the queue.
#[test]
fn an_event_is_a_notification_of_any_queue() {
    let (_world, mut a, _b) = pair(Setup::new(1), Setup::new(2));
    let device = a.device();
    let before = device.control().counters().notifications;
    device.notified(1);
    assert_eq!(device.control().counters().notifications, before + 1);
    let registers = device.description().bars[0].notifications.clone().unwrap();
    let queues = device.transport.registers.state.queues.len() as u64;
    let expected = (0..queues).map(|queue| NOTIFY.start + 4 * queue);
    assert!(registers.offsets().eq(expected));
}

#[test]
fn interrupts_come_when_they_were_asked_for_and_once_a_burst() {
    let (world, mut a, mut b) = pair(Setup::new(1), Setup::new(2));
    b.sink.take();
    assert!(!b.driver.receive[0].ring.want_interrupt().unwrap());
    for _ in 0..10 {
        let sent = frame(a.mac, b.mac, 64);
        let driver = &mut a.driver;
        driver.transmit[0].push(&mut driver.arena, &Header::default(), &sent, &[]).unwrap();
    }
    a.driver.flush(0).unwrap();
    world.settle();
    assert_eq!(b.sink.take(), [0], "the vector of the first receive queue");
    a.send(&frame(a.mac, b.mac, 64));
    world.settle();
    assert!(b.sink.take().is_empty(), "that was not asked for");
    assert_eq!(b.received().len(), 11);
}

#[test]
fn a_driver_without_buffers_loses_frames_and_gets_them_again_later() {
    let (world, mut a, mut b) = pair(Setup::new(1), Setup::new(2));
    for number in 0..100_u8 {
        let mut sent = frame(a.mac, b.mac, 64);
        sent[14] = number;
        a.send(&sent);
        world.settle();
    }
    let received: Vec<u8> = b.received().iter().map(|one| one.frame[14]).collect();
    assert_eq!(received, (0..64).collect::<Vec<u8>>(), "as many as there were buffers");
    assert_eq!(b.device().control().counters().no_buffer, 36);
    a.send(&frame(a.mac, b.mac, 64));
    world.settle();
    assert_eq!(b.received().len(), 1);
}

#[test]
fn large_frames_take_several_buffers_where_the_driver_merges_them() {
    let jumbo = |setup: Setup| {
        setup.settings(|settings| settings.mtu = 9000).options(|options| options.buffer = 1536)
    };
    let (world, mut a, mut b) = pair(jumbo(Setup::new(1)), jumbo(Setup::new(2)));
    for len in [1524, 1525, 3060, 9014, 9018] {
        let sent = frame(a.mac, b.mac, len);
        a.send(&sent);
        world.settle();
        let received = b.received();
        assert!(received[0].frame == sent, "{len}");
        let buffers = (len + 12).div_ceil(1536);
        assert_eq!(usize::from(received[0].header.num_buffers.get()), buffers);
    }
    a.send(&frame(a.mac, b.mac, 9019));
    world.settle();
    assert!(b.received().is_empty(), "beyond the MTU");
    // Without merging a frame that does not fit its buffer is dropped, and the buffer stays.
    let single = jumbo(Setup::new(3)).options(|options| options.features -= Features::MRG_RXBUF);
    let mut c = single.host(&world);
    c.send(&frame(c.mac, a.mac, 60));
    world.settle();
    a.send(&frame(a.mac, c.mac, 1525));
    a.send(&frame(a.mac, c.mac, 1524));
    world.settle();
    let received = c.received();
    assert_eq!((received.len(), received[0].frame.len()), (1, 1524));
    assert_eq!(c.device().control().counters().too_large, 1);
}

#[test]
fn several_pairs_are_served_in_turn_and_answers_come_back_to_the_queue_that_asked() {
    let many = |setup: Setup| {
        setup.settings(|settings| settings.pairs = 4).options(|options| options.pairs = 4)
    };
    let world = World::new();
    let (mut a, mut b) = (many(Setup::new(1)).host(&world), Setup::new(2).host(&world));
    a.driver.command(4, 0, &[4, 0]).unwrap();
    let udp = |from: Mac, to: Mac, ports: (u16, u16)| {
        let mut sent = frame(from, to, 64);
        sent[12..24].copy_from_slice(&[8, 0, 0x45, 0, 0, 50, 0, 0, 0, 0, 64, 17]);
        sent[26..34].copy_from_slice(&[10, 0, 0, 1, 10, 0, 0, 1]);
        sent[34..36].copy_from_slice(&ports.0.to_be_bytes());
        sent[36..38].copy_from_slice(&ports.1.to_be_bytes());
        sent
    };
    for queue in 0..4_u16 {
        let sent = udp(a.mac, b.mac, (1000 + queue, 7));
        let driver = &mut a.driver;
        let transmit = &mut driver.transmit[usize::from(queue)];
        transmit.push(&mut driver.arena, &Header::default(), &sent, &[]).unwrap();
        driver.flush(queue).unwrap();
    }
    world.settle();
    assert_eq!(b.received().len(), 4);
    for queue in 0..4_u16 {
        b.send(&udp(b.mac, a.mac, (7, 1000 + queue)));
        world.settle();
        for other in 0..4 {
            let count = a.received_on(other).len();
            assert_eq!(count, usize::from(other == usize::from(queue)), "{queue} on {other}");
        }
    }
    // With one pair in use every frame comes to that pair; frames that the driver still has in the
    // others leave.
    a.driver.command(4, 0, &[1, 0]).unwrap();
    b.send(&udp(b.mac, a.mac, (7, 1003)));
    world.settle();
    assert_eq!((a.received().len(), a.received_on(3).len()), (1, 0));
    let driver = &mut a.driver;
    let sent = udp(a.mac, b.mac, (1003, 7));
    driver.transmit[3].push(&mut driver.arena, &Header::default(), &sent, &[]).unwrap();
    driver.flush(3).unwrap();
    world.settle();
    assert_eq!(b.received().len(), 1);
}
