//! State that function and port share, and state that both directions of the data path use.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use slipway_pci::Pin;
use slipway_ram::{Memory, View};
use slipway_telemetry::Clock;

use crate::counters::Live;
use crate::interrupts::Line;
use crate::rules::Rules;
use crate::statistics::Statistics;

/// State that function and port share.
pub(crate) struct Shared {
    /// `true` if the port sleeps until the transmit tail is written.
    asleep: AtomicBool,
    /// Tails, which the function stores.
    pub tdt: AtomicU32,
    pub rdt: AtomicU32,
    /// Heads, which the owner of the path stores.
    pub tdh: AtomicU32,
    pub rdh: AtomicU32,
    pub line: Line,
    pub live: Live,
    pub statistics: Statistics,
    pub clock: Arc<dyn Clock>,
}

impl Shared {
    pub fn new(pin: Pin, clock: Arc<dyn Clock>) -> Arc<Self> {
        Arc::new(Self {
            asleep: AtomicBool::new(false),
            tdt: AtomicU32::new(0),
            rdt: AtomicU32::new(0),
            tdh: AtomicU32::new(0),
            rdh: AtomicU32::new(0),
            line: Line::new(pin),
            live: Live::default(),
            statistics: Statistics::default(),
            clock,
        })
    }

    /// Stores the transmit tail. Returns whether the port sleeps, and is to be woken.
    pub fn store_tail(&self, tail: u32) -> bool {
        // Both sequentially consistent, like the store and the load in `fall_asleep` and the look
        // at the tail behind it: one of the two sides sees the other's store.
        self.tdt.store(tail, Ordering::SeqCst);
        self.asleep.load(Ordering::SeqCst) && self.asleep.swap(false, Ordering::SeqCst)
    }

    /// Notes that the port sleeps. The caller then looks at the tail once more.
    pub fn fall_asleep(&self) {
        self.asleep.store(true, Ordering::SeqCst);
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
