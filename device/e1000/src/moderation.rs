//! Interrupt causes, the delay timers and the throttling of interrupts (sections 3.2.7, 3.4.3 and
//! 13.4.17 to 13.4.21), in virtual time: the caller passes the time, in nanoseconds of the device's
//! clock.
//!
//! A frame sets its cause at once, or starts a *packet timer*, which each further frame starts
//! again, and an *absolute timer*, which it does not. The first of the two that expires sets the
//! cause. The pin is asserted while a cause is set that is not masked, but not sooner than the
//! throttle's interval after it was last asserted.

use serde::{Deserialize, Serialize};
use slipway_e1000_spec::{DELAY_UNIT, THROTTLE_UNIT, cause};

/// The two delay timers of one direction, as times at which they expire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
struct Timers {
    packet: Option<u64>,
    absolute: Option<u64>,
}

impl Timers {
    /// Starts the timers for frames at `now`. Delays are in nanoseconds; 0 leaves the absolute
    /// timer off.
    fn start(&mut self, now: u64, packet: u64, absolute: u64) {
        self.packet = Some(now.saturating_add(packet));
        if absolute > 0 && self.absolute.is_none() {
            self.absolute = Some(now.saturating_add(absolute));
        }
    }

    fn due(&self) -> Option<u64> {
        self.packet.into_iter().chain(self.absolute).min()
    }

    /// Stops the timers if one has expired. Returns whether one had.
    fn expire(&mut self, now: u64) -> bool {
        let expired = self.due().is_some_and(|due| due <= now);
        if expired {
            *self = Self::default();
        }
        expired
    }
}

/// The delays that a driver has set: the registers' values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub(crate) struct Delays {
    /// RDTR.
    pub receive: u16,
    /// RADV.
    pub receive_absolute: u16,
    /// TIDV.
    pub transmit: u16,
    /// TADV.
    pub transmit_absolute: u16,
}

/// Frames that were sent, by the interrupts that their descriptors ask for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub(crate) struct Sent {
    /// A descriptor asked for a report, not delayed.
    pub at_once: bool,
    /// A descriptor asked for a report, delayed.
    pub delayed: bool,
    /// The ring is empty.
    pub empty: bool,
}

/// Causes, mask, timers and throttle of one device.
#[derive(Debug, Default)]
pub(crate) struct Moderator {
    causes: u32,
    mask: u32,
    delays: Delays,
    receive: Timers,
    transmit: Timers,
    /// ITR, in units of 256 ns.
    throttle: u16,
    /// The shortest interval that the host allows, in nanoseconds.
    floor: u64,
    /// The time at which the pin was last asserted; negative in a successor whose clock is younger.
    last: Option<i64>,
    asserted: bool,
    interrupts: u64,
}

const fn nanoseconds(delay: u16) -> u64 {
    delay as u64 * DELAY_UNIT
}

impl Moderator {
    /// Returns to the state after a reset. The host's interval stays, and holds for the next
    /// interrupt, too: a driver cannot end it by a reset.
    pub fn reset(&mut self) {
        let (floor, last, interrupts) = (self.floor, self.last, self.interrupts);
        *self = Self { floor, last, interrupts, ..Self::default() };
    }

    /// Returns the causes that are set.
    pub fn causes(&self) -> u32 {
        self.causes
    }

    /// Returns the mask: the causes that interrupt.
    pub fn mask(&self) -> u32 {
        self.mask
    }

    /// Returns whether the pin is to be asserted.
    pub fn asserted(&self) -> bool {
        self.asserted
    }

    /// Returns the number of times that the pin was asserted.
    pub fn interrupts(&self) -> u64 {
        self.interrupts
    }

    /// Sets causes.
    pub fn cause(&mut self, now: u64, causes: u32) {
        self.causes |= causes & cause::ALL;
        self.advance(now);
    }

    /// Clears causes.
    pub fn clear(&mut self, now: u64, causes: u32) {
        self.causes &= !causes;
        self.advance(now);
    }

    /// Sets the mask.
    pub fn set_mask(&mut self, now: u64, mask: u32) {
        self.mask = mask & cause::ALL;
        self.advance(now);
    }

    /// Sets ITR, in units of 256 ns; 0 is off.
    pub fn set_throttle(&mut self, now: u64, throttle: u16) {
        self.throttle = throttle;
        self.advance(now);
    }

    /// Sets the shortest interval that the host allows, in nanoseconds; 0 is off.
    pub fn set_floor(&mut self, now: u64, floor: u64) {
        self.floor = floor;
        self.advance(now);
    }

    /// Sets the delays. Timers that run keep their times.
    pub fn set_delays(&mut self, delays: Delays) {
        self.delays = delays;
    }

