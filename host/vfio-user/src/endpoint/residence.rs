//! The reactor that an endpoint is on.

/// The reactor that an endpoint is on, or on the way to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Residence {
    /// Its home, which it shares with others.
    Home,
    /// On the way to a reactor of its own, for its client.
    MovingForClient {
        /// The endpoint slept in the step in which it left, so it stays on the new reactor.
        slept: bool,
    },
    /// A reactor of its own, until the cleanup after its client is done.
    OwnForClient,
    /// A reactor of its own, for good: the endpoint has slept in a step, or is meant to.
    OwnForGood,
}

impl Residence {
    /// Returns the residence of an endpoint that has come to a reactor. `moved` says that a reactor
    /// of its own was started for its client, `alone` that the endpoint slept in a step and was
    /// left behind by its former reactor.
    pub fn arrived(self, moved: bool, alone: bool) -> Self {
        match self {
            _ if alone => Self::OwnForGood,
            Self::MovingForClient { slept: true } if moved => Self::OwnForGood,
            Self::MovingForClient { .. } if moved => Self::OwnForClient,
            Self::MovingForClient { .. } => Self::Home,
            Self::Home | Self::OwnForClient | Self::OwnForGood => self,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Residence::{Home, MovingForClient, OwnForClient, OwnForGood};

    #[test]
    fn an_endpoint_that_has_slept_keeps_its_reactor() {
        let (awake, asleep) = (MovingForClient { slept: false }, MovingForClient { slept: true });
        for (from, moved, alone, to) in [
            (Home, false, false, Home),
            (Home, false, true, OwnForGood),
            (awake, true, false, OwnForClient),
            (asleep, true, false, OwnForGood),
            // No thread could be started.
            (awake, false, false, Home),
            (asleep, false, false, Home),
            (OwnForClient, false, true, OwnForGood),
            (OwnForGood, false, false, OwnForGood),
        ] {
            assert_eq!(from.arrived(moved, alone), to, "{from:?}, {moved}, {alone}");
        }
    }
}
