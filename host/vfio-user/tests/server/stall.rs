//! A client makes its endpoint sleep within a step, as a page fault does on memory that the client
//! takes away.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use slipway_reactor::{Reactor, Settings};

use crate::common::*;

/// Starts a reactor that does not report stalls.
fn reactor() -> Arc<Reactor> {
    let settings = Settings { on_stall: Arc::new(|_| {}), ..Settings::default() };
    Arc::new(Reactor::spawn(settings).unwrap())
}

/// Has an endpoint sleep in a step while its neighbour's client is answered.
fn sleep(attacked: &Served, victim: &mut Raw) {
    attacked.knobs.asleep.store(true, Ordering::SeqCst);
    let polls = attacked.knobs.polls.load(Ordering::SeqCst);
    attacked.control.poke();
    eventually("it sleeps", || attacked.knobs.polls.load(Ordering::SeqCst) > polls);
    assert!(victim.is_alive());
    attacked.knobs.asleep.store(false, Ordering::SeqCst);
}

#[test]
fn an_endpoint_that_sleeps_goes_on_alone_and_says_so() {
    let attacked = serve_on(reactor(), |_| {});
    let neighbour = serve_on(attacked.reactor.clone(), |_| {});
    let (mut raw, mut victim) = (attacked.client(), neighbour.client());
    assert_eq!(attacked.control.stats().stalls, 0);
    sleep(&attacked, &mut victim);
    assert!(raw.is_alive());
    assert_eq!(attacked.control.stats().stalls, 1);
    // The endpoint stays on its thread, whether it is told to move or gets another client.
    attacked.control.relocate(&attacked.reactor.handle());
    drop(raw);
    let mut raw = attacked.client();
    sleep(&attacked, &mut victim);
    assert!(raw.is_alive());
    assert_eq!(attacked.control.stats().stalls, 1, "it went back to where it disturbs others");
    assert_eq!(neighbour.control.stats().stalls, 0);
    // Message-only memory, for which other endpoints move, works on the thread that this one has.
    raw.call(Command::DmaMap, dma_map(0, 1 << 20).as_bytes()).ok();
    assert!(attacked.control.is_private() && raw.is_alive());
    drop(raw);
    assert!(attacked.client().is_alive());
    attacked.control.close();
    assert!(attacked.control.wait_closed(PATIENCE));
    assert!(victim.is_alive());
}

/// Interrupts, and a client that connects and disconnects, work after the endpoint began again on
/// its own thread.
#[test]
fn an_endpoint_alone_serves_as_any_other() {
    use std::os::fd::AsFd;
    let attacked = serve_on(reactor(), |config| config.doorbells = DoorbellMode::Mapped);
    let neighbour = serve_on(attacked.reactor.clone(), |_| {});
    let (mut raw, mut victim) = (attacked.client(), neighbour.client());
    let (guest, interrupt) = (memory(0x2000), event());
    raw.map(0, 0x2000, guest.as_fd()).ok();
    sleep(&attacked, &mut victim);
    assert!(raw.is_alive());
    let request = spec::IrqSet {
        argsz: U32::new(20),
        flags: U32::new((spec::IrqSetFlags::DATA_EVENTFD | spec::IrqSetFlags::TRIGGER).bits()),
        index: U32::new(spec::irq::MSIX),
        start: U32::new(0),
        count: U32::new(1),
    };
    raw.call_with(Command::DeviceSetIrqs, request.as_bytes(), &[interrupt.as_fd()]).ok();
    raw.write_u32(0x58, 0);
    eventually("an interrupt", || count(&interrupt) == 1);
    pwrite(&guest, 0, b"moved");
    assert_eq!(super::dma_map::copy(&mut raw, 0, 0x1000, 5), slipway_vfio_user::testing::DONE);
    assert_eq!(pread(&guest, 0x1000, 5), b"moved");
    drop(raw);
    assert!(attacked.client().is_alive());
}