    /// Makes a receive timer that runs expire now (RDTR, Flush Partial Descriptor).
    pub fn flush(&mut self, now: u64) {
        if self.receive.due().is_some() {
            self.receive = Timers::default();
            self.cause(now, cause::RXT0);
        }
    }

    /// Notes that frames were received.
    pub fn received(&mut self, now: u64) {
        let Delays { receive, receive_absolute, .. } = self.delays;
        if receive == 0 {
            self.receive = Timers::default();
            return self.cause(now, cause::RXT0);
        }
        self.receive.start(now, nanoseconds(receive), nanoseconds(receive_absolute));
        self.advance(now);
    }

    /// Notes that descriptors of sent frames were written back.
    pub fn sent(&mut self, now: u64, sent: Sent) {
        let Delays { transmit, transmit_absolute, .. } = self.delays;
        if sent.empty {
            self.causes |= cause::TXQE;
        }
        if sent.at_once || (sent.delayed && transmit == 0) {
            self.causes |= cause::TXDW;
            self.transmit = Timers::default();
        } else if sent.delayed {
            self.transmit.start(now, nanoseconds(transmit), nanoseconds(transmit_absolute));
        }
        self.advance(now);
    }

    /// Carries out everything that is due at `now`.
    pub fn advance(&mut self, now: u64) {
        if self.receive.expire(now) {
            self.causes |= cause::RXT0;
        }
        if self.transmit.expire(now) {
            self.causes |= cause::TXDW;
        }
        let wanted = self.causes & self.mask != 0;
        if !wanted {
            self.asserted = false;
        } else if !self.asserted && self.opens() <= now {
            (self.asserted, self.last) = (true, Some(signed(now)));
            self.interrupts += 1;
        }
    }

    /// Returns the time from which on the pin may be asserted.
    fn opens(&self) -> u64 {
        let interval = (u64::from(self.throttle) * THROTTLE_UNIT).max(self.floor);
        match self.last {
            Some(last) if interval > 0 => {
                u64::try_from(last.saturating_add_unsigned(interval)).unwrap_or_default()
            }
            _ => 0,
        }
    }

    /// Returns the next time at which [`Moderator::advance`] has something to do, or `None`.
    pub fn deadline(&self) -> Option<u64> {
        let waits = self.causes & self.mask != 0 && !self.asserted;
        let throttled = waits.then(|| self.opens());
        self.receive.due().into_iter().chain(self.transmit.due()).chain(throttled).min()
    }
}

/// Saved form of a [`Moderator`]. Times are nanoseconds from the time of saving on, or before it,
/// since a successor has another clock.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ModeratorState {
    causes: u32,
    mask: u32,
    throttle: u16,
    /// The remaining times of the packet and the absolute timer, receive and transmit.
    timers: [Option<u64>; 4],
    /// The time since the pin was last asserted.
    since: Option<u64>,
    asserted: bool,
}

/// Returns a time as a signed number; a clock takes three centuries to get beyond it.
fn signed(now: u64) -> i64 {
    i64::try_from(now).unwrap_or(i64::MAX)
}

/// The longest time that a timer can have left, in nanoseconds.
const LONGEST: u64 = nanoseconds(u16::MAX);

impl Moderator {
    /// Returns what a successor needs.
    pub fn save(&self, now: u64) -> ModeratorState {
        let left = |at: Option<u64>| at.map(|at| at.saturating_sub(now));
        ModeratorState {
            causes: self.causes,
            mask: self.mask,
            throttle: self.throttle,
            timers: [
                left(self.receive.packet),
                left(self.receive.absolute),
                left(self.transmit.packet),
                left(self.transmit.absolute),
            ],
            since: self
                .last
                .map(|last| u64::try_from(signed(now).saturating_sub(last)).unwrap_or_default()),
            asserted: self.asserted,
        }
    }

    /// Takes over a saved state. Returns `false` and changes nothing if it cannot be one. A pin
    /// that was asserted stays so.
    pub fn restore(&mut self, now: u64, state: &ModeratorState) -> bool {
        let ModeratorState { causes, mask, throttle, timers, since, asserted } = *state;
        if (causes | mask) & !cause::ALL != 0 || timers.iter().flatten().any(|left| *left > LONGEST)
        {
            return false;
        }
        self.reset();
        let at = |left: Option<u64>| left.map(|left| now.saturating_add(left));
        (self.causes, self.mask, self.throttle) = (causes, mask, throttle);
        self.receive = Timers { packet: at(timers[0]), absolute: at(timers[1]) };
        self.transmit = Timers { packet: at(timers[2]), absolute: at(timers[3]) };
        self.last = since.map(|since| signed(now).saturating_sub_unsigned(since));
        self.asserted = asserted && causes & mask != 0;
        true
    }
}

#[cfg(test)]
#[path = "moderation_tests.rs"]
mod tests;
