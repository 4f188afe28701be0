//! The processor's time stamp counter as a clock, for stamps on a data path. A call of the kernel's
//! clock costs two to three times as much.

use std::sync::Arc;
use std::time::Duration;

use crate::clock::{Clock, MonotonicClock};

/// Returns the cheapest clock of this machine whose nanoseconds can be relied on: the processor's
/// counter if it ticks evenly (the *invariant* TSC of Intel's manual, volume 3, 18.17.1), and
/// otherwise the kernel's clock. The clock's start is arbitrary. The call takes some milliseconds,
/// mostly asleep.
pub fn stamp_clock() -> Arc<dyn Clock> {
    match imp::calibrate() {
        Some(clock) => Arc::new(clock),
        None => Arc::new(MonotonicClock::new()),
    }
}

#[cfg(target_arch = "x86_64")]
mod imp {
    use super::*;
    use crate::clock::monotonic_ns;
    use core::arch::x86_64::{__cpuid, _rdtsc};

    /// The time for which both clocks are compared. An error of 100 ns in reading them together
    /// leads to an error of 2 in 100,000 in every duration.
    const COMPARED: Duration = Duration::from_millis(5);
    /// The number of attempts at reading both clocks together, of which the quickest counts.
    const ATTEMPTS: usize = 16;

    /// A clock whose nanoseconds are `(counter - start) * factor / 2^32`.
    #[derive(Debug)]
    pub(super) struct TscClock {
        start: u64,
        factor: u64,
    }

    /// Returns the processor's time stamp counter.
    fn counter() -> u64 {
        // SAFETY: RDTSC is part of x86-64 and has no effect but its result; a kernel that forbids
        // it (CR4.TSD, PR_SET_TSC) ends the program, it does not corrupt it.
        unsafe { _rdtsc() }
    }

    /// Returns whether the counter runs at one rate in all states of the processor.
    fn is_invariant() -> bool {
        const ADVANCED_POWER_MANAGEMENT: u32 = 0x8000_0007;
        __cpuid(0x8000_0000).eax >= ADVANCED_POWER_MANAGEMENT
            && __cpuid(ADVANCED_POWER_MANAGEMENT).edx & (1 << 8) != 0
    }

    /// Returns the counter, and the nanoseconds of the kernel's monotonic clock, at one moment.
    fn both() -> (u64, u64) {
        let attempts = (0..ATTEMPTS).map(|_| {
            let before = counter();
            let nanos = monotonic_ns();
            let took = counter().wrapping_sub(before);
            (took, before.wrapping_add(took / 2), nanos)
        });
        let best = attempts.min_by_key(|(took, ..)| *took);
        best.map_or((0, 0), |(_, counter, nanos)| (counter, nanos))
    }

    /// Measures the counter's rate by the kernel's clock. Returns `None` if the counter does not
    /// tick evenly, or its rate is not that of a time stamp counter.
    pub(super) fn calibrate() -> Option<TscClock> {
        if !is_invariant() {
            return None;
        }
        let (from, from_ns) = both();
        std::thread::sleep(COMPARED);
        let (to, to_ns) = both();
        let (ticks, nanos) = (to.checked_sub(from)?, to_ns.checked_sub(from_ns)?);
        let factor = (u128::from(nanos) << 32).checked_div(u128::from(ticks))?;
        // A time stamp counter ticks at 1 MHz to 100 GHz.
        let plausible = (1_u128 << 32) / 100..(1_u128 << 32) * 1000;
        let factor = plausible.contains(&factor).then_some(factor)?;
        Some(TscClock { start: from, factor: u64::try_from(factor).ok()? })
    }

    impl Clock for TscClock {
        fn now(&self) -> Duration {
            Duration::from_nanos(self.nanos())
        }

        fn nanos(&self) -> u64 {
            // Counters of two processors may differ by some ticks, so a value may be before the
            // start.
            let ticks = counter().saturating_sub(self.start);
            ((u128::from(ticks) * u128::from(self.factor)) >> 32) as u64
        }
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod imp {
    /// Returns `None`: other processors' counters are not used.
    pub(super) fn calibrate() -> Option<super::MonotonicClock> {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::monotonic_ns;

    #[test]
    fn runs_as_fast_as_the_kernels_clock() {
        let clock = stamp_clock();
        // Stamps of the kernel's clock around one of ours: whatever holds this thread up meanwhile
        // widens the bounds.
        let around = || (monotonic_ns(), clock.nanos(), monotonic_ns());
        let (before, start, after) = around();
        std::thread::sleep(Duration::from_millis(20));
        let (early, end, late) = around();
        let (least, most) = (early - after, late - before);
        let slack = most / 1000;
        let took = end - start;
        assert!((least - slack..=most + slack).contains(&took), "{took} not in {least}..{most}");
        assert!(clock.now() >= Duration::from_nanos(end));
    }
}
