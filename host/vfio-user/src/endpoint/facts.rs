//! The choice of an endpoint's next step, as functions of facts that the endpoint gathers: a step
//! at once ([`Facts`]) or a sleep ([`Sleep`]). They read no clock and no device, so tests list
//! cases.

use std::time::{Duration, Instant};

use slipway_reactor::Step;

/// The interval at which a function that does not become quiet is asked again.
pub const RECHECK: Duration = Duration::from_millis(1);

/// The facts that decide whether an endpoint has its next step at once.
#[derive(Clone, Copy, Debug, Default)]
pub struct Facts {
    /// A request of the client is pending.
    pub pending: bool,
    /// The function must not be polled: a request quiesces it, or it does not run.
    pub quiescing: bool,
    /// The client's last turn left messages unread.
    pub more: bool,
    /// The step of a function whose next poll is due at once.
    pub busy: Option<Step>,
    /// Work that only a poll finds was found a short time ago, and there is a client.
    pub hot: bool,
}

impl Facts {
    /// Returns the endpoint's step if it has one at once, or `None` if it may sleep.
    #[inline]
    pub fn at_once(self) -> Option<Step> {
        if self.quiescing {
            return None;
        }
        if self.more && !self.pending {
            return Some(Step::Busy);
        }
        self.busy.or(self.hot.then_some(Step::Looking))
    }
}

/// The way in which mapped doorbells are looked at while an endpoint sleeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DoorbellPolling {
    /// Nothing is mapped, or the function must not be polled.
    None,
    /// The endpoint itself looks at this time.
    At(Instant),
    /// The reactor looks, once in each such period ([`Step::Sweep`]).
    Sweep(Duration),
}

/// The facts that decide how long an endpoint sleeps.
#[derive(Clone, Copy, Debug)]
pub struct Sleep {
    /// A request of the client is pending.
    pub pending: bool,
    /// The way in which mapped doorbells are looked at meanwhile.
    pub looks: DoorbellPolling,
    /// The deadline of a function that may be polled.
    pub deadline: Option<Instant>,
    /// The time at which a client that has not negotiated is disconnected.
    pub handshake: Option<Instant>,
    /// The time at which to accept again after an error.
    pub retry: Option<Instant>,
}

impl Sleep {
    /// Returns a sleep until the earliest of the times, or until an event if there is no time.
    pub fn step(self, now: Instant) -> Step {
        let recheck = self.pending.then(|| now + RECHECK);
        let look = match self.looks {
            DoorbellPolling::At(at) => Some(at),
            DoorbellPolling::None | DoorbellPolling::Sweep(_) => None,
        };
        let times = [self.deadline, look, recheck, self.handshake, self.retry];
        let until = times.into_iter().flatten().min();
        match self.looks {
            DoorbellPolling::Sweep(period) => Step::Sweep(period, until),
            DoorbellPolling::None | DoorbellPolling::At(_) => Step::Idle(until),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_follows_at_once_while_there_is_work() {
        let (idle, busy) = (Facts::default(), Some(Step::Busy));
        let behind = Some(Step::Behind);
        let table = [
            (idle, None),
            (Facts { more: true, ..idle }, busy),
            // No message is read before the pending request has ended.
            (Facts { more: true, pending: true, ..idle }, None),
            (Facts { more: true, pending: true, hot: true, ..idle }, Some(Step::Looking)),
            (Facts { busy: behind, ..idle }, behind),
            (Facts { busy: behind, more: true, ..idle }, busy),
            (Facts { busy: behind, hot: true, ..idle }, behind),
            (Facts { hot: true, ..idle }, Some(Step::Looking)),
            (Facts { quiescing: true, more: true, busy, hot: true, ..idle }, None),
        ];
        for (facts, step) in table {
            assert_eq!(facts.at_once(), step, "{facts:?}");
        }
    }

    #[test]
    fn a_sleep_ends_at_the_earliest_time() {
        let now = Instant::now();
        let after = |ms: u64| now + Duration::from_millis(ms);
        let (looks, period) = (DoorbellPolling::None, Duration::from_millis(7));
        let idle = Sleep { pending: false, looks, deadline: None, handshake: None, retry: None };
        let sweep = Sleep { looks: DoorbellPolling::Sweep(period), ..idle };
        let table = [
            (idle, Step::Idle(None)),
            (Sleep { pending: true, ..idle }, Step::Idle(Some(now + RECHECK))),
            (Sleep { deadline: Some(after(9)), ..idle }, Step::Idle(Some(after(9)))),
            (
                Sleep { deadline: Some(after(9)), handshake: Some(after(8)), ..idle },
                Step::Idle(Some(after(8))),
            ),
            (
                Sleep { handshake: Some(after(8)), retry: Some(after(3)), ..idle },
                Step::Idle(Some(after(3))),
            ),
            (Sleep { looks: DoorbellPolling::At(after(2)), ..idle }, Step::Idle(Some(after(2)))),
            (sweep, Step::Sweep(period, None)),
            (Sleep { deadline: Some(after(9)), ..sweep }, Step::Sweep(period, Some(after(9)))),
        ];
        for (sleep, step) in table {
            assert_eq!(sleep.step(now), step, "{sleep:?}");
        }
    }
}
