use super::*;

const RXT0: u32 = cause::RXT0;
const TXDW: u32 = cause::TXDW;

fn moderator() -> Moderator {
    let mut one = Moderator::default();
    one.set_mask(0, RXT0 | TXDW);
    one
}

fn delays(receive: u16, receive_absolute: u16) -> Delays {
    Delays { receive, receive_absolute, transmit: 0, transmit_absolute: 0 }
}

/// Acknowledges the interrupt as a driver does by reading ICR.
fn acknowledge(one: &mut Moderator, now: u64) {
    one.clear(now, u32::MAX);
    assert!(!one.asserted());
}

#[test]
fn without_delays_each_frame_interrupts_at_once() {
    let mut one = moderator();
    one.received(5);
    assert!(one.asserted() && one.causes() == RXT0 && one.deadline().is_none());
    acknowledge(&mut one, 6);
    one.sent(7, Sent { at_once: true, ..Sent::default() });
    assert!(one.asserted() && one.causes() == TXDW);
    assert_eq!(one.interrupts(), 2);
}

#[test]
fn the_packet_timer_starts_again_with_each_frame_and_the_absolute_timer_does_not() {
    let mut one = moderator();
    one.set_delays(delays(10, 25));
    one.received(0);
    assert_eq!(one.deadline(), Some(10 * 1024));
    one.received(9 * 1024);
    assert_eq!(one.deadline(), Some(19 * 1024));
    one.received(18 * 1024);
    assert_eq!(one.deadline(), Some(25 * 1024), "the absolute timer comes first");
    one.advance(25 * 1024 - 1);
    assert!(!one.asserted());
    one.advance(25 * 1024);
    assert!(one.asserted() && one.deadline().is_none());
    acknowledge(&mut one, 25 * 1024);
    one.received(30 * 1024);
    assert_eq!(one.deadline(), Some(40 * 1024), "both timers start anew");
}

#[test]
fn without_an_absolute_timer_a_steady_stream_delays_for_ever() {
    let mut one = moderator();
    one.set_delays(delays(2, 0));
    for now in 0..1000 {
        one.received(now * 1024);
        assert!(!one.asserted());
    }
    one.advance(1001 * 1024);
    assert!(one.asserted());
}

#[test]
fn sent_frames_are_delayed_only_if_their_descriptors_ask_for_it() {
    let mut one = moderator();
    one.set_delays(Delays { transmit: 8, transmit_absolute: 32, ..Delays::default() });
    let delayed = Sent { delayed: true, ..Sent::default() };
    for at in [0, 7, 14, 21, 28] {
        one.sent(at * 1024, delayed);
        assert!(!one.asserted());
    }
    assert_eq!(one.deadline(), Some(32 * 1024));
    one.sent(29 * 1024, Sent { at_once: true, ..delayed });
    assert!(one.asserted() && one.deadline().is_none(), "one that is not delayed takes all along");
    acknowledge(&mut one, 30 * 1024);
    one.sent(40 * 1024, Sent { empty: true, ..Sent::default() });
    assert_eq!(one.causes(), cause::TXQE);
    assert!(!one.asserted(), "no descriptor asked, and the cause is masked");
}

#[test]
fn the_throttle_holds_the_next_interrupt_for_exactly_its_interval() {
    let mut one = moderator();
    one.set_throttle(0, 250);
    one.received(100);
    assert!(one.asserted(), "the first is not held");
    acknowledge(&mut one, 200);
    for now in 201..300 {
        one.received(now);
    }
    assert_eq!(one.deadline(), Some(100 + 250 * 256));
    one.advance(100 + 250 * 256 - 1);
    assert!(!one.asserted());
    one.advance(100 + 250 * 256);
    assert!(one.asserted());
    acknowledge(&mut one, 100 + 250 * 256);
    one.received(1 << 30);
    assert!(one.asserted(), "after a pause nothing is held");
    assert_eq!(one.interrupts(), 3);
}

#[test]
fn a_mask_that_is_opened_within_the_interval_waits_for_its_end() {
    let mut one = moderator();
    one.set_throttle(0, 4);
    one.received(0);
    one.set_mask(10, 0);
    assert!(!one.asserted() && one.deadline().is_none());
    one.set_mask(20, RXT0);
    assert!(!one.asserted());
    assert_eq!(one.deadline(), Some(4 * 256));
    one.set_throttle(30, 0);
    assert!(one.asserted(), "the throttle is off");
}

#[test]
fn the_hosts_interval_binds_a_driver_that_asks_for_none_or_resets_the_device() {
    let mut one = moderator();
    one.set_floor(0, 50_000);
    one.received(1000);
    acknowledge(&mut one, 1100);
    one.received(1200);
    assert_eq!(one.deadline(), Some(51_000));
    one.reset();
    one.set_mask(1300, RXT0);
    one.received(1400);
    assert_eq!(one.deadline(), Some(51_000));
    one.set_throttle(1500, 1000);
    assert_eq!(one.deadline(), Some(1000 + 256_000), "the driver may ask for more");
}

#[test]
fn a_flush_ends_a_delay_and_nothing_else() {
    let mut one = moderator();
    one.flush(1);
    assert_eq!(one.causes(), 0);
    one.set_delays(delays(100, 0));
    one.received(2);
    one.flush(3);
    assert!(one.asserted() && one.deadline().is_none());
}

#[test]
fn a_successor_with_another_clock_keeps_every_deadline() {
    let mut one = moderator();
    one.set_throttle(0, 1000);
    one.set_delays(Delays { transmit: 50, transmit_absolute: 90, ..delays(20, 30) });
    one.received(1_000_000);
    one.advance(1_000_000 + 20 * 1024);
    acknowledge(&mut one, 1_030_000);
    one.received(1_040_000);
    one.sent(1_041_000, Sent { delayed: true, ..Sent::default() });
    let left = one.deadline().map(|at| at - 1_045_000);
    let mut next = Moderator::default();
    assert!(next.restore(7_000_000, &one.save(1_045_000)));
    next.set_delays(one.delays);
    assert_eq!(next.deadline().map(|at| at - 7_000_000), left);
    for step in (0..400_000).step_by(512) {
        one.advance(1_045_000 + step);
        next.advance(7_000_000 + step);
        assert_eq!((one.asserted(), one.causes()), (next.asserted(), next.causes()), "{step}");
    }
    assert!(next.asserted());
    let mut young = Moderator::default();
    acknowledge(&mut one, 8_000_000);
    one.cause(9_000_000, RXT0);
    acknowledge(&mut one, 9_000_100);
    assert!(young.restore(50, &one.save(9_000_200)));
    young.cause(60, RXT0);
    assert_eq!(
        young.deadline(),
        Some(50 + 256_000 - 200),
        "the clock is younger than the interval"
    );
    let mut bad = one.save(10_000_000);
    bad.timers[1] = Some(u64::MAX);
    assert!(!next.restore(0, &bad));
}
