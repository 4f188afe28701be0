//! The communication status block ([`slipway_e1000_spec::csb`]): tails without register accesses,
//! and kicks and interrupts only for a side that sleeps.

use std::sync::atomic::{Ordering, fence};

use slipway_e1000_spec::csb;
use slipway_ram::{Access, Memory, Window};

/// The block, while it is in use. The device reads only the driver's half and writes only its own.
pub(crate) struct Csb {
    at: u64,
    window: Window,
    /// The driver was asked for a kick.
    asked: bool,
}

impl Csb {
    pub fn new(at: u64) -> Self {
        Self { at, window: Window::new(at, csb::LEN, Access::Write), asked: true }
    }

    /// Returns the block's address.
    pub fn address(&self) -> u64 {
        self.at
    }

    /// Reads a word of the driver's; `None` if the block is not in memory.
    #[inline]
    pub fn load(&mut self, memory: &Memory, word: usize) -> Option<u32> {
        self.window.span(memory)?.load_u32(word).ok()
    }

    /// Writes a word of the device's. Failures are the driver's own loss.
    #[inline]
    pub fn store(&mut self, memory: &Memory, word: usize, value: u32) {
        if let Some(span) = self.window.span(memory) {
            let _ = span.store_u32(word, value);
        }
    }

    /// Asks the driver for a kick. The caller then looks at the tail once more.
    pub fn ask(&mut self, memory: &Memory) {
        self.asked = true;
        self.store(memory, csb::NEED_TX_KICK, 1);
        // Pairs with the driver's barrier between its store of the tail and its load of the word.
        fence(Ordering::SeqCst);
    }

    /// Tells the driver that no kick is needed while the device looks by itself.
    #[inline]
    pub fn stay_awake(&mut self, memory: &Memory) {
        if std::mem::take(&mut self.asked) {
            self.store(memory, csb::NEED_TX_KICK, 0);
        }
    }

    /// Returns whether the driver wants an interrupt, by one of its words. The caller has passed a
    /// full barrier after it stored what the driver looks at.
    #[inline]
    pub fn wants(&mut self, memory: &Memory, word: usize) -> bool {
        self.load(memory, word).is_some_and(|wants| wants != 0)
    }

    /// Releases the memory.
    pub fn release(&mut self, memory: &Memory) {
        if !self.asked {
            // A driver that finds work for a device that is quiesced has to kick it.
            self.asked = true;
            self.store(memory, csb::NEED_TX_KICK, 1);
        }
        self.window.release();
    }
}
