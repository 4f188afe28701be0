//! How the guest is told to look.

use std::sync::{Mutex, MutexGuard};

use slipway_pci::{Interrupt, Pin};

/// The function's interrupt: raised by whoever has the channel, lowered and routed by the function.
pub struct Attention {
    interrupt: Interrupt,
    level: Mutex<Level>,
}

struct Level {
    pin: Pin,
    /// Asked for and not yet seen.
    cause: bool,
    pin_enabled: bool,
    msix_enabled: bool,
}

impl Attention {
    pub fn new(interrupt: Interrupt) -> Self {
        let pin = interrupt.pin();
        let level = Level { pin, cause: false, pin_enabled: true, msix_enabled: false };
        Self { interrupt, level: Mutex::new(level) }
    }

    fn level(&self) -> MutexGuard<'_, Level> {
        self.level.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Asks for it.
    pub fn raise(&self) {
        let mut level = self.level();
        level.cause = true;
        if level.msix_enabled {
            self.interrupt.signal();
        } else {
            let enabled = level.pin_enabled;
            level.pin.set(enabled);
        }
    }

    /// Configuration space has changed.
    pub fn route(&self, pin_enabled: bool, msix_enabled: bool) {
        let mut level = self.level();
        (level.pin_enabled, level.msix_enabled) = (pin_enabled, msix_enabled);
        let wanted = pin_enabled && !msix_enabled && level.cause;
        level.pin.set(wanted);
    }

    /// The guest has seen it. Whether there was anything to see.
    pub fn take(&self) -> bool {
        let mut level = self.level();
        level.pin.set(false);
        std::mem::take(&mut level.cause)
    }

    /// Whether the pin is asserted, or would be.
    pub fn is_pending(&self) -> bool {
        let level = self.level();
        level.cause && !level.msix_enabled
    }
}
