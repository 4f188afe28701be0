//! The interrupt by which the guest is told to look.

use std::sync::{Mutex, MutexGuard};

use slipway_pci::{Interrupt, Pin};

/// The function's interrupt: the owner of the channel raises it, the function lowers and routes it.
pub struct Attention {
    interrupt: Interrupt,
    level: Mutex<Level>,
}

struct Level {
    pin: Pin,
    /// `true` if the interrupt was raised and the guest has not seen it yet.
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

    /// Raises the interrupt.
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

    /// Routes the interrupt anew after a change of configuration space.
    pub fn route(&self, pin_enabled: bool, msix_enabled: bool) {
        let mut level = self.level();
        (level.pin_enabled, level.msix_enabled) = (pin_enabled, msix_enabled);
        let wanted = pin_enabled && !msix_enabled && level.cause;
        level.pin.set(wanted);
    }

    /// Lowers the interrupt, since the guest has seen it. Returns whether it was raised.
    pub fn take(&self) -> bool {
        let mut level = self.level();
        level.pin.set(false);
        std::mem::take(&mut level.cause)
    }

    /// Returns whether the pin is asserted, or would be if it were enabled.
    pub fn is_pending(&self) -> bool {
        let level = self.level();
        level.cause && !level.msix_enabled
    }
}
