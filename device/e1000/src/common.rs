//! State that function and port share, and state that both directions of the data path use.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering, fence};

use slipway_doorbells::Doorbells;
use slipway_pci::Pin;
use slipway_ram::{Memory, View};
use slipway_telemetry::Clock;

use crate::counters::Live;
use crate::interrupts::Line;
use crate::parts::DOORBELLS;
use crate::rules::Rules;
use crate::statistics::Statistics;

/// Bits of tail and head registers.
pub(crate) const INDEX: u32 = 0xffff;

/// State that function and port share.
pub(crate) struct Shared {
    /// `true` if the port sleeps until the transmit tail is written.
    asleep: AtomicBool,
    /// The cells of the tails ([`crate::parts::TAILS`]). The function stores what drivers write to
    /// the registers, and a client may store to the cells itself.
    tails: Doorbells,
    /// Heads, which the owner of the path stores.
    pub tdh: AtomicU32,
    pub rdh: AtomicU32,
    pub line: Line,
    pub live: Live,
    pub statistics: Statistics,
    pub clock: Arc<dyn Clock>,
}

impl Shared {
    pub fn new(pin: Pin, tails: Doorbells, clock: Arc<dyn Clock>) -> Arc<Self> {
        Arc::new(Self {
            asleep: AtomicBool::new(false),
            tails,
            tdh: AtomicU32::new(0),
            rdh: AtomicU32::new(0),
            line: Line::new(pin),
            live: Live::default(),
            statistics: Statistics::default(),
            clock,
        })
    }

    /// Returns the transmit tail, as the register has it.
    #[inline]
    pub fn tdt(&self) -> u32 {
        self.tails.load(0) & INDEX
    }

    /// Returns the receive tail, as the register has it.
    #[inline]
    pub fn rdt(&self) -> u32 {
        self.tails.load(1) & INDEX
    }

    /// Stores the tails: transmit, receive.
    pub fn store_tails(&self, [transmit, receive]: [u32; DOORBELLS]) {
        self.tails.store(0, transmit);
        self.tails.store(1, receive);
    }

    /// Stores the transmit tail. The caller then asks whether the port [has to be
    /// woken](Self::rouse).
    pub fn store_tdt(&self, tail: u32) {
        self.tails.store(0, tail);
    }

    /// Stores the receive tail.
    pub fn store_rdt(&self, tail: u32) {
        self.tails.store(1, tail);
    }

    /// Returns whether the port sleeps, and is to be woken, now that the transmit tail has changed.
    pub fn rouse(&self) -> bool {
        // Pairs with the fence in `fall_asleep`: one of the two sides sees the other's store.
        fence(Ordering::SeqCst);
        self.asleep.load(Ordering::Relaxed) && self.asleep.swap(false, Ordering::SeqCst)
    }

    /// Notes that the port sleeps. The caller then looks at the tail once more.
    pub fn fall_asleep(&self) {
        self.asleep.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// Notes that the port is awake.
    #[inline]
    pub fn stay_awake(&self) {
        if self.asleep.load(Ordering::Relaxed) {
            self.asleep.store(false, Ordering::SeqCst);
        }
    }
}

/// State that both directions of the data path use.
pub(crate) struct Common {
    pub memory: Memory,
    pub view: View,
    pub rules: Rules,
    pub shared: Arc<Shared>,
}
