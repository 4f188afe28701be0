//! Loom goes through every interleaving of an interrupt, edge or level, and its mask:
//! `src/mask.rs`, unchanged, on loom's atomics.
#![allow(clippy::unwrap_used)] // helpers of tests state facts as tests do
#![allow(dead_code)] // the module is used in part

#[path = "../src/mask.rs"]
mod mask;

mod outside {
    pub use loom::sync::atomic::{AtomicBool, AtomicU8, Ordering};
}

use loom::sync::Arc;
use loom::sync::atomic::AtomicU32;
use mask::{Level, Mask};
use outside::{AtomicBool, Ordering};

#[derive(Default)]
struct Line {
    mask: Mask,
    delivered: AtomicU32,
}

impl Line {
    fn deliver(&self) {
        self.delivered.fetch_add(1, Ordering::SeqCst);
    }
}

/// Explores one thread that signals `signals` times, and another that unmasks, or masks and
/// unmasks.
fn model(signals: u32, mask_again: bool) {
    loom::model(move || {
        let line = Arc::new(Line::default());
        line.mask.mask();
        let other = line.clone();
        let device = loom::thread::spawn(move || {
            for _ in 0..signals {
                other.mask.signal(|| other.deliver());
            }
        });
        if mask_again {
            line.mask.unmask(|| line.deliver());
            line.mask.mask();
        }
        line.mask.unmask(|| line.deliver());
        device.join().unwrap();
        let delivered = line.delivered.load(Ordering::SeqCst);
        assert!((1..=signals).contains(&delivered), "{signals} came, {delivered} delivered");
        // No interrupt stays pending for a later unmask to find.
        line.mask.unmask(|| panic!("an interrupt was still pending"));
    });
}

#[test]
fn an_interrupt_is_delivered_once_whoever_is_quicker() {
    model(1, false);
}

#[test]
fn masked_again_and_signalled_twice_nothing_is_lost_or_left() {
    model(1, true);
    model(2, false);
}

#[derive(Default)]
struct Pin {
    level: Level,
    delivered: AtomicU32,
}

impl Pin {
    fn look(&self) {
        let delivered = self.level.look(|| {
            self.delivered.fetch_add(1, Ordering::SeqCst);
            true
        });
        assert!(delivered, "somebody receives the level");
    }
}

/// Explores a function that asserts, deasserts and asserts again, and a client that unmasks. In any
/// order, a level that is asserted in the end was delivered, and waits for the client to unmask it,
/// if for anything.
fn level_model(unmasks: u32, mask_first: bool) {
    loom::model(move || {
        let pin = Arc::new(Pin::default());
        if mask_first {
            pin.level.mask();
        }
        let other = pin.clone();
        let device = loom::thread::spawn(move || {
            for asserted in [true, false, true] {
                other.level.set(asserted);
                if asserted {
                    other.look();
                }
            }
        });
        for _ in 0..unmasks {
            pin.level.unmask();
            pin.look();
        }
        device.join().unwrap();
        let delivered = pin.delivered.load(Ordering::SeqCst);
        let most = 1 + unmasks;
        assert!((1..=most).contains(&delivered), "{delivered} deliveries, {unmasks} unmasks");
        // No delivery is due: the level is delivered again after an unmask, and not before.
        pin.look();
        assert_eq!(pin.delivered.load(Ordering::SeqCst), delivered);
        pin.level.unmask();
        pin.look();
        assert_eq!(pin.delivered.load(Ordering::SeqCst), delivered + 1);
    });
}

#[test]
fn a_level_is_delivered_as_often_as_it_is_unmasked_and_never_lost() {
    level_model(0, false);
    level_model(1, false);
    level_model(2, false);
    level_model(1, true);
}

/// A level whose route may go, as that of `src/interrupts.rs`.
#[derive(Default)]
struct RoutedPin {
    pin: Pin,
    is_routed: AtomicBool,
}

impl RoutedPin {
    fn route(&self, is_routed: bool) {
        self.is_routed.store(is_routed, Ordering::SeqCst);
    }

    fn deliver(&self) -> bool {
        let is_routed = self.is_routed.load(Ordering::SeqCst);
        if is_routed {
            self.pin.delivered.fetch_add(1, Ordering::SeqCst);
        }
        is_routed
    }

    fn look(&self) {
        while self.is_routed.load(Ordering::SeqCst) && !self.pin.level.look(|| self.deliver()) {}
    }
}

/// A client tears the interrupt down and sets it up again while the function asserts it.
#[test]
fn a_level_that_meets_no_route_is_delivered_to_the_next_one() {
    loom::model(|| {
        let routed = Arc::new(RoutedPin::default());
        routed.route(true);
        let other = routed.clone();
        let device = loom::thread::spawn(move || {
            other.pin.level.set(true);
            other.look();
        });
        routed.route(false);
        routed.pin.level.unmask();
        routed.route(true);
        routed.look();
        device.join().unwrap();
        let delivered = routed.pin.delivered.load(Ordering::SeqCst);
        assert!((1..=2).contains(&delivered), "{delivered} deliveries");
        routed.look();
        assert_eq!(routed.pin.delivered.load(Ordering::SeqCst), delivered, "it was still due");
    });
}
