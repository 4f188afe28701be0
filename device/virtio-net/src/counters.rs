//! Counters of frames and rings, and a device's need of a reset: any thread may read them.
//!
//! A new counter is a field of `Live`, which the thread of its object counts, and one of
//! `Counters`, which `Live::snapshot` fills in; `tests/traffic.rs` and `hostile.rs` read them.
//! Users see frames that got lost here as causes of the switch's port: `take_malformed` of
//! `transmit` counts those from the driver, and what `receive` delivers those for it. A figure of
//! the device for users is one of `SwitchPort` besides: the head of `port.rs` in `host/fabric`.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// A number that one thread counts and any thread reads.
#[derive(Default)]
pub(crate) struct Count(AtomicU64);

impl Count {
    #[inline]
    pub fn add(&self, more: u64) {
        // Only one thread writes, so no atomic addition is needed.
        self.0.store(self.0.load(Ordering::Relaxed) + more, Ordering::Relaxed);
    }

    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Live counts of one device, and whether it needs a reset.
#[derive(Default)]
pub(crate) struct Live {
    pub shape: Count,
    pub short: Count,
    pub long: Count,
    pub header: Count,
    pub memory: Count,
    pub filtered: Count,
    pub too_large: Count,
    pub no_buffer: Count,
    pub interrupts: Count,
    pub arms: Count,
    /// Notifications, counted by the function's thread.
    pub notifications: Count,
    broken: AtomicBool,
}

/// Counts since the device was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Counters {
    /// Sent frames dropped because a buffer had the wrong shape (one that the device is to write,
    /// or none at all).
    pub bad_shape: u64,
    /// Sent frames dropped that were shorter than an Ethernet header.
    pub too_short: u64,
    /// Sent frames dropped that were longer than 64 KiB.
    pub too_long: u64,
    /// Sent frames dropped because their header asked for something invalid or not negotiated.
    pub bad_header: u64,
    /// Sent frames dropped because their memory is not mapped.
    pub bad_memory: u64,
    /// Frames that the driver's filter did not want.
    pub filtered: u64,
    /// Frames dropped that were larger than the driver's buffers, or whose memory went away.
    pub too_large: u64,
    /// Frames dropped since the driver had no buffer for them.
    pub no_buffer: u64,
    /// Interrupts of queues.
    pub interrupts: u64,
    /// Requests to the driver for a notification, before the switch slept.
    pub arms: u64,
    /// Notifications from the driver.
    pub notifications: u64,
}

impl Live {
    /// Sets whether the path met an error that needs a reset.
    pub fn set_broken(&self, broken: bool) {
        self.broken.store(broken, Ordering::Release);
    }

    /// Returns whether the path met an error that needs a reset.
    pub fn is_broken(&self) -> bool {
        self.broken.load(Ordering::Acquire)
    }

    pub fn snapshot(&self) -> Counters {
        Counters {
            bad_shape: self.shape.get(),
            too_short: self.short.get(),
            too_long: self.long.get(),
            bad_header: self.header.get(),
            bad_memory: self.memory.get(),
            filtered: self.filtered.get(),
            too_large: self.too_large.get(),
            no_buffer: self.no_buffer.get(),
            interrupts: self.interrupts.get(),
            arms: self.arms.get(),
            notifications: self.notifications.get(),
        }
    }
}
